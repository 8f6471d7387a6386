"""What a job's work needs of a planner, whether it runs or not: processor time, and changes of the store."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from stageloom.planner.api.context import ApiContext
from stageloom.planner.api.jobs import Job, JobCancelled

T = TypeVar("T")


def computed(api: ApiContext, job: Job, function: Callable[..., T], *arguments: Any) -> T:
    """What a module-level function returns: from the search pool, or from here where no planner runs.

    Raises:
        JobCancelled: the job should end.
        UnavailableError: the worker died.
        StageloomError: what the function raised.
    """
    job.check()
    if api.running is None:
        return function(*arguments)
    return waited(job, api.running.pool.submit(function, *arguments))


def waited(job: Job, future: "Future[T]") -> T:
    """What a pool's future results in; a job that should end cancels it.

    Raises:
        JobCancelled: the job should end.
        UnavailableError: the worker died.
        StageloomError: what ran there raised it.
    """

    def end() -> None:
        future.cancel()

    job.when_cancelled(end)
    try:
        return future.result()
    except CancelledError as error:
        raise JobCancelled from error


def changed(api: ApiContext, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What `function(session, ...)` of the store returns, once its change is committed.

    Raises:
        StorageError: nothing was kept.
        StageloomError: what the function raised; nothing was kept.
    """
    if api.running is not None:
        return api.running.store.write(function, *arguments, **named)
    result: T = api.reader.database.change(function, *arguments, **named)
    return result
