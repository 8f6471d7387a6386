"""How long tasks have waited of late: what a guard compares before and after a change. Pure."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from stageloom.shared.engine.interval_guard import GuardConfig, WaitedBefore, WaitedSince

_TASKS: Final = 8192
_LEVELS: Final = 1024

_KEEP_S: Final = 60.0

_STEP_S: Final = 1.0
"""From one window of those before a change to the next."""

_LEAST_S: Final = 3.0
"""A shorter window's p99 is that of one queue building up or not."""

_GROWTHS_S: Final = (1.5, 3.0)
"""Over so long the growth of the oldest age is taken: a burst is young when a change answers it, and one
task that waits ages by a second a second."""

_SURE: Final = 3.0
"""Standard deviations of how many tasks lie beyond the p99: it is looked at again and again."""

_TOLD_LATE_S: Final = 1.0  # an end that the engine process told the application itself

_Span = tuple[float, float]
"""Arrival and end of a task; about in the order of their ends."""

_Level = tuple[float, float, Mapping[str, int]]
"""An instant, the oldest age, and how many tasks of each model had arrived."""


class WaitingLog:
    """How long tasks have waited in the last minute.

    Latencies are of completed tasks, by when they arrived; ages are those of the oldest task that waits,
    whenever the engine process told. Instants are seconds on one monotonic clock and do not go back.
    """

    def __init__(self) -> None:
        self._tasks: deque[_Span] = deque(maxlen=_TASKS)  # that completed
        self._missed: deque[_Span] = deque(maxlen=_TASKS)  # that expired
        self._levels: deque[_Level] = deque(maxlen=_LEVELS)
        self._moved_s = -math.inf
        self._newest: Mapping[str, int] = {}  # counts as the engine process told them last
        self._gone: dict[str, int] = {}  # tasks of models that came back and count anew

    def task_completed(self, arrived_s: float, ended_s: float) -> None:
        """Count a task that the application got an answer to."""
        self._tasks.append((arrived_s, ended_s))

    def task_expired(self, arrived_s: float, ended_s: float) -> None:
        """Count a task whose deadline came first."""
        self._missed.append((arrived_s, ended_s))

    def seen(self, at_s: float, oldest_age_s: float, arrived: Mapping[str, int]) -> None:
        """The queues at one instant; `arrived` counts each model's tasks since the engine serves it."""
        while self._levels and self._levels[0][0] < at_s - _KEEP_S:
            self._levels.popleft()
        self._gone = {name: gone for name, count in arrived.items() if (gone := self._earlier(name, count))}
        self._newest = arrived
        told = arrived if not self._gone else {n: c + self._gone.get(n, 0) for n, c in arrived.items()}
        self._levels.append((at_s, oldest_age_s, told))

    def _earlier(self, name: str, count: int) -> int:
        """The tasks of a model that were counted before no plan served it."""
        if name not in self._newest:
            return next((told[name] for *_, told in reversed(self._levels) if name in told), 0)
        newest = self._newest[name]
        return self._gone.get(name, 0) + (newest if count < newest else 0)

    def arrivals_moved(self, since_s: float) -> None:
        """Other tasks come since that instant: latencies of before it are no measure for these."""
        self._moved_s = since_s

    def environment_changed(self) -> None:
        """What was seen in another environment says nothing about this one."""
        self._tasks.clear()
        self._missed.clear()
        self._levels.clear()

    def engine_restarted(self) -> None:
        """Another engine process counts anew."""
        self._levels.clear()
        self._newest, self._gone = {}, {}

    def before(self, now_s: float, config: GuardConfig) -> WaitedBefore:
        """Of the last minute, at the instant of a change."""
        from_s = now_s - _KEEP_S
        alike_s = max(from_s, self._moved_s)  # since then the same tasks have come as come now
        per_s = sum(self.arrivals_per_s(alike_s, now_s).values())
        window_s = min(max(_LEAST_S, config.min_tasks / per_s if per_s else math.inf), config.length_s)
        least = config.min_tasks // 2  # a p99 of fewer is one of the slowest two
        windows = list(_windows(from_s, now_s, window_s))
        latencies = [self._latencies(*window) for window in windows]
        ended = [self._missed_of(*window) for window in windows if window[0] >= alike_s]
        return WaitedBefore(
            p99_s=max((_p99_s(one) for one in latencies if len(one) >= least), default=0.0),
            window_s=window_s,
            oldest_age_s=max((age for at, age, _ in self._levels if at >= from_s), default=0.0),
            age_growth=max(self.age_growth(now_s - seconds, now_s) for seconds in _GROWTHS_S),
            arrivals_per_s=per_s,
            moved=self._moved_s > from_s,
            missed=max(
                (missed / count for missed, count in ended if count >= max(least, 1)),
                default=_share(*self._missed_of(alike_s, now_s), none=1.0),
            ),
        )

    def since(self, from_s: float, now_s: float, before: WaitedBefore, config: GuardConfig) -> WaitedSince:
        """Of tasks that arrived since a change at `from_s`, of late."""
        window_from_s = max(from_s, now_s - before.window_s)
        latencies = self._latencies(window_from_s, now_s)
        ages = [age for at, age, _ in self._levels if at > from_s and at >= now_s - config.persists_s]
        missed, ended = self._missed_of(window_from_s, now_s)
        return WaitedSince(
            tasks=len(latencies),
            p99_s=_p99_s(latencies),
            p99_least_s=_p99_least_s(latencies),
            oldest_age_s=min(ages, default=0.0),
            arrivals_per_s=sum(self.arrivals_per_s(from_s, now_s).values()),
            missed=_share(missed, ended),
            ended=ended,
        )

    def age_growth(self, from_s: float, to_s: float) -> float:
        """How fast the oldest age grew, in seconds per second: the slope by least squares."""
        points = [(at, age) for at, age, _ in self._levels if from_s <= at <= to_s]
        if len(points) < 2:
            return 0.0
        mean_at, mean_age = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
        spread = math.fsum((at - mean_at) ** 2 for at, _ in points)
        return math.fsum((at - mean_at) * (age - mean_age) for at, age in points) / spread if spread else 0.0

    def arrivals_per_s(self, from_s: float, to_s: float) -> dict[str, float]:
        """Per model; empty where fewer than two instants were seen."""
        levels = [one for one in self._levels if from_s <= one[0] <= to_s]
        if len(levels) < 2 or not levels[-1][0] > levels[0][0]:
            return {}
        first, last = levels[0], levels[-1]
        grown = {name: count - first[2].get(name, 0) for name, count in last[2].items()}
        return {name: max(count, 0) / (last[0] - first[0]) for name, count in grown.items()}

    def last_arrivals_per_s(self, length_s: float) -> dict[str, float]:
        """Over the last seconds that were seen."""
        if not self._levels:
            return {}
        last_s = self._levels[-1][0]
        return self.arrivals_per_s(last_s - length_s, last_s)

    def _latencies(self, from_s: float, to_s: float) -> list[float]:
        return sorted(ended - arrived for arrived, ended in _arrived(self._tasks, from_s, to_s))

    def _missed_of(self, from_s: float, to_s: float) -> tuple[int, int]:
        """Of the tasks that arrived in these seconds and have ended: those that expired, and all."""
        missed, completed = (
            sum(1 for _ in _arrived(tasks, from_s, to_s)) for tasks in (self._missed, self._tasks)
        )
        return missed, missed + completed


def _arrived(tasks: deque[_Span], from_s: float, to_s: float) -> Iterator[_Span]:
    """Those that arrived in these seconds, the newest first: whose end is older did not."""
    for one in reversed(tasks):
        if one[1] < from_s - _TOLD_LATE_S:
            return
        if from_s <= one[0] <= to_s:
            yield one


def _windows(from_s: float, to_s: float, window_s: float) -> Iterator[tuple[float, float]]:
    """Begin and end of each, the newest first."""
    end_s = to_s
    while end_s - window_s >= from_s:
        yield end_s - window_s, end_s
        end_s -= _STEP_S


def _share(missed: int, ended: int, none: float = 0.0) -> float:
    return missed / ended if ended else none


def _p99_s(ascending: Sequence[float]) -> float:
    return ascending[math.ceil(0.99 * len(ascending)) - 1] if ascending else 0.0


def _p99_least_s(ascending: Sequence[float]) -> float:
    """What the p99 is surely not below: more tasks lie beyond it than chance explains."""
    beyond = 0.01 * len(ascending)
    most = math.floor(beyond + _SURE * math.sqrt(beyond))
    return ascending[len(ascending) - 1 - most] if most < len(ascending) else 0.0
