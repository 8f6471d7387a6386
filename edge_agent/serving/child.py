"""A server's process as a child of the agent."""

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from typing import Final

import msgspec

from stageloom.edge_agent.serving.settings import FAILED
from stageloom.shared.errors import StageloomError, UnavailableError

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>


def end_with(agent: int) -> None:
    """Have the kernel end this process when the agent's does, however it does.

    Raises:
        UnavailableError: it is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != agent:
        raise UnavailableError("the agent that started this process is gone")


@contextlib.contextmanager
def failure_told(report: int) -> Iterator[None]:
    """Write the error that ends this process to `report`, the agent's descriptor, and raise it."""
    try:
        yield
    except StageloomError as error:
        with contextlib.suppress(OSError):  # the agent is gone
            os.write(report, msgspec.json.encode({FAILED: str(error)}))
        raise


def address_unusable(address: str, error: Exception) -> UnavailableError:
    """What to tell of an address that a server could not bind because of `error`."""
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    cause = f"{address} is in use" if in_use else f"{address} cannot be served: {error}"
    return UnavailableError(cause, remedy="choose another address")
