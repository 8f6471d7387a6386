"""What a device class's operators cost, in seconds, and what was measured of its stages.

Operators: measured on the device where a measurement is there, keyed by artifact and operator; else a
roofline estimate (`stageloom.shared.search.analytic`). One that was measured at batch B takes, at another
batch b, its time times the ratio of the estimates at b and at B: plans of different batches can be compared.

Merged launches: estimated by `stageloom.shared.search.merging` until they were measured.

Stages: `stageloom.shared.search.stage_costs`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from stageloom.shared.bitmask import mask_of
from stageloom.shared.blocks import Block
from stageloom.shared.digest import digest_of, digest_to_raw
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.schedule import Group
from stageloom.shared.search import analytic
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.interference import Interference
from stageloom.shared.search.merging import mergeable, merged_work
from stageloom.shared.search.stage_costs import StageCosts as StageCosts
from stageloom.shared.search.stage_costs import Traits

Members: TypeAlias = tuple[tuple[Digest, int, int], ...]
"""Per member of a combined block the artifact, its first operator, and one past its last."""

MemberOf: TypeAlias = tuple[Digest, Graph, Block]


class MeasuredStage(NamedTuple):
    """One stage of a combined block as a device measured it, at the largest batch of its members."""

    members: Members
    batch: int
    groups: tuple[Group, ...]
    seconds: float
    merge: bool = False
    samples: int = 0  # runs behind it
    measured_at_us: int = 0  # wall clock


def combined_digest(members: Iterable[tuple[Digest, int, int]]) -> Digest:
    """Digest over what the members compute: artifact, first operator, one past the last; no names."""
    return digest_of([[digest_to_raw(artifact), start, stop] for artifact, start, stop in members])


class Provenance(NamedTuple):
    """Where a measured operator's seconds come from."""

    samples: int
    measured_at_us: int  # wall clock


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Operator costs of one device class, and what is known of stages."""

    measured_s: Mapping[tuple[Digest, OpId], float] = field(default_factory=dict)
    measured_at: Mapping[Digest, int] = field(default_factory=dict)
    """The batch of `measured_s` per artifact; of one that is not named it is 1."""

    rates: DeviceRates = field(default_factory=DeviceRates)
    stages: tuple[MeasuredStage, ...] = ()
    provenance: Mapping[tuple[Digest, OpId], Provenance] = field(default_factory=dict)
    """Of `measured_s`, where it is known."""

    fresh_since_us: int = 0
    """What was measured before that is stale: it counts until it is measured again, and is asked for."""

    interference: Interference | None = None
    optimism: float = 0.0  # see `StageCosts.optimism`

    @cached_property
    def stages_of(self) -> Mapping[tuple[Digest, int], tuple[MeasuredStage, ...]]:
        """Measured stages per (combined block, batch)."""
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
        """The measurement, scaled where it is of another batch, or the estimate where there is none."""
        measured = self.measured_s.get((artifact, op))
        if measured is None:
            return self.estimate_s(graph, op, batch)
        at = self.measured_at.get(artifact, 1)
        if at == batch:
            return measured
        return measured * self.estimate_s(graph, op, batch) / self.estimate_s(graph, op, at)

    def is_measured(self, artifact: Digest, op: OpId, batch: int) -> bool:
        """Whether it was measured at this very batch."""
        return (artifact, op) in self.measured_s and self.measured_at.get(artifact, 1) == batch

    def estimate_s(self, graph: Graph, op: OpId, batch: int = 1) -> float:
        """Roofline estimate from the operator's flop, the bytes it reads and writes, and its threads."""
        return analytic.alone_s(graph, op, self.rates, batch)

    def work_s(self, artifact: Digest, graph: Graph, op: OpId, batch: int = 1) -> float:
        """The estimate's share of the device, over the operator's seconds."""
        share = analytic.work_s(graph, op, self.rates, batch) / self.estimate_s(graph, op, batch)
        return self.operator_s(artifact, graph, op, batch) * share

    def merged_s(self, artifact: Digest, graph: Graph, ops: Sequence[OpId], batch: int = 1) -> float:
        """Estimate of operators that run as one launch; see `stageloom.shared.search.merging`."""
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
        batch = max(batches)
        known: tuple[MeasuredStage, ...] = ()
        if self.stages:
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
        """What the model of a device class reads of every operator of a combined block. [num_ops]"""
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
        """Every merge that a search may choose, in the combined graph's numbering, with its estimate."""
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
