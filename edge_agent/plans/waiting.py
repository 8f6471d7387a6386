"""How long tasks have waited lately: what a guard compares before and after a change. Pure.

Latencies are of completed tasks, by when they arrived; ages are those of the oldest queued task whenever the
engine process told. Both go back about half a minute.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from stageloom.shared.engine.interval_guard import Waiting

_TASKS: Final = 8192
_LEVELS: Final = 1024
_KEEP_S: Final = 30.0


class WaitingLog:
    """The last seconds of this device. Instants are seconds on one monotonic clock and do not go back."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[float, float]] = deque(maxlen=_TASKS)  # arrival, latency; by end
        self._levels: deque[tuple[float, float, Mapping[str, int]]] = deque(maxlen=_LEVELS)

    def task_completed(self, arrived_s: float, ended_s: float) -> None:
        """A task was answered."""
        self._tasks.append((arrived_s, ended_s - arrived_s))

    def seen(self, at_s: float, oldest_age_s: float, arrived: Mapping[str, int]) -> None:
        """The queues at one instant; `arrived` counts each model's tasks since the engine process started."""
        while self._levels and self._levels[0][0] < at_s - _KEEP_S:
            self._levels.popleft()
        self._levels.append((at_s, oldest_age_s, arrived))

    def engine_restarted(self) -> None:
        """Another engine process counts anew."""
        self._levels.clear()

    def between(self, from_s: float, to_s: float) -> Waiting:
        """Tasks that arrived in these seconds; the greatest age that was seen in them."""
        ages = [age for at, age, _ in self._levels if from_s <= at <= to_s]
        return self._waiting(from_s, to_s, max(ages, default=0.0))

    def since(self, from_s: float, now_s: float) -> Waiting:
        """Tasks that arrived since then; the age that was seen last, if any was."""
        last = self._levels[-1] if self._levels else None
        return self._waiting(from_s, now_s, last[1] if last and last[0] >= from_s else 0.0)

    def _waiting(self, from_s: float, to_s: float, age_s: float) -> Waiting:
        latencies = sorted(latency for arrived, latency in self._tasks if from_s <= arrived <= to_s)
        p99_s = latencies[math.ceil(0.99 * len(latencies)) - 1] if latencies else 0.0
        return Waiting(tasks=len(latencies), p99_s=p99_s, oldest_age_s=age_s)

    def age_growth(self, from_s: float, to_s: float) -> float:
        """How fast the oldest age grew, in seconds per second."""
        first, last = self._ends(from_s, to_s)
        return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0

    def arrivals_per_s(self, from_s: float, to_s: float) -> dict[str, float]:
        """Per model; empty where fewer than two instants were seen."""
        first, last = self._ends(from_s, to_s)
        length_s = last[0] - first[0]
        if not length_s > 0:
            return {}
        grown = {name: count - first[2].get(name, 0) for name, count in last[2].items()}
        return {name: max(count, 0) / length_s for name, count in grown.items()}

    def last_arrivals_per_s(self, length_s: float) -> dict[str, float]:
        """Over the last seconds that were seen."""
        if not self._levels:
            return {}
        last_s = self._levels[-1][0]
        return self.arrivals_per_s(last_s - length_s, last_s)

    def _ends(
        self, from_s: float, to_s: float
    ) -> tuple[tuple[float, float, Mapping[str, int]], tuple[float, float, Mapping[str, int]]]:
        levels = [one for one in self._levels if from_s <= one[0] <= to_s]
        nothing: tuple[float, float, Mapping[str, int]] = (0.0, 0.0, {})
        return (levels[0], levels[-1]) if levels else (nothing, nothing)
