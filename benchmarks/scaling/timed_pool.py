"""A pool that notes what each task takes where it runs."""

import os
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeVar

from stageloom.planner.cluster.interface import SearchFuture, SearchPool

T = TypeVar("T")


class Taken(NamedTuple):
    """Of one task, on its worker."""

    process: int
    cpu_s: float
    wall_s: float


def timed(function: Callable[..., T], arguments: tuple[Any, ...]) -> tuple[T, Taken]:
    """Run a function on a worker."""
    cpu_s, began_s = time.process_time(), time.monotonic()
    result = function(*arguments)
    return result, Taken(os.getpid(), time.process_time() - cpu_s, time.monotonic() - began_s)


def nothing(number: int) -> int:
    """A task without work: what is left is the hand-over."""
    return number


class TimedPool:
    """Satisfies `SearchPool`, through another one."""

    def __init__(self, pool: SearchPool) -> None:
        self._pool = pool
        self.taken: list[Taken] = []

    @property
    def workers(self) -> int:
        return self._pool.workers

    @property
    def where(self) -> str:
        return self._pool.where

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        inner = self._pool.submit(timed, function, arguments)
        outer: SearchFuture[T] = SearchFuture()
        outer.stop = inner.cancel

        def ended(done: "Future[tuple[T, Taken]]") -> None:
            try:
                result, taken = done.result()
            except (Exception, CancelledError) as error:
                outer.fail(error)
                return
            self.taken.append(taken)
            outer.settle(result)

        inner.add_done_callback(ended)
        return outer

    def close(self) -> None:
        self._pool.close()
