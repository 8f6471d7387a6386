"""Does a plan that has just been activated keep its place? Pure.

It fails at once when tasks fail that used to be served: at least `min_failed` of them and more than
`max_failed_share` of those that ran; a crash of the engine ends it from outside. Under a guard it fails also
when tasks wait longer than before. It passes when `length_s` and the guard's time have gone by without that.
Refused, cancelled and expired tasks say something about load, not about the plan's correctness.
"""

from dataclasses import dataclass, field
from enum import Enum

from stageloom.edge_agent.plans.waiting import WaitingLog
from stageloom.shared.engine.interval_guard import GuardConfig, GuardVerdict, IntervalGuard
from stageloom.shared.engine.steps import Outcome

_GROWTH_S = 1.0
"""Over so long the growth of the oldest age is taken: a burst is young when a change answers it."""


class Verdict(Enum):
    """What probation has come to."""

    OPEN = "open"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class ProbationConfig:
    """How long and how strict."""

    length_s: float = 5.0
    min_failed: int = 3
    max_failed_share: float = 0.1
    guard: GuardConfig = field(default_factory=GuardConfig)


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
        self.verdict = Verdict.OPEN
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
        if self.verdict is not Verdict.OPEN:
            return
        self.completed += outcome is Outcome.COMPLETED
        if outcome is not Outcome.FAILED:
            return
        self.failed += 1
        ran = self.completed + self.failed
        if self.failed >= self.config.min_failed and self.failed > self.config.max_failed_share * ran:
            self._end(Verdict.FAILED, f"{self.failed} of {ran} tasks failed: {reason}")

    def tick(self, now_s: float) -> None:
        """Time passed."""
        if self._guard is not None and self._waiting is not None and self.verdict is Verdict.OPEN:
            seen = self._guard.seen(self._waiting.since(self._began_s, now_s), now_s)
            if seen is GuardVerdict.ROLL_BACK:
                self._end(Verdict.FAILED, self._guard.reason)
        if now_s >= self.ends_s:
            self._end(Verdict.PASSED, f"{self.completed} tasks completed, {self.failed} failed")

    def _end(self, verdict: Verdict, reason: str) -> None:
        if self.verdict is Verdict.OPEN:
            self.verdict, self.reason = verdict, reason
