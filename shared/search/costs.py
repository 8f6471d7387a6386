"""What operators and stages cost, in seconds.

Operators: measured on the device where a measurement is there, keyed by artifact and operator; else a
roofline estimate (`shared.search.analytic`).

Stages: IOS (Ding et al. 2021, section 3) measures every stage it meets; TOP keeps those measurements. Until
a stage has one, its groups cost

    least + contention * (total - least) + barrier,    least = max(longest, work)

over the groups' sums; `work` is the seconds that the whole device would need for the operators, where that is
known, and else nothing. `contention` 0 means that groups never slow each other down while there is room, 1
that they run as if one after another; both ends are exact, what lies between is a straight line and nothing
more. Where stages were measured, `fitted` makes the line fit them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Final, NamedTuple

from shared.blocks import Block
from shared.digest import digest_of, digest_to_raw
from shared.errors import InputError
from shared.graph import Graph
from shared.ids import Digest, OpId
from shared.schedule import Group, StageSchedule
from shared.search import analytic
from shared.search.analytic import DeviceRates


class MeasuredStage(NamedTuple):
    """One stage of a combined block as a device measured it, at the largest batch of its members.

    `members`: per member the artifact, its first operator, and one past its last.
    """

    members: tuple[tuple[Digest, int, int], ...]
    batch: int
    groups: tuple[Group, ...]
    seconds: float


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
    """Sibling operators, ascending, that may become one launch (IOS, section 3), and its seconds. A combined
    graph holds no tensors, so whoever knows the operators' attributes says which may merge."""

    work_s: tuple[float, ...] = ()
    """Per operator what the whole device would need for it, at most its own seconds [num_ops]; empty: one
    operator is not known to leave room for another."""

    measured: tuple[tuple[tuple[Group, ...], float], ...] = ()
    """Stages that were measured whole, by their groups in canonical order, and their seconds."""

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

    def schedule_s(self, schedule: StageSchedule) -> float:
        """Seconds of all stages, one after another.

        Raises:
            KeyError: a stage merges operators that are not among `merges`.
        """
        merged = dict(self.merges)
        return sum(
            merged[tuple(sorted(stage.operators))] if stage.merge else self.stage_s(stage.groups)
            for stage in schedule.stages
        )


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Operator costs of one device class."""

    measured_s: Mapping[tuple[Digest, OpId], float] = field(default_factory=dict)
    rates: DeviceRates = field(default_factory=DeviceRates)
    stages: tuple[MeasuredStage, ...] = ()

    @cached_property
    def stages_of(self) -> Mapping[tuple[Digest, int], tuple[tuple[tuple[Group, ...], float], ...]]:
        """Measured stages per (combined block, batch)."""
        found: dict[tuple[Digest, int], list[tuple[tuple[Group, ...], float]]] = {}
        for stage in self.stages:
            key = combined_digest(stage.members), stage.batch
            found.setdefault(key, []).append((stage.groups, stage.seconds))
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

    def for_members(self, members: Sequence[tuple[Digest, Graph, Block]], *, batch: int = 1) -> StageCosts:
        """The costs of a combined block, numbered as `shared.blocks.combine` numbers its operators.

        `batch` is the largest of its members'.
        """
        measured: tuple[tuple[tuple[Group, ...], float], ...] = ()
        if self.stages:
            block = combined_digest((artifact, block.start, block.stop) for artifact, _, block in members)
            measured = self.stages_of.get((block, batch), ())
        return StageCosts(
            tuple(
                self.operator_s(artifact, graph, OpId(op))
                for artifact, graph, block in members
                for op in block.operators
            ),
            contention=self.rates.contention,
            barrier_s=self.rates.barrier_s,
            work_s=self._works_s(members) if self.rates.threads else (),
            measured=measured,
        )

    def _works_s(self, members: Sequence[tuple[Digest, Graph, Block]]) -> tuple[float, ...]:
        return tuple(
            self.work_s(artifact, graph, OpId(op))
            for artifact, graph, block in members
            for op in block.operators
        )


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
        if len(stage.groups) < 2 or any(times[op] is None for group in stage.groups for op in group):
            continue
        sums = [sum(times[op] or 0.0 for op in group) for group in stage.groups]
        beside = sum(sums) - max(sums)
        if beside > 0.0:
            found.append((stage.seconds - max(sums) - table.rates.barrier_s) / beside)
    if len(found) < LEAST_STAGES_TO_FIT:
        return table
    return replace(table, rates=replace(table.rates, contention=max(median(found), 0.0)))
