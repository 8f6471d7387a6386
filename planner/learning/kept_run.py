"""Where a training keeps its state, so that it goes on after an interruption: a folder of the data directory.

A folder is named by what is trained, so the same request finds its own, and any other begins anew. What the
run was begun with lies there, too: arrivals are counted and costs measured anew all the time, and what was
learned and how well it scored is worth nothing on others.
"""

import fcntl
import json
import logging
import os
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import RefusedError

log = logging.getLogger(__name__)

FOLDER: Final = "trainings"
LOCK_FILE: Final = "lock"
BEGUN_WITH_FILE: Final = "begun_with"
KEPT_S: Final = 30 * 86_400.0
"""Age at which a run that nobody went on with is deleted."""


def run_folder(data_dir: Path, about: Mapping[str, Any]) -> Path:
    """Where the state of a training of `about` (as JSON takes it) lies."""
    text = json.dumps(about, sort_keys=True).encode()
    return data_dir / FOLDER / digest_bytes([text])[:32]


@contextmanager
def held_run(data_dir: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of a training, for one process at a time.

    Raises:
        RefusedError: the same training runs already.
        OSError: the folder cannot be made.
    """
    folder = run_folder(data_dir, about)
    _sweep(folder.parent)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        yield folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RefusedError(
                "the same training runs already", remedy="wait for it, or train with another seed"
            ) from error
        yield
    finally:
        os.close(handle)


def keep_begun_with(folder: Path, value: object) -> None:
    """Keep what the run in a folder begins with; it pickles.

    Raises:
        OSError: it cannot be written.
    """
    part = folder / (BEGUN_WITH_FILE + ".part")
    part.write_bytes(pickle.dumps(value))
    part.replace(folder / BEGUN_WITH_FILE)


def begun_with(folder: Path) -> Any:
    """What the run in a folder began with; None where that is not known, or no longer to be read."""
    try:
        return pickle.loads((folder / BEGUN_WITH_FILE).read_bytes())  # of this planner's own folder
    except FileNotFoundError:
        return None
    except Exception as error:  # of another version, whose classes have moved: whatever they raise
        log.warning("a training begins anew: what it had begun with cannot be read: %s", error)
        return None


def forget_run(folder: Path) -> None:
    """What the training left is kept elsewhere: there is nothing to go on with. One that runs stays."""
    with suppress(OSError, RefusedError), _locked(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(runs: Path) -> None:
    """Delete what nobody went on with for long."""
    with suppress(OSError):
        for folder in runs.iterdir():
            newest_s = max((file.stat().st_mtime for file in folder.iterdir()), default=time.time())
            if time.time() - newest_s > KEPT_S:
                forget_run(folder)
