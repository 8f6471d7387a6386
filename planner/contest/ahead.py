"""Has the twin's kernels compiled before a contest needs them."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Final

from stageloom.planner.cluster.processes import ProcessPool
from stageloom.planner.twin.compiled.kept import compile_ahead, kept

log = logging.getLogger(__name__)

AFTER_S: Final = 30.0
"""After the planner's start, which has better things to do at first."""


class CompiledAhead:
    """One process that compiles, once, where that was not done before; from `__init__` to `close`."""

    def __init__(self, after_s: float = AFTER_S, work: Callable[[], None] = compile_ahead) -> None:
        """Begin after so many seconds."""
        self._work = work
        self._pool = ProcessPool(1)
        self._timer = threading.Timer(after_s, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Stop, done or not: what is compiled by then is kept."""
        self._timer.cancel()
        self._pool.close()

    def _begin(self) -> None:
        if find_spec("numba") is not None and not kept():
            self._pool.submit(self._work).add_done_callback(_ended)


def _ended(done: "Future[None]") -> None:
    if done.cancelled():
        return
    if error := done.exception():
        log.warning("the twin's kernels were not compiled, so contests simulate slowly: %s", error)
    else:
        log.info("the twin's kernels are compiled")
