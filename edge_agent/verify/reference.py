"""The whole model in onnxruntime, with inner tensors made visible."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.verify.inputs import Feeds
from shared.errors import ExecutorError
from shared.importer.operators import SHAPE_ONLY

if TYPE_CHECKING:
    import numpy as np
    import onnx

_SATURATING = {"Softmax", "Sigmoid"}
_REARRANGING = SHAPE_ONLY | {"Transpose"}


class Reference:
    """One session over all of a normalised model."""

    def __init__(self, model: "onnx.ModelProto", names: Iterable[str], folder: Path) -> None:
        """`names` are the tensors to return; `folder` takes a copy of the model for the session to load.

        Raises:
            ExecutorError: onnxruntime cannot load the model.
        """
        import onnxruntime
        from onnx import helper

        self._names = list(dict.fromkeys(names))
        inputs = {value.name for value in model.graph.input}
        outputs = len(model.graph.output)
        known = {value.name for value in model.graph.output}
        model.graph.output.extend(
            helper.make_empty_tensor_value_info(name) for name in self._names if name not in known | inputs
        )
        path = folder / "reference.onnx"
        path.write_bytes(model.SerializeToString())
        del model.graph.output[outputs:]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(
                f"onnxruntime cannot load the whole model: {' '.join(str(error).split())[:300]}",
                remedy="import the model again",
            ) from error
        finally:
            path.unlink()
        self._computed = [name for name in self._names if name not in inputs]

    def run(self, feeds: Feeds) -> "dict[str, np.ndarray]":
        """The chosen tensors under these inputs; a chosen graph input is returned as it was fed.

        Raises:
            ExecutorError: onnxruntime fails on these inputs.
        """
        try:
            made = self._session.run(self._computed, feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(
                f"onnxruntime fails on the drawn inputs: {' '.join(str(error).split())[:300]}",
                remedy="give the valid values of an input with --range NAME=LO:HI",
            ) from error
        found = dict(zip(self._computed, made, strict=True))
        return {name: found[name] if name in found else feeds[name] for name in self._names}


def before_saturation(model: "onnx.ModelProto", output: str) -> str:
    """The tensor that a final Softmax or Sigmoid reads, or `output` itself where there is none.

    Behind them a change may vanish (a probability stays at 1) or look large (one of 1e-9 doubles).
    """
    maker = {name: node for node in model.graph.node for name in node.output if name}
    name = output
    while (node := maker.get(name)) is not None:
        if node.op_type in _SATURATING:
            return str(node.input[0])
        if node.op_type not in _REARRANGING or node.output[0] != name:
            return output
        name = node.input[0]
    return output
