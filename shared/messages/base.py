"""What all messages share: the envelope and the bounded types that fields are made of.

A field without a bound is a defect (a test inspects every message type): text and bytes have a longest
length, lists a largest count, numbers a range. A range also refuses NaN and infinity.
"""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta, Struct

from stageloom.shared.ids import DeviceId, Digest

PROTOCOL_VERSION: Final = 1
MOST: Final = 2**53
"""The largest count, and the largest time in microseconds: a double still holds it exactly. Sums end here."""

NO_NUL: Final = r"^[^\x00]*\Z"
"""A NUL has no place in a text: Postgres stores none, and C programs end a text there."""

Version = Annotated[int, Meta(ge=1, le=255)]
Correlation = Annotated[int, Meta(ge=0, le=MOST)]
"""Chosen by whoever asks; the answer repeats it. 0 where nothing is asked."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
SmallCount = Annotated[int, Meta(ge=0, le=1_000_000)]
Epoch = Annotated[int, Meta(ge=0, le=MOST)]
Generation = Annotated[int, Meta(ge=0, le=MOST)]
BootId = Annotated[int, Meta(ge=1, le=2**62)]
"""One life of an agent: random, so that it is unique even where nothing could be stored."""

Mask = Annotated[int, Meta(ge=0, le=2**62)]
MicroSeconds = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
MOST_REAL: Final = 1e15
Real = Annotated[float, Meta(ge=-MOST_REAL, le=MOST_REAL)]
PositiveBytes = Annotated[int, Meta(ge=1, le=2**44)]

Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
"""A name of a model, plan or device that a person typed."""

NameOrVersion = Annotated[
    str, Meta(min_length=1, max_length=71, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[1-9][0-9]{0,5})?\Z")
]
"""A model's name, or one of its versions: `stageloom.shared.model_version`."""

ModelVersion = Annotated[int, Meta(ge=1, le=999_999)]

DeviceName = Annotated[DeviceId, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
DigestText = Annotated[Digest, Meta(min_length=64, max_length=64, pattern=r"^[0-9a-f]{64}\Z")]
PublicKey = Annotated[str, Meta(min_length=40, max_length=40, pattern=r"^[\x21-\x7e]{40}\Z")]
"""A CURVE key in Z85."""

Line = Annotated[str, Meta(max_length=512, pattern=NO_NUL)]
"""One line for people: a reason, a remedy."""

ShortText = Annotated[str, Meta(max_length=128, pattern=NO_NUL)]
MAX_PLAN_BYTES: Final = 96 << 10
PlanBytes = Annotated[bytes, Meta(max_length=MAX_PLAN_BYTES)]


class Message(Struct, frozen=True, kw_only=True, tag_field="type"):
    """The envelope: `type` (the tag), the protocol version and an id to correlate by."""

    version: Version = PROTOCOL_VERSION
    correlation: Correlation = 0


class RefusalCode(str, Enum):
    """Why the other side said no. A retired code stays reserved."""

    UNKNOWN_KEY = "unknown_key"
    REVOKED = "revoked"
    QUARANTINED = "quarantined"  # it counted further than it can have; an operator lets it in again
    HELLO_FIRST = "hello_first"  # no session on this connection: say hello again
    SUPERSEDED = "superseded"  # another agent with the same key said hello later
    MALFORMED = "malformed"
    RATE = "rate"
    TOKEN_WRONG = "token_wrong"
    TOKEN_USED = "token_used"
    TOKEN_EXPIRED = "token_expired"
    NAME_TAKEN = "name_taken"
    NOT_FOUND = "not_found"
    NOT_PERMITTED = (
        "not_permitted"  # this device may not: its autonomy is off, it was never given that artifact
    )
    BUSY = "busy"  # credits used up, or the store is behind: ask again later
    INTERNAL = "internal"


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """No, and why; `boot` is the boot of the agent that superseded, 0 otherwise."""

    code: RefusalCode
    reason: Line = ""
    boot: Annotated[int, Meta(ge=0, le=2**62)] = 0
