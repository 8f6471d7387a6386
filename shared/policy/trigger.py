"""When to re-plan: other arrivals, diverging queues, a task that waits too long, drift, a power mode. Pure.

TOP re-plans when the variance over its queues exceeds T (section IV, algorithm 1 line 30). That alone would
fire at every sample of a backlog, and never on a device with one queue. So: a level fires once and is armed
again when its value falls below a fraction of its threshold (hysteresis), or, since a re-plan need not help,
after `retry_s`; between two firings lies the cool-down, which grows while queues diverge and no other plan
comes of it; and age, arrivals, drift and power mode have a say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import (
    DEADLINE_WITHOUT_ONE_S,
    PolicySample,
    QueueMeasure,
    SampleRing,
    age_threshold_s,
    deviations,
    tightest_s,
    urgency,
    values,
    variance,
    variance_threshold_s2,
)


class Cause(str, Enum):
    """What fired, in the order in which one is named when several do."""

    POWER_MODE = "power_mode"
    REGIME = "regime"
    VARIANCE = "variance"
    OLDEST_AGE = "oldest_age"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerConfig:
    """The defaults are those for tasks without a deadline; `with_deadlines` makes those for others."""

    measure: QueueMeasure = QueueMeasure.WORK
    tightest_s: float = DEADLINE_WITHOUT_ONE_S  # the deadline that the thresholds follow from
    variance: float = field(default_factory=lambda: variance_threshold_s2(()))  # T, s^2 or tasks^2
    oldest_age_s: float = field(default_factory=lambda: age_threshold_s(()))
    drift: float = 1.25  # measured over planned latency, or planned over measured
    regime: float = 2.0  # by what arrivals moved; see `stageloom.shared.policy.regime`
    rearm: float = 0.5  # of a threshold; of its logarithm where that is a factor
    cooldown_s: float = 10.0  # as long as the guard of the launch intervals that the last firing set
    retry_s: float = 60.0  # as long as the longest trial

    def __post_init__(self) -> None:
        positive = (self.tightest_s, self.variance, self.oldest_age_s, self.cooldown_s, self.retry_s)
        factors = (self.drift, self.regime)
        allowed = all(0.0 < n < math.inf for n in positive) and all(1.0 < n < math.inf for n in factors)
        if not allowed or not 0 < self.rearm <= 1:
            raise ValueError(f"no trigger with {self}")

    @classmethod
    def with_deadlines(cls, deadlines_s: Sequence[float]) -> "TriggerConfig":
        """Thresholds that follow from the tasks' deadlines (seconds from arrival)."""
        return cls(
            tightest_s=tightest_s(deadlines_s),
            variance=variance_threshold_s2(deadlines_s),
            oldest_age_s=age_threshold_s(deadlines_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """A re-plan is due. `value` exceeded `threshold`, in the unit of the cause.

    Of the variance both are those of the tightest deadline's queue, of an age those of the task that waits.
    """

    cause: Cause
    value: float  # s^2 or tasks^2; s; a ratio of at least 1; 1 for a power mode
    threshold: float  # 0 for a power mode
    at_s: float
    samples: tuple[PolicySample, ...]  # what a policy reads, oldest first [n]
    detail: str = ""


def _thresholds(config: TriggerConfig) -> dict[Cause, tuple[float, float]]:
    """Per level its threshold, and the value below which it is armed again."""
    rearm = config.rearm
    return {
        Cause.REGIME: (config.regime, config.regime**rearm),
        Cause.VARIANCE: (config.variance, rearm * config.variance),
        Cause.OLDEST_AGE: (config.oldest_age_s, rearm * config.oldest_age_s),
        Cause.DRIFT: (config.drift, config.drift**rearm),
    }


class _Level:
    """One value against its threshold, with hysteresis."""

    __slots__ = ("_armed", "_fired_s", "low", "threshold")

    def __init__(self, threshold: float, low: float) -> None:
        self.threshold = threshold
        self.low = low
        self._armed = True
        self._fired_s = -math.inf

    def due(self, value: float, now: float, retry_s: float) -> bool:
        """Record a value; whether the level should fire."""
        if value < self.low or now - self._fired_s >= retry_s:
            self._armed = True
        return self._armed and value > self.threshold

    def fired(self, now: float) -> None:
        """Disarm: a re-plan was requested while the value was above its threshold."""
        self._armed = False
        self._fired_s = now


_WORSE: Final = {Cause.VARIANCE: 4.0, Cause.OLDEST_AGE: 2.0}
"""Queues that diverge by so much more than was told are news: twice the deviation, twice the age."""


_LONGEST: Final = 64
"""Cool-downs between two firings for queues of which no other plan comes, at most: ten minutes by default."""


class _Patience:
    """How long queues that diverge are not told again, since no other plan came of what was told.

    Near saturation they diverge anew for as long as a load lasts, and every alarm has plans judged for it.
    """

    __slots__ = ("_firings", "_tightest_s", "_told", "_until_s")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Another plan runs, another kind of alarm was raised, or nobody heard one: what waits is news."""
        self._firings = 0
        self._until_s = -math.inf
        self._tightest_s = 0.0
        self._told = dict.fromkeys(_WORSE, 0.0)

    def configured(self, config: TriggerConfig) -> None:
        """Tasks that are twice as urgent as those that were told of are late where others were not."""
        if config.tightest_s <= 0.5 * self._tightest_s:
            self.reset()

    def allows(self, cause: Cause, value: float, threshold: float, now: float) -> bool:
        if cause not in _WORSE or now >= self._until_s:
            return True
        return value > _WORSE[cause] * max(self._told[cause], threshold)

    def fired(self, current: dict[Cause, float], now: float, config: TriggerConfig) -> None:
        """Queues were told of; nothing for the longest time since the wait was over: a new beginning."""
        if now - self._until_s > _LONGEST * config.cooldown_s:
            self.reset()
        self._until_s = now + config.cooldown_s * min(2**self._firings, _LONGEST)
        self._firings = min(self._firings + 1, _LONGEST)
        self._tightest_s = config.tightest_s
        self._told = {cause: max(told, current[cause]) for cause, told in self._told.items()}


class Trigger:
    """Watches one device. Feed `observe` at an even pace, some ten times as often as a re-plan may be wanted.

    It does not fire before the ring is full, so every firing has all its samples, but for those while a plan
    is tried. Every level that is above its threshold when one fires is answered by the same re-plan.
    """

    def __init__(
        self, config: TriggerConfig | None = None, *, samples: int = 10, power_mode: str | None = None
    ) -> None:
        """`power_mode`: the one that the running plan was made for; None: that of the first observation."""
        self.config = config or TriggerConfig()
        self.ring = SampleRing(samples)
        self._levels = {cause: _Level(*limits) for cause, limits in _thresholds(self.config).items()}
        self.power_mode = power_mode  # that the last decision was made for
        self._fired_s = -math.inf
        self._patience = _Patience()

    def configure(self, config: TriggerConfig) -> None:
        """Go on with other thresholds; what has fired stays fired until it is armed again.

        Raises:
            ValueError: the measure is another one, so the samples so far mean something else.
        """
        if config.measure is not self.config.measure:
            raise ValueError("a trigger's measure does not change")
        self.config = config
        for cause, (threshold, low) in _thresholds(config).items():
            self._levels[cause].threshold, self._levels[cause].low = threshold, low
        self._patience.configured(config)

    def another_plan(self, now: float) -> None:
        """Another plan runs: what waits is not its doing, and it has the cool-down to work that off."""
        self._fired_s = now
        self._patience.reset()

    def unheard(self) -> None:
        """What was told of queues reached nobody: where they diverge yet, that is news."""
        self._patience.reset()

    def observe(
        self,
        loads: Sequence[Load],
        progress: tuple[tuple[int, ...], ...],
        now: float,
        *,
        power_mode: str = "",
        drift: float = 1.0,
        regime: float = 1.0,
        held: bool = False,
        trying: bool = False,
        at_once: bool = False,
    ) -> Firing | None:
        """Record one instant of a device; a firing if a re-plan is due.

        `progress`: per model and block 1 where an instance is [W][B_w]. `power_mode` is empty where the
        device has none, `drift` measured over planned latency of the running plan's stages, `regime` by what
        factor arrivals have moved since that plan was chosen; 1 where it may be chance, or a burst.

        While `held` none is, and while `trying` a plan, none but for arrivals that moved, since the plan was
        found for those before: whatever else is above its threshold then keeps its turn, and is judged by
        what is seen once that has ended. Nor is a full ring waited for then: plans that cut a model elsewhere
        change places with every window, and each change starts the ring anew. Where arrivals are to be
        answered `at_once`, since the answer is known, the cool-down does not count.

        Raises:
            ValueError: a drift that is not above 0, or a regime below 1.
        """
        if not 1.0 <= regime < math.inf:
            raise ValueError(f"no arrivals moved by {regime}")
        if not 0.0 < drift < math.inf:
            raise ValueError(f"no drift of {drift}")
        config = self.config
        counted = values(loads, config.measure)
        urgent = [urgency(load, config.tightest_s) for load in loads]
        self.ring.push(PolicySample(progress, deviations(counted)))
        if self.power_mode is None:
            self.power_mode = power_mode
        weighed = counted
        if config.measure is QueueMeasure.WORK:
            weighed = [one * share for one, share in zip(counted, urgent, strict=True)]
        ages = [load.oldest_age_s * share for load, share in zip(loads, urgent, strict=True)]
        current = {
            Cause.REGIME: regime,
            Cause.VARIANCE: variance(weighed),
            Cause.OLDEST_AGE: max(ages, default=0.0),
            Cause.DRIFT: max(drift, 1.0 / drift),
        }
        retry_s = config.retry_s
        due = [
            cause
            for cause, level in self._levels.items()
            if level.due(current[cause], now, retry_s)
            and self._patience.allows(cause, current[cause], level.threshold, now)
        ]
        changed = power_mode != self.power_mode
        cooling = held or (not at_once and now - self._fired_s < self.config.cooldown_s)
        if trying and Cause.REGIME not in due:
            due, changed = [], False
        if cooling or not (self.ring.full or trying) or not (due or changed):
            return None
        self._fired_s = now
        for cause, level in self._levels.items():
            if current[cause] > level.threshold:
                level.fired(now)
        if (changed and not trying) or due[0] not in _WORSE:
            self._patience.reset()
        else:
            self._patience.fired(current, now, config)
        if changed and not trying:
            detail = f"{self.power_mode or 'none'} to {power_mode or 'none'}"
            self.power_mode = power_mode
            return self._firing(Cause.POWER_MODE, 1.0, 0.0, now, detail)
        cause = due[0]
        share = urgent[ages.index(current[cause])] if cause is Cause.OLDEST_AGE else 1.0
        return self._firing(cause, current[cause] / share, self._levels[cause].threshold / share, now)

    def _firing(self, cause: Cause, value: float, threshold: float, now: float, detail: str = "") -> Firing:
        return Firing(
            cause=cause,
            value=value,
            threshold=threshold,
            at_s=now,
            samples=self.ring.samples,
            detail=detail,
        )
