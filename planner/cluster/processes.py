"""Searches in processes of this machine: one fresh process each, so that a cancelled one simply ends.

Used while Ray starts and where it does not. A process costs about a quarter of a second to start, which a
search is long enough to bear.
"""

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from planner.cluster.interface import SearchFuture
from shared.errors import UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

_Work = tuple[SearchFuture[Any], Callable[..., Any], tuple[Any, ...]]


class ProcessPool:
    """Up to `workers` processes at a time; implements `SearchPool`."""

    where = "processes"

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[SearchFuture[Any]] = set()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
        """See `SearchPool`."""
        future: SearchFuture[T] = SearchFuture()
        with self._lock:
            if self._closed:
                future.fail(UnavailableError("the search workers are closed"))
                return future
            self._open.add(future)
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name="search", daemon=True)
                self._threads.append(thread)
                thread.start()
        future.add_done_callback(self._forget)
        self._queue.put((future, function, arguments))
        return future

    def close(self) -> None:
        """See `SearchPool`."""
        with self._lock:
            self._closed = True
            open_now = list(self._open)
        for future in open_now:
            future.cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _forget(self, future: Any) -> None:
        with self._lock:
            self._open.discard(future)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            future, function, arguments = work
            if not future.cancelled():
                self._run(future, function, arguments)

    def _run(
        self, future: SearchFuture[Any], function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy ZeroMQ's and SQLite's threads
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, function, arguments), daemon=True)
        try:
            process.start()
        except Exception as error:
            log.exception("a search process does not start")
            future.fail(UnavailableError(f"a search process does not start: {error}"))
            return
        finally:
            there.close()
        future.stop = process.terminate
        if future.cancelled():
            process.terminate()
        try:
            ok, value = pickle.loads(here.recv_bytes())  # from a process of our own
        except (EOFError, OSError):
            process.join()
            future.fail(UnavailableError(f"a search process ended with code {process.exitcode}"))
        else:
            future.settle(value) if ok else future.fail(value)
        finally:
            here.close()
            process.join()


def _work(there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the planner ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(5)  # serving comes first
    try:
        answer = (True, function(*arguments))
    except Exception as error:
        answer = (False, error)
    try:
        body = pickle.dumps(answer)
    except Exception as error:
        body = pickle.dumps((False, UnavailableError(f"the answer does not pickle: {error}")))
    there.send_bytes(body)
