"""From measured times of operators and their parts to the problem of splitting a model over two resources.

Operators and parts are measured as sessions of their own; in a plan those that follow each other in one
way run in one session, which is shorter: no layout is undone between them. So all are taken at their share of
what one session over the model took; what they take longer alone is a *border*, paid where a session begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum, lcm, prod
from typing import Final, NamedTuple, Protocol, TypeAlias

from stageloom.shared.errors import Unsplittable
from stageloom.shared.graph import Graph
from stageloom.shared.legality import split_violations
from stageloom.shared.operator_parts import SplitAxis, halves_of
from stageloom.shared.partition import Axis, AxisRange, NodeRun, Split
from stageloom.shared.search.patterns import fitted_pattern
from stageloom.shared.search.split_problem import (
    AxisTimes,
    Halves,
    SplitChoice,
    SplitProblem,
    SplitState,
    SplittableOperator,
    Whole,
    chains_of,
)
from stageloom.shared.split_graph import split_dimension

CHANNEL_TILE: Final = 8
"""Channels that kernels take at once: between multiples of it a depthwise convolution of onnxruntime, for
one, is slower than at the next one."""

PartSamples: TypeAlias = Mapping[tuple[int, Axis], Mapping[int, float]]
"""Seconds by extent, per operator and axis."""


class PartSample(NamedTuple):
    """What the part [0, extent) of an operator's output took along an axis."""

    op: int
    axis: Axis
    extent: int
    seconds: float


class OperatorNodes(Protocol):
    """The nodes of a model's operators: `stageloom.shared.importer.splittable.SplitReader`."""

    def nodes(self, first: int, last: int) -> NodeRun:
        """Of operators `first` to `last`."""

    def axes(self, first: int, last: int | None = None) -> tuple[SplitAxis, ...]:
        """The axes that they may be split on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceTimes:
    """What operators take on one resource within a session, and what it takes to begin one with them."""

    whole_s: Sequence[float]  # [num_ops]
    part_s: PartSamples
    border_s: Sequence[float]  # [num_ops]

    @classmethod
    def of(cls, alone_s: Sequence[float], part_s: PartSamples, session_s: float) -> "ResourceTimes":
        """From times of operators and parts alone, and of one session over the whole model. [num_ops]"""
        ratio = session_s / fsum(alone_s)
        return cls(
            whole_s=tuple(ratio * one for one in alone_s),
            part_s={
                key: {extent: ratio * seconds for extent, seconds in samples.items()}
                for key, samples in part_s.items()
            },
            border_s=tuple(max(1.0 - ratio, 0.0) * one for one in alone_s),
        )


def granule_of(axis: SplitAxis) -> int:
    """Of what boundaries are multiples: the quantum, and of many channels the tile."""
    tiled = axis.axis is Axis.CHANNELS and axis.extent >= 4 * CHANNEL_TILE and axis.extent % CHANNEL_TILE == 0
    return lcm(axis.quantum, CHANNEL_TILE) if tiled else axis.quantum


def measured_problem(
    graph: Graph,
    axes: Sequence[Sequence[SplitAxis]],
    times: tuple[ResourceTimes, ResourceTimes],
    joins: "SharedMemoryJoins",
) -> SplitProblem:
    """A problem of all operators, with every axis of which both resources have samples.

    `axes` are those that each operator may be split on. [num_ops]

    Raises:
        InputError: a sample is no time of a part.
    """
    chains, stages = chains_of(graph)
    operators = []
    for op, offered in enumerate(axes):
        known = [axis for axis in offered if all((op, axis.axis) in one.part_s for one in times)]
        whole_s = times[0].whole_s[op], times[1].whole_s[op]
        operators.append(SplittableOperator(whole_s, tuple(_axis_times(op, axis, times) for axis in known)))
    return SplitProblem(operators=operators, joins=joins, chains=chains, stages=stages)


def _axis_times(op: int, axis: SplitAxis, times: tuple[ResourceTimes, ResourceTimes]) -> AxisTimes:
    fast, slow = (fitted_pattern(one.part_s[op, axis.axis]) for one in times)
    granule = granule_of(axis)
    quanta = (_up(fast.quantum, granule), _up(slow.quantum, granule))
    return AxisTimes(axis.axis, axis.extent, (fast, slow), quanta, granule)


def _up(quantum: int, granule: int) -> int:
    return -(-quantum // granule) * granule


def alike(graph: Graph, nodes: OperatorNodes) -> tuple[int, ...]:
    """Per operator the first one of the same nodes, attributes and shapes: times of one are the other's."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(_signature(graph, nodes, op), op) for op in range(len(graph.operators)))


