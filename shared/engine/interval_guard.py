"""Launch intervals are changed under a guard, not in a trial; proven plans come back under one.

Why no trial: an interval shifts waiting between queue and device, so its effect shows over many tasks of an
ever changing queue and not in paired windows. What is guarded is what users feel: p99 latency, the oldest
task's age and tasks that miss their deadline, for 10 s after the change. Capacity never falls below what
arrives (`never_below_arrivals`).

There is no control to compare with, and a queue near saturation fluctuates by more than a fifth all the
time. So what counts is what all windows of before did not show, and what lasts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

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
class WaitedBefore:
    """How long tasks took before a change.

    `missed` and `arrivals_per_s`, of all models together, are since arrivals `moved` last, where they did
    lately: latencies of before that are of other tasks.
    """

    p99_s: float  # latency from arrival to answer, the greatest of several windows; 0 without one
    window_s: float  # over which a p99 is taken
    oldest_age_s: float  # the greatest that a task had which waited, in a queue or an instance
    age_growth: float  # of late; seconds per second
    arrivals_per_s: float
    moved: bool
    missed: float  # share of ended tasks that expired, the greatest of several windows; 1 without one


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedSince:
    """How long tasks that arrived since the change take, in the newest window.

    `p99_least_s`: what the p99 is surely not below; of a few hundred tasks it is one of the slowest.
    """

    tasks: int  # that p99 was taken over
    p99_s: float
    p99_least_s: float
    oldest_age_s: float  # the least of those seen in the last `persists_s`
    arrivals_per_s: float  # of all models together, since the change
    missed: float  # the share that expired
    ended: int  # so many with those


class GuardVerdict(str, Enum):
    """What a change of launch intervals came to."""

    OPEN = "open"
    KEEP = "keep"
    ROLL_BACK = "roll_back"


class GuardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan that is activated without a trial is guarded: for how long, and how strictly."""

    length_s: Seconds = 10.0
    worsening: Share = 0.2  # of p99 and of ages
    missed: Share = 0.1  # more of the tasks that end
    min_tasks: Annotated[int, Meta(ge=1, le=1_000_000)] = 100  # fewer have no 99th percentile
    age_floor_s: Seconds = 0.01  # as in a trial: below it a fifth more is nothing
    sample_s: Seconds = 0.25  # an age may have been seen so long ago
    persists_s: Seconds = 1.0  # an age that falls again within so long was chance


_ALIKE: Final = 1.25
"""Where so many times as many tasks come, latencies and missed tasks of before are no measure."""

_GROWING: Final = 0.05
"""Seconds per second by which the oldest age grows where a queue builds up."""

_SURE: Final = 2.5
"""Standard deviations by which the share of missed tasks is surely higher."""

_TOGETHER: Final = 2.25
"""Tasks that queue up are missed together: so many say no more than one."""


class IntervalGuard:
    """One change. A verdict that is not OPEN is final.

    A change is often the answer to a burst, in which the oldest task grows older whatever is done. So a task
    that came before the change is no witness against it unless it still waits when the guard ends, and what
    the oldest age would have grown to by itself (`age_growth`) is held against neither ages nor p99. Nor is
    an age below the p99 latency of before: where lanes were idle nothing waited, and a plan of one lane has
    a task wait for the one in front of it. Where arrivals moved, or more tasks come than before, p99 is no
    measure at all: what is left is that tasks grow old or miss their deadlines.
    """

    def __init__(self, before: WaitedBefore, now: float, *, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        self.before = before
        self.verdict = GuardVerdict.OPEN
        self.reason = ""
        self._began_s = now

    @property
    def ends_s(self) -> float:
        """When the change is kept if nothing has happened."""
        return self._began_s + self.config.length_s

    def seen(self, since: WaitedSince, now: float) -> GuardVerdict:
        """Judge by what happened since the change."""
        if self.verdict is not GuardVerdict.OPEN:
            return self.verdict
        worse = self._p99_worse(since, now) or self._age_worse(since, now) or self._missed_worse(since)
        if worse:
            self.verdict, self.reason = GuardVerdict.ROLL_BACK, worse
        elif now >= self.ends_s:
            self.verdict = GuardVerdict.KEEP
            self.reason = f"neither p99 nor the oldest age worsened by {self.config.worsening:.0%}"
        return self.verdict

    def _expected_s(self, now: float) -> float:
        """What the oldest age may be, or a latency, without any fault of the change."""
        before = self.before
        growth = max(before.age_growth, 0.0) * (now - self._began_s)
        return max(before.oldest_age_s, before.p99_s) + growth

    def _more_come(self, since: WaitedSince) -> bool:
        return since.arrivals_per_s > _ALIKE * self.before.arrivals_per_s

    def _p99_worse(self, since: WaitedSince, now: float) -> str:
        config, before = self.config, self.before
        alike = not before.moved and not self._more_come(since)
        if not alike or not before.p99_s or since.tasks < config.min_tasks:
            return ""
        limit_s = before.p99_s if before.age_growth < _GROWING else self._expected_s(now)
        if since.p99_least_s <= (1.0 + config.worsening) * limit_s:
            return ""
        return f"p99 rose from {before.p99_s:.4g} s to {since.p99_s:.4g} s"

    def _age_worse(self, since: WaitedSince, now: float) -> str:
        config, elapsed_s = self.config, now - self._began_s
        arrived_since = since.oldest_age_s + config.sample_s < elapsed_s - config.persists_s
        if elapsed_s < config.persists_s or not (arrived_since or now >= self.ends_s):
            return ""
        expected_s, floor_s = self._expected_s(now), config.age_floor_s
        if since.oldest_age_s + floor_s <= (1.0 + config.worsening) * (expected_s + floor_s):
            return ""
        return f"the oldest task's age is {since.oldest_age_s:.4g} s where {expected_s:.4g} s was expected"

    def _missed_worse(self, since: WaitedSince) -> str:
        config, before = self.config, self.before
        if since.ended < config.min_tasks or self._more_come(since):
            return ""
        chance = _SURE * math.sqrt(_TOGETHER * since.missed * (1.0 - since.missed) / since.ended)
        if since.missed - chance <= before.missed + config.missed:
            return ""
        return f"{since.missed:.0%} of the tasks miss their deadline where {before.missed:.0%} did"
