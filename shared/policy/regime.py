"""Whether other tasks come than a plan was chosen for, and have for longer than a burst lasts. Pure.

Two *regimes*, rates of arrivals by model, lie a distance apart: the mean |log ratio| of the rates, each model
weighted by its share in the work, the mean of its shares under both. exp(distance) is a factor: 2 where every
model's arrivals doubled or halved, 2.7 where three equal models' 4:2:1 turned into 1:2:4, and 1.2 where one
that makes a tenth of the work doubled.

`RegimeWatch` compares the last 12, 24 and 60 s with what was seen when the plan was chosen. Poisson arrivals
move by chance: with n_0 tasks in t_0 against n_1 in t_1, at one rate r, the log ratio has the variance
1 / (r t_0) + 1 / (r t_1). The distance must lie above the factor and above what chance makes of it in all but
a few of a hundred thousand windows; both with *any* five seconds of the window left out, so that no burst
which is shorter decides, however high it is. Regimes that a device has been in are told sooner by
`stageloom.shared.policy.returns`.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from stageloom.shared.policy.arrivals import Arrivals, Arrived, Moment, arrived

Regime: TypeAlias = Mapping[str, Arrived]
"""What came of each model, and in how long."""

BURST_S: Final = 5.0
"""What is shorter is a burst, and no regime."""

WINDOWS_S: Final = (12.0, 24.0, 60.0)
"""The first finds a change of many tasks soon, the last one that of few at all."""

_IDLE_S: Final = 6.0
"""A pause this long is of no regime, and a shorter one moves no window by a factor of 2."""

_FIRST_S: Final = 30.0
_FIRST_TASKS: Final = 10
"""Before any alarm the plan is taken to be chosen for what comes first, from ten tasks without a pause on."""

_SETTLED_S: Final = 30.0
"""What is like it and raised no alarm for so long is added to what is compared with, up to `_MOST_S`."""

_LIKE: Final = 1.4
_MOST_S: Final = 120.0

_MEAN: Final = 0.8  # of |z|
_SPREAD: Final = 2.5  # standard deviations beyond that: an alarm in hours, as simulations show

_HALF: Final = 0.5  # of a task: none is no proof that none comes


def shares(rates_per_s: Sequence[float], service_s: Sequence[float]) -> list[float]:
    """Each model's share in the work; in the tasks where no service time is known. [num_models]"""
    work = [rate * one for rate, one in zip(rates_per_s, service_s, strict=True)]
    if not any(work):
        work = list(rates_per_s)
    total = math.fsum(work)
    return [one / total for one in work] if total > 0.0 else [0.0] * len(work)


def weights(
    before_per_s: Sequence[float], now_per_s: Sequence[float], service_s: Sequence[float]
) -> list[float]:
    """What each model counts with: the mean of its shares in the work of both. [num_models]"""
    pairs = zip(shares(before_per_s, service_s), shares(now_per_s, service_s), strict=True)
    return [(one + other) / 2 for one, other in pairs]


def moved(before: Regime, now: Regime, service_s: Mapping[str, float]) -> float:
    """By what factor, at least 1, of the same models; 1 too where chance may have done it."""
    pairs = [(one, now[name]) for name, one in before.items()]
    heavy = weights(
        [one.per_s for one, _ in pairs],
        [two.per_s for _, two in pairs],
        [service_s.get(name, 0.0) for name in before],
    )
    distance = math.fsum(w * _log_ratio(one, two) for w, (one, two) in zip(heavy, pairs, strict=True))
    noise = [w * _deviation(one, two) for w, (one, two) in zip(heavy, pairs, strict=True)]
    chance = _MEAN * math.fsum(noise) + _SPREAD * math.sqrt(math.fsum(one * one for one in noise))
    return math.exp(distance) if distance > chance else 1.0


def _log_ratio(before: Arrived, now: Arrived) -> float:
    return abs(math.log((now.tasks + _HALF) * (before.seconds) / ((before.tasks + _HALF) * now.seconds)))


def _deviation(before: Arrived, now: Arrived) -> float:
    """Of the log ratio by chance alone, if both are of one rate."""
    rate_per_s = (before.tasks + now.tasks + _HALF) / (before.seconds + now.seconds)
    return math.sqrt(1.0 / (rate_per_s * before.seconds) + 1.0 / (rate_per_s * now.seconds))


