"""Answers that are computed for long: in a process beside the planner's.

The planner's own interpreter belongs to the thread that serves devices. The search pool may be taken by a
search for minutes, so what an operator reads has a process of its own, which ends when nobody has asked for
a while.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import UnavailableError

MOST_OPEN: Final = 32

P = ParamSpec("P")
T = TypeVar("T")


class StoreReaders:
    """Runs functions of a store in a process of its own, one after the other."""

    def __init__(self, data_dir: Path, database_url: str) -> None:
        from stageloom.planner.cluster.processes import ProcessPool  # nobody else needs multiprocessing

        self._where = (data_dir, database_url)
        self._pool = ProcessPool(1)
        self._lock = threading.Lock()
        self._open = 0

    def submit(
        self, function: Callable[Concatenate[ReadStore, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """What `function(store, ...)` returns; it is of a module, and its arguments and result pickle.

        Raises:
            UnavailableError: too many wait for theirs; or, from the future, the process died.
            StageloomError: from the future, what the function raises.
        """
        with self._lock:
            if self._open >= MOST_OPEN:
                raise UnavailableError(
                    f"{self._open} answers that take long are asked for", remedy="ask again in a minute"
                )
            self._open += 1
        future = self._pool.submit(_run, self._where, function, args, kwargs)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: "Future[Any]") -> None:
        with self._lock:
            self._open -= 1

    def close(self) -> None:
        """End what runs, and leave no process behind."""
        self._pool.close()


def _run(
    where: tuple[Path, str], function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    with closing(ReadStore.open(*where)) as store:
        return function(store, *args, **kwargs)
