"""How a process of the planner comes after what is served on the same machine."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

BEHIND_SERVING: Final = 5
"""Niceness: a quarter of a core that somebody else wants as well."""

LOWEST: Final = 19

_AUTOGROUP: Final = Path("/proc/self/autogroup")
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1
"""The kernel lets all processes but root's change one group in so long."""


def come_after(niceness: int) -> None:
    """Add to the niceness of this process, which leads a session, and have its session be as nice.

    Where the kernel shares the processor between sessions first (autogroup), niceness counts within one
    alone: an agent in another session would lose half of a core to the nicest search.
    """
    nice = os.nice(niceness)
    with suppress(OSError):  # no such kernel
        for _ in range(_ATTEMPTS):
            with suppress(BlockingIOError):
                _AUTOGROUP.write_text(str(nice))
                return
            time.sleep(_PAUSE_S)
