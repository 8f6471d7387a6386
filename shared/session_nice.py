"""How much of a core a session gets that others want as well.

Linux shares the processor between sessions first where it groups them (autogroup), and niceness counts within
one alone. A session that is nicer than one which computes on every core waits long for it, however little it
wants: `python -m benchmarks.waking` has what a client's thread waits, by how nice an agent's session is.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_AUTOGROUP: Final = Path("/proc/self/autogroup")
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1
"""The kernel lets all processes but root's change one group in so long."""


def leads_session() -> bool:
    """Whether this process leads its session, as a service does, and nothing that a shell started."""
    return os.getsid(0) == os.getpid()


def make_session_nice(niceness: int) -> None:
    """Have the session of this process come after others by so much; nothing where the kernel groups none."""
    with suppress(OSError):
        for _ in range(_ATTEMPTS):
            with suppress(BlockingIOError):
                _AUTOGROUP.write_text(str(niceness))
                return
            time.sleep(_PAUSE_S)
