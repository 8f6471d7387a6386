"""Operators that are not lowered run in onnxruntime on the CPU, one session each, and say so."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.node import Spec
from stageloom.edge_agent.lowering.trace import empty
from stageloom.edge_agent.lowering.unit import Alternative
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.subgraph import SubModel


class ForeignSession:
    """One operator as an onnxruntime session; tensors pass through the host, which waits for the device.

    A session computes on the thread that calls it. `wanted` are the graph's own types: what runs in float16
    elsewhere is float32 here.
    """

    def __init__(
        self, part: SubModel, names: Sequence[str], wanted: Sequence[torch.dtype], specs: Sequence[Spec],
        device: torch.device,
    ) -> None:  # fmt: skip
        try:
            import onnxruntime
        except ImportError as error:
            raise ExecutorError(
                "an operator is not lowered and onnxruntime is missing", remedy="install onnxruntime"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                part.onnx_bytes, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(f"onnxruntime cannot load an operator: {str(error)[:300]}") from error
        self._names = tuple(names)
        self._wanted = tuple(wanted)
        self._specs = tuple(specs)
        self._device = device
        self._made = [output.name for output in self._session.get_outputs()]

    def run(self, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs on the device."""
        outs = tuple(empty(spec, self._device) for spec in self._specs)
        self.run_into(args, outs)
        return outs

    def run_into(self, args: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Write the outputs into `outs`."""
        feeds = {
            name: arg.to("cpu", dtype).contiguous().numpy()
            for name, dtype, arg in zip(self._names, self._wanted, args, strict=True)
        }
        for out, made in zip(outs, self._session.run(self._made, feeds), strict=True):
            out.copy_(torch.from_numpy(made))

    def alternative(self) -> Alternative:
        """As the only way to run the unit."""
        return Alternative("onnxruntime", self.run, self.run_into)
