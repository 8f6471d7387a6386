"""The headers by which a receiver knows that a message is this planner's, and fresh.

Source: Standard Webhooks 1.0 (standardwebhooks.com), symmetric signatures: HMAC-SHA256 over the identifier,
the time and the body, joined by full stops.
"""

import base64
import hashlib
import hmac
from typing import Final

_PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32  # the specification asks for 24 to 64


def secret_text(secret: bytes) -> str:
    """A secret as the receiver's library takes it."""
    return _PREFIX + base64.b64encode(secret).decode()


def signed_headers(secret: str, message: str, at_s: int, body: bytes) -> dict[str, str]:
    """The three headers of a message that is sent at `at_s`, seconds since 1970."""
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    digest = hmac.digest(key, b".".join((message.encode(), str(at_s).encode(), body)), hashlib.sha256)
    return {
        "webhook-id": message,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
