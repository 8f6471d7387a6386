"""Last-known-good that does not load, while nothing else runs: when to try it again. Pure.

A GPU's driver may come later than the agent, and memory may be short for a while.
"""

from dataclasses import dataclass
from typing import Final

from shared.ids import Digest

_FIRST_S: Final = 1.0
_LONGEST_S: Final = 60.0


@dataclass
class Restoring:
    """One plan's tries: 1 s after the first failure, then after 2, 4, ... 60 s, without an end."""

    digest: Digest
    reason: str
    patience_s: float  # so long the failure is no verdict
    told: bool = False  # the link knows
    _since_s: float | None = None
    _again_s: float | None = None  # None: a try is under way
    _delay_s: float = _FIRST_S

    def failed(self, now_s: float) -> bool:
        """It does not load, said again and again; returns whether that is to be told to the link now."""
        if self._since_s is None:
            self._since_s = now_s
        if self._again_s is None:
            self._again_s = now_s + self._delay_s
            self._delay_s = min(2 * self._delay_s, _LONGEST_S)
        return not self.told and now_s - self._since_s >= self.patience_s

    def due(self, now_s: float) -> bool:
        """Whether to try now; if so, the try has begun."""
        if self._again_s is None or now_s < self._again_s:
            return False
        self._again_s = None
        return True
