"""One training or check in a process of its own: `python -m stageloom.planner.learning.worker`.

`stageloom.planner.learning.messages` has what it reads and writes. What it prints besides goes to stderr.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from stageloom.planner.cluster.priority import BEHIND_SERVING, come_after
from stageloom.planner.learning.messages import (
    Checked,
    Tell,
    Trained,
    TrainingFailed,
    TrainingMessage,
    TrainingTask,
)
from stageloom.shared.blas_threads import ONE_THREAD


def main() -> None:
    """Train or check what stdin says."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` may have turned off
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    come_after(BEHIND_SERVING)
    os.environ.update(ONE_THREAD)  # before anything brings numpy
    task = msgspec.json.decode(_line(), type=TrainingTask)
    threading.Thread(target=_end_with_planner, daemon=True).start()
    with told:
        _write(told, _outcome(task, lambda step: _write(told, step)))


def _line() -> bytes:
    """The first line of stdin, and nothing of what follows."""
    line = bytearray()
    while not line.endswith(b"\n") and (part := os.read(0, 1 << 16)):
        line += part
    return bytes(line)


def _end_with_planner() -> None:
    """What was kept of the training is on disk: the next one goes on from there."""
    while os.read(0, 1 << 10):
        pass
    os._exit(1)


def _write(told: BinaryIO, message: TrainingMessage) -> None:
    told.write(msgspec.json.encode(message) + b"\n")
    told.flush()


def _outcome(task: TrainingTask, tell: Tell) -> TrainingMessage:
    from stageloom.planner.api.problem import problem_of
    from stageloom.shared.errors import ExecutorError, InputError

    what = "training" if task.check is None else "check"
    try:
        return _ended(task, tell)
    except KeyboardInterrupt:
        error: BaseException = InputError(f"the {what} was interrupted", remedy="ask for it again")
    except ModuleNotFoundError as missing:
        error = ExecutorError(
            f"{missing.name or missing} cannot be imported where the planner runs: {missing}",
            remedy="install it there with `pip install 'stageloom[learn]'`",
        )
    except BaseException as failed:
        error = failed
    return TrainingFailed(problem=problem_of(error, f"a {what}"))


def _ended(task: TrainingTask, tell: Tell) -> Trained | Checked:
    from stageloom.planner.store.store import ReadStore

    folder = Path(task.data_dir)
    store = ReadStore.open(folder)
    try:
        if task.gpg is not None:
            from stageloom.planner.learning.gpg.stored import train_stored as train_gpg

            return train_gpg(store, task.gpg, tell)
        if task.check is not None:
            from stageloom.planner.learning.maddpg.stored_check import check_stored

            return check_stored(store, task.check, tell)
        assert task.maddpg is not None
        from stageloom.planner.learning.maddpg.stored_training import train_stored as train_maddpg

        return train_maddpg(store, task.maddpg, tell)
    finally:
        store.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
