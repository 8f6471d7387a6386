"""Searches as Ray tasks: on this machine by itself, or in a cluster that runs already.

A local Ray listens on the loopback interface only: Ray binds to the address of its node, and asks the network
for that address unless `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER` says that there is no cluster to be reached by.
Its processes die with the *thread* that started them (Linux, PR_SET_PDEATHSIG), so one thread owns Ray from
`ray.init` to `ray.shutdown`, and the signal handlers stay the planner's own.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from planner.cluster.interface import SearchFuture
from shared.errors import ExecutorError, StageloomError, UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

OBJECT_STORE_BYTES: Final = 80 << 20  # the least that Ray takes is 75 MiB; a search job is a few hundred KiB
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TQDM_PATCH_PRINT": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
_LOOPBACK: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayPool:
    """Ray from `__init__`, which returns at once, to `close`; implements `SearchPool` once `ready`."""

    where = "ray"

    def __init__(self, workers: int = 1, *, address: str = "") -> None:
        """Start Ray on a thread of its own; with an `address` join the cluster there."""
        self.workers = workers
        self._address = address
        self._ray: Any = None
        self._error: StageloomError | None = None
        self._started = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._open: set[SearchFuture[Any]] = set()
        self._thread = threading.Thread(target=self._own, name="ray", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether tasks may be submitted."""
        return self._ray is not None and not self._stop.is_set()

    @property
    def error(self) -> StageloomError | None:
        """Why Ray does not run, with the remedy."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Wait until Ray runs or has failed; whether it runs."""
        self._started.wait(timeout_s)
        return self.ready

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
        """See `SearchPool`."""
        future: SearchFuture[T] = SearchFuture()
        with self._lock:
            if not self.ready:
                future.fail(self._error or UnavailableError("Ray does not run"))
                return future
            self._open.add(future)
            try:
                # One try: a task that dies of memory takes its machine along if it is started again.
                reference = self._ray.remote(max_retries=0, num_cpus=1)(function).remote(*arguments)
            except Exception as error:
                self._open.discard(future)
                future.fail(UnavailableError(f"Ray takes no task: {_line(error)}"))
                return future
        future.stop = lambda: self._cancel(reference)
        future.add_done_callback(self._forget)
        reference.future().add_done_callback(lambda done: self._done(future, done))
        return future

    def close(self) -> None:
        """See `SearchPool`. Waits for a start under way: Ray cannot be stopped before it runs."""
        with self._lock:
            self._stop.set()
            open_now = list(self._open)
        for future in open_now:
            future.cancel()
        self._thread.join()

    # -- the thread that owns Ray ---------------------------------------------------------------------------

    def _own(self) -> None:
        try:
            started = self._start()
        except ImportError as error:
            self._error = ExecutorError(
                f"ray cannot be imported: {_line(error)}", remedy="install it with the extra `planner`"
            )
        except Exception as error:
            where = f"the Ray cluster at {self._address}" if self._address else "a local Ray"
            self._error = UnavailableError(
                f"{where} does not start: {_line(error)}",
                remedy="check --ray-address" if self._address else "see /tmp/ray/session_latest/logs",
            )
        else:
            self._ray = started
        self._started.set()
        if self._ray is not None:
            self._stop.wait()
            self._ray.shutdown()

    def _start(self) -> Any:
        for name, value in {**_ENVIRONMENT, **({} if self._address else _LOOPBACK)}.items():
            os.environ.setdefault(name, value)
        import ray

        common: dict[str, Any] = {
            "configure_logging": False,
            "log_to_driver": False,
            "namespace": "stageloom",
        }
        if self._address:
            ray.init(address=self._address, **common)
        else:
            ray.init(
                num_cpus=self.workers,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                **common,
            )
        return ray

    # -- tasks ----------------------------------------------------------------------------------------------

    def _forget(self, future: Any) -> None:
        with self._lock:
            self._open.discard(future)

    def _cancel(self, reference: Any) -> None:
        try:
            self._ray.cancel(reference, force=False)
        except Exception as error:
            log.info("Ray did not cancel a search: %s", _line(error))

    def _done(self, future: SearchFuture[T], done: "Future[T]") -> None:
        try:
            result = done.result()
        except Exception as error:
            cause = getattr(error, "cause", None)
            if not isinstance(cause, Exception):
                cause = UnavailableError(f"a search on Ray ended without an answer: {_line(error)}")
            future.fail(cause)
        else:
            future.settle(result)


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
