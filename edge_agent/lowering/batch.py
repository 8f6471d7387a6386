"""Lower one model at one batch: a unit per operator, and units of several operators on demand.

Operators that cannot be lowered run in onnxruntime on the CPU, one session each.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import torch
from torch import Tensor

from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.lowering.dtypes import TORCH_OF_NAME, Unsupported
from stageloom.edge_agent.lowering.kernels import alternatives, chain_of
from stageloom.edge_agent.lowering.node import Constant, Spec, WeightStore
from stageloom.edge_agent.lowering.out_of_memory import is_out_of_memory
from stageloom.edge_agent.lowering.program import Alternative, KernelProgram, Unit
from stageloom.edge_agent.lowering.trace import NodeTracer, TracedNode, empty, spec_of
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph, Operator
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.importer.nodes import opset_of
from stageloom.shared.importer.operators import ELEMENTWISE, POINTWISE
from stageloom.shared.importer.subgraph import SubModel


class ForeignSession:
    """An operator as an onnxruntime session; tensors pass through the host, which waits for the device.

    A session computes on the calling thread. `wanted` are the graph's own types: float32 where other units
    run in float16.
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
        """Return the outputs, on the device."""
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
        """Return the only way to run the unit."""
        return Alternative("onnxruntime", self.run, self.run_into)


LAYOUT_KINDS = frozenset({
    "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool",
    "BatchNormalization", "Resize", "Upsample", "LRN",
})  # fmt: skip
"""Operators that run faster with channels last; tensors that only others read keep their order."""

_KEEPING = POINTWISE | ELEMENTWISE | {"Concat", "Pad", "Split", "Slice"}
"""Operators whose output has the memory order of their input."""

_COMPLETE = frozenset({torch.float32, torch.float64, torch.int64, torch.bool})
"""Types in which torch has every kernel on every device."""

_ERROR_CHARS = 160


@dataclass(frozen=True)
class LoweredModel:
    """The units of one model at one batch."""

    batch: int
    device: torch.device
    units: tuple[Unit, ...]  # by OpId
    specs: tuple[Spec, ...]  # by TensorId

    @property
    def foreign(self) -> tuple[Unit, ...]:
        """The units that run in onnxruntime."""
        return tuple(unit for unit in self.units if unit.foreign)

    def allocate(self, tensor: TensorId) -> Tensor:
        """Return an uninitialised buffer for a tensor of the graph."""
        return empty(self.specs[tensor], self.device)


@dataclass(frozen=True)
class Parsed:
    """A normalised model with its weights, which all its batches share."""

    graph: Graph
    model: onnx.ModelProto  # without weights; not to be changed
    constants: Mapping[str, Constant]
    parts: ModelParts
    store: WeightStore
    channels_last: bool

    def trace(self, batch: int, further: Mapping[str, Constant] | None = None) -> NodeTracer:
        """Return a tracer that knows the weights and `further` constants only."""
        constants = {**self.constants, **(further or {})}
        return NodeTracer(
            self.store, constants, opset=opset_of(self.model), batch=batch, channels_last=self.channels_last
        )

    def expected(self, tensor: TensorId, batch: int, *, channels_last: bool) -> Spec:
        """Return the graph's spec of a tensor, at a batch and in the store's precision."""
        described = self.graph.tensors[tensor]
        dtype = self.store.runtime_dtype(TORCH_OF_NAME[described.dtype])
        return Spec(described.batched(batch), dtype, channels_last)

    def name(self, tensor: TensorId) -> str:
        """A tensor's name in the file."""
        return self.graph.tensors[tensor].name


