"""What a running planner counts: requests of its API, searches, and what its devices' telemetry says.

Counters begin at zero with the process, as Prometheus expects of them.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.dispatch.ports import StoredRow
from stageloom.shared.engine.trial import Verdict
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import TaskCounters, TrialEnded
from stageloom.shared.metrics import CountedSeconds

OUTCOMES: Final = ("completed", "refused", "cancelled", "expired", "failed")
SEARCH_ENDS: Final = ("completed", "failed", "cancelled")

T = TypeVar("T")


class PlannerCounters:
    """May be used from any thread; `copy` is one moment of all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.request_s: dict[str, CountedSeconds] = {}  # by route
        self.searches: Counter[tuple[str, str]] = Counter()  # by where and how they ended
        self.search_s: dict[str, CountedSeconds] = {}  # of completed ones, by where
        self.searching: Counter[str] = Counter()
        self.tasks: defaultdict[DeviceId, Counter[str]] = defaultdict(Counter)  # of all, by outcome
        self.verdicts: Counter[str] = Counter({verdict.value: 0 for verdict in Verdict})
        self.replans = 0

    def copy(self) -> "PlannerCounters":
        """As it is now, and stays."""
        now = PlannerCounters()
        with self._lock:
            now.requests, now.searches = self.requests.copy(), self.searches.copy()
            now.searching, now.verdicts = self.searching.copy(), self.verdicts.copy()
            now.request_s = {name: _copied(counted) for name, counted in self.request_s.items()}
            now.search_s = {name: _copied(counted) for name, counted in self.search_s.items()}
            now.tasks.update({device: counts.copy() for device, counts in self.tasks.items()})
            now.replans = self.replans
        return now

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """The API answered; of a stream, its first item."""
        with self._lock:
            self.requests[route, status] += 1
            _of(self.request_s, route).add(seconds)

    def search_began(self, where: str) -> None:
        """A search was handed to the pool."""
        with self._lock:
            self.searching[where] += 1

    def search_ended(self, where: str, how: str, seconds: float) -> None:
        """`how`: of `SEARCH_ENDS`."""
        with self._lock:
            self.searching[where] -= 1
            self.searches[where, how] += 1
            if how == "completed":
                _of(self.search_s, where).add(seconds)

    def replan_began(self) -> None:
        """An alarm began a re-plan."""
        with self._lock:
            self.replans += 1

    def rows_stored(self, rows: Iterable[tuple[DeviceId, StoredRow]]) -> None:
        """Telemetry that is new in the store."""
        with self._lock:
            for device, row in rows:
                if isinstance(row.data, TaskCounters):
                    self.tasks[device].update({name: getattr(row.data, name) for name in OUTCOMES})
                elif isinstance(row.data, TrialEnded) and row.data.verdict in self.verdicts:
                    self.verdicts[row.data.verdict] += 1


def _of(by_name: dict[str, CountedSeconds], name: str) -> CountedSeconds:
    return by_name.setdefault(name, CountedSeconds.empty())


def _copied(counted: CountedSeconds) -> CountedSeconds:
    return CountedSeconds(counted.counts.copy(), counted.sum_s)


class CountedPool:
    """A pool whose searches are counted, by where they were begun."""

    def __init__(
        self, pool: SearchPool, counters: PlannerCounters, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._counters = counters
        self._now_s = now_s

    @property
    def workers(self) -> int:
        return self._pool.workers

    @property
    def where(self) -> str:
        return self._pool.where

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        where, began_s = self._pool.where, self._now_s()
        self._counters.search_began(where)
        try:
            future = self._pool.submit(function, *arguments)
        except BaseException:
            self._counters.search_ended(where, "failed", 0.0)
            raise

        def ended(done: "Future[T]") -> None:
            failed = not done.cancelled() and done.exception() is not None
            how = "cancelled" if done.cancelled() else "failed" if failed else "completed"
            self._counters.search_ended(where, how, self._now_s() - began_s)

        future.add_done_callback(ended)
        return future

    def close(self) -> None:
        self._pool.close()
