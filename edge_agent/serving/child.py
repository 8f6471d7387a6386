"""A server's process as a child of the agent."""

import ctypes
import os
import signal
from typing import Final

from stageloom.shared.errors import UnavailableError

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>


def end_with(agent: int) -> None:
    """Have the kernel end this process when the agent's does, however it does.

    Raises:
        UnavailableError: it is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != agent:
        raise UnavailableError("the agent that started this process is gone")
