"""The enrolment conversation: a one-time secret turns a device's own key into an enrolled one.

One TLS connection carries one request and one reply, each a frame behind its length (`LENGTH`). TLS proves
the planner to the device. The device proves that it holds its key when it first connects with it.
"""

import struct
from typing import Annotated, Final

from msgspec import Meta

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.messages.base import DeviceName, Message, PublicKey, Refused, ShortText

LENGTH: Final = struct.Struct(">I")  # bytes of the frame that follows

Secret = Annotated[bytes, Meta(min_length=16, max_length=32)]


class EnrolRequest(Message, frozen=True, kw_only=True, tag="enrol_request"):
    """Device to planner. `device` is the name asked for; the token's own name, if it has one, wins."""

    secret: Secret
    public_key: PublicKey
    device: DeviceName
    agent_version: ShortText = ""
    device_class: ShortText = ""


class EnrolReply(Message, frozen=True, kw_only=True, tag="enrol_reply"):
    """Planner to device: enrolled under this name. The same key and secret again get the same answer."""

    device: DeviceName


EnrolToPlanner = EnrolRequest
EnrolToDevice = EnrolReply | Refused

TO_PLANNER: Codec[EnrolToPlanner] = Codec(
    EnrolToPlanner, CodecLimits(frame_bytes=1 << 10, body_bytes=1 << 10)
)
TO_DEVICE: Codec[EnrolToDevice] = Codec(EnrolToDevice, CodecLimits(frame_bytes=2 << 10, body_bytes=2 << 10))
