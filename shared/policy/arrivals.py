"""How many tasks of each model came over the last seconds and over the last minute. Pure.

A rate is a count over a time, so by chance it is off by 1 / sqrt(count) of itself (Poisson arrivals). Two are
told: one *of late*, over no longer than `_LATE_TASKS` tasks take to come, so by 20 % at most where they come
within ten seconds; and the *usual* one, over a minute. A stretch that ends when a count is reached gives a
rate that is too high by 1 / count on average, which is left in: it is less than chance.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LATE_TASKS: Final = 25
_LATE_S: Final = (2.0, 10.0)  # at least and at most, however many come
_USUAL_S: Final = (10.0, 60.0)  # less tells nothing of what is usual
_PACE_S: Final = 0.5  # of what is remembered


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


class Arrivals:
    """Fed with counts that only grow, some ten times a second."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, int]]] = deque()  # half a second apart, oldest first
        self._newest: tuple[float, Mapping[str, int]] | None = None

    def add(self, at_s: float, counts: Mapping[str, int]) -> None:
        """Take in the tasks so far, by model; counts that fell are those of a new engine process."""
        before = self._newest
        if before is not None and any(count < before[1].get(name, 0) for name, count in counts.items()):
            self._kept.clear()
        self._newest = (at_s, counts)
        if not self._kept or at_s - self._kept[-1][0] >= _PACE_S:
            self._kept.append(self._newest)
        while len(self._kept) > 2 and at_s - self._kept[1][0] >= _USUAL_S[1]:
            self._kept.popleft()

    def late(self, model: str) -> Arrived:
        """Over the last seconds. A model that came later than others counts from then on."""
        found = NOTHING
        for at in range(len(self._kept) - 1, -1, -1):
            one = self._since(at, model)
            if one is None:
                break
            found = one
            enough = found.tasks >= _LATE_TASKS and found.seconds >= _LATE_S[0]
            if enough or found.seconds >= _LATE_S[1]:
                break
        return found

    def usual(self, model: str) -> Arrived:
        """Over the last minute, or as much of it as was seen; nothing before ten seconds were."""
        for at in range(len(self._kept)):
            found = self._since(at, model)
            if found is not None:
                return found if found.seconds >= _USUAL_S[0] else NOTHING
        return NOTHING

    def _since(self, at: int, model: str) -> Arrived | None:
        """What came since one of the moments that are remembered; None where the model was not there yet."""
        began_s, began = self._kept[at]
        if self._newest is None or model not in began or model not in self._newest[1]:
            return None
        ended_s, ended = self._newest
        return Arrived(ended[model] - began[model], ended_s - began_s)
