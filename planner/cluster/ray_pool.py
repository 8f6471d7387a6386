"""Searches as Ray tasks, through a process that owns Ray: see `stageloom.planner.cluster.ray_host`."""

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, TypeVar

from stageloom.planner.cluster.interface import SearchFuture, WorkersGone
from stageloom.planner.cluster.ray_host import Broken, Cancel, Ended, Running, Submit, host
from stageloom.shared.errors import StageloomError, UnavailableError

T = TypeVar("T")

_END_S: Final = 15.0  # that Ray may take to shut down


class RayPool:
    """Ray from `__init__`, which returns at once, to `close`; implements `SearchPool` once `ready`."""

    where = "ray"

    def __init__(
        self,
        workers: int = 1,
        *,
        address: str = "",
        failed: Callable[[StageloomError], None] = lambda error: None,
    ) -> None:
        """Start a local Ray, or with an `address` join the cluster there.

        `failed` is told, on a thread of this pool, why Ray does not run, or runs no more.
        """
        self.workers = workers
        self._address = address
        self._failed = failed
        self._lock = threading.Lock()
        self._open: dict[int, SearchFuture[Any]] = {}
        self._numbers = count(1)
        self._state = threading.Condition()
        self._running = self._over = self._closing = False
        self._error: StageloomError | None = None
        self._pipe: Connection | None = None
        self._process: SpawnProcess | None = None
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether tasks may be submitted."""
        return self._running and not self._over

    @property
    def error(self) -> StageloomError | None:
        """Why Ray does not run, with the remedy."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Wait until Ray runs or has failed; whether it runs."""
        with self._state:
            self._state.wait_for(lambda: self._running or self._over, timeout_s)
        return self.ready

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
        """See `SearchPool`."""
        future: SearchFuture[T] = SearchFuture()
        task = next(self._numbers)
        work = pickle.dumps((function, arguments))
        with self._lock:
            if self._pipe is None or not self.ready:
                future.fail(self._error or UnavailableError("Ray does not run"))
                return future
            self._open[task] = future
            future.stop = lambda: self._cancel(task)
            self._send(Submit(task, work))
        return future

    def close(self) -> None:
        """See `SearchPool`."""
        with self._lock:
            self._closing = True
            waiting = list(self._open.values())
        for future in waiting:
            future.cancel()
        with self._lock:
            if self._process is not None:
                if self._running:
                    self._send(None)
                else:
                    self._process.terminate()  # it starts Ray, whose processes end with it
        self._thread.join()

    def _cancel(self, task: int) -> None:
        with self._lock:
            self._open.pop(task, None)
            self._send(Cancel(task))

    def _send(self, message: Submit | Cancel | None) -> None:
        """To the host, under the lock. One that has just gone fails every open task in `_run`."""
        try:
            if self._pipe is not None:
                self._pipe.send(message)
        except OSError:
            pass

    # -- the thread that listens to the host ----------------------------------------------------------------

    def _run(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=host, args=(there, self.workers, self._address), name="ray-host", daemon=True
        )
        try:
            process.start()
        except Exception as error:
            self._end(UnavailableError(f"the process for Ray does not start: {error}"))
            return
        finally:
            there.close()
        with self._lock:
            self._pipe, self._process = here, process
            if self._closing:
                process.terminate()
        self._listen(here)
        process.join(_END_S)
        process.kill()
        process.join()
        if self._running and self._address:
            gone = f"the Ray cluster at {self._address} went away"
        else:
            gone = f"the process that owns Ray ended with code {process.exitcode}"
        self._end(WorkersGone(gone))

    def _listen(self, pipe: Connection) -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                return
            if isinstance(message, Running):
                with self._state:
                    self._running = True
                    self._state.notify_all()
            elif isinstance(message, Broken):
                self._error = message.error
            elif isinstance(message, Ended):
                self._settle(message)

    def _settle(self, message: Ended) -> None:
        with self._lock:
            future = self._open.pop(message.task, None)
        if future is None:
            return  # it was cancelled
        if message.ok:
            future.settle(message.value)
        else:
            future.fail(message.value)

    def _end(self, error: StageloomError) -> None:
        """Ray is gone: fail what is open, and say why unless it was closed on purpose."""
        with self._lock:
            self._error = self._error or error
            waiting, self._open = list(self._open.values()), {}
            closing = self._closing
            self._over = True  # under the lock: nothing may be submitted once what is open was taken
        with self._state:
            self._state.notify_all()
        for future in waiting:
            future.fail(self._error)
        if not closing:
            self._failed(self._error)
