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
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import onnx
import torch
from torch import Tensor

from edge_agent.lowering.dtypes import TORCH_OF_NAME, Precision
from edge_agent.lowering.errors import Unsupported
from edge_agent.lowering.foreign import ForeignSession
from edge_agent.lowering.node import Spec
from edge_agent.lowering.program import Program
from edge_agent.lowering.trace import Trace, empty, spec_of
from edge_agent.lowering.unit import Alternative, Unit
from edge_agent.lowering.weights import Constant, WeightStore, stored_constant
from shared.artifact import Artifact
from shared.graph import Operator
from shared.ids import OpId, TensorId
from shared.importer.operators import ELEMENTWISE, POINTWISE
from shared.importer.subgraph import ModelSource

LAYOUT_KINDS = frozenset({
    "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool",
    "BatchNormalization", "Resize", "Upsample", "LRN",
})  # fmt: skip
"""Operators that run better with channels last; what only others read keeps its order."""

_KEEPING = POINTWISE | ELEMENTWISE | {"Concat", "Pad", "Split", "Slice"}
"""Operators whose output has its input's memory order."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """An operator that runs in onnxruntime."""

    op: OpId
    kind: str
    reason: str


@dataclass(frozen=True)
class LoweredModel:
    """The units of one model at one batch."""

    batch: int
    device: torch.device
    units: tuple[Unit, ...]  # by OpId
    specs: tuple[Spec, ...]  # by TensorId
    foreign: tuple[Foreign, ...]

    def allocate(self, tensor: TensorId) -> Tensor:
        """A buffer for a tensor of the graph, with no contents."""
        return empty(self.specs[tensor], self.device)


class ModelLowering:
    """An artifact on one device in one precision; holds the weights, once, for every batch. Thread-safe."""

    def __init__(
        self, artifact: Artifact, *, device: torch.device, precision: Precision, channels_last: bool
    ) -> None:
        self.artifact = artifact
        self.precision = precision
        self.channels_last = channels_last
        self.weights = WeightStore(device, precision)
        self._source = ModelSource.open(artifact)
        self._model = onnx.ModelProto.FromString(artifact.onnx_bytes())
        self._constants = _constants(self._model)
        self._lowered: dict[int, LoweredModel] = {}
        self._lock = threading.Lock()

    def at_batch(self, batch: int) -> LoweredModel:
        """The units at this batch; a second call is free.

        Raises:
            ExecutorError: an operator can neither be lowered nor run in onnxruntime.
            ModelError: the model runs with batch 1 only.
        """
        with self._lock:
            if batch not in self._lowered:
                self._lowered[batch] = _BatchLowering(self, batch).lower()
            return self._lowered[batch]

    def trace(self, batch: int) -> Trace:
        """A trace that knows the weights and nothing else."""
        opset = next((o.version for o in self._model.opset_import if o.domain in ("", "ai.onnx")), 1)
        return Trace(
            self.weights, self._constants, opset=opset, batch=batch, channels_last=self.channels_last
        )

    @property
    def model(self) -> onnx.ModelProto:
        """The normalised model; not to be changed."""
        return self._model

    @property
    def source(self) -> ModelSource:
        """Where parts of the model are cut out for onnxruntime."""
        return self._source


def _constants(model: onnx.ModelProto) -> dict[str, Constant]:
    """The weights that torch can hold; operators that read others are not lowered."""
    found = {}
    for proto in model.graph.initializer:
        with suppress(Unsupported):
            found[proto.name] = stored_constant(proto)
    return found


class _BatchLowering:
    """Lowers one model at one batch, operator by operator in the graph's order."""

    def __init__(self, lowering: ModelLowering, batch: int) -> None:
        self._lowering = lowering
        self._batch = batch
        self._graph = lowering.artifact.graph
        self._nodes = lowering.model.graph.node
        self._device = lowering.weights.device
        self._trace = lowering.trace(batch)
        self._units: list[Unit] = []
        self._foreign: list[Foreign] = []

    def lower(self) -> LoweredModel:
        for tensor in self._graph.inputs:
            self._trace.add_input(
                self._name(tensor), self._expected(tensor, self._wants_channels_last(tensor))
            )
        for index, operator in enumerate(self._graph.operators):
            self._units.append(self._unit(OpId(index), operator))
        specs = tuple(self._spec(TensorId(t)) for t in range(len(self._graph.tensors)))
        return LoweredModel(self._batch, self._device, tuple(self._units), specs, tuple(self._foreign))

    def _name(self, tensor: TensorId) -> str:
        return self._graph.tensors[tensor].name

    def _spec(self, tensor: TensorId) -> Spec:
        name = self._name(tensor)
        if self._trace.constant(name) is not None:
            return self._expected(tensor, False)
        return self._trace.spec(name)

    def _expected(self, tensor: TensorId, channels_last: bool) -> Spec:
        """What the graph says of a tensor, at this batch and precision."""
        found = self._graph.tensors[tensor]
        shape = found.shape if self._batch == 1 else (self._batch, *found.shape[1:])
        dtype = self._lowering.weights.runtime_dtype(TORCH_OF_NAME[found.dtype])
        return Spec(shape, dtype, channels_last)

    def _wants_channels_last(self, tensor: TensorId) -> bool:
        kinds = {self._graph.operators[op].kind for op in self._graph.consumers[tensor]}
        rank = len(self._graph.tensors[tensor].shape)
        return self._lowering.channels_last and rank in (4, 5) and not kinds.isdisjoint(LAYOUT_KINDS)

    def _unit(self, op: OpId, operator: Operator) -> Unit:
        try:
            if operator.opaque:
                raise Unsupported(operator.opaque)
            return self._lowered_unit(op, operator)
        except Unsupported as error:
            return self._foreign_unit(op, operator, str(error))

    def _lowered_unit(self, op: OpId, operator: Operator) -> Unit:
        traced = [t for node in operator.nodes if (t := self._trace.visit(self._nodes[node])) is not None]
        for tensor in operator.outputs:
            self._check(tensor)
        inputs = [self._name(t) for t in self._run_time(operator.inputs)]
        program = Program(traced, inputs, [self._output(t) for t in operator.outputs], self._trace)
        return self._assembled(op, operator, program)

    def _output(self, tensor: TensorId) -> str | Tensor:
        name = self._name(tensor)
        known = self._trace.constant(name)
        return name if known is None else self._lowering.weights.tensor(known)

    def _check(self, tensor: TensorId) -> None:
        """What was traced must agree with the graph, or slots would not fit."""
        wanted = self._expected(tensor, False)
        name = self._name(tensor)
        known = self._trace.constant(name)
        if known is not None:
            dtype = self._lowering.weights.runtime_dtype(known.value.dtype)
            shape = tuple(known.value.shape)
        else:
            shape, dtype = self._trace.spec(name).shape, self._trace.spec(name).dtype
        if (shape, dtype) != (wanted.shape, wanted.dtype):
            raise Unsupported(
                f"{name!r} becomes {dtype} {list(shape)}, not {wanted.dtype} {list(wanted.shape)}"
            )

    def _run_time(self, tensors: Sequence[TensorId]) -> tuple[TensorId, ...]:
        """Those of the tensors that are not known beforehand."""
        return tuple(t for t in tensors if self._trace.constant(self._name(t)) is None)

    def _assembled(self, op: OpId, operator: Operator, program: Program) -> Unit:
        reads, made = self._run_time(operator.inputs), self._run_time(operator.outputs)
        sources = [self._trace.metas[self._name(t)] for t in reads]
        held = {self._trace.memory[self._name(t)] for t in reads}
        aliases = [self._trace.memory[self._name(t)] in held for t in made]
        order = self._makes_channels_last(operator, sources)
        in_order = [self._trace.settle(self._name(t), channels_last=order) for t in made]
        return Unit(
            ops=(op,),
            inputs=reads,
            outputs=operator.outputs,
            input_specs=tuple(spec_of(m, channels_last=self._lowering.channels_last) for m in sources),
            output_specs=tuple(self._spec(t) for t in operator.outputs),
            alternatives=(Alternative("nodes", program.run, program.run_into),),
            view=len(made) == len(operator.outputs) and all(aliases) and all(in_order),
        )

    def _makes_channels_last(self, operator: Operator, sources: Sequence[Tensor]) -> bool:
        if operator.kind in LAYOUT_KINDS:
            return True
        specs = [spec_of(s, channels_last=self._lowering.channels_last) for s in sources]
        return operator.kind in _KEEPING and any(spec.channels_last for spec in specs)

    def _foreign_unit(self, op: OpId, operator: Operator, reason: str) -> Unit:
        part = self._lowering.source.extract([op], batch=self._batch)
        for tensor in part.outputs:
            self._trace.add_input(self._name(tensor), self._expected(tensor, False))
        specs = tuple(self._expected(t, False) for t in part.outputs)
        wanted = [TORCH_OF_NAME[self._graph.tensors[t].dtype] for t in part.inputs]
        session = ForeignSession(part, [self._name(t) for t in part.inputs], wanted, specs, self._device)
        self._foreign.append(Foreign(op, operator.kind, reason))
        return Unit(
            ops=(op,),
            inputs=part.inputs,
            outputs=part.outputs,
            input_specs=tuple(self._spec(t) for t in part.inputs),
            output_specs=specs,
            alternatives=(session.alternative(),),
            foreign=reason,
        )


def lower_model(
    artifact: Artifact, *, batch: int, device: torch.device, precision: Precision, channels_last: bool
) -> LoweredModel:
    """One model at one batch; for more than one batch keep a `ModelLowering`.

    Raises:
        ExecutorError: an operator can neither be lowered nor run in onnxruntime.
    """
    lowering = ModelLowering(artifact, device=device, precision=precision, channels_last=channels_last)
    return lowering.at_batch(batch)