class BatchLowering:
    """One model at one batch; the constructor lowers operator by operator in the graph's order."""

    def __init__(self, parsed: Parsed, batch: int) -> None:
        self._parsed = parsed
        self._batch = batch
        self._graph = parsed.graph
        self._trace = parsed.trace(batch)
        self._traced: list[list[TracedNode] | None] = []  # by operator, None for a foreign one
        for tensor in self._graph.inputs:
            spec = parsed.expected(tensor, batch, channels_last=self._wants_channels_last(tensor))
            self._trace.add_input(parsed.name(tensor), spec)
        units = tuple(self._unit(OpId(i), operator) for i, operator in enumerate(self._graph.operators))
        made = {t for operator in self._graph.operators for t in operator.outputs} | set(self._graph.inputs)
        specs = tuple(
            # What passes inside operators that are split together is nothing's output.
            self._spec(TensorId(t)) if t in made else parsed.expected(TensorId(t), batch, channels_last=False)
            for t in range(len(self._graph.tensors))
        )
        self.lowered = LoweredModel(batch, parsed.store.device, units, specs)

    def joined(self, ops: Sequence[OpId]) -> Unit:
        """Return several operators as one unit, with no buffers between them and kernels that may span them.

        `ops` are the operators of one launch on one stream; no other operator lies between them.

        Raises:
            Unsupported: one of them runs in onnxruntime.
        """
        ops = sorted(ops)
        traced: list[TracedNode] = []
        for op in ops:
            own = self._traced[op]
            if own is None:
                raise Unsupported(f"operator {op} runs in onnxruntime")
            traced += own
        inputs, outputs = self._parsed.parts.skeleton.borders(ops)
        return self._assembled(tuple(ops), self._run_time(inputs), outputs, traced)

    def _unit(self, op: OpId, operator: Operator) -> Unit:
        try:
            if operator.opaque:
                raise Unsupported(operator.opaque)
            return self._lowered_unit(op, operator)
        except Unsupported as error:
            self._traced.append(None)
            return self._foreign_unit(op, str(error))

    def _lowered_unit(self, op: OpId, operator: Operator) -> Unit:
        nodes = [self._parsed.model.graph.node[node] for node in operator.nodes]
        traced = [t for node in nodes if (t := self._trace.visit(node)) is not None]
        for tensor in operator.outputs:
            self._check(tensor)
        reads = self._run_time(operator.inputs)
        unit = self._assembled((op,), reads, operator.outputs, traced)
        self._try(unit)
        sources = [self._trace.metas[self._parsed.name(t)] for t in reads]
        held = {self._trace.memory[self._parsed.name(t)] for t in reads}
        made = [self._parsed.name(t) for t in self._run_time(operator.outputs)]
        order = self._makes_channels_last(operator, sources)
        # Not short-circuited: every value must be settled.
        in_order = [self._trace.settle(name, channels_last=order) for name in made]
        view = all(in_order) and all(self._trace.memory[name] in held for name in made)
        self._traced.append(traced)
        return replace(
            unit,
            view=view and len(made) == len(operator.outputs),
            output_specs=tuple(self._spec(t) for t in operator.outputs),
        )

    def _assembled(
        self,
        ops: tuple[OpId, ...],
        inputs: Sequence[TensorId],
        outputs: Sequence[TensorId],
        traced: Sequence[TracedNode],
    ) -> Unit:
        names = [self._parsed.name(t) for t in inputs]
        made = [self._output(t) for t in outputs]
        program = KernelProgram(traced, names, made, self._trace)
        alternatives, signature = ways(program, traced, names, made, self._trace)
        return Unit(
            ops=ops,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            input_specs=tuple(self._spec(t) for t in inputs),
            output_specs=tuple(self._spec(t) for t in outputs),
            alternatives=alternatives,
            signature=signature,
        )

    def _try(self, unit: Unit) -> None:
        """Run a unit of unusual types once: torch reports a missing kernel only when it runs."""
        if {spec.dtype for spec in (*unit.input_specs, *unit.output_specs)} <= _COMPLETE:
            return
        args = [empty(spec, self._parsed.store.device).zero_() for spec in unit.input_specs]
        try:
            with torch.inference_mode():
                unit.run(args)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise Unsupported(" ".join(str(error).split())[:_ERROR_CHARS]) from error

    def _foreign_unit(self, op: OpId, reason: str) -> Unit:
        part = self._parsed.parts.sub_model([op], self._batch)
        specs = tuple(self._parsed.expected(t, self._batch, channels_last=False) for t in part.outputs)
        for tensor, spec in zip(part.outputs, specs, strict=True):
            self._trace.add_input(self._parsed.name(tensor), spec)
        names = [self._parsed.name(t) for t in part.inputs]
        wanted = [TORCH_OF_NAME[self._graph.tensors[t].dtype] for t in part.inputs]
        session = ForeignSession(part, names, wanted, specs, self._parsed.store.device)
        return Unit(
            ops=(op,),
            inputs=part.inputs,
            outputs=part.outputs,
            input_specs=tuple(self._spec(t) for t in part.inputs),
            output_specs=specs,
            alternatives=(session.alternative(),),
            foreign=reason,
        )

    def _run_time(self, tensors: Sequence[TensorId]) -> tuple[TensorId, ...]:
        """Return the tensors that are not known beforehand."""
        return tuple(t for t in tensors if self._trace.constant(self._parsed.name(t)) is None)

    def _output(self, tensor: TensorId) -> str | Tensor:
        name = self._parsed.name(tensor)
        known = self._trace.constant(name)
        return name if known is None else self._parsed.store.tensor(known)

    def _spec(self, tensor: TensorId) -> Spec:
        name = self._parsed.name(tensor)
        if self._trace.constant(name) is not None:
            return self._parsed.expected(tensor, self._batch, channels_last=False)
        return self._trace.spec(name)

    def _check(self, tensor: TensorId) -> None:
        """Check that a traced tensor agrees with the graph, or slots would not fit."""
        wanted = self._parsed.expected(tensor, self._batch, channels_last=False)
        name = self._parsed.name(tensor)
        known = self._trace.constant(name)
        if known is not None:
            shape, dtype = known.shape, self._parsed.store.runtime_dtype(known.dtype)
        else:
            shape, dtype = self._trace.spec(name).shape, self._trace.spec(name).dtype
        if (shape, dtype) != (wanted.shape, wanted.dtype):
            raise Unsupported(
                f"{name!r} becomes {dtype} {list(shape)}, not {wanted.dtype} {list(wanted.shape)}"
            )

    def _wants_channels_last(self, tensor: TensorId) -> bool:
        kinds = {self._graph.operators[op].kind for op in self._graph.consumers[tensor]}
        rank = len(self._graph.tensors[tensor].shape)
        return self._parsed.channels_last and rank in (4, 5) and not kinds.isdisjoint(LAYOUT_KINDS)

    def _makes_channels_last(self, operator: Operator, sources: Sequence[Tensor]) -> bool:
        if operator.kind in LAYOUT_KINDS:
            return True
        specs = [spec_of(s, channels_last=self._parsed.channels_last) for s in sources]
        return operator.kind in _KEEPING and any(spec.channels_last for spec in specs)


def ways(
    program: KernelProgram,
    traced: Sequence[TracedNode],
    inputs: Sequence[str],
    outputs: Sequence[str | Tensor],
    trace: NodeTracer,
) -> tuple[tuple[Alternative, ...], Hashable]:
    """Return one kernel per node and further kernels with the same result; and what they all compute."""
    plain = Alternative("nodes", program.run, program.run_into)
    if any(isinstance(o, Tensor) for o in outputs):
        return (plain,), None
    chain = chain_of(traced, inputs, [str(o) for o in outputs], trace.store)
    if chain is None:
        return (plain,), None
    return (plain, *alternatives(chain, trace, inputs, trace.store.device)), chain.signature
