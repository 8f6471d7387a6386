"""Functions that a pool's workers can import."""

import os
import time
from pathlib import Path

from stageloom.shared.errors import PlanError


def add(left: int, right: int) -> int:
    return left + right


def refuse() -> None:
    raise PlanError("no such plan", remedy="make another")


def die() -> None:
    os._exit(3)


def busy(started: str, ended: str) -> None:
    """Say that it runs, work for a minute in Python, say that it ended."""
    Path(started).write_text(str(os.getpid()))
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        sum(range(1000))
    Path(ended).touch()


def threads_around_numpy() -> tuple[int, int]:
    """The threads of this process before a product of numpy's and after it."""
    threads = Path("/proc/self/task")
    before = len(list(threads.iterdir()))
    import numpy as np

    square = np.ones((512, 512), np.float32)
    assert (square @ square).max() == 512
    return before, len(list(threads.iterdir()))
