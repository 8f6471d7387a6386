"""A pool that runs what it is given in this process, at once: no process starts."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class InlinePool:
    """Implements `SearchPool` with one worker; what `AnytimePool` is told besides does not matter."""

    workers, where = 1, "here"

    def __init__(self, workers: int = 1, **how: object) -> None:
        """As `AnytimePool`."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """See `SearchPool`. What goes in and what comes out are pickled, as on the way to a process."""
        future: Future[Any] = Future()
        call, given = pickle.loads(pickle.dumps((function, arguments)))
        future.set_result(pickle.loads(pickle.dumps(call(*given))))
        return future

    def close(self) -> None:
        """Nothing is left."""
