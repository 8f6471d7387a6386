"""Keeps a lane's thread on the cores of its resource."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from stageloom.shared.errors import ExecutorError
from stageloom.shared.plan import Plan


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


class LanePin:
    """Where one lane's thread runs. Used by that thread alone."""

    def __init__(self) -> None:
        self._everywhere = os.sched_getaffinity(0)
        self._cores: tuple[int, ...] = ()

    def keep_to(self, cores: tuple[int, ...]) -> None:
        """Keep the calling thread to these cores; to all that the process has where none are named."""
        if cores != self._cores:
            os.sched_setaffinity(0, cores or self._everywhere)
            self._cores = cores


@contextmanager
def pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """The calling thread on these cores; on all that the process has where none are named."""
    pin = LanePin()
    pin.keep_to(cores)
    try:
        yield
    finally:
        pin.keep_to(())
