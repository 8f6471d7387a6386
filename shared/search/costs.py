"""What operators and stages cost, in seconds.

Operators: measured on the device where a measurement is there, keyed by artifact and operator; else a
roofline estimate (`shared.search.analytic`).

Merged launches: estimated by `shared.search.merging` until they were measured.

Stages: IOS (Ding et al. 2021, section 3) measures every stage it meets; TOP keeps those measurements. Until
a stage has one, its groups cost

    least + contention * (total - least) + barrier,    least = max(longest, work)

over the groups' sums; `work` is the seconds that the whole device would need for the operators, where that is
known, and else nothing. `contention` 0 means that groups never slow each other down while there is room, 1
that they run as if one after another; both ends are exact, what lies between is a straight line and nothing
more. Where stages were measured, `fitted` makes the line fit them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Final, NamedTuple

from shared.blocks import Block
from shared.digest import digest_of, digest_to_raw
from shared.errors import InputError
from shared.graph import Graph
from shared.ids import Digest, OpId
from shared.schedule import Group, Stage, StageSchedule
from shared.search import analytic
from shared.search.analytic import DeviceRates
from shared.search.merging import mergeable, merged_work


class MeasuredStage(NamedTuple):
    """One stage of a combined block as a device measured it, at the largest batch of its members.

    `members`: per member the artifact, its first operator, and one past its last.
    """

    members: tuple[tuple[Digest, int, int], ...]
    batch: int
    groups: tuple[Group, ...]
    seconds: float
    merge: bool = False


def combined_digest(members: Iterable[tuple[Digest, int, int]]) -> Digest:
    """Digest over what the members compute: artifact, first operator, one past the last; no names."""
    return digest_of([[digest_to_raw(artifact), start, stop] for artifact, start, stop in members])


@dataclass(frozen=True)
class StageCosts:
    """The costs of one combined block."""

    operators_s: tuple[float, ...]  # per operator of the combined graph [num_ops]
    contention: float = 1.0
    barrier_s: float = 0.0
    merges: tuple[tuple[Group, float], ...] = ()
    """Operators, ascending, that may become one launch (IOS, section 3.2), and its seconds, estimated or
    measured. A combined graph says which may merge, and holds no tensors to tell what that costs."""

    work_s: tuple[float, ...] = ()
    """Per operator what the whole device would need for it, at most its own seconds [num_ops]; empty: one
    operator is not known to leave room for another."""

    measured: tuple[tuple[tuple[Group, ...], float], ...] = ()
    """Stages that were measured whole, by their groups in canonical order, and their seconds."""

    measured_merges: tuple[Group, ...] = ()
    """The `merges` whose seconds were measured."""

    @cached_property
    def merged_s(self) -> Mapping[Group, float]:
        """`merges` to look up."""
        return dict(self.merges)

    @cached_property
    def measured_s(self) -> Mapping[tuple[Group, ...], float]:
        """`measured` to look up."""
        return dict(self.measured)

    def stage_s(self, groups: Sequence[Group]) -> float:
        """Seconds of one stage: the measurement, or the formula where there is none.

        A stage of a single group has no barrier to pay for.
        """
        known = self.measured_s.get(tuple(groups)) if self.measured else None
        return self.formula_s(groups) if known is None else known

    def formula_s(self, groups: Sequence[Group]) -> float:
        """Seconds of one stage by the formula alone."""
        sums = [sum(self.operators_s[op] for op in group) for group in groups]
        if len(sums) == 1:
            return sums[0]
        least = max(sums)
        if self.work_s:
            least = max(least, sum(self.work_s[op] for group in groups for op in group))
        return least + self.contention * (sum(sums) - least) + self.barrier_s

    def one_stage_s(self, stage: Stage) -> float:
        """Seconds of a stage as it is to run.

        Raises:
            KeyError: it merges operators that are not among `merges`.
        """
        if stage.merge:
            return self.merged_s[tuple(sorted(stage.operators))]
        return self.stage_s(stage.groups)

    def is_measured(self, stage: Stage) -> bool:
        """Whether the stage's seconds were measured as a whole."""
        if stage.merge:
            return tuple(sorted(stage.operators)) in self.measured_merges
        return stage.groups in self.measured_s

    def schedule_s(self, schedule: StageSchedule) -> float:
        """Seconds of all stages, one after another.

        Raises:
            KeyError: a stage merges operators that are not among `merges`.
        """
        return sum(self.one_stage_s(stage) for stage in schedule.stages)


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Operator costs of one device class."""

    measured_s: Mapping[tuple[Digest, OpId], float] = field(default_factory=dict)
    rates: DeviceRates = field(default_factory=DeviceRates)
    stages: tuple[MeasuredStage, ...] = ()

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

    def operator_s(self, artifact: Digest, graph: Graph, op: OpId) -> float:
        """The measurement, or the estimate where there is none."""
        measured = self.measured_s.get((artifact, op))
        return self.estimate_s(graph, op) if measured is None else measured

    def estimate_s(self, graph: Graph, op: OpId) -> float:
        """Roofline estimate from the operator's flop, the bytes it reads and writes, and its threads."""
        return analytic.alone_s(graph, op, self.rates)

    def work_s(self, artifact: Digest, graph: Graph, op: OpId) -> float:
        """The estimate's share of the device, over the operator's seconds."""
        share = analytic.work_s(graph, op, self.rates) / self.estimate_s(graph, op)
        return self.operator_s(artifact, graph, op) * share

    def merged_s(self, artifact: Digest, graph: Graph, ops: Sequence[OpId]) -> float:
        """Estimate of operators that run as one launch; see `shared.search.merging`."""
        known_s = sum(self.operator_s(artifact, graph, op) for op in ops)
        scale = known_s / sum(self.estimate_s(graph, op) for op in ops)
        elements = sum(analytic.elements_of(graph, op) for op in ops)
        one_s = analytic.roofline_s(self.rates, *merged_work(graph, ops), elements)
        return scale * one_s + self.rates.barrier_s

    def for_members(self, members: Sequence[tuple[Digest, Graph, Block]], *, batch: int = 1) -> StageCosts:
        """The costs of a combined block, numbered as `shared.blocks.combine` numbers its operators.

        `batch` is the largest of its members'.
        """
        known: tuple[MeasuredStage, ...] = ()
        if self.stages:
            digest = combined_digest((artifact, block.start, block.stop) for artifact, _, block in members)
            known = self.stages_of.get((digest, batch), ())
        measured_merges = {
            tuple(sorted(op for group in stage.groups for op in group)): stage.seconds
            for stage in known
            if stage.merge
        }
        return StageCosts(
            tuple(
                self.operator_s(artifact, graph, OpId(op))
                for artifact, graph, block in members
                for op in block.operators
            ),
            contention=self.rates.contention,
            barrier_s=self.rates.barrier_s,
            work_s=self._works_s(members) if self.rates.threads else (),
            merges=tuple(({**dict(self._merges(members)), **measured_merges}).items()),
            measured=tuple((stage.groups, stage.seconds) for stage in known if not stage.merge),
            measured_merges=tuple(measured_merges),
        )

    def _works_s(self, members: Sequence[tuple[Digest, Graph, Block]]) -> tuple[float, ...]:
        return tuple(
            self.work_s(artifact, graph, OpId(op))
            for artifact, graph, block in members
            for op in block.operators
        )

    def _merges(self, members: Sequence[tuple[Digest, Graph, Block]]) -> Iterator[tuple[Group, float]]:
        """Every merge that a search may choose, in the combined graph's numbering, with its estimate."""
        offset = 0
        for artifact, graph, block in members:
            for ops in mergeable(graph, block):
                numbers = tuple(op - block.start + offset for op in ops)
                yield numbers, self.merged_s(artifact, graph, ops)
            offset += len(block.operators)


LEAST_STAGES_TO_FIT: Final = 3


def fitted(table: CostTable) -> CostTable:
    """The table with the contention under which the formula gives the measured stages, their median.

    Only stages of several groups whose operators were all measured tell. Never below 0; above 1 where groups
    hinder each other so much that one after another is faster. Fewer than three such stages change nothing.
    """
    found = []
    for stage in table.stages:
        operators = [
            (artifact, OpId(op)) for artifact, start, stop in stage.members for op in range(start, stop)
        ]
        times = [table.measured_s.get(operator) for operator in operators]
        if (
            stage.merge
            or len(stage.groups) < 2
            or any(times[op] is None for group in stage.groups for op in group)
        ):
            continue
        sums = [sum(times[op] or 0.0 for op in group) for group in stage.groups]
        beside = sum(sums) - max(sums)
        if beside > 0.0:
            found.append((stage.seconds - max(sums) - table.rates.barrier_s) / beside)
    if len(found) < LEAST_STAGES_TO_FIT:
        return table
    return replace(table, rates=replace(table.rates, contention=max(median(found), 0.0)))
