"""Descriptors that applications pass in: which of them may be used, and how they are closed.

Only memory files are: they are regular files that lie in memory, so that nothing done with one waits for a
reader, a disk or a server. Of any other file even `fstat` and `close` may wait for as long as its owner likes
(a file system in user space, a socket that lingers).
"""

import fcntl
import os
import threading
from collections.abc import Iterable


def seals_of(descriptor: int) -> int | None:
    """The seals of a memory file; None for any other file. Never waits: the kernel answers by itself."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return None


def close_received(descriptors: Iterable[int]) -> None:
    """Close descriptors of an application without waiting for it."""
    for descriptor in descriptors:
        if seals_of(descriptor) is not None:
            os.close(descriptor)
        else:
            threading.Thread(target=os.close, args=(descriptor,), name="close", daemon=True).start()
