"""What the stages of one combined block cost, in seconds.

IOS (Ding et al. 2021, section 3) measures every stage it meets; TOP keeps those measurements. Until a stage
has one, it costs what the model of its device class predicts (`stageloom.shared.search.interference`), which
also says how sure it is. Where there is no model the groups cost

    least + contention * (total - least) + barrier,    least = max(longest, work)

over the groups' sums; `work` is the seconds that the whole device would need for the operators, where that is
known, and else nothing. `contention` 0 means that groups never slow each other down while there is room, 1
that they run as if one after another; both ends are exact, what lies between is a straight line and nothing
more. Groups of a stage that names resources cost the most that one of those takes for its groups, and the
barrier.

Stages of one group that follow each other on one member have no barrier between them and become one launch of
all their operators (`stageloom.shared.launch_list`). A schedule therefore costs its *runs*, not those stages
one by one; under the plain formula that is the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stageloom.shared.bitmask import mask_of
from stageloom.shared.schedule import Group, Stage, StageSchedule
from stageloom.shared.search.interference import GroupTerms, Interference, Terms, stage_terms

MERGE_DOUBT: Final = 0.5
"""How wrong the estimate of a merge may be, as a share of it."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Features of an operator, beside its seconds, for the model of a device class."""

    member: int
    moved_s: float  # all its bytes, weights too, at the device's bandwidth
    reads: tuple[tuple[int, float], ...]  # (operator that made it, or -1; seconds) per tensor
    makes: tuple[tuple[int, float], ...]  # (mask of the operators that read it, or -1: others too; seconds)


