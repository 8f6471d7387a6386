"""Time as an argument: shells hand a clock in, cores receive the instant."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell reads time."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment; never falls."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970 (UTC); may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return time.time_ns() // 1000


class ManualClock:
    """A clock that moves only when told: for simulators and tests."""

    def __init__(self, *, monotonic_s: float = 0.0, wall_us: int = 1_700_000_000_000_000) -> None:
        self._monotonic_s = monotonic_s
        self._wall_us = wall_us

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_us(self) -> int:
        return self._wall_us

    def advance(self, seconds: float) -> None:
        """Move both clocks forward.

        Raises:
            ValueError: `seconds` is negative; use another clock to test a wall clock that jumps.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot move by {seconds} s")
        self._monotonic_s += seconds
        self._wall_us += round(seconds * 1e6)
