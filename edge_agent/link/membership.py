"""What joining leaves behind: the planner's endpoints and key, and the name we are enrolled under."""

from pathlib import Path
from typing import Final

from msgspec import Struct

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.durable_file import replace_synced
from stageloom.shared.errors import DecodeError, StateError, StorageError
from stageloom.shared.messages.base import DeviceName, PublicKey
from stageloom.shared.token import Endpoints


class Membership(Struct, frozen=True, kw_only=True, tag="membership", tag_field="type"):
    """One planner, as this device knows it."""

    device: DeviceName
    planner_key: PublicKey
    endpoints: Endpoints


_CODEC: Final[Codec[Membership]] = Codec(Membership, CodecLimits(frame_bytes=4 << 10, body_bytes=4 << 10))


def save_membership(path: Path, membership: Membership) -> None:
    """Replace the file durably.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        replace_synced(path, _CODEC.encode(membership))
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", remedy="check the folder"
        ) from error


def load_membership(path: Path) -> Membership | None:
    """The planner we joined, or None if we never did.

    Raises:
        StateError: the file is damaged; the agent can still run alone.
    """
    try:
        return _CODEC.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, DecodeError) as error:
        raise StateError(f"{path} is unreadable: {error}", remedy="join the planner again") from error