def resources_s(resources: Sequence[int], groups_s: Sequence[float]) -> float:
    """Seconds of groups on the resources that they name: those of one in turn, in nobody else's way.

    A resource has one thread for the groups of a step. [num_groups] both
    """
    sums: dict[int, float] = {}
    for resource, group_s in zip(resources, groups_s, strict=True):
        sums[resource] = sums.get(resource, 0.0) + group_s
    return max(sums.values())


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

    stale: tuple[tuple[tuple[Group, ...], bool], ...] = ()
    """(groups, merge) of those measured so long ago that they should be again."""

    guessed: int = 0
    """Operators, as a mask, whose seconds are estimates."""

    interference: Interference | None = None
    traits: tuple[Traits, ...] = ()  # per operator, where there is a model [num_ops]
    launch_s: float = 0.0
    optimism: float = 0.0
    """What stages nobody is sure of cost: 0, what is predicted; 1, the least that they may. The best schedule
    under 1 is what is worth measuring beside the best one under 0."""

    @cached_property
    def merged_s(self) -> Mapping[Group, float]:
        """`merges` as a dictionary."""
        if not self.optimism:
            return dict(self.merges)
        hoped = 1.0 - self.optimism * MERGE_DOUBT
        return {ops: s if ops in self.measured_merges else hoped * s for ops, s in self.merges}

    @cached_property
    def measured_s(self) -> Mapping[tuple[Group, ...], float]:
        """`measured` as a dictionary."""
        return dict(self.measured)

    @cached_property
    def _known_groups(self) -> dict[Group, GroupTerms]:
        """Groups return in many stages."""
        return {}

    def stage_s(self, groups: Sequence[Group]) -> float:
        """Seconds of one stage: the measurement, else the model's, else the formula's.

        A stage of a single group has no barrier to pay for.
        """
        known = self.measured_s.get(tuple(groups)) if self.measured else None
        if known is not None:
            return known
        if self.interference is None:
            return self.formula_s(groups)
        seconds = self.interference.seconds(self.terms(groups))
        return seconds * (1.0 - self.optimism * self.doubt(groups)) if self.optimism else seconds

    def formula_s(self, groups: Sequence[Group]) -> float:
        """Return the seconds of one stage by the formula alone."""
        sums = [sum(self.operators_s[op] for op in group) for group in groups]
        if len(sums) == 1:
            return sums[0]
        least = max(sums)
        if self.work_s:
            least = max(least, sum(self.work_s[op] for group in groups for op in group))
        return least + self.contention * (sum(sums) - least) + self.barrier_s

    def terms(self, groups: Sequence[Group]) -> Terms:
        """Return the terms of a stage for the model of a device class; needs `traits`."""
        known = self._known_groups
        return stage_terms([known.get(group) or self._group_terms(group) for group in groups], self.launch_s)

    def _group_terms(self, group: Group) -> GroupTerms:
        inside = mask_of(group)
        inner = border = moved = 0.0
        for op in group:
            traits = self.traits[op]
            moved += traits.moved_s
            for maker, seconds in traits.reads:
                if maker >= 0 and inside >> maker & 1:
                    inner += seconds
                else:
                    border += seconds
            border += sum(seconds for readers, seconds in traits.makes if readers & ~inside)
        found = self._known_groups[group] = GroupTerms(
            seconds=sum(self.operators_s[op] for op in group),
            work=sum(self.work_s[op] for op in group) if self.work_s else 0.0,
            inner=inner,
            border=border,
            moved=moved,
            operators=len(group),
        )
        return found

    def one_stage_s(self, stage: Stage) -> float:
        """Seconds of a stage as it is to run.

        Raises:
            KeyError: it merges operators that are not among `merges`.
        """
        if stage.merge:
            return self.merged_s[tuple(sorted(stage.operators))]
        if stage.resources and len(stage.groups) > 1:
            sums = [sum(self.operators_s[op] for op in group) for group in stage.groups]
            return resources_s(stage.resources, sums) + self.barrier_s
        return self.stage_s(stage.groups)

    def is_measured(self, stage: Stage) -> bool:
        """Return whether the stage was measured as a whole; none is kept of groups on other resources."""
        if stage.resources:
            return False
        if stage.merge:
            return tuple(sorted(stage.operators)) in self.measured_merges
        return stage.groups in self.measured_s

    def doubt(self, groups: Sequence[Group]) -> float:
        """Return the share by which an unsure prediction may be too high, at most 1; 0 for a sure one."""
        if self.interference is None or (len(groups) == 1 and len(groups[0]) == 1):
            return 0.0
        terms = self.terms(groups)
        guessed = bool(self.guessed & mask_of(op for group in groups for op in group))
        if self.interference.sure(terms) and not guessed:
            return 0.0
        doubt = 1.0 if guessed else min(self.interference.doubt(terms), 1.0)
        seconds = self.interference.seconds(terms)
        if seconds <= 0.0:
            return 0.0
        return min(doubt, max(1.0 - self.interference.least * terms.longest / seconds, 0.0))

    def is_sure(self, stage: Stage) -> bool:
        """Return whether the stage need not be measured: it was recently, its prediction is sure, or no time
        of it would be kept, as of groups on other resources."""
        if stage.resources:
            return True
        if self.is_measured(stage):
            return (stage.groups, stage.merge) not in self.stale
        if stage.merge:
            return False
        if self.interference is None or len(stage.operators) == 1:
            return len(stage.operators) == 1
        if self.guessed & mask_of(stage.operators):
            return False
        return self.interference.sure(self.terms(stage.groups))

    def runs(self, stages: Iterable[Stage]) -> Iterator[Stage]:
        """Return the stages as they run: successive stages of one group on one member become one."""
        waiting: Stage | None = None
        for stage in stages:
            if stage.merge or stage.resources or len(stage.groups) > 1 or not self.traits:
                if waiting is not None:
                    yield waiting
                    waiting = None
                yield stage
            elif waiting is not None and self._member(waiting) == self._member(stage):
                waiting = Stage((tuple(sorted(waiting.groups[0] + stage.groups[0])),))
            else:
                if waiting is not None:
                    yield waiting
                waiting = stage
        if waiting is not None:
            yield waiting

    def _member(self, stage: Stage) -> int:
        return self.traits[stage.groups[0][0]].member

    def stages_s(self, stages: Iterable[Stage]) -> float:
        """Seconds of stages that run one after another.

        Raises:
            KeyError: a stage merges operators that are not among `merges`.
        """
        return sum(self.one_stage_s(stage) for stage in self.runs(stages))

    def schedule_s(self, schedule: StageSchedule) -> float:
        """Seconds of all stages, one after another.

        Raises:
            KeyError: a stage merges operators that are not among `merges`.
        """
        return self.stages_s(schedule.stages)
