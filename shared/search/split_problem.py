"""What operators cost that are split over two resources: parts, joins between neighbours, whole models.

Resource 0 is the fast one. A *chain* is a run of operators that follow each other in the graph's numbering,
each the only reader of the one before and reading nothing else made at run time; only within a chain can
parts be handed on without being joined. At its borders all tensors are whole on one resource, the *home*.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol, TypeAlias

from stageloom.shared.bitmask import bits
from stageloom.shared.graph import Graph
from stageloom.shared.partition import Axis, Split

PartSeconds: TypeAlias = Callable[[int], float]
"""Seconds of a part of that extent, on one resource, with its own input and output borders."""


class Whole(NamedTuple):
    """An operator runs whole on a resource."""

    resource: int


class Halves(NamedTuple):
    """Part one, [0, boundary) of the output's axis, runs on resource 0, the rest on resource 1."""

    axis: Axis
    boundary: int


SplitState: TypeAlias = Whole | Halves


@dataclass(frozen=True, slots=True)
class AxisTimes:
    """An axis along which an operator may be split, with the times of its parts per resource."""

    axis: Axis
    extent: int
    part_s: tuple[PartSeconds, PartSeconds]
    quanta: tuple[int, int] = (1, 1)  # tile sizes of the resources: a part fills its last tile
    granule: int = 1  # a boundary is a multiple of it (groups of a convolution)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Ascending boundaries at which one of the parts fills its last tile."""
        first, second = self.quanta
        ends = {*range(first, self.extent, first)}
        ends.update(range(self.extent - second, 0, -second))
        return tuple(sorted(end for end in ends if end % self.granule == 0))

    def seconds(self, boundary: int) -> float:
        """Of both parts at once: the longer one, without the join."""
        return max(self.part_s[0](boundary), self.part_s[1](self.extent - boundary))

    def nearest(self, share: float) -> int | None:
        """The boundary that leaves resource 0 the share closest to `share`; None where there is none."""
        return min(self.boundaries, key=lambda end: abs(end - share * self.extent), default=None)


@dataclass(frozen=True, slots=True)
class SplittableOperator:
    """One operator: its seconds whole on either resource, and the axes along which it may be split."""

    whole_s: tuple[float, float]
    axes: tuple[AxisTimes, ...] = ()

    @property
    def best_whole(self) -> Whole:
        """On the resource that is faster for it; resource 0 of equal ones."""
        return Whole(int(self.whole_s[1] < self.whole_s[0]))

    @property
    def least_whole_s(self) -> float:
        return min(self.whole_s)

    def seconds(self, state: SplitState) -> float:
        """Seconds in this state, without joins; infinite where it may not be split so."""
        if isinstance(state, Whole):
            return self.whole_s[state.resource]
        for one in self.axes:
            if one.axis is state.axis and 0 < state.boundary < one.extent:
                return inf if state.boundary % one.granule else one.seconds(state.boundary)
        return inf


class Joins(Protocol):
    """What it costs that neighbours do not run in the same way; see `into_s`."""

    @property
    def barrier_s(self) -> float:
        """One resource waits for the other."""

    def carried(self, op: int, before: SplitState) -> SplitState | None:
        """The state in which `op` reads, on each resource, just what the one before it made there.

        Two states are never carried to one; a resource is carried to itself.
        """

    def leave_s(self, op: int, state: SplitState, home: Whole) -> float:
        """Seconds of what has to be copied until the output of `op` is whole at home."""

    def enter_s(self, op: int, state: SplitState, home: Whole) -> float:
        """Seconds of what has to be copied from home until `op` can run in this state."""


@dataclass(frozen=True, slots=True)
class ConstantJoins:
    """EOP's cm: every operator that is split pays the same for split, copies and concatenation (eq. 2)."""

    join_s: float
    barrier_s: float = 0.0

    def carried(self, op: int, before: SplitState) -> SplitState | None:
        """Only an operator that is whole is where the next one may stay."""
        return before if isinstance(before, Whole) else None

    def leave_s(self, op: int, state: SplitState, home: Whole) -> float:
        """Nothing: it is in the constant."""
        return 0.0

    def enter_s(self, op: int, state: SplitState, home: Whole) -> float:
        """The constant, of a split."""
        return self.join_s if isinstance(state, Halves) else 0.0


