"""The rules of admission (ZAP, ZeroMQ RFC 27) as a function.

The thread that owns the sockets answers for itself: no second thread that may die, no lock around the keys.

Source: https://rfc.zeromq.org/spec/27/. Request: version, request id, domain, address, identity, mechanism,
credentials. Reply: version, request id, status, text, user id, metadata.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from zmq.utils import z85

log = logging.getLogger(__name__)

ENDPOINT: Final = "inproc://zeromq.zap.01"
DEVICES: Final = "stageloom.devices"
_VERSION: Final = b"1.0"


def reply(
    request: Sequence[bytes], may_connect: Callable[[str], bool], in_time: Callable[[str], bool]
) -> list[bytes] | None:
    """The answer to one ZAP request; None if it is not even one. Never raises: what fails is denied.

    The devices' domain admits the keys of which `may_connect(key)` is true, any other domain nobody. The key,
    in Z85, becomes the `User-Id` of every message of the connection. One whose `in_time(key)` is false is
    told nothing (300, a temporary error) and comes back by itself.
    """
    if len(request) < 2:
        return None
    request_id = request[1]
    try:
        key = _admitted_key(request, may_connect)
    except Exception:
        log.exception("admission failed; the connection is denied")
        key = None
    if key is None:
        return [_VERSION, request_id, b"400", b"No access", b"", b""]
    if not in_time(key):
        return [_VERSION, request_id, b"300", b"Too often", b"", b""]
    return [_VERSION, request_id, b"200", b"OK", key.encode("ascii"), b""]


def _admitted_key(request: Sequence[bytes], may_connect: Callable[[str], bool]) -> str | None:
    if len(request) != 7 or request[0] != _VERSION or request[5] != b"CURVE" or len(request[6]) != 32:
        return None
    domain, key = request[2], z85.encode(request[6]).decode("ascii")
    if domain == DEVICES.encode() and may_connect(key):
        return key
    return None
