"""How an inference service waits: on an event loop, or by blocking the thread that asks.

Both run the same coroutines. Where nothing suspends, a coroutine is an ordinary call, which `blocking` makes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from typing import Any, Protocol, TypeVar

from stageloom.edge_agent.ingest.client import TaskFuture

_T = TypeVar("_T")


class ServiceWaiting(Protocol):
    """Waits for other threads and processes."""

    async def call(self, function: Callable[..., _T], *given: Any) -> _T:
        """The result of a function that blocks."""

    async def results(self, tasks: Sequence[TaskFuture]) -> list[Any]:
        """The results in order; the first error ends the wait."""


class OnLoop:
    """Suspends the coroutine."""

    async def call(self, function: Callable[..., _T], *given: Any) -> _T:
        return await asyncio.to_thread(function, *given)

    async def results(self, tasks: Sequence[TaskFuture]) -> list[Any]:
        if len(tasks) == 1:
            return [await asyncio.wrap_future(tasks[0])]
        return list(await asyncio.gather(*map(asyncio.wrap_future, tasks)))


class InThread:
    """Blocks the thread: a reply wakes the one that asked, and no event loop before it."""

    async def call(self, function: Callable[..., _T], *given: Any) -> _T:
        return function(*given)

    async def results(self, tasks: Sequence[TaskFuture]) -> list[Any]:
        if len(tasks) > 1:
            futures.wait(tasks, return_when=futures.FIRST_EXCEPTION)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
        return [task.result() for task in tasks]


def blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits `InThread` alone."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: _T = ended.value
        return result
    work.close()
    raise RuntimeError("it waits on an event loop")
