"""Whether arrivals are back that a device has had before, told within a second or so. Pure.

`stageloom.shared.policy.regime` leaves any five seconds out, since what is shorter may be a burst, and for
one nobody searches and tries a plan. A regime in which another plan ran needs neither: that plan is known. So
a change back to it is told as soon as it is sure, by the cumulative sum of log likelihood ratios (E. S. Page,
Continuous inspection schemes, Biometrika 41, 1954). Poisson arrivals n_m of each model m within
t seconds, of rates a_m in today's regime and b_m in the known one, add

    sum over m of (n_m log(b_m / a_m) - (b_m - a_m) t)

to the score of that regime, which never falls below 0. A score above `SURE` tells of it, unless what came
since it rose is not explained by the known regime: too many or too few tasks, or other models' (K. Pearson's
chi-squared over the models). A pause is none, however unlike today's it is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stageloom.shared.ids import Digest
from stageloom.shared.policy.arrivals import Arrived, Moment
from stageloom.shared.policy.regime import Regime, moved

SURE: Final = 16.0
"""At constant rates a score that high comes once in exp(16) looks or more: at ten a second, in ten days."""

LEAST_S: Final = 0.8
"""A score takes that long to become sure at least: a batch of tasks that come at once is no regime."""

_HIGHEST: Final = 2 * SURE
"""So that a score falls soon after arrivals change again, should nobody have asked for a plan meanwhile."""

_FIT: Final = 2.0
"""Standard deviations by which what came since a score rose may miss what the known regime explains."""

_LEAST_TASKS: Final = 15
"""So many the known regime must explain since a score rose: fewer tell it from no other."""

_MOST: Final = 8
"""Known regimes that are kept, the newest."""

_HASTY_S: Final = 60.0
"""Who leaves again within so long came for a burst: for as long, doubled each time, nothing is told."""

_LONGEST_PAUSE_S: Final = 3600.0

_HALF: Final = 0.5  # of a task: none is no proof that none comes


@dataclass
class _Known:
    """A regime, and the structure of the plan that ran when it was left."""

    regime: Regime
    structure: Digest
    score: float = 0.0
    since_s: float = 0.0  # the score has risen
    tasks: Mapping[str, int] = field(default_factory=dict)  # since then, by model

    def reset(self) -> None:
        self.score = 0.0


class ReturnWatch:
    """Remembers regimes as they are left, and tells when one is back under another plan than ran there."""

    def __init__(self) -> None:
        self._known: list[_Known] = []  # newest first
        self._before: Moment | None = None
        self._told_s = -math.inf
        self._pause_s = 0.0
        self._paused_until_s = -math.inf

    def left(
        self, regime: Regime | None, structure: Digest | None, service_s: Mapping[str, float], now: float
    ) -> None:
        """A regime has ended, under a plan of this structure."""
        if now - self._told_s < _HASTY_S:
            self._pause_s = min(max(2 * self._pause_s, _HASTY_S), _LONGEST_PAUSE_S)
            self._paused_until_s = now + self._pause_s
        self._told_s = -math.inf
        self.rest()
        if not regime or structure is None:
            return
        others = [
            one
            for one in self._known
            if one.regime.keys() == regime.keys() and moved(one.regime, regime, service_s) > 1.0
        ]
        self._known = [_Known(regime, structure), *others][:_MOST]

    @property
    def scores(self) -> tuple[float, ...]:
        """Of the known regimes, that of the newest first."""
        return tuple(one.score for one in self._known)

    def rest(self) -> None:
        """What comes now is no sign of anything: begin anew."""
        self._before = None
        for one in self._known:
            one.reset()

    def look(
        self,
        moment: Moment,
        today: Regime | None,
        structure: Digest | None,
        service_s: Mapping[str, float],
        least: float,
    ) -> Regime | None:
        """The known regime that is back, if one is: of another plan, and unlike today's by a factor `least`.

        To be asked some ten times a second: what came before the change within a look is counted as after.
        """
        before, self._before = self._before, moment
        if before is None or today is None or structure is None or before.counts.keys() != today.keys():
            return None
        seconds = moment.at_s - before.at_s
        if seconds <= 0.0 or moment.counts.keys() != today.keys():
            return None
        counts = {name: moment.counts[name] - before.counts[name] for name in today}
        if min(counts.values()) < 0 or moment.at_s < self._paused_until_s:
            self.rest()
            return None
        for one in self._known:
            if one.structure == structure or one.regime.keys() != today.keys():
                one.reset()
                continue
            _add(one, counts, today, before.at_s, seconds)
            if one.score > SURE and _fits(one, moment.at_s) and moved(today, one.regime, service_s) > least:
                return one.regime
        return None

    def told(self, now: float) -> None:
        """Another plan was asked for because a regime is back."""
        self._told_s = now


def _add(one: _Known, counts: Mapping[str, int], today: Regime, began_s: float, seconds: float) -> None:
    gained = 0.0
    for name, count in counts.items():
        a_per_s, b_per_s = _per_s(today[name]), _per_s(one.regime[name])
        gained += count * math.log(b_per_s / a_per_s) - (b_per_s - a_per_s) * seconds
    if one.score <= 0.0:
        one.since_s, one.tasks = began_s, dict.fromkeys(counts, 0)
    one.score = min(max(one.score + min(gained, SURE * seconds / LEAST_S), 0.0), _HIGHEST)
    one.tasks = {name: tasks + counts[name] for name, tasks in one.tasks.items()}


def _fits(one: _Known, now: float) -> bool:
    expected = {name: _per_s(arrived) * (now - one.since_s) for name, arrived in one.regime.items()}
    came, in_all = sum(one.tasks.values()), math.fsum(expected.values())
    if in_all < _LEAST_TASKS or not came or abs(came - in_all) > _FIT * math.sqrt(in_all) + _HALF:
        return False
    squares = math.fsum((one.tasks[name] - mean) ** 2 / mean for name, mean in expected.items())
    variance = math.fsum(2.0 + 1.0 / mean for mean in expected.values())  # of that sum, of Poisson counts
    return squares <= len(expected) + _FIT * math.sqrt(variance)


def _per_s(arrived: Arrived) -> float:
    return (arrived.tasks + _HALF) / arrived.seconds if arrived.seconds > 0.0 else _HALF
