"""How many tasks of each model came over the last seconds and over the last minute. Pure.

A rate is a count over a time, so by chance it is off by 1 / sqrt(count) of itself (Poisson arrivals). Two are
told: one *of late*, over no longer than `_LATE_TASKS` tasks take to come, so by 20 % at most where they come
within ten seconds; and the *usual* one, over a minute. A stretch that ends when a count is reached gives a
rate that is too high by 1 / count on average, which is left in: it is less than chance.

Where arrivals have risen, what came before says nothing of what comes now: a plan for the mean of both is one
for neither. So the newest rise is looked for, by the likelihood ratio of one change of Poisson rates against
none (D. V. Hinkley, Inference about the change-point in a sequence of random variables, Biometrika 57, 1970),
and rates of late begin with it. A pause is no such change, since it may be chance that it ends.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LATE_TASKS: Final = 25
_LATE_S: Final = (2.0, 10.0)  # at least and at most, however many come
_USUAL_S: Final = (5.0, 60.0)  # less is a burst
_PACE_S: Final = 0.5  # of what is remembered

_RISE_S: Final = 4.0  # at most, since a rise that is looked for
_BEFORE_S: Final = (2.0, 20.0)  # what it is compared with, at least and at most
_SURE: Final = 10.0
"""Log likelihood ratio that makes a rise, and one more for each model."""

_RISEN: Final = 10  # tasks, at least: fewer are a coincidence

YOUNG_S: Final = 2.0
"""A rise so young tells neither how much comes, nor whether it stays."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Tasks that came within so many seconds."""

    tasks: float
    seconds: float

    @property
    def per_s(self) -> float:
        """0 for no time."""
        return self.tasks / self.seconds if self.seconds > 0.0 else 0.0


NOTHING: Final = Arrived(0, 0.0)


def late_s(per_s: float) -> float:
    """Seconds over which a rate of late was counted."""
    at_least, at_most = _LATE_S
    return min(max(_LATE_TASKS / per_s, at_least), at_most) if per_s > 0.0 else at_most


@dataclass(frozen=True, slots=True)
class Moment:
    """How many tasks of each model had come by then."""

    at_s: float
    counts: Mapping[str, int]


def arrived(began: Moment, ended: Moment) -> dict[str, Arrived]:
    """What came between two moments; of a model that was not there at first, nothing and in no time."""
    seconds = ended.at_s - began.at_s
    return {
        name: Arrived(count - began.counts[name], seconds) if name in began.counts else NOTHING
        for name, count in ended.counts.items()
    }


class Arrivals:
    """Fed with counts that only grow, some ten times a second."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque()  # of the last minute, half a second apart, oldest first
        self.newest: Moment | None = None  # that was taken in
        self._rise: Moment | None = None

    def add(self, at_s: float, counts: Mapping[str, int]) -> None:
        """Take in the tasks so far, by model.

        Counts that fell are those of a new engine process, or of a model that was gone and came back.
        """
        known = [] if self.newest is None else [self.newest]
        if known and not counts.keys() <= known[0].counts.keys():
            known += self.moments
        if any(count < one.counts.get(name, 0) for one in known for name, count in counts.items()):
            self.moments.clear()
            self._rise = None
        self.newest = Moment(at_s, counts)
        self._rise = self._newest_rise() or self._rise
        if not self.moments or at_s - self.moments[-1].at_s >= _PACE_S:
            self.moments.append(self.newest)
        while len(self.moments) > 2 and at_s - self.moments[1].at_s >= _USUAL_S[1]:
            self.moments.popleft()

    def forget_before(self, at_s: float) -> None:
        """What came before that moment is not usual any more."""
        while len(self.moments) > 1 and self.moments[0].at_s < at_s:
            self.moments.popleft()

    def since(self, at_s: float) -> dict[str, Arrived]:
        """What came between a moment and the newest one that is kept."""
        began = next((one for one in self.moments if one.at_s >= at_s), None)
        return {} if began is None else arrived(began, self.moments[-1])

    @property
    def rise_s(self) -> float:
        """The moment since which more come; -inf where none is known in the last ten seconds."""
        if self._rise is None or self.newest is None or self.newest.at_s - self._rise.at_s > _LATE_S[1]:
            return -math.inf
        return self._rise.at_s

    def late(self, model: str) -> Arrived:
        """Over the last seconds, since a rise. A model that came later than others counts from then on."""
        found = self._late(model)
        if self._rise is None or self.rise_s == -math.inf:
            return found
        risen = self._since(self._rise, model)
        return risen if 0.0 < risen.seconds < found.seconds else found

    def _newest_rise(self) -> Moment | None:
        """The likeliest moment of the last seconds since which more come, if that is sure.

        One that is known and not young any more is what later ones are compared with.
        """
        newest = self.newest
        assert newest is not None
        known_s = self.rise_s if newest.at_s - self.rise_s >= YOUNG_S else -math.inf
        sure, rise = _SURE + len(newest.counts), None
        for place in range(len(self.moments) - 1, 0, -1):
            one = self.moments[place]
            if newest.at_s - one.at_s > _RISE_S:
                break
            before = self.moments[max(place - round(_BEFORE_S[1] / _PACE_S), 0)]
            if before.at_s < known_s and self._rise is not None:
                before = self._rise
            comparable = before.counts.keys() == one.counts.keys() == newest.counts.keys()
            if comparable and one.at_s - before.at_s >= _BEFORE_S[0] and newest.at_s > one.at_s:
                found = _risen(before, one, newest)
                if found > sure:
                    sure, rise = found, one
        return rise

    def _late(self, model: str) -> Arrived:
        found = NOTHING
        for began in reversed(self.moments):
            found, before = self._since(began, model), found
            if found is NOTHING:
                return before
            enough = found.tasks >= _LATE_TASKS and found.seconds >= _LATE_S[0]
            if enough or found.seconds >= _LATE_S[1]:
                break
        return found

    def usual(self, model: str) -> Arrived:
        """Over the last minute, or as much of it as was seen; nothing before five seconds were."""
        spans = (self._since(began, model) for began in self.moments)
        longest = next((one for one in spans if one is not NOTHING), NOTHING)
        return longest if longest.seconds >= _USUAL_S[0] else NOTHING

    def _since(self, began: Moment, model: str) -> Arrived:
        """What came since one of the moments; nothing where the model was not there yet."""
        newest = self.newest
        if newest is None or model not in began.counts or model not in newest.counts:
            return NOTHING
        return Arrived(newest.counts[model] - began.counts[model], newest.at_s - began.at_s)


def _risen(began: Moment, rose: Moment, ended: Moment) -> float:
    """The log likelihood ratio of two rates of each model against one; 0 where no more come than before."""
    old_s, new_s = rose.at_s - began.at_s, ended.at_s - rose.at_s
    old = [rose.counts[name] - count for name, count in began.counts.items()]
    new = [ended.counts[name] - count for name, count in rose.counts.items()]
    if sum(new) < _RISEN or sum(new) * old_s <= sum(old) * new_s:
        return 0.0
    seconds = old_s + new_s
    total = 0.0
    for before, after in zip(old, new, strict=True):
        if before:
            total += before * math.log(before * seconds / ((before + after) * old_s))
        if after:
            total += after * math.log(after * seconds / ((before + after) * new_s))
    return total
