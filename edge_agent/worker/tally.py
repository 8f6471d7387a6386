"""Counts what the engine's steps took, between two reports."""

from dataclasses import dataclass

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.worker.messages import CombinedStats
from stageloom.shared.engine.steps import PlanKey, ProgramKey, Step

MAX_COMBINED = 512
"""So that a report of statistics stays below the size of a message."""


@dataclass(slots=True)
class _Sum:
    """Steps of one combined block under one mask."""

    steps: int = 0
    tasks: int = 0
    busy_s: float = 0.0
    shortest_s: float = float("inf")
    longest_s: float = 0.0


class Tally:
    """Guarded by the driver's lock."""

    def __init__(self) -> None:
        self._sums: dict[ProgramKey, _Sum] = {}
        self._busy_s = 0.0
        self._in_flight = 0
        self._since_s = 0.0

    def step_issued(self, now: float) -> None:
        """A step was handed to a lane."""
        if not self._in_flight:
            self._since_s = now
        self._in_flight += 1

    def step_ended(self, step: Step, result: StepResult | None, now: float) -> None:
        """It ended; one that failed counts as busy time only."""
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_s += now - self._since_s
        if result is None:
            return
        total = self._sums.get(step.program)
        if total is None:
            total = self._sums[step.program] = _Sum()
        taken_s = result.ended_s - result.started_s
        total.steps += 1
        for member in step.members:
            total.tasks += len(member.tasks)
        total.busy_s += taken_s
        if taken_s < total.shortest_s:
            total.shortest_s = taken_s
        if taken_s > total.longest_s:
            total.longest_s = taken_s

    def busy_s(self, now: float) -> float:
        """Seconds in which at least one step was in flight."""
        return self._busy_s + (now - self._since_s if self._in_flight else 0.0)

    def take(self) -> tuple[CombinedStats, ...]:
        """The sums since the last call, at most MAX_COMBINED of them; the others go on and come later."""
        programs: dict[tuple[PlanKey, int, int], list[ProgramKey]] = {}
        for key in self._sums:
            programs.setdefault((key.plan, key.combined, key.mask), []).append(key)
        return tuple(self._freeze(one, programs[one]) for one in sorted(programs)[:MAX_COMBINED])

    def _freeze(self, of: tuple[PlanKey, int, int], programs: list[ProgramKey]) -> CombinedStats:
        """One sum over all batch buckets."""
        sums = [self._sums.pop(key) for key in programs]
        return CombinedStats(
            *of,
            sum(one.steps for one in sums),
            sum(one.tasks for one in sums),
            sum(one.busy_s for one in sums),
            min(one.shortest_s for one in sums),
            max(one.longest_s for one in sums),
        )
