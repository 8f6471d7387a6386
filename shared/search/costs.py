"""What a device class's operators cost, in seconds, and what was measured of its stages.

Operators: measured on the device where a measurement is there, keyed by artifact and operator; else a
roofline estimate (`stageloom.shared.search.analytic`). One that was measured at batch B takes, at another
batch b, its time times the ratio of the estimates at b and at B: plans of different batches can be compared.

Merged launches: estimated by `stageloom.shared.search.costs` until they were measured.

Stages: `stageloom.shared.search.stage_costs`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Final, NamedTuple, TypeAlias

from stageloom.shared.bitmask import mask_of
from stageloom.shared.blocks import Block
from stageloom.shared.digest import digest_of, digest_to_raw
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.merge import merge_key, merged, padding
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.schedule import Group
from stageloom.shared.search import analytic
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.interference import Interference, Sample, fit
from stageloom.shared.search.part_costs import PartCosts
from stageloom.shared.search.stage_costs import StageCosts as StageCosts
from stageloom.shared.search.stage_costs import Traits

_ALL_SUBSETS_OF: Final = 6


def mergeable(graph: Graph, block: Block) -> Iterator[tuple[OpId, ...]]:
    """Yield sets of operators of a block that a search may merge (IOS, section 3.2), each ascending.

    Any two or more operators of a class (`stageloom.shared.merge`) may run as one launch. Classes of up to
    six give all their subsets, 57 at most. Larger ones, which no model of the papers has, give the runs of
    neighbours when sorted by the size of their kernels: what merges well is of about one size, as smaller
    kernels are padded.
    """
    classes: dict[object, list[OpId]] = {}
    for op in block.operators:
        key = merge_key(graph, OpId(op))
        if key is not None:
            classes.setdefault(key, []).append(OpId(op))
    for ops in classes.values():
        if len(ops) <= _ALL_SUBSETS_OF:
            for size in range(2, len(ops) + 1):
                yield from combinations(ops, size)
            continue
        by_size = sorted(ops, key=lambda op: (_taps(graph, op), op))
        for first in range(len(ops)):
            for last in range(first + 2, len(ops) + 1):
                yield tuple(sorted(by_size[first:last]))


def merged_work(graph: Graph, ops: Sequence[OpId], batch: int = 1) -> tuple[int, int]:
    """The estimate is that of one convolution of the padded, stacked size that reads its input once, whose
    output is written, read and written again by the split, and that is a launch of its own: it joins no
    neighbour, and pays the barrier. Where the operators were measured it is scaled by what they took over
    what was estimated.

    (flop, bytes moved) of operators that run as one launch, over `batch` rows.
    """
    merge = merged(graph, ops)
    flop, weights = padding(graph, merge)
    weights += sum(graph.operators[op].weight_bytes for op in ops)
    flop += sum(graph.operators[op].flop for op in ops)
    made = sum(graph.tensors[tensor].nbytes for tensor in merge.outputs)
    return flop * batch, weights + (graph.tensors[merge.input].nbytes + 3 * made) * batch


def _taps(graph: Graph, op: OpId) -> int:
    convolution = graph.operators[op].convolution
    return prod(convolution.kernel) if convolution is not None else 0


Members: TypeAlias = tuple[tuple[Digest, int, int], ...]
"""The members of a combined block: artifact, first operator, one past the last."""

MemberOf: TypeAlias = tuple[Digest, Graph, Block]


class MeasuredStage(NamedTuple):
    """One stage of a combined block as a device measured it, with all its members at one batch."""

    members: Members
    batch: int
    groups: tuple[Group, ...]
    seconds: float
    merge: bool = False
    samples: int = 0  # runs behind it
    measured_at_us: int = 0  # wall clock


def stage_batch(batches: Iterable[int]) -> int | None:
    """The batch that stages of members with these batches are kept under.

    None where they differ: such stages are of no other block than theirs, and are not kept.
    """
    known = set(batches)
    return known.pop() if len(known) == 1 else None


def combined_digest(members: Iterable[tuple[Digest, int, int]]) -> Digest:
    """Return a digest over what the members compute, without names."""
    return digest_of([[digest_to_raw(artifact), start, stop] for artifact, start, stop in members])


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Operator costs of one device class on one executor, and its measured stages there."""

    measured_s: Mapping[tuple[Digest, OpId], float] = field(default_factory=dict)
    measured_at: Mapping[Digest, int] = field(default_factory=dict)
    """The batch of `measured_s` by artifact; 1 for an artifact that is not named."""

    rates: DeviceRates = field(default_factory=DeviceRates)
    stages: tuple[MeasuredStage, ...] = ()
    fresh_since_us: int = 0
    """Stale measurements: used, and requested, until they are repeated."""

    interference: Interference | None = None
    optimism: float = 0.0  # see `StageCosts.optimism`
    parts: Mapping[Digest, PartCosts] = field(default_factory=dict)
    """By artifact what parts of its operators cost, where that was measured."""

    executor: ExecutorOptions | None = None
    """What runs all that this table is of; None: it holds for whatever does."""

    beside: Mapping[ExecutorOptions, "CostTable"] = field(default_factory=dict)
    """What the same device takes on the other executors of a plan."""

    def under(self, executor: ExecutorOptions) -> "CostTable":
        """The costs on one executor: estimates alone where nothing is known of it."""
        if executor in self.beside:
            return self.beside[executor]
        # In which order launches are issued tells costs no more than it tells who keeps them.
        if self.executor is None or replace(executor, issue=self.executor.issue) == self.executor:
            return self
        rates, learned = fitted((), DeviceRates())
        return CostTable(executor=executor, rates=rates, interference=learned, optimism=self.optimism)

    @cached_property
    def stages_of(self) -> Mapping[tuple[Digest, int], tuple[MeasuredStage, ...]]:
        """Measured stages by combined block and the batch of its members."""
        found: dict[tuple[Digest, int], list[MeasuredStage]] = {}
        for stage in self.stages:
            found.setdefault((combined_digest(stage.members), stage.batch), []).append(stage)
        return {key: tuple(stages) for key, stages in found.items()}

    def __post_init__(self) -> None:
        for (artifact, op), seconds in self.measured_s.items():
            if not 0.0 <= seconds < float("inf"):  # false for NaN too
                raise InputError(
                    f"operator {op} of artifact {artifact[:12]} has the cost {seconds}",
                    remedy="measure it again",
                )

    def operator_s(self, artifact: Digest, graph: Graph, op: OpId, batch: int = 1) -> float:
        """Return the measurement, scaled to the batch if needed, or the estimate if there is none."""
        measured = self.measured_s.get((artifact, op))
        if measured is None:
            return self.estimate_s(graph, op, batch)
        at = self.measured_at.get(artifact, 1)
        if at == batch:
            return measured
        return measured * self.estimate_s(graph, op, batch) / self.estimate_s(graph, op, at)

    def is_measured(self, artifact: Digest, op: OpId, batch: int) -> bool:
        """Return whether the operator was measured at this batch."""
        return (artifact, op) in self.measured_s and self.measured_at.get(artifact, 1) == batch

    def estimate_s(self, graph: Graph, op: OpId, batch: int = 1) -> float:
        """Return the roofline estimate from the operator's flop, the bytes it moves, and its threads."""
        return analytic.alone_s(graph, op, self.rates, batch)

    def work_s(self, artifact: Digest, graph: Graph, op: OpId, batch: int = 1) -> float:
        """Return the work estimate, scaled to the operator's seconds."""
        share = analytic.work_s(graph, op, self.rates, batch) / self.estimate_s(graph, op, batch)
        return self.operator_s(artifact, graph, op, batch) * share

    def merged_s(self, artifact: Digest, graph: Graph, ops: Sequence[OpId], batch: int = 1) -> float:
        """Return the estimate of operators that run as one launch (`merged_work`)."""
        known_s = sum(self.operator_s(artifact, graph, op, batch) for op in ops)
        scale = known_s / sum(self.estimate_s(graph, op, batch) for op in ops)
        elements = sum(analytic.elements_of(graph, op) for op in ops) * batch
        one_s = analytic.roofline_s(self.rates, *merged_work(graph, ops, batch), elements)
        return scale * one_s + self.rates.barrier_s

    def for_members(self, members: Sequence[MemberOf], *, batches: Sequence[int] = ()) -> StageCosts:
        """The costs of a combined block, numbered as `stageloom.shared.blocks.combine` numbers its operators.

        `batches` is per member; without it all have one task at a time.
        """
        batches = batches or (1,) * len(members)
        batch = stage_batch(batches)
        known: tuple[MeasuredStage, ...] = ()
        if self.stages and batch is not None:
            digest = combined_digest((artifact, block.start, block.stop) for artifact, _, block in members)
            known = self.stages_of.get((digest, batch), ())
        measured_merges = {
            tuple(sorted(op for group in stage.groups for op in group)): stage.seconds
            for stage in known
            if stage.merge
        }
        old = [stage for stage in known if stage.measured_at_us < self.fresh_since_us]
        return StageCosts(
            tuple(
                self.operator_s(artifact, graph, OpId(op), rows)
                for (artifact, graph, block), rows in zip(members, batches, strict=True)
                for op in block.operators
            ),
            contention=self.rates.contention,
            barrier_s=self.rates.barrier_s,
            work_s=self._works_s(members, batches) if self.rates.threads else (),
            merges=tuple(({**dict(self._merges(members, batches)), **measured_merges}).items()),
            measured=tuple((stage.groups, stage.seconds) for stage in known if not stage.merge),
            measured_merges=tuple(measured_merges),
            stale=tuple((stage.groups, stage.merge) for stage in old),
            guessed=self._guessed(members, batches) if self.interference is not None else 0,
            interference=self.interference,
            traits=self.traits(members, batches) if self.interference is not None else (),
            launch_s=self.rates.launch_s,
            optimism=self.optimism,
        )

    def traits(self, members: Sequence[MemberOf], batches: Sequence[int]) -> tuple[Traits, ...]:
        """Return the traits of every operator of a combined block. [num_ops]"""
        found: list[Traits] = []
        for member, (_, graph, block) in enumerate(members):
            shift = len(found) - block.start
            scale = batches[member] / self.rates.bytes_per_s
            for op in block.operators:
                operator = graph.operators[op]
                reads = tuple(
                    (
                        graph.producer[tensor] + shift if graph.producer[tensor] in block.operators else -1,
                        graph.tensors[tensor].nbytes * scale,
                    )
                    for tensor in operator.inputs
                )
                makes = tuple(
                    (_readers(graph, tensor, block, shift), graph.tensors[tensor].nbytes * scale)
                    for tensor in operator.outputs
                )
                moved_s = operator.weight_bytes / self.rates.bytes_per_s + sum(
                    seconds for _, seconds in (*reads, *makes)
                )
                found.append(Traits(member, moved_s, reads, makes))
        return tuple(found)

    def _guessed(self, members: Sequence[MemberOf], batches: Sequence[int]) -> int:
        known = [
            self.is_measured(artifact, OpId(op), batch)
            for (artifact, _, block), batch in zip(members, batches, strict=True)
            for op in block.operators
        ]
        return mask_of(op for op, measured in enumerate(known) if not measured)

    def _works_s(self, members: Sequence[MemberOf], batches: Sequence[int]) -> tuple[float, ...]:
        return tuple(
            self.work_s(artifact, graph, OpId(op), batch)
            for (artifact, graph, block), batch in zip(members, batches, strict=True)
            for op in block.operators
        )

    def _merges(self, members: Sequence[MemberOf], batches: Sequence[int]) -> Iterator[tuple[Group, float]]:
        """Return the estimate of every merge that a search may choose, in the combined graph's numbering."""
        offset = 0
        for (artifact, graph, block), batch in zip(members, batches, strict=True):
            for ops in mergeable(graph, block):
                numbers = tuple(op - block.start + offset for op in ops)
                yield numbers, self.merged_s(artifact, graph, ops, batch)
            offset += len(block.operators)