class Reads(NamedTuple):
    """What a part [a, b) reads along the input's axis: [a stride - pad, (b - 1) stride - pad + window)."""

    axis: Axis
    stride: int = 1
    window: int = 1
    pad: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorBytes:
    """The tensors of one operator, per axis of its output what a part reads; no entry: all of the input."""

    input_bytes: int
    output_bytes: int
    input_extents: Mapping[Axis, int] = field(default_factory=dict)
    output_extents: Mapping[Axis, int] = field(default_factory=dict)
    reads: Mapping[Axis, Reads] = field(default_factory=dict)

    def read_shares(self, state: Halves) -> tuple[float, float]:
        """The shares of the input that both parts read: together 1 or, with a halo, more."""
        reads = self.reads.get(state.axis)
        if reads is None:
            return 1.0, 1.0
        extent = self.input_extents[reads.axis]
        last = (state.boundary - 1) * reads.stride - reads.pad + reads.window
        first = state.boundary * reads.stride - reads.pad
        return min(max(last, 0), extent) / extent, 1.0 - min(max(first, 0), extent) / extent


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderJoins:
    """Bytes that change sides, each copy with its latency, and one barrier; nothing where it is carried.

    With `bytes_per_s` infinite and no latency the resources share memory, and a join is a barrier.
    """

    operators: Sequence[OperatorBytes]
    barrier_s: float
    latency_s: float = 0.0
    bytes_per_s: float = inf

    def carried(self, op: int, before: SplitState) -> SplitState | None:
        """The same resource; or the boundary at which both parts read up to `before`'s, without a halo."""
        if isinstance(before, Whole):
            return before
        own = self.operators[op]
        for axis, reads in own.reads.items():
            if reads.axis is not before.axis or reads.window > reads.stride:
                continue
            boundary, rest = divmod(before.boundary + reads.pad, reads.stride)
            if not rest and 0 < boundary < own.output_extents[axis]:
                return Halves(axis, boundary)
        return None

    def leave_s(self, op: int, state: SplitState, home: Whole) -> float:
        """Of what the other resource made."""
        if isinstance(state, Whole):
            share = float(state != home)
        else:
            part = state.boundary / self.operators[op].output_extents[state.axis]
            share = part if home.resource else 1.0 - part
        return self._copy_s(self.operators[op].output_bytes * share)

    def enter_s(self, op: int, state: SplitState, home: Whole) -> float:
        """Of what the other resource reads."""
        own = self.operators[op]
        share = (
            float(state != home) if isinstance(state, Whole) else own.read_shares(state)[1 - home.resource]
        )
        return self._copy_s(own.input_bytes * share)

    def _copy_s(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """A model to be split over two resources.

    `chains` are ranges of operators in order; `stages` are chains, by their place, of which none reads what
    another of the same stage makes. Without stages the chains run one after another. `home` is where tensors
    are whole at the borders of chains.
    """

    operators: Sequence[SplittableOperator]
    joins: Joins
    chains: Sequence[range]
    stages: Sequence[Sequence[int]] = ()
    home: Whole = Whole(0)  # noqa: RUF009 (immutable)


def chains_of(graph: Graph) -> tuple[tuple[range, ...], tuple[tuple[int, ...], ...]]:
    """The chains of a graph and their stages: a chain's stage follows the last one that it reads from."""
    starts = [0, *(op for op in range(1, len(graph.operators)) if not _follows(graph, op))]
    chains = tuple(map(range, starts, [*starts[1:], len(graph.operators)]))
    chain_of = {op: place for place, chain in enumerate(chains) for op in chain}
    levels: list[int] = []
    for chain in chains:
        read = {chain_of[before] for before in bits(graph.predecessors[chain.start])}
        levels.append(1 + max((levels[one] for one in read), default=-1))
    stages: list[list[int]] = [[] for _ in range(max(levels) + 1)]
    for place, level in enumerate(levels):
        stages[level].append(place)
    return chains, tuple(map(tuple, stages))


def _follows(graph: Graph, op: int) -> bool:
    """Whether `op` reads what the one before it makes and nothing else, and nobody else reads that."""
    operator, before = graph.operators[op], graph.operators[op - 1]
    return (
        not operator.opaque
        and not before.opaque
        and set(operator.inputs) == set(before.outputs)
        and all(graph.consumers[tensor] == (op,) for tensor in before.outputs)
        and not set(before.outputs) & set(graph.outputs)
    )


# Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """How a model's operators run, and what that is predicted to take.

    `splits`: as a plan has them. `resources`: per operator, of one that is not split; None for the others.
    `beside`: pairs of operators' sets that run at the same time, the first on resource 0.
    """

    states: tuple[SplitState, ...]
    splits: tuple[Split, ...]
    seconds: float
    beside: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    home: Whole = Whole(0)  # noqa: RUF009 (immutable)

    @property
    def resources(self) -> tuple[int | None, ...]:
        return tuple(state.resource if isinstance(state, Whole) else None for state in self.states)


def runs_of(problem: SplitProblem, states: Sequence[SplitState]) -> tuple[Split, ...]:
    """Splits of the fewest joins: neighbours whose state is carried are one run."""
    found: list[Split] = []
    for chain in problem.chains:
        for op in chain:
            state = states[op]
            if not isinstance(state, Halves):
                continue
            joined = op == chain.start or problem.joins.carried(op, states[op - 1]) != state
            first = op if joined else found.pop().first
            found.append(Split(first, op, state.axis, state.boundary))
    return tuple(found)


def each_alone(states: Sequence[SplitState]) -> tuple[Split, ...]:
    """A split of its own for every operator, joined after it."""
    return tuple(
        Split(op, op, state.axis, state.boundary)
        for op, state in enumerate(states)
        if isinstance(state, Halves)
    )


def into_s(problem: SplitProblem, op: int, before: SplitState, after: SplitState) -> float:
    """cm(s', s): what it takes until `op` can run as `after` on what the one before made as `before`.

    0 where parts are handed on as they are, else one barrier and the bytes that change sides. They go by
    home: a plan's splits are joined whole before anything else reads them.
    """
    joins = problem.joins
    if joins.carried(op, before) == after:
        return 0.0
    left_s = 0.0 if before == problem.home else joins.leave_s(op - 1, before, problem.home)
    return joins.barrier_s + left_s + joins.enter_s(op, after, problem.home)


def gathered_s(problem: SplitProblem, op: int, state: SplitState) -> float:
    """What it takes until the output of `op` is whole at home."""
    if state == problem.home:
        return 0.0
    return problem.joins.barrier_s + problem.joins.leave_s(op, state, problem.home)


def begun_anew_s(problem: SplitProblem, op: int) -> float:
    """What the operator behind `op` pays that runs whole at home, where `op` was split and joined.

    0 at the end of a chain: what comes next is not known there.
    """
    behind = op + 1
    place = bisect_left(problem.chains, behind, key=lambda chain: chain.start)
    starts = place < len(problem.chains) and problem.chains[place].start == behind
    if starts or behind == len(problem.operators):
        return 0.0
    return problem.joins.enter_s(behind, problem.home, problem.home)


def coupled_s(problem: SplitProblem, states: Sequence[SplitState]) -> float:
    """Seconds of all chains one after another, neighbours handing parts on where they are carried."""
    return sum(chain_s(problem, chain, [states[op] for op in chain]) for chain in problem.chains)


def chain_s(problem: SplitProblem, chain: range, states: Sequence[SplitState]) -> float:
    """Seconds of one chain, from home to home; `states` are its operators'."""
    before: SplitState = problem.home
    seconds = 0.0
    for op, after in zip(chain, states, strict=True):
        seconds += into_s(problem, op, before, after) + problem.operators[op].seconds(after)
        before = after
    return seconds + gathered_s(problem, chain[-1], before)


def apart_s(problem: SplitProblem, states: Sequence[SplitState]) -> float:
    """Seconds of all chains one after another, every split operator being joined at home."""
    seconds = 0.0
    for chain in problem.chains:
        before: SplitState = problem.home
        for op in chain:
            after = states[op]
            seconds += into_s(problem, op, before, after) + problem.operators[op].seconds(after)
            if isinstance(after, Halves):
                seconds += gathered_s(problem, op, after)
                if op != chain[-1] and states[op + 1] == problem.home:
                    seconds += begun_anew_s(problem, op)
                after = problem.home
            before = after
        seconds += gathered_s(problem, chain[-1], before)
    return seconds
