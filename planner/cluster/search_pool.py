"""The pool that the planner uses: Ray once it runs, processes of this machine until then and without it."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from stageloom.planner.cluster.interface import SearchFuture, WorkersGone
from stageloom.planner.cluster.processes import IDLE_S, ProcessPool
from stageloom.planner.cluster.ray_pool import RayPool
from stageloom.shared.errors import ExecutorError, StageloomError, UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_S: Final = 60.0


class AnytimePool:
    """Implements `SearchPool`; nothing waits for Ray.

    The first search starts Ray in the background and runs in a process of this machine; later ones run on Ray
    as soon as it is there. With an address Ray is joined at once. Where it fails or goes away, one warning
    says why, what it was running starts again in a process of this machine, and a search that comes a minute
    later tries to have Ray again.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        use_ray: bool = True,
        ray_address: str = "",
        idle_s: float | None = IDLE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s`: as `ProcessPool`; Ray decides for itself.

        Without `ray_address`, and without the package `ray`, Ray is not tried at all.
        """
        self._workers = workers
        if use_ray and not ray_address and find_spec("ray") is None:
            log.info(
                "searches run in processes of this machine, since Ray is not installed; "
                "`pip install 'stageloom[planner]'` adds it"
            )
            use_ray = False
        self._use_ray = use_ray
        self._address = ray_address
        self._now_s = now_s
        self._lock = threading.Lock()
        self._closed = False
        self._processes = ProcessPool(workers, idle_s=idle_s)
        self._again_s: float | None = 0.0  # when Ray may be started; None: never, or it has been
        self._ray: RayPool | None = None
        if use_ray and ray_address:
            self._start()

    @property
    def workers(self) -> int:
        """Searches that run at the same time."""
        return self._workers

    @property
    def where(self) -> str:
        """Where the next search runs."""
        return "ray" if self._ray is not None and self._ray.ready else "processes"

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        with self._lock:
            if self._closed:
                future: Future[T] = Future()
                future.set_exception(UnavailableError("the search workers are closed"))
                return future
            if self._use_ray and self._again_s is not None and self._now_s() >= self._again_s:
                self._start()
            ray = self._ray
        if ray is not None and ray.ready:
            return _Search(lambda pool: pool.submit(function, *arguments), ray, self._processes)
        return self._processes.submit(function, *arguments)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._processes.close()
        if self._ray is not None:
            self._ray.close()

    def _start(self) -> None:
        self._again_s = None
        self._ray = RayPool(self._workers, address=self._address, failed=self._failed)

    def _failed(self, error: StageloomError) -> None:
        log.warning("searches run in processes of this machine, since %s", error)
        if not isinstance(error, ExecutorError):  # which says that Ray is not installed
            self._again_s = self._now_s() + _AGAIN_S


class _Search(SearchFuture[T]):
    """A search on Ray, and in a process of this machine if Ray goes away under it."""

    def __init__(
        self, begin: Callable[[RayPool | ProcessPool], "Future[T]"], ray: RayPool, instead: ProcessPool
    ) -> None:
        super().__init__()
        self._begin, self._instead = begin, instead
        self._follow(begin(ray))

    def _follow(self, run: "Future[T]") -> None:
        self.stop = run.cancel
        run.add_done_callback(self._ended)
        if self.cancelled():  # before this one could be stopped
            run.cancel()

    def _ended(self, run: "Future[T]") -> None:
        if run.cancelled():
            if not self.cancelled():  # else it was this one that cancelled it
                self.cancel()
            return
        error = run.exception()
        if isinstance(error, WorkersGone):
            try:
                self._follow(self._begin(self._instead))
            except Exception as failed:  # a future would swallow it, and this one never end
                self.fail(failed)
        elif error is not None:
            self.fail(error)
        else:
            self.settle(run.result())
