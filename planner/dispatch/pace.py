"""How often a device may connect. A key that comes more often waits, longer each time."""

from dataclasses import dataclass
from typing import Final

BURST: Final = 60  # twenty restarts of an agent, which connects to three sockets
REFILL_PER_S: Final = 0.1
FIRST_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 300.0


@dataclass
class _Key:
    tokens: float
    at_s: float
    wait_s: float = 0.0
    until_s: float = 0.0


class ConnectionPace:
    """A token bucket per key. One that finds its bucket empty is shut out for a time that doubles.

    The time starts at `FIRST_WAIT_S` again once the bucket has been full. Memory grows with the keys that are
    asked about, so ask about enrolled ones only.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def admits(self, key: str, now_s: float) -> bool:
        """Whether `key` may connect now; if so, that counts as one connection."""
        known = self._keys.setdefault(key, _Key(float(BURST), now_s))
        known.tokens = min(float(BURST), known.tokens + (now_s - known.at_s) * REFILL_PER_S)
        known.at_s = now_s
        if known.tokens == BURST:
            known.wait_s = 0.0
        if now_s < known.until_s:
            return False
        if known.tokens >= 1:
            known.tokens -= 1
            return True
        known.wait_s = min(max(2 * known.wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
        known.until_s = now_s + known.wait_s
        return False
