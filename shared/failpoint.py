"""Failpoints: named places where a test makes a real process die or fail. A testing aid.

They stand where durable state and the wire meet. `STAGELOOM_FAILPOINT` names those that act, separated by
commas; without it a failpoint does nothing. It is read once, when this module is imported:

    agent.state.after=kill      end this process with SIGKILL, as a power cut or the kernel would
    engine.load=kill@3          the third time only
    agent.state.before=error    raise OSError(EIO), each time
    planner.migration=error@1   the first time only

A name that no failpoint has is never reached; `docs/fault_simulation.md` lists them all.
"""

import errno
import os
import signal
from collections.abc import Callable
from typing import Final, TypeAlias

from stageloom.shared.errors import SettingError

VARIABLE: Final = "STAGELOOM_FAILPOINT"

Act: TypeAlias = Callable[[str], None]

_act: Act | None = None


def failpoint(name: str) -> None:
    """A place where this process may be made to die or to fail.

    Raises:
        OSError: the environment asks for it; never otherwise.
    """
    if _act is not None:
        _act(name)


def arm(act: Act | None) -> Act | None:
    """What every failpoint of this process calls with its name from now on; returns what it was before."""
    global _act
    before, _act = _act, act
    return before


def acts(setting: str) -> Act | None:
    """What a setting asks for; None for an empty one.

    Raises:
        SettingError: it does not read like the examples above.
    """
    wanted: dict[str, tuple[str, int]] = {}
    for part in filter(None, setting.split(",")):
        name, _, what = part.partition("=")
        deed, at, number = what.partition("@")
        if deed not in ("kill", "error") or bool(at) != number.isdecimal() or number == "0":
            raise SettingError(
                f"{VARIABLE} cannot be read at {part!r}", remedy="write NAME=kill, NAME=error or NAME=kill@3"
            )
        wanted[name] = (deed, int(number or 0))
    if not wanted:
        return None
    reached = dict.fromkeys(wanted, 0)

    def act(name: str) -> None:
        deed, at = wanted.get(name, ("", 0))
        if deed:
            reached[name] += 1
            if at in (0, reached[name]):
                _do(deed, name)

    return act


def _do(deed: str, name: str) -> None:
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.EIO, f"failpoint {name}")


arm(acts(os.environ.get(VARIABLE, "")))

ARMED: Final = _act is not None
"""For places that are passed thousands of times a second: `if ARMED: failpoint(...)`."""
