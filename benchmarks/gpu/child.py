"""A process beside this one: for what takes too long to wait for, or needs CUDA started anew."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.results import why


def in_child(work: Callable[..., Any], *arguments: Any, limit_s: float, **environment: str) -> Any:
    """What `work` returns in a fresh process, which then ends, with all that it started.

    Raises:
        TimeoutError: it took longer. RuntimeError: it ended, or `work` raised.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, environment, work, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise TimeoutError(f"not done in {limit_s:.0f} s")
        answer = ours.recv()
    except EOFError:
        raise RuntimeError("the process ended without an answer") from None
    finally:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _run(
    pipe: Connection, environment: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.setsid()  # so that compilers it starts end with it
    os.dup2(2, 1)  # the parent's stdout is one JSON object
    os.environ.update(environment)
    try:
        pipe.send(work(*arguments))
    except Exception as error:  # told to the parent, whatever it is
        pipe.send(RuntimeError(why(error)))
