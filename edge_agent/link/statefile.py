"""The link's durable state in one file, replaced as a whole."""

import logging
import os
from pathlib import Path
from typing import Final

from edge_agent.link.events import LinkState
from shared.codec import Codec, Limits
from shared.errors import DecodeError
from shared.messages.base import MAX_PLAN_BYTES

log = logging.getLogger(__name__)

_LIMIT_BYTES: Final = 3 * MAX_PLAN_BYTES + (64 << 10)  # two plans, their artifacts and the profiles
_CODEC: Codec[LinkState] = Codec(LinkState, Limits(frame_bytes=_LIMIT_BYTES, body_bytes=_LIMIT_BYTES))


def encode_state(state: LinkState) -> bytes:
    """The file's content."""
    return _CODEC.encode(state)


def decode_state(frame: bytes) -> LinkState:
    """What `encode_state` wrote.

    Raises:
        DecodeError: damaged, or written by something else.
    """
    return _CODEC.decode(frame)


def save_state(path: Path, state: LinkState) -> None:
    """Replace the file durably: new file, sync, rename, sync of the folder.

    Raises:
        OSError: it is not on disk; the old file is still whole.
    """
    new = path.with_name(path.name + ".new")
    file = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(encode_state(state))
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_state(path: Path) -> tuple[LinkState, str | None]:
    """The saved state, or an empty one and why: a missing file is no complaint, a damaged one is.

    A damaged file is set aside as `NAME.bad`, so that the agent starts (and asks the planner for everything)
    instead of failing at every boot.
    """
    try:
        return decode_state(path.read_bytes()), None
    except FileNotFoundError:
        return LinkState(), None
    except DecodeError as error:
        bad = path.with_name(path.name + ".bad")
        path.replace(bad)
        log.error("%s is unreadable and was set aside as %s: %s", path.name, bad.name, error)
        return LinkState(), f"{path.name} was unreadable and is set aside as {bad.name}: {error}"