class RegimeWatch:
    """Compares a device's arrivals with those that its plan was chosen for."""

    def __init__(self, arrivals: Arrivals) -> None:
        """Looks at what these have counted, and makes them forget what was before the regime of today."""
        self.chosen_for: Regime | None = None  # what is compared with
        self._arrivals = arrivals
        self._began_s = -math.inf  # what came before that was of another regime
        self._settled_s = -math.inf  # what came until then is in what is compared with
        self._factor = 1.0
        self._window_s = 0.0  # that told of the move
        self._looked_s = -math.inf

    def look(self, service_s: Mapping[str, float], least: float) -> float:
        """By how much arrivals have moved for longer than a burst; 1 where that is not above `least`.

        To be asked as often as one likes. `service_s` is the device time of one task, by model.
        """
        moments = [one for one in self._arrivals.moments if one.at_s >= self._began_s]
        if not moments or moments[-1].at_s == self._looked_s:
            return self._factor
        self._looked_s, self._factor = moments[-1].at_s, 1.0
        known = self.chosen_for.keys() if self.chosen_for is not None else moments[-1].counts.keys()
        if not known == moments[0].counts.keys() == moments[-1].counts.keys():  # other models are served
            self.chosen_for, self._began_s = None, moments[-1].at_s
            return 1.0
        if self.chosen_for is None:
            self._learn(moments)
            return 1.0
        if _is_idle(moments):
            self._began_s = moments[-1].at_s
            return 1.0
        for window_s in WINDOWS_S:
            found = _least_move(self.chosen_for, moments, window_s, service_s, least)
            if found > least:
                self._factor, self._window_s = found, window_s
                return found
        self._settle(moments, service_s)
        return 1.0

    def answered(self) -> float:
        """Another plan is asked for: what comes now is what is compared with from here on; since when."""
        began_s = self._looked_s - (self._window_s - BURST_S)  # what came before may be of the old regime
        self.chose(self._arrivals.since(began_s), began_s)
        return began_s

    @property
    def of_late(self) -> tuple[Regime, float]:
        """What came in the last seconds, as an alarm of any cause shows it, and when those began."""
        late = {name: self._arrivals.late(name) for name in self._arrivals.moments[-1].counts}
        known = {name: one for name, one in late.items() if one.seconds > 0.0}
        return known, self._looked_s - max((one.seconds for one in known.values()), default=0.0)

    def chose(self, regime: Regime, began_s: float) -> None:
        """A plan was chosen for this, which came from that moment on."""
        self.chosen_for, self._factor = regime, 1.0
        self._settled_s = began_s + max((one.seconds for one in regime.values()), default=0.0)
        self._began_s = began_s
        self._arrivals.forget_before(began_s)

    def _learn(self, moments: Sequence[Moment]) -> None:
        """Take what comes in the first while, once tasks come without a pause."""
        if _tasks(moments[0], moments[-1]) < _FIRST_TASKS and _is_idle(moments):
            self._began_s = moments[-1].at_s
        elif moments[-1].at_s - moments[0].at_s >= _FIRST_S:
            self.chose(arrived(moments[0], moments[-1]), moments[0].at_s)

    def _settle(self, moments: Sequence[Moment], service_s: Mapping[str, float]) -> None:
        """What raised no alarm for a while belongs to what is compared with."""
        assert self.chosen_for is not None
        known_s = max((one.seconds for one in self.chosen_for.values()), default=0.0)
        new = [one for one in moments if self._settled_s <= one.at_s <= moments[-1].at_s - _SETTLED_S]
        if not new or new[-1].at_s - new[0].at_s < WINDOWS_S[0] or known_s >= _MOST_S:
            return
        more = arrived(new[0], new[-1])
        self._settled_s = new[-1].at_s
        if moved(self.chosen_for, more, service_s) > _LIKE:
            return  # a burst was in it
        self.chosen_for = {
            name: Arrived(one.tasks + more[name].tasks, one.seconds + more[name].seconds)
            for name, one in self.chosen_for.items()
        }


def _least_move(
    before: Regime,
    moments: Sequence[Moment],
    window_s: float,
    service_s: Mapping[str, float],
    least: float,
) -> float:
    """By how much the newest window moved, whatever burst in it is left out; 1 where that may be chance."""
    end = moments[-1]
    window = moments[bisect_right(moments, end.at_s - window_s, key=_at_s) - 1 :]
    if end.at_s - window[0].at_s < window_s:
        return 1.0
    whole = arrived(window[0], end)
    found = moved(before, whole, service_s)
    until = 0
    for one in window:
        while until < len(window) and window[until].at_s - one.at_s < BURST_S:
            until += 1
        if found <= least or until == len(window):
            break
        burst = arrived(one, window[until])
        if window[until].at_s - one.at_s >= end.at_s - window[0].at_s:
            return 1.0  # nobody looked in between: nothing tells a burst from what comes on
        rest = {
            name: Arrived(all_.tasks - burst[name].tasks, all_.seconds - burst[name].seconds)
            for name, all_ in whole.items()
        }
        found = min(found, moved(before, rest, service_s))
    return found


def _is_idle(moments: Sequence[Moment]) -> bool:
    """Whether nothing came for a while: that says nothing of what will come."""
    end = moments[-1]
    for one in reversed(moments):
        if _tasks(one, end) > 0:
            return False
        if end.at_s - one.at_s >= _IDLE_S:
            return True
    return False


def _at_s(moment: Moment) -> float:
    return moment.at_s


def _tasks(began: Moment, ended: Moment) -> int:
    return sum(count - began.counts.get(name, count) for name, count in ended.counts.items())
