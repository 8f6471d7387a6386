"""Last-known-good that does not load: when to try it again, and when that is a verdict. Pure.

A GPU's driver may come later than the agent, and memory may be short for a while.
"""

from typing import Final, NamedTuple

_FIRST_S: Final = 1.0
_LONGEST_S: Final = 60.0


class Unusable(NamedTuple):
    """Why a plan does not run here."""

    reason: str
    may_pass: bool  # by itself: a plan that did not load may load later, one that is not legal stays so


class Restoring:
    """One plan's tries: 1 s after the first failure, then after 2, 4, ... 60 s, without an end."""

    def __init__(self, patience_s: float, now_s: float) -> None:
        """It has just failed for the first time; for `patience_s` that is no verdict."""
        self.told = False  # the link knows
        self._verdict_s = now_s + patience_s
        self._delay_s = _FIRST_S
        self._again_s = now_s + self._delay_s

    def overdue(self, now_s: float) -> bool:
        """Whether it has failed for so long that the link must know."""
        return now_s >= self._verdict_s

    def due(self, now_s: float) -> bool:
        """Whether to try now; if so, the next try is due later."""
        if now_s < self._again_s:
            return False
        self._delay_s = min(2 * self._delay_s, _LONGEST_S)
        self._again_s = now_s + self._delay_s
        return True
