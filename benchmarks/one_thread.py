"""A benchmark in a process whose numpy computes on one thread."""

import os
import sys

from stageloom.shared.blas_threads import ONE_THREAD


def in_one_thread(module: str) -> None:
    """Start this process over as `module`, with its own arguments, unless it is that already.

    Threads that wait for each other would count as processor time, and as search time where cores are taken.
    """
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **ONE_THREAD})
