"""Does a plan that has just been activated keep its place? Pure.

It fails at once when tasks fail that used to be served: at least `min_failed` of them and more than
`max_failed_share` of those that ran; a crash of the engine ends it from outside. Under a guard it fails also
when tasks wait longer than before. It passes when `length_s` and the guard's time have gone by without that.
Refused, cancelled and expired tasks say something about load, not about the plan's correctness.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from stageloom.shared.engine.interval_guard import GuardConfig, GuardVerdict, IntervalGuard, Waiting
from stageloom.shared.engine.steps import Outcome

_GROWTH_S = 1.0
"""Over so long the growth of the oldest age is taken: a burst is young when a change answers it."""


_TASKS: Final = 8192


_LEVELS: Final = 1024


_KEEP_S: Final = 30.0


_SURE: Final = 3.0
"""Standard deviations of how many tasks lie beyond the p99: it is looked at again and again."""


class WaitingLog:
    """How long tasks have waited in the last half minute: what a guard compares before and after a change.

    Latencies are of completed tasks, by when they arrived; ages are those of the oldest task that waits,
    whenever the engine process told. Instants are seconds on one monotonic clock and do not go back.
    """

    def __init__(self) -> None:
        self._tasks: deque[tuple[float, float]] = deque(maxlen=_TASKS)  # arrival, latency; by end
        self._levels: deque[tuple[float, float, Mapping[str, int]]] = deque(maxlen=_LEVELS)

    def task_completed(self, arrived_s: float, ended_s: float) -> None:
        """Count a task that the application got an answer to."""
        self._tasks.append((arrived_s, ended_s - arrived_s))

    def seen(self, at_s: float, oldest_age_s: float, arrived: Mapping[str, int]) -> None:
        """The queues at one instant; `arrived` counts each model's tasks since the engine process started."""
        while self._levels and self._levels[0][0] < at_s - _KEEP_S:
            self._levels.popleft()
        self._levels.append((at_s, oldest_age_s, arrived))

    def environment_changed(self) -> None:
        """What was seen in another environment says nothing about this one."""
        self._tasks.clear()
        self._levels.clear()

    def engine_restarted(self) -> None:
        """Another engine process counts anew."""
        self._levels.clear()

    def between(self, from_s: float, to_s: float) -> Waiting:
        """Tasks that arrived in these seconds; the greatest age that was seen in them."""
        ages = [age for at, age, _ in self._levels if from_s <= at <= to_s]
        return self._waiting(from_s, to_s, max(ages, default=0.0))

    def since(self, from_s: float, now_s: float) -> Waiting:
        """Tasks that arrived since then; the age that was seen last, if any was."""
        last = self._levels[-1] if self._levels else None
        return self._waiting(from_s, now_s, last[1] if last and last[0] >= from_s else 0.0)

    def _waiting(self, from_s: float, to_s: float, age_s: float) -> Waiting:
        latencies = sorted(latency for arrived, latency in self._tasks if from_s <= arrived <= to_s)
        count = len(latencies)
        p99_s = latencies[math.ceil(0.99 * count) - 1] if latencies else 0.0
        beyond = 0.01 * count
        most = math.floor(beyond + _SURE * math.sqrt(beyond))  # beyond the p99, by chance
        least_s = latencies[count - 1 - most] if most < count else 0.0
        return Waiting(tasks=count, p99_s=p99_s, p99_least_s=least_s, oldest_age_s=age_s)

    def age_growth(self, from_s: float, to_s: float) -> float:
        """How fast the oldest age grew, in seconds per second."""
        first, last = self._ends(from_s, to_s)
        return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0

    def arrivals_per_s(self, from_s: float, to_s: float) -> dict[str, float]:
        """Per model; empty where fewer than two instants were seen."""
        first, last = self._ends(from_s, to_s)
        length_s = last[0] - first[0]
        if not length_s > 0:
            return {}
        grown = {name: count - first[2].get(name, 0) for name, count in last[2].items()}
        return {name: max(count, 0) / length_s for name, count in grown.items()}

    def last_arrivals_per_s(self, length_s: float) -> dict[str, float]:
        """Over the last seconds that were seen."""
        if not self._levels:
            return {}
        last_s = self._levels[-1][0]
        return self.arrivals_per_s(last_s - length_s, last_s)

    def _ends(
        self, from_s: float, to_s: float
    ) -> tuple[tuple[float, float, Mapping[str, int]], tuple[float, float, Mapping[str, int]]]:
        levels = [one for one in self._levels if from_s <= one[0] <= to_s]
        nothing: tuple[float, float, Mapping[str, int]] = (0.0, 0.0, {})
        return (levels[0], levels[-1]) if levels else (nothing, nothing)


@dataclass(frozen=True, kw_only=True)
class ProbationConfig:
    """How long and how strict."""

    length_s: float = 5.0
    min_failed: int = 3
    max_failed_share: float = 0.1
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def guarded_s(self) -> float:
        """How long a plan is watched that runs without a trial."""
        return max(self.length_s, self.guard.length_s)


def unloaded(config: ProbationConfig, age_s: float) -> ProbationConfig:
    """For a plan before which no task waited: any wait is longer than none, so tasks may wait for `age_s`."""
    guard = structs.replace(config.guard, age_floor_s=age_s / config.guard.worsening)
    return replace(config, guard=guard)


class Probation:
    """One plan's probation; a verdict that is not OPEN is final.

    `waiting`: how long tasks have waited so far, which is held against the plan (a guard). Without it the
    plan was ordered or has won a trial.
    """

    def __init__(
        self, began_s: float, config: ProbationConfig | None = None, waiting: WaitingLog | None = None
    ) -> None:
        self.config = config or ProbationConfig()
        self.ends_s = began_s + self.config.length_s
        self.completed = 0
        self.failed = 0
        self.verdict = GuardVerdict.OPEN
        self.reason = ""
        self._began_s = began_s
        self._waiting = waiting
        self._guard: IntervalGuard | None = None
        if waiting is not None:
            before_s = began_s - self.config.guard.length_s
            self._guard = IntervalGuard(
                waiting.between(before_s, began_s),
                began_s,
                age_growth=waiting.age_growth(began_s - _GROWTH_S, began_s),
                config=self.config.guard,
            )
            self.ends_s = max(self.ends_s, self._guard.ends_s)

    def task_ended(self, outcome: Outcome, reason: str) -> None:
        """A task ended while the plan ran."""
        if self.verdict is not GuardVerdict.OPEN:
            return
        self.completed += outcome is Outcome.COMPLETED
        if outcome is not Outcome.FAILED:
            return
        self.failed += 1
        ran = self.completed + self.failed
        if self.failed >= self.config.min_failed and self.failed > self.config.max_failed_share * ran:
            self._end(GuardVerdict.ROLL_BACK, f"{self.failed} of {ran} tasks failed: {reason}")

    def tick(self, now_s: float) -> None:
        """Ask the guard, and end probation when its time is over."""
        if self._guard is not None and self._waiting is not None and self.verdict is GuardVerdict.OPEN:
            seen = self._guard.seen(self._waiting.since(self._began_s, now_s), now_s)
            if seen is GuardVerdict.ROLL_BACK:
                self._end(GuardVerdict.ROLL_BACK, self._guard.reason)
        if now_s >= self.ends_s:
            self._end(GuardVerdict.KEEP, f"{self.completed} tasks completed, {self.failed} failed")

    def _end(self, verdict: GuardVerdict, reason: str) -> None:
        if self.verdict is GuardVerdict.OPEN:
            self.verdict, self.reason = verdict, reason
