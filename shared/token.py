"""The join token: what an operator carries from the planner to a device, once.

    token   = "stgl2." base64url(body), without padding
    body    = msgpack array [planner key (32 bytes), secret (16 to 32 bytes), control, telemetry, bulk,
                             enrol, certificate (32 bytes)]

`control`, `telemetry` and `bulk` are ZeroMQ endpoints. `enrol` is where the planner takes the one request of
enrolment over TLS, and `certificate` the SHA-256 of the certificate (DER) that it must show there. The secret
is good for one enrolment; the planner keeps only its digest.
"""

import base64
import binascii
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from stageloom.shared.codec import CodecLimits, convert, unpack
from stageloom.shared.errors import DecodeError, TokenError

PREFIX: Final = "stgl2."
_OLD_PREFIX: Final = "stgl1."  # enrolment over ZeroMQ, up to version 0.1
MAX_TOKEN_CHARS: Final = 1024
_LIMITS: Final = CodecLimits(
    frame_bytes=MAX_TOKEN_CHARS, body_bytes=MAX_TOKEN_CHARS, array_items=7, map_items=0
)
_REMEDY: Final = "make a new one with `stageloom device token`"

Endpoint = Annotated[
    str, Meta(min_length=7, max_length=128, pattern=r"^tcp://[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5}\Z")
]

EnrolAddress = Annotated[
    str, Meta(min_length=7, max_length=128, pattern=r"^tls://[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5}\Z")
]


class Endpoints(Struct, frozen=True, array_like=True):
    """Where the planner's three device sockets listen."""

    control: Endpoint
    telemetry: Endpoint
    bulk: Endpoint


class JoinToken(Struct, frozen=True, array_like=True):
    """A decoded token. `planner_key` is the planner's raw CURVE public key."""

    planner_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    secret: Annotated[bytes, Meta(min_length=16, max_length=32)]
    control: Endpoint
    telemetry: Endpoint
    bulk: Endpoint
    enrol: EnrolAddress
    certificate: Annotated[bytes, Meta(min_length=32, max_length=32)]

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(self.control, self.telemetry, self.bulk)


def format_token(token: JoinToken) -> str:
    """The token's text.

    Raises:
        TokenError: its parts do not make a token that `parse_token` accepts.
    """
    text = PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).rstrip(b"=").decode("ascii")
    parse_token(text)
    return text


def parse_token(text: str) -> JoinToken:
    """The token in `text`; surrounding white space is forgiven, nothing else is.

    Raises:
        TokenError: too long, another version, not base64url, or not the fields above. The text itself is
            never repeated in the message, since it holds a secret.
    """
    text = text.strip()
    if len(text) > MAX_TOKEN_CHARS:
        raise TokenError(
            f"the join token has {len(text)} characters, more than {MAX_TOKEN_CHARS}", remedy=_REMEDY
        )
    if text.startswith(_OLD_PREFIX):
        raise TokenError(
            "the join token was made by a planner of an older version",
            remedy="upgrade the planner, then make a new one there with `stageloom device token`",
        )
    if not text.startswith(PREFIX):
        raise TokenError(f"the join token does not start with {PREFIX!r}", remedy=_REMEDY)
    encoded = text[len(PREFIX) :]
    try:
        body = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        token: JoinToken = convert(unpack(body, _LIMITS), JoinToken)
    except (binascii.Error, ValueError, DecodeError) as error:
        raise TokenError("the join token is damaged or cut off", remedy=_REMEDY) from error
    if msgspec.msgpack.encode(token) != body:
        raise TokenError("the join token is not in its canonical form", remedy=_REMEDY)
    return token
