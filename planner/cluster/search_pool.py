"""The pool that the planner uses: Ray once it runs, processes of this machine until then and without it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from planner.cluster.processes import IDLE_S, ProcessPool
from planner.cluster.ray_pool import RayPool
from shared.errors import StageloomError, UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")


class AnytimePool:
    """Implements `SearchPool`; nothing waits for Ray.

    The first search starts Ray in the background and runs in a process of this machine; later ones run on Ray
    as soon as it is there. With an address Ray is joined at once. Where it fails, one warning says why.
    """

    def __init__(
        self, workers: int = 1, *, use_ray: bool = True, ray_address: str = "", idle_s: float | None = IDLE_S
    ) -> None:
        """`idle_s`: as `ProcessPool`; Ray decides for itself."""
        self._workers = workers
        self._use_ray = use_ray
        self._address = ray_address
        self._lock = threading.Lock()
        self._closed = False
        self._processes = ProcessPool(workers, idle_s=idle_s)
        self._ray: RayPool | None = None
        if use_ray and ray_address:
            self._ray = RayPool(workers, address=ray_address, failed=_warn)

    @property
    def workers(self) -> int:
        """Searches that run at the same time."""
        return self._workers

    @property
    def where(self) -> str:
        """Where the next search runs."""
        return "ray" if self._ray is not None and self._ray.ready else "processes"

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """See `SearchPool`."""
        with self._lock:
            if self._closed:
                future: Future[T] = Future()
                future.set_exception(UnavailableError("the search workers are closed"))
                return future
            if self._ray is None and self._use_ray:
                self._ray = RayPool(self._workers, failed=_warn)
        if self._ray is not None and self._ray.ready:
            return self._ray.submit(function, *arguments)
        return self._processes.submit(function, *arguments)

    def close(self) -> None:
        """See `SearchPool`."""
        with self._lock:
            self._closed = True
        self._processes.close()
        if self._ray is not None:
            self._ray.close()


def _warn(error: StageloomError) -> None:
    log.warning("searches run in processes of this machine, since %s", error)
