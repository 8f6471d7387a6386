"""One node of a model run alone in onnxruntime."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stageloom.shared.importer.nodes import captured_names

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime

_log = logging.getLogger(__name__)
_EMBED_ELEMENTS = 1 << 16  # smaller stored tensors become part of the session: some kernels ask for constants


def reads_of(node: "onnx.NodeProto") -> list[str]:
    """Everything the node reads, values captured by its sub-graphs included, without repeats."""
    return list(dict.fromkeys([*(name for name in node.input if name), *captured_names(node)]))


class NodeRunner:
    """Runs nodes of one model, each in a session of its own."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        self._opsets = list(model.opset_import)
        self._ir_version = model.ir_version
        self._functions = list(model.functions)

    def run(
        self,
        node: "onnx.NodeProto",
        runs: "Sequence[Mapping[str, np.ndarray]]",
        stored: "Mapping[str, onnx.TensorProto]",
        replaced: "Mapping[str, np.ndarray]",
    ) -> "list[list[np.ndarray]] | None":
        """Per output its value in each run, or None if onnxruntime does not run the node alone.

        `stored` are the node's stored tensors; `replaced` holds other values for some of them.
        """
        from onnx import numpy_helper

        fed: dict[str, np.ndarray] = {}
        embedded: list[onnx.TensorProto] = []
        for name, tensor in stored.items():
            if name in replaced:
                array = numpy_helper.to_array(tensor)
                fed[name] = replaced[name].astype(array.dtype).reshape(array.shape)
            elif tensor.ByteSize() > _EMBED_ELEMENTS:
                fed[name] = numpy_helper.to_array(tensor)
            else:
                embedded.append(tensor)
        outputs = [name for name in node.output if name]
        try:
            session = self._session(node, {**runs[0], **fed}, embedded, outputs)
            found = [session.run(outputs, {**run, **fed}) for run in runs]
        except Exception as error:  # onnxruntime's exceptions share no base class
            _log.info("node %s cannot be run alone: %s", node.name, str(error)[:200])
            return None
        return [[result[i] for result in found] for i in range(len(outputs))]

    def _session(
        self,
        node: "onnx.NodeProto",
        feeds: "Mapping[str, np.ndarray]",
        embedded: "list[onnx.TensorProto]",
        outputs: list[str],
    ) -> "onnxruntime.InferenceSession":
        import onnxruntime
        from onnx import helper

        graph = helper.make_graph(
            [node],
            "single_node",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in feeds.items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            embedded,
        )
        model = helper.make_model(graph, opset_imports=self._opsets, functions=self._functions)
        model.ir_version = self._ir_version
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