def _readers(graph: Graph, tensor: TensorId, block: Block, shift: int) -> int:
    readers = graph.consumers[tensor]
    if tensor in graph.outputs or any(reader not in block.operators for reader in readers):
        return -1
    return mask_of(reader + shift for reader in readers)


def samples(table: CostTable, graphs: Mapping[Digest, Graph]) -> list[Sample]:
    """Return the measured stages, without merges, whose graphs are given and whose operators are measured."""
    taught: list[Sample] = []
    known: dict[tuple[Members, int], StageCosts | None] = {}
    reading = replace(table, stages=(), interference=fit(()))
    for stage in table.stages:
        key = stage.members, stage.batch
        if key not in known:
            known[key] = _readable(reading, stage, graphs)
        costs = known[key]
        if costs is not None and not stage.merge:
            networks = tuple(sorted({artifact for artifact, _, _ in stage.members}))
            taught.append(Sample(costs.terms(stage.groups), stage.seconds, networks))
    return taught


def _readable(table: CostTable, stage: MeasuredStage, graphs: Mapping[Digest, Graph]) -> StageCosts | None:
    members = []
    for artifact, start, stop in stage.members:
        if artifact not in graphs or any(
            (artifact, OpId(op)) not in table.measured_s for op in range(start, stop)
        ):
            return None
        members.append((artifact, graphs[artifact], Block(0, start, stop, (), (), (), ())))
    return table.for_members(members, batches=[stage.batch] * len(members))


LEAST_STAGES_TO_FIT: Final = 3
"""With fewer stages the formula stays: they tell little about others."""


def fitted(taught: Sequence[Sample], rates: DeviceRates) -> tuple[DeviceRates, Interference]:
    """The model of a device class, and its rates with what the model says of streams.

    Streams have no stages to predict: their simulation gets the model's contention and barrier.
    """
    learned = fit(
        taught if len(taught) >= LEAST_STAGES_TO_FIT else (),
        contention=rates.contention,
        barrier_s=rates.barrier_s,
        launch_s=rates.launch_s,
    )
    if not learned.samples:
        return rates, learned
    return replace(
        rates,
        contention=max(learned.of("rest"), 0.0),
        barrier_s=max(learned.of("meet"), 0.0) * rates.launch_s,
    ), learned
