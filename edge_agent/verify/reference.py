"""The whole model in onnxruntime, with inner tensors made visible."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stageloom.edge_agent.verify.inputs import Feeds
from stageloom.shared.errors import ExecutorError

if TYPE_CHECKING:
    import numpy as np
    import onnx


class Reference:
    """One session over all of a normalised model."""

    def __init__(
        self, model: "onnx.ModelProto", names: Iterable[str], folder: Path, *, optimised: bool = True
    ) -> None:
        """`names` are the tensors to return; `folder` takes a copy of the model for the session to load.

        `optimised`: with all that onnxruntime does to a model before it runs, or node by node as it stands.

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
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
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
