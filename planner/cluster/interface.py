"""What a pool of search workers offers, and the searches that its workers run."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from stageloom.shared.errors import UnavailableError
from stageloom.shared.plan import Plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.job import BlockJob, SearchJob, run_block_search, run_search

T = TypeVar("T")


class WorkersGone(UnavailableError):
    """All workers of a pool went away together, for no fault of what they ran."""


class SearchPool(Protocol):
    """Runs pure functions elsewhere. Methods may be called from any thread and return at once."""

    @property
    def workers(self) -> int:
        """Functions that run at the same time."""
        ...

    @property
    def where(self) -> str:
        """`ray` or `processes`, for people."""
        ...

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Run a module-level function with arguments that pickle.

        The future has its result or the exception that it raised. Cancelling it stops the function, even
        while it runs; the future then ends at once with `CancelledError`.

        Raises (from the future):
            UnavailableError: the worker died, or the pool is closed.
        """
        ...

    def close(self) -> None:
        """Cancel what runs, and leave no process behind."""
        ...


class SearchFuture(Future[T]):
    """A future that can be cancelled while its function runs; `stop` ends the function."""

    def __init__(self) -> None:
        super().__init__()
        self.stop: Callable[[], object] = lambda: None

    def cancel(self) -> bool:
        """Cancel, if it is not done; True where it ends cancelled."""
        if not super().cancel():
            return False
        self.stop()
        return True

    def settle(self, result: T) -> None:
        """Give the result, unless it was cancelled meanwhile."""
        if self.set_running_or_notify_cancel():
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give the error, unless it was cancelled meanwhile."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


def search(job: SearchJob) -> Plan:
    """`run_search` on this machine's clock.

    Raises:
        SettingError, PlanError: as `run_search`.
    """
    return run_search(job, time.monotonic)


def search_block(job: BlockJob) -> StageSchedule:
    """`run_block_search` on this machine's clock."""
    return run_block_search(job, time.monotonic)
