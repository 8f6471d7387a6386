"""The link's durable state in one file, replaced as a whole."""

from pathlib import Path
from typing import Final

import msgspec

from stageloom.edge_agent.lifecycle.states import LinkState, RunnablePlan
from stageloom.edge_agent.store import StateFile
from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.errors import DecodeError, StorageError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.messages.base import MAX_PLAN_BYTES

_LIMIT_BYTES: Final = 4 * MAX_PLAN_BYTES + (128 << 10)  # four plans, their artifacts and the profiles
_EMPTY: Final = "starting empty: the planner sends its plan again, or give models with `run --model FILE`"
_CODEC: Codec[LinkState] = Codec(LinkState, CodecLimits(frame_bytes=_LIMIT_BYTES, body_bytes=_LIMIT_BYTES))


def encode_state(state: LinkState) -> bytes:
    """The state as msgpack, without the checksum that `StateFile` adds."""
    return _CODEC.encode(state)


def decode_state(frame: bytes) -> LinkState:
    """What `encode_state` wrote.

    Raises:
        DecodeError: damaged, or written by something else.
    """
    return _CODEC.decode(frame)


def save_state(path: Path, state: LinkState) -> None:
    """Replace the file durably, keeping the copy before.

    Raises:
        OSError: it is not on disk; the old file is still whole.
    """
    failpoint("agent.state.before")
    try:
        StateFile(path).save(encode_state(state))
    except StorageError as error:
        raise OSError(str(error)) from error
    failpoint("agent.state.after")


def load_state(path: Path) -> tuple[LinkState, str | None]:
    """The saved state, or an empty one and why: a missing file is no complaint, a damaged one is.

    A damaged file is set aside and the copy before it is used, so that the agent starts in any case (at worst
    it asks the planner for everything) instead of failing at every boot.
    """
    found = StateFile(path).load()
    if found.body is None:
        return LinkState(), f"{found.problem}; {_EMPTY}" if found.problem else None
    try:
        state = decode_state(found.body)
    except DecodeError as error:
        return LinkState(), f"{path.name} is of another version and is forgotten: {error.cause}; {_EMPTY}"
    used = "; the copy before it is used" if found.is_previous else ""
    return state, f"{found.problem}{used}" if found.problem else None


class FallbackFile:
    """One plan in a checked file; nothing about it ever stops a start."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path)

    def load(self) -> tuple[RunnablePlan | None, str]:
        """The plan, if there is one that can be read, and what was wrong."""
        found = self._file.load()
        if found.body is None:
            return None, found.problem
        try:
            return msgspec.msgpack.decode(found.body, type=RunnablePlan), found.problem
        except msgspec.MsgspecError as error:
            return None, f"the fallback plan cannot be read and is forgotten: {error}"

    def save(self, plan: RunnablePlan) -> str:
        """Replace it durably; why not, if it cannot be written."""
        try:
            self._file.save(msgspec.msgpack.encode(plan))
        except StorageError as error:
            return str(error)
        return ""
