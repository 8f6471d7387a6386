"""What the listener and the planner say to each other: one msgpack packet on a SOCK_SEQPACKET pair each."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

PACKET_BYTES: Final = 4096

Ticket = Annotated[int, Meta(ge=0, le=2**62)]
Frame = Annotated[bytes, Meta(max_length=2048)]


class Ask(Struct, frozen=True, array_like=True):
    """To the planner: a request's frame, and the network address that it came from."""

    ticket: Ticket
    peer: Annotated[str, Meta(max_length=64)]
    frame: Frame


class Answer(Struct, frozen=True, array_like=True):
    """To the listener: the reply's frame for a ticket."""

    ticket: Ticket
    frame: Frame


encode = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
