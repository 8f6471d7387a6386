"""A model lowered to torch: one unit per operator of its graph.

How an executor uses it:

    device = torch.device("cuda")
    lowering = ModelLowering(artifact, device=device, precision=Precision.FP16, channels_last=True)
    lowered = lowering.at_batch(4)          # weights are shared with every other batch
    unit = lowered.units[op]                # per OpId; see `unit.Unit`
    with arithmetic(lowering.precision):    # TF32 or not, process-wide
        unit.run_into([buffers[t] for t in unit.inputs], [buffers[t] for t in unit.outputs])

`lowered.specs[tensor]` gives shape, type and memory order of every tensor of the graph while running: float16
where the precision says so, channels last where convolutions want it; `lowered.allocate(tensor)` makes one.
Tasks feed and read float32, so an executor converts at the graph's inputs and outputs (`copy_` does).
`lowered.foreign` lists what runs in onnxruntime and why. CPU and CUDA take the same path.

`lowering.joined(batch, ops)` makes one unit of operators that run one after another on one stream: what
lies between them needs no buffer, and one kernel may do Conv, Add and Relu. `lowering.merged(batch, ops)`
makes one unit of a merge stage. Both are units like every other.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress

import onnx
import torch

from stageloom.edge_agent.lowering.batch import BatchLowering, Foreign, LoweredModel, Parsed
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.merge import merged_unit
from stageloom.edge_agent.lowering.unit import Unit
from stageloom.edge_agent.lowering.weights import Constant, WeightStore, stored_constant
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import OpId
from stageloom.shared.importer.subgraph import ModelSource

__all__ = ["Foreign", "LoweredModel", "ModelLowering", "lower_model"]


class ModelLowering:
    """An artifact on one device in one precision; holds the weights, once, for every batch. Thread-safe."""

    def __init__(
        self, artifact: Artifact, *, device: torch.device, precision: Precision, channels_last: bool
    ) -> None:
        self.artifact = artifact
        self.precision = precision
        self.channels_last = channels_last
        self.weights = WeightStore(device, precision)
        model = onnx.ModelProto.FromString(artifact.onnx_bytes())
        self._parsed = Parsed(
            graph=artifact.graph,
            model=model,
            constants=_constants(model),
            source=ModelSource.open(artifact),
            store=self.weights,
            channels_last=channels_last,
        )
        self._batches: dict[int, BatchLowering] = {}
        self._several: dict[tuple[str, int, tuple[OpId, ...]], Unit] = {}
        self._lock = threading.RLock()

    def at_batch(self, batch: int) -> LoweredModel:
        """The units at this batch; a second call is free.

        Raises:
            ExecutorError: an operator can neither be lowered nor run in onnxruntime.
            ModelError: the model runs with batch 1 only.
        """
        return self._batch(batch).lowered

    def joined(self, batch: int, ops: Sequence[OpId]) -> Unit:
        """Operators that run one after another on one stream as one unit; a second call is free.

        Raises:
            ExecutorError: one of them runs in onnxruntime.
        """
        return self._made("joined", batch, tuple(sorted(ops)))

    def merged(self, batch: int, ops: Sequence[OpId]) -> Unit:
        """The operators of a merge stage as one unit (`stageloom.shared.merge`); a second call is free.

        Raises:
            ValueError: they may not merge.
            ExecutorError: their weights cannot be held.
        """
        return self._made("merged", batch, tuple(sorted(ops)))

    def _batch(self, batch: int) -> BatchLowering:
        with self._lock:
            if batch not in self._batches:
                self._batches[batch] = BatchLowering(self._parsed, batch)
            return self._batches[batch]

    def _made(self, how: str, batch: int, ops: tuple[OpId, ...]) -> Unit:
        key = (how, batch, ops)
        with self._lock:
            if key not in self._several:
                lowering = self._batch(batch)
                try:
                    if how == "merged":
                        self._several[key] = merged_unit(self._parsed, lowering.lowered, ops)
                    else:
                        self._several[key] = lowering.joined(ops)
                except Unsupported as error:
                    raise ExecutorError(
                        f"operators {list(ops)} of {self.artifact.graph.name!r} cannot be {how}: {error}"
                    ) from error
            return self._several[key]


def _constants(model: onnx.ModelProto) -> dict[str, Constant]:
    """The weights that torch can hold; operators that read others are not lowered."""
    found = {}
    for proto in model.graph.initializer:
        with suppress(Unsupported):
            found[proto.name] = stored_constant(proto)
    return found


def lower_model(
    artifact: Artifact, *, batch: int, device: torch.device, precision: Precision, channels_last: bool
) -> LoweredModel:
    """One model at one batch; for more than one batch keep a `ModelLowering`.

    Raises:
        ExecutorError: an operator can neither be lowered nor run in onnxruntime.
    """
    lowering = ModelLowering(artifact, device=device, precision=precision, channels_last=channels_last)
    return lowering.at_batch(batch)
