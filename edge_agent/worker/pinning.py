"""Keeps a lane's thread on the cores of its resource."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from stageloom.shared.errors import ExecutorError
from stageloom.shared.plan import Plan

_log = logging.getLogger(__name__)


def require_cores(plan: Plan) -> None:
    """Raises:
    ExecutorError: the plan pins a lane to a core that this process may not use.
    """
    allowed = os.sched_getaffinity(0)
    for number, resource in enumerate(plan.resources):
        if missing := set(resource.cores) - allowed:
            names = ", ".join(map(str, sorted(allowed)))
            raise ExecutorError(
                f"resource {number} wants core {min(missing)}, and the process may use {names}",
                remedy="plan for this device's cores, or give the agent's service more of them",
            )


def may_keep_to(cores: Iterable[int]) -> bool:
    """Keep the calling thread to these cores, unless none of them is there any more: a power mode, or whoever
    takes cores offline, may have taken them since the plan was loaded."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return False
    return True


def log_lost(cores: tuple[int, ...]) -> None:
    """Say that a thread runs elsewhere."""
    names = ", ".join(map(str, cores))
    _log.warning("no core of %s can be used any more: what was to run there runs on any", names)


class LanePin:
    """Where one lane's thread runs. Used by that thread alone."""

    def __init__(self) -> None:
        self._everywhere = os.sched_getaffinity(0)
        self._cores: tuple[int, ...] = ()
        self._lost: set[tuple[int, ...]] = set()  # of which that was said

    def keep_to(self, cores: tuple[int, ...]) -> None:
        """Keep the calling thread to these cores; to all that the process has where none are named, or none
        of them is there any more."""
        if cores == self._cores:
            return
        self._cores = cores
        if not may_keep_to(cores or self._everywhere):
            may_keep_to(self._everywhere)  # else the kernel has chosen
            if cores and cores not in self._lost:
                self._lost.add(cores)
                log_lost(cores)


@contextmanager
def pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """The calling thread on these cores; where it was before, if none are named.

    Raises:
        OSError: none of them is there; what is measured elsewhere says nothing about them.
    """
    everywhere = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            may_keep_to(everywhere)
