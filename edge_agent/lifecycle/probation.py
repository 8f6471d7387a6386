"""Does a plan that has just been activated keep its place? Pure.

It fails at once when tasks fail that used to be served: at least `min_failed` of them and more than
`max_failed_share` of those that ran; a crash of the engine ends it from outside. Under a guard it fails also
when tasks wait longer than before. It passes when `length_s` and the guard's time have gone by without that.
Refused, cancelled and expired tasks say something about load, not about the plan's correctness.
"""

from dataclasses import dataclass, field, replace

from msgspec import structs

from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.shared.engine.interval_guard import GuardConfig, GuardVerdict, IntervalGuard
from stageloom.shared.engine.steps import Outcome


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
            before = waiting.before(began_s, self.config.guard)
            self._guard = IntervalGuard(before, began_s, config=self.config.guard)
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
            guard = self._guard
            since = self._waiting.since(self._began_s, now_s, guard.before, guard.config)
            if guard.seen(since, now_s) is GuardVerdict.ROLL_BACK:
                self._end(GuardVerdict.ROLL_BACK, self._guard.reason)
        if now_s >= self.ends_s:
            self._end(GuardVerdict.KEEP, f"{self.completed} tasks completed, {self.failed} failed")

    def _end(self, verdict: GuardVerdict, reason: str) -> None:
        if self.verdict is GuardVerdict.OPEN:
            self.verdict, self.reason = verdict, reason
