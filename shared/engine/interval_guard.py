"""Launch intervals are changed under a guard, not in a trial.

Why no trial: an interval shifts waiting between queue and device, so its effect shows over many tasks of an
ever changing queue and not in paired windows. What is guarded is what users feel: p99 latency and the oldest
task's age, for 10 s after the change. Capacity never falls below what arrives (`never_below_arrivals`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Share = Annotated[float, Meta(ge=0.0, le=10.0)]


def never_below_arrivals(
    intervals_s: Mapping[str, float], arrivals_per_s: Mapping[str, float]
) -> dict[str, float]:
    """Launch intervals, seconds per task, shortened where they would launch fewer tasks than arrive.

    A model that is absent from `arrivals_per_s`, or at 0 there, keeps its interval: nothing waits for it.

    Raises:
        ValueError: a number that is negative, infinite or not a number.
    """
    numbers = (*intervals_s.values(), *arrivals_per_s.values())
    if not all(0.0 <= n < math.inf for n in numbers):
        raise ValueError(f"no launch intervals {dict(intervals_s)} for arrivals {dict(arrivals_per_s)}")
    limited = {}
    for model, interval_s in intervals_s.items():
        rate_per_s = arrivals_per_s.get(model, 0.0)
        limited[model] = min(interval_s, 1.0 / rate_per_s) if rate_per_s else interval_s
    return limited


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How long tasks take, over some seconds.

    `p99_least_s`: what the p99 is surely not below. That of a few hundred tasks is one of the slowest of
    them; judged by it alone, a fifth of all plans like the one before were rolled back in a simulation.
    """

    tasks: int  # that p99 was taken over
    p99_s: float  # latency from arrival to answer, of tasks that arrived in these seconds
    p99_least_s: float
    oldest_age_s: float  # the greatest that a task had which waited, in a queue or an instance


class GuardVerdict(str, Enum):
    """What a change of launch intervals came to."""

    OPEN = "open"
    KEEP = "keep"
    ROLL_BACK = "roll_back"


class GuardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan that is activated without a trial is guarded: for how long, and how strictly."""

    length_s: Seconds = 10.0
    worsening: Share = 0.2
    min_tasks: Annotated[int, Meta(ge=1, le=1_000_000)] = 100  # fewer have no 99th percentile
    age_floor_s: Seconds = 0.01  # as in a trial: below it a fifth more is nothing
    sample_s: Seconds = 0.25  # an age may have been seen so long ago


class IntervalGuard:
    """One change of launch intervals. A verdict that is not OPEN is final.

    `before` covers the seconds before the change, as many as the guard is long. A change is often the answer
    to a burst, in which the oldest task grows older whatever is done. So a task that came before the change
    is no witness against it unless it still waits when the guard ends; and `age_growth` is how fast the
    oldest age grew just before (seconds per second): what it would have grown to by itself is not held
    against the change either. Nor is an age below the p99 latency of before: where lanes were idle nothing
    waited, and a plan of one lane has a task wait for the one in front of it.
    """

    def __init__(
        self,
        before: Waiting,
        now: float,
        *,
        age_growth: float = 0.0,
        config: GuardConfig | None = None,
    ) -> None:
        self.config = config or GuardConfig()
        self.verdict = GuardVerdict.OPEN
        self.reason = ""
        self._before = before
        self._began_s = now
        self._age_growth = max(age_growth, 0.0)

    @property
    def ends_s(self) -> float:
        """When the change is kept if nothing has happened."""
        return self._began_s + self.config.length_s

    def seen(self, since: Waiting, now: float) -> GuardVerdict:
        """Judge by what happened since the change. `since.oldest_age_s` is that of this instant."""
        if self.verdict is not GuardVerdict.OPEN:
            return self.verdict
        config, before = self.config, self._before
        limit = 1.0 + config.worsening
        elapsed_s = now - self._began_s
        expected_age_s = max(before.oldest_age_s, before.p99_s) + self._age_growth * elapsed_s
        witness = since.oldest_age_s + config.sample_s < elapsed_s or now >= self.ends_s
        enough = min(before.tasks, since.tasks) >= config.min_tasks
        if enough and since.p99_least_s > limit * before.p99_s:
            self._end(GuardVerdict.ROLL_BACK, f"p99 rose from {before.p99_s:.4g} s to {since.p99_s:.4g} s")
        elif witness and since.oldest_age_s + config.age_floor_s > limit * (
            expected_age_s + config.age_floor_s
        ):
            ages = f"{since.oldest_age_s:.4g} s where {expected_age_s:.4g} s was expected"
            self._end(GuardVerdict.ROLL_BACK, f"the oldest task's age is {ages}")
        elif now >= self.ends_s:
            self._end(GuardVerdict.KEEP, f"neither p99 nor the oldest age worsened by {config.worsening:.0%}")
        return self.verdict

    def _end(self, verdict: GuardVerdict, reason: str) -> None:
        self.verdict, self.reason = verdict, reason
