"""How a combined block runs: as stages of parallel groups (IOS, TOP) or as streams (Opara, Nimble)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Group: TypeAlias = tuple[int, ...]
"""Operators of one connected component of a stage, in run order, on one stream."""

OWN_RESOURCE = -1
"""Of a group that runs on its lane's own resource."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An ending chosen as one step: its groups run in parallel, a barrier follows.

    With `merge` the groups are sibling operators of one input that become one launch (IOS, section 3.2).
    """

    groups: tuple[Group, ...]
    merge: bool = False
    resources: tuple[int, ...] = ()
    """Per group the plan's resource that runs it, or OWN_RESOURCE [num_groups]; empty: all on their own."""

    @property
    def operators(self) -> tuple[int, ...]:
        """All operators, group by group."""
        return tuple(op for group in self.groups for op in group)

    def resource(self, group: int) -> int:
        """The resource of a group, by its position."""
        return self.resources[group] if self.resources else OWN_RESOURCE

    def active(self, ops: int) -> "Stage":
        """What the operators in the mask `ops` leave of it; a group is active or not as a whole."""
        kept = [index for index, group in enumerate(self.groups) if ops >> group[0] & 1]
        groups = tuple(self.groups[index] for index in kept)
        return stage_of(groups, self.merge, [self.resource(index) for index in kept])


def stage_of(groups: Sequence[Group], merge: bool, resources: Sequence[int]) -> Stage:
    """A stage in its one form: without resources where no group names one. [num_groups]"""
    named = any(resource != OWN_RESOURCE for resource in resources)
    return Stage(tuple(groups), merge, tuple(resources) if named else ())


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """Stages in run order. Canonical: the groups of a stage are ordered by their first operator."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One operator on one stream."""

    op: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Operators in launch order, each on a stream (Opara, algorithms 1 and 2; Nimble)."""

    launches: tuple[Launch, ...]


Schedule: TypeAlias = StageSchedule | StreamSchedule


def joint_stage(stages: Sequence[Stage]) -> Stage | None:
    """The stage that was timed: one, or those of one group that ran as one; None where there is none."""
    if len(stages) == 1:
        return stages[0]
    if not stages or any(stage.merge or stage.resources or len(stage.groups) != 1 for stage in stages):
        return None
    return Stage((tuple(sorted(op for stage in stages for op in stage.operators)),))


def num_operators(schedule: Schedule) -> int:
    """Operators that a schedule runs, repeats counted."""
    if isinstance(schedule, StreamSchedule):
        return len(schedule.launches)
    return sum(len(group) for stage in schedule.stages for group in stage.groups)


def names_resources(schedule: Schedule) -> bool:
    """Whether a group runs on a resource that the schedule names."""
    return isinstance(schedule, StageSchedule) and any(stage.resources for stage in schedule.stages)


def resources_named(schedule: Schedule) -> set[int]:
    """The resources that groups of a schedule name."""
    if not isinstance(schedule, StageSchedule):
        return set()
    return {one for stage in schedule.stages for one in stage.resources} - {OWN_RESOURCE}


def stage_schedule(stages: list[list[list[int]]]) -> StageSchedule:
    """A canonical stage schedule from plain lists: stages of groups of operators."""
    return StageSchedule(tuple(Stage(tuple(sorted(tuple(group) for group in stage))) for stage in stages))