def _signature(graph: Graph, nodes: OperatorNodes, op: int) -> object:
    try:
        run = nodes.nodes(op, op)
    except Unsplittable:
        return op
    return tuple(
        (
            node.kind,
            tuple(sorted(node.attributes.items(), key=lambda pair: pair[0])),
            tuple((run.shapes.get(name), run.numbers.get(name)) for name in node.inputs),
            tuple(run.shapes.get(name) for name in node.outputs),
        )
        for node in run.nodes
    )


def operators_to_time(
    axes: Sequence[Sequence[SplitAxis]], first: Sequence[int], alone_s: Sequence[float]
) -> list[int]:
    """Of operators that may be split the first of each that are alike, those that take longest first.

    `first` is what `alike` returns; `alone_s` are the operators' times, 0 for what is not known. [num_ops]
    """
    return sorted({op for op in first if axes[op]}, key=lambda op: (-alone_s[op], op))


def part_samples(
    axes: Sequence[Sequence[SplitAxis]], first: Sequence[int], timed: Iterable[PartSample]
) -> PartSamples:
    """Samples of every operator from those of the first ones that are alike.

    An axis counts that was timed up to the whole: a profile may have ended in the middle of one.
    """
    found: dict[tuple[int, Axis], dict[int, float]] = {}
    for one in timed:
        found.setdefault((one.op, one.axis), {})[one.extent] = one.seconds
    return {
        (op, axis.axis): {extent: taken for extent, taken in samples.items() if extent <= axis.extent}
        for op, offered in enumerate(axes)
        for axis in offered
        if axis.extent in (samples := found.get((first[op], axis.axis), {}))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMeasurements:
    """What was measured of a model on one resource."""

    alone_s: Sequence[float]  # each operator as a session of its own [num_ops]
    parts: Sequence[PartSample]  # of the first operators of those that are alike
    session_s: float  # one session over the whole model
    handover_s: float  # of calling another resource and waiting for it
    copy_bytes_per_s: float  # of putting two halves together


def split_problem(
    graph: Graph, nodes: OperatorNodes, measured: tuple[SplitMeasurements, SplitMeasurements]
) -> SplitProblem:
    """The problem of splitting a model over two resources that share memory, from what was measured of both.

    A hand-over takes what it takes on the resource on which it takes longer, and so does a copy.

    Raises:
        InputError: a sample is no time of a part.
    """
    axes = tuple(nodes.axes(op) for op in range(len(graph.operators)))
    first = alike(graph, nodes)
    fast, slow = (
        ResourceTimes.of(one.alone_s, part_samples(axes, first, one.parts), one.session_s) for one in measured
    )
    joins = SharedMemoryJoins(
        graph=graph,
        nodes=nodes,
        axes=axes,
        handover_s=max(one.handover_s for one in measured),
        copy_bytes_per_s=min(one.copy_bytes_per_s for one in measured),
        border_s=(fast.border_s, slow.border_s),
    )
    return measured_problem(graph, axes, (fast, slow), joins)


@dataclass
class SharedMemoryJoins:
    """Joins of resources that share memory: one hand-over, and a copy where halves are not written in place.

    Whoever is not at home is called and waited for once, however its halves come and go: so the whole of it
    is on entering, and `barrier_s` is nothing. So is the border of the session that begins there.

    Whether an operator goes on where the one before was split is asked of its nodes: each half must read just
    what the half before it made, of the same dimension, and nothing twice.
    """

    graph: Graph
    nodes: OperatorNodes
    axes: Sequence[Sequence[SplitAxis]]  # that each operator may be split on [num_ops]
    handover_s: float  # of calling the other resource and waiting for it
    copy_bytes_per_s: float
    border_s: tuple[Sequence[float], Sequence[float]]  # per resource, of sessions that begin there [num_ops]
    _known: dict[tuple[int, Halves], Halves | None] = field(default_factory=dict, init=False)

    @property
    def barrier_s(self) -> float:
        """Nothing more than `handover_s`."""
        return 0.0

    def carried(self, op: int, before: SplitState) -> SplitState | None:
        """The same resource; or the boundary at which both halves read what `before`'s made."""
        if isinstance(before, Whole):
            return before
        key = op, before
        if key not in self._known:
            self._known[key] = self._halves(op, before)
        return self._known[key]

    def leave_s(self, op: int, state: SplitState, home: Whole) -> float:
        """The copy of halves that do not lie one behind the other in the joined output."""
        if isinstance(state, Whole):
            return 0.0
        copied = 0
        dim = self._dimension(op, state)
        for number in self.graph.operators[op].outputs:
            tensor = self.graph.tensors[number]
            if dim is not None and prod(tensor.shape[:dim]) > 1:
                copied += tensor.nbytes
        return copied / self.copy_bytes_per_s

    def enter_s(self, op: int, state: SplitState, home: Whole) -> float:
        """The hand-over and the border; parts are timed with what it takes to read a slice."""
        handover_s = 0.0 if state == home else self.handover_s
        if isinstance(state, Whole):
            return handover_s + self.border_s[state.resource][op]
        axis = next((one for one in self.axes[op] if one.axis is state.axis), None)
        share = state.boundary / axis.extent if axis is not None else 1.0
        return handover_s + max(self.border_s[0][op] * share, self.border_s[1][op] * (1.0 - share))

    def _dimension(self, op: int, state: Halves) -> int | None:
        return split_dimension(self.graph, Split(op, op, state.axis, state.boundary))

    @cached_property
    def _runs(self) -> dict[int, NodeRun]:
        return {op: self.nodes.nodes(op, op) for op, offered in enumerate(self.axes) if offered}

    def _halves(self, op: int, before: Halves) -> Halves | None:
        dim = self._dimension(op - 1, before)
        made = [self.graph.tensors[one] for one in self.graph.operators[op - 1].outputs]
        extents = {one.shape[dim] for one in made if dim is not None and dim < len(one.shape)}
        if dim is None or len(extents) != 1:
            return None
        (extent,) = extents
        wanted = AxisRange(dim, 0, before.boundary), AxisRange(dim, before.boundary, extent)
        for axis in self.axes[op]:
            end, rest = divmod(before.boundary * axis.extent, extent)
            if rest or not 0 < end < axis.extent or end % axis.quantum:
                continue
            try:
                halves = halves_of(self._runs[op], axis.dim, end)
            except Unsplittable:
                continue
            if all(
                half.held.get(tensor.name) == part
                for half, part in zip(halves, wanted, strict=True)
                for tensor in made
            ):
                return Halves(axis.axis, end)
        return None


def batch_splits(
    graph: Graph, nodes: OperatorNodes, session_s: tuple[float, float], handover_s: float
) -> tuple[SplitChoice, ...]:
    """The whole model split along its batch: the boundary that balances both resources, and its neighbours.

    Every operator has the same boundary and no halo, so that nothing is joined but the outputs. Chains end
    where the model branches; such a run does not. None where an operator has no such axis. `session_s`: what
    one session over the model takes on each resource.
    """
    last = len(graph.operators) - 1
    axis = next((one for one in nodes.axes(0, last) if one.axis is Axis.BATCH), None)
    if axis is None:
        return ()
    fast_s, slow_s = (one / axis.extent for one in session_s)
    balanced = axis.extent * slow_s / (fast_s + slow_s)
    ends = sorted(range(axis.quantum, axis.extent, axis.quantum), key=lambda end: (abs(end - balanced), end))
    return tuple(
        SplitChoice(
            states=(Halves(Axis.BATCH, end),) * (last + 1),
            splits=(Split(0, last, Axis.BATCH, end),),
            seconds=max(fast_s * end, slow_s * (axis.extent - end)) + handover_s,
        )
        for end in ends[:3]
        if not split_violations([Split(0, last, Axis.BATCH, end)], graph, ())
    )
