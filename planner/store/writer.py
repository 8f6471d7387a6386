"""The one thread that writes: works queue up, are run in groups, and each group is one commit.

A commit waits for the disk, so its cost is shared: everything that arrived during one commit goes into the
next. A result is handed out only after its commit; what was acknowledged is therefore on disk.

There are two queues. Bulk work, such as the telemetry of a fleet, takes a while; it gets every other commit
and all that nothing else wants, so that whoever waits for a small work waits for one bulk commit at most.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar

from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from stageloom.planner.store.database import Database, LostRace, Unstorable, is_defect, is_of_the_record
from stageloom.shared.errors import StageloomError, StorageError, UnavailableError
from stageloom.shared.failpoint import failpoint

logger = logging.getLogger(__name__)


Item = TypeVar("Item")

T = TypeVar("T")


GROUP: Final = 256
"""Works per commit at most: bounds how long the first of a group waits for the last."""


Together = Callable[[Session, Sequence[Item]], Sequence[T | StageloomError]]
"""Works that are one and the same on different items: (items) -> their results, or why one is refused."""


_Entry: TypeAlias = "tuple[Together[Any, Any], Any, Future[Any]]"
"""What works on an item, the item, and who waits for the result."""


class Writer:
    """Runs works on a thread of its own, in the order of `submit`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._small: deque[_Entry] = deque()
        self._bulk: deque[_Entry] = deque()
        self._bulk_next = False
        self._changed = threading.Condition()  # guards what is above and below
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Works that wait; approximate, for limits and metrics."""
        return len(self._small) + len(self._bulk)

    def submit(self, work: Callable[[Session], T], *, bulk: bool = False) -> "Future[T]":
        """Queue a work; the future's callbacks run on the writer's thread, after the commit.

        It cannot be cancelled: a client that goes away takes no entry out of the audit log.

        Raises (from the future):
            StorageError: the commit failed, nothing of the work was kept.
            StageloomError: what `work` itself raised; the rest of its group is not affected.
        """
        return self.submit_one(_each, work, bulk=bulk)

    def submit_one(self, together: Together[Item, T], item: Item, *, bulk: bool = False) -> "Future[T]":
        """`submit` where many items may come at once: those that stand in a row are worked on together.

        A refusal of one item undoes nothing, so whatever `together` refuses it must not have written; where
        it raises, all of them fail.
        """
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # from now on a `cancel` is refused
        with self._changed:
            closed = self._closed
            if not closed:
                (self._bulk if bulk else self._small).append((together, item, answer))
                self._changed.notify()
        if closed:
            answer.set_exception(UnavailableError("the store is closed"))
        return answer

    def run(self, work: Callable[[Session], T], *, bulk: bool = False, timeout_s: float = 60.0) -> T:
        """Submit and wait.

        Raises:
            UnavailableError: not committed in time; it may still be.
        """
        try:
            return self.submit(work, bulk=bulk).result(timeout_s)
        except TimeoutError as error:
            raise UnavailableError(
                f"the store did not commit within {timeout_s:g} s", remedy="try again"
            ) from error

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Commit what was submitted, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while group := self._next_group():
            self._commit(group)

    def _next_group(self) -> list[_Entry]:
        """What goes into the next commit; empty when all is done and the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._small or self._bulk or self._closed)
            bulk = bool(self._bulk) and (self._bulk_next or not self._small)
            self._bulk_next = not bulk
            lane = self._bulk if bulk else self._small
            return [lane.popleft() for _ in range(min(len(lane), GROUP))]

    def _commit(self, group: Sequence[_Entry]) -> None:
        results: list[Any] = []
        try:
            with self._database.write() as session:
                for together, entries in groupby(group, itemgetter(0)):
                    results += _together(session, together, [item for _, item, _ in entries])
                failpoint("planner.commit.before")
            failpoint("planner.commit.after")
        except (LostRace, StaleDataError):
            self._one_by_one(group)
            return
        except Exception as error:
            if len(group) > 1 and is_of_the_record(error):
                self._one_by_one(group)
                return
            failure = _failure(error)
            for _, _, answer in group:
                answer.set_exception(failure)
            return
        for (_, _, answer), result in zip(group, results, strict=True):
            _deliver(answer, result)

    def _one_by_one(self, group: Sequence[_Entry]) -> None:
        """Run each work until it is in, or shows that it cannot be.

        Postgres rolled the group back in favour of another writer, or one of its works is to blame.
        """
        for together, item, answer in group:
            try:
                (result,) = self._database.change(together, [item])
            except Exception as error:
                result = _failure(error)
            _deliver(answer, result)


def _each(session: Session, works: Sequence[Callable[[Session], Any]]) -> Sequence[Any]:
    """Works that have nothing in common; a refusal of one undoes only that one."""
    return [_attempt(session, work) for work in works]


def _together(session: Session, together: "Together[Any, Any]", items: Sequence[Any]) -> Sequence[Any]:
    if together is _each:
        return _each(session, items)
    results = _attempt(session, lambda session: together(session, items))
    return [results] * len(items) if isinstance(results, StageloomError) else results


def _attempt(session: Session, work: Callable[[Session], Any]) -> Any:
    """What a part of a group results in; a refusal is its result and undoes only that part."""
    try:
        with session.begin_nested():
            return work(session)
    except StageloomError as error:
        return error


def _failure(error: Exception) -> StageloomError:
    """What is told of a transaction that failed; a defect goes to the log with its traceback."""
    if is_defect(error):
        logger.error("a write failed", exc_info=error)
    if isinstance(error, StageloomError):
        return error
    kind = Unstorable if is_of_the_record(error) else StorageError
    failure = kind(f"the store failed: {error}", remedy="see the planner's log")
    failure.__cause__ = error
    return failure


def _deliver(answer: "Future[Any]", result: Any) -> None:
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def isolated(
    keep: Callable[[Sequence[T]], None], records: Sequence[T], blame: Callable[[T, Exception], None]
) -> None:
    """Keep records in one transaction; where one makes that fail, keep all the others and `blame` that one.

    Halves the records until it is found: k of n that cannot be kept take about 2 k log2 n transactions.

    Raises:
        Exception: what `keep` raised where no record is to blame, such as a database that is away. Some of
            the records may be kept by then; to keep them again must change nothing.
    """
    if not records:
        return
    try:
        keep(records)
    except Exception as error:
        if not is_of_the_record(error):
            raise
        if len(records) == 1:
            blame(records[0], error)
            return
    else:
        return
    middle = len(records) // 2
    for half in (records[:middle], records[middle:]):
        isolated(keep, half, blame)
