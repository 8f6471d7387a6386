"""The bulk conversation: artifacts by digest, in bounded chunks that the device asks for.

The device keeps at most `Welcome.bulk_credits` requests open and resumes at any offset; nothing is sent that
was not asked for, so a slow device holds no memory of the planner.
"""

from typing import Annotated, Final

from msgspec import Meta

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.messages.base import DigestText, Message, PositiveBytes, Refused

MAX_CHUNK_BYTES: Final = 256 << 10
Offset = Annotated[int, Meta(ge=0, le=2**44)]


class ChunkRequest(Message, frozen=True, kw_only=True, tag="chunk_request"):
    """Device to planner: `length_bytes` of the artifact from `offset_bytes` on."""

    digest: DigestText
    offset_bytes: Offset
    length_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)] = MAX_CHUNK_BYTES


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """Planner to device: bytes at an offset, and the artifact's whole size. Empty only at the end."""

    digest: DigestText
    offset_bytes: Offset
    size_bytes: PositiveBytes
    data: Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]


BulkToPlanner = ChunkRequest
BulkToDevice = Chunk | Refused

TO_PLANNER: Codec[BulkToPlanner] = Codec(BulkToPlanner, CodecLimits(frame_bytes=1 << 10, body_bytes=1 << 10))
TO_DEVICE: Codec[BulkToDevice] = Codec(
    BulkToDevice,
    CodecLimits(frame_bytes=MAX_CHUNK_BYTES + 1024, body_bytes=MAX_CHUNK_BYTES + 1024),
    compress=False,
)
