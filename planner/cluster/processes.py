"""Searches in processes of this machine.

Used while Ray starts and where it does not. A process goes on with the next function, since those of a
contest or a training are short beside its start and what they import. One that had nothing to do for a while
ends, so that a planner that searches now and then does not hold its memory, as does one whose function is
cancelled.
"""

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, TypeVar

from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.cluster.priority import BEHIND_SERVING, come_after
from stageloom.shared.blas_threads import ONE_THREAD
from stageloom.shared.errors import UnavailableError

log = logging.getLogger(__name__)

IDLE_S: Final = 20.0

T = TypeVar("T")

_Work = tuple[SearchFuture[Any], Callable[..., Any], tuple[Any, ...]]


class ProcessPool:
    """Up to `workers` processes at a time; implements `SearchPool`.

    A process that had no work for `idle_s` ends, and what it keeps in its modules with it; None: it stays.
    """

    where = "processes"

    def __init__(self, workers: int = 1, *, idle_s: float | None = IDLE_S) -> None:
        self.workers = workers
        self._idle_s = idle_s
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[SearchFuture[Any]] = set()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
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
        worker: _Worker | None = None
        while True:
            try:
                work = self._queue.get(timeout=None if worker is None else self._idle_s)
            except queue.Empty:
                assert worker is not None
                worker.end()
                worker = None
                continue
            if work is None:
                break
            future, function, arguments = work
            if future.cancelled():
                continue
            if worker is None:
                try:
                    worker = _Worker()
                except Exception as error:
                    log.exception("a search process does not start")
                    future.fail(UnavailableError(f"a search process does not start: {error}"))
                    continue
            alive = worker.run(future, function, arguments)
            if not alive or future.cancelled():
                worker.end()
                worker = None
        if worker is not None:
            worker.end()


class _Worker:
    """One process, seen from the thread that it works for."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy ZeroMQ's and SQLite's threads
        self._pipe, there = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(there,), daemon=True)
        try:
            self._process.start()
        finally:
            there.close()

    def run(
        self, future: SearchFuture[Any], function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> bool:
        """Have it done; whether the process is still there."""
        future.stop = self._process.terminate
        if future.cancelled():
            self._process.terminate()
        try:
            body = pickle.dumps((function, arguments))
        except Exception as error:
            future.fail(error)
            return True
        try:
            self._pipe.send_bytes(body)
            ok, value = pickle.loads(self._pipe.recv_bytes())  # from a process of our own
        except (EOFError, OSError):
            self._process.join()
            future.fail(UnavailableError(f"a search process ended with code {self._process.exitcode}"))
            return False
        future.settle(value) if ok else future.fail(value)
        return True

    def end(self) -> None:
        """Leave nothing behind; it ends by itself where it has nothing to do."""
        self._pipe.close()
        self._process.join()


def _serve(there: Connection) -> None:
    """A worker: until the pipe ends, which it also does when the planner goes, however it goes."""
    os.setsid()  # Ctrl-C at the planner's terminal is the planner's, which ends us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    come_after(BEHIND_SERVING)
    os.environ.update(ONE_THREAD)  # before a function brings numpy; Ray gives its own workers the same
    with suppress(EOFError, OSError):
        while True:
            there.send_bytes(_answer(there.recv_bytes()))


def _answer(body: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(body)
        answer = (True, function(*arguments))
    except Exception as error:
        answer = (False, error)
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps((False, UnavailableError(f"the answer does not pickle: {error}")))
