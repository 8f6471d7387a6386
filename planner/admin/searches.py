"""Searches that an operator waits for: off the thread that answers, and cancelled when the operator is."""

import threading
from concurrent.futures import CancelledError, Future

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.cluster.run import search
from stageloom.shared.errors import InputError
from stageloom.shared.plan import Plan
from stageloom.shared.search.job import SearchJob
from stageloom.shared.search.registry import reads_costs


class Searches:
    """What runs in the pool, by ticket. May be called from several threads at once."""

    def __init__(self, pool: SearchPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._running: dict[int, Future[Plan]] = {}
        self._cancelled: set[int] = set()

    def run(self, job: SearchJob, ticket: int = 0) -> Plan:
        """Search and wait. A scheduler that costs cannot change is no search: it takes a few milliseconds.

        Raises:
            InputError: it was cancelled.
            SettingError, PlanError: as `search`.
            UnavailableError: the worker died.
        """
        if not reads_costs(job.scheduler):
            return search(job)
        future = self._pool.submit(search, job)
        if ticket:
            with self._lock:
                self._running[ticket] = future
                early = ticket in self._cancelled
                self._cancelled.discard(ticket)
            if early:
                future.cancel()
        try:
            return future.result()
        except CancelledError as error:
            raise InputError("the search was cancelled", remedy="run it again") from error
        finally:
            with self._lock:
                self._running.pop(ticket, None)

    def cancel(self, ticket: int) -> None:
        """End a search; one that is only about to begin ends at once, one that is done is left alone."""
        with self._lock:
            future = self._running.get(ticket)
            if future is None and len(self._cancelled) < 64:
                self._cancelled.add(ticket)
        if future is not None:
            future.cancel()
