"""Searches in the background for better schedules of combined blocks, kept for the next proposal.

One search at a time, and none while a caller waits for a search in `foreground`: a background search that had
begun by then is cancelled and begun again afterwards.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeAlias, TypeVar

from stageloom.planner.cluster.interface import SearchPool, search_block
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import Digest
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.job import BlockJob

log = logging.getLogger(__name__)

_MOST: Final = 256
"""That wait: the next re-plan names again what is still missing."""

T = TypeVar("T")
_Wanted: TypeAlias = tuple[str, BlockJob]
_Key: TypeAlias = tuple[str, Digest, int]


class ScheduleSearches:
    """Serves from `start` to `close`; methods may be called from any thread."""

    def __init__(self, pool: SearchPool, keep: Callable[[str, BlockJob, StageSchedule], None]) -> None:
        """`keep` takes what was found: what its costs are kept under, the block, its schedule."""
        self.foreground: SearchPool = _Foreground(pool, self)
        self._pool = pool
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: deque[_Wanted] = deque()
        self._known: set[_Key] = set()  # what waits or is searched
        self._running: Future[StageSchedule] | None = None
        self._pauses = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="replan-schedules", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; the next re-plan asks again for what was not found."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            running = self._running
        if running is not None:
            running.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def idle(self) -> bool:
        """Nothing is searched or waits for a search, here or in the foreground."""
        with self._changed:
            return not self._pauses and not self._known

    def want(self, costs_key: str, jobs: Sequence[BlockJob]) -> None:
        """Queue searches for these; a queued search is not queued twice."""
        with self._changed:
            for job in jobs:
                key = _key((costs_key, job))
                if key not in self._known and len(self._waiting) < _MOST:
                    self._known.add(key)
                    self._waiting.append((costs_key, job))
            self._changed.notify_all()

    def pause(self) -> None:
        """Leave the pool to a caller who waits, until `resume`."""
        with self._changed:
            self._pauses += 1
            running = self._running
        if running is not None:
            running.cancel()

    def resume(self) -> None:
        """Undo one `pause`."""
        with self._changed:
            self._pauses -= 1
            self._changed.notify_all()

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            wanted, future = begun
            try:
                found = future.result()
            except CancelledError:
                self._ended(wanted, again=True)
                continue
            except StageloomError as error:
                log.info("a search for a schedule found nothing: %s", error)
            except Exception:
                log.exception("a search for a schedule failed")
            else:
                self._kept(wanted, found)
            self._ended(wanted)

    def _begin(self) -> tuple[_Wanted, "Future[StageSchedule]"] | None:
        """Wait until a search may run, and begin it; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._waiting and not self._pauses))
            if self._stopping:
                return None
            wanted = self._waiting.popleft()
            self._running = self._pool.submit(search_block, wanted[1])
            return wanted, self._running

    def _ended(self, wanted: _Wanted, *, again: bool = False) -> None:
        with self._changed:
            self._running = None
            if again:
                self._waiting.appendleft(wanted)
            else:
                self._known.discard(_key(wanted))

    def _kept(self, wanted: _Wanted, found: StageSchedule) -> None:
        try:
            self._keep(*wanted, found)
        except StageloomError as error:
            log.warning("a schedule that was found is not kept: %s", error)


def _key(wanted: _Wanted) -> _Key:
    costs_key, job = wanted
    return costs_key, job.combined_block, job.batch


class _Foreground:
    """The pool, for searches that a caller waits for."""

    def __init__(self, pool: SearchPool, behind: ScheduleSearches) -> None:
        self._pool = pool
        self._behind = behind

    @property
    def workers(self) -> int:
        return self._pool.workers

    @property
    def where(self) -> str:
        return self._pool.where

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        self._behind.pause()
        try:
            future = self._pool.submit(function, *arguments)
        except BaseException:
            self._behind.resume()
            raise
        future.add_done_callback(lambda _: self._behind.resume())
        return future

    def close(self) -> None:
        self._pool.close()
