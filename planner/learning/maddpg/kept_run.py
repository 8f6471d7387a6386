"""A run on disk, so that one that was killed goes on: what it is of, the seconds it took, the course's state.

One file: a line of JSON, then the state. It is replaced whole or not at all, so a run that is killed while it
writes goes on from the validation before.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageloom.shared.errors import InputError

FILE: Final = "maddpg.run"
_REMEDY: Final = "name another --output, or delete it"


@dataclass(frozen=True, slots=True)
class KeptRun:
    """What `save` was given."""

    spent_s: float
    state: bytes


def save(folder: Path, about: Mapping[str, Any], run: KeptRun) -> None:
    """Keep a run; `about` is what it is of, as JSON takes it.

    Raises:
        OSError: it cannot be written.
    """
    head = json.dumps({"about": about, "spent_s": run.spent_s})
    part = folder / (FILE + ".part")
    with part.open("wb") as file:
        file.write(head.encode() + b"\n" + run.state)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / FILE)


def load(folder: Path, about: Mapping[str, Any]) -> KeptRun | None:
    """The run that is kept there; None where there is none.

    Raises:
        InputError: it is a run of something else, or none at all.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            head, state = json.loads(file.readline()), file.read()
        found, spent_s = head["about"], float(head["spent_s"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is no training run: {str(error)[:120]}", remedy=_REMEDY) from error
    wanted = json.loads(json.dumps(about))
    if found != wanted:
        names = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
        raise InputError(f"{path} is a run with other {', '.join(names) or 'settings'}", remedy=_REMEDY)
    return KeptRun(spent_s, state)
