"""How a combined block runs: as stages of parallel groups (IOS, TOP) or as streams (Opara, Nimble)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Group: TypeAlias = tuple[int, ...]
"""Operators of one connected component of a stage, in run order, on one stream."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An ending chosen as one step: its groups run in parallel, a barrier follows.

    With `merge` the groups are sibling operators of one input that become one launch (IOS, section 3.2).
    """

    groups: tuple[Group, ...]
    merge: bool = False

    @property
    def operators(self) -> tuple[int, ...]:
        """All operators, group by group."""
        return tuple(op for group in self.groups for op in group)


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
    if not stages or any(stage.merge or len(stage.groups) != 1 for stage in stages):
        return None
    return Stage((tuple(sorted(op for stage in stages for op in stage.operators)),))


def num_operators(schedule: Schedule) -> int:
    """Operators that a schedule runs, repeats counted."""
    if isinstance(schedule, StreamSchedule):
        return len(schedule.launches)
    return sum(len(group) for stage in schedule.stages for group in stage.groups)


def stage_schedule(stages: list[list[list[int]]]) -> StageSchedule:
    """A canonical stage schedule from plain lists: stages of groups of operators."""
    return StageSchedule(tuple(Stage(tuple(sorted(tuple(group) for group in stage))) for stage in stages))
