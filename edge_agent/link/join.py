"""Joining: a token and our own key become an enrolled device, by one request over TLS.

The token names the planner's certificate by its digest, so no authority, host name or date is checked.
"""

import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Callable
from random import Random

from stageloom.edge_agent.link.connection import Membership, z85_key
from stageloom.shared.backoff import backoff_s
from stageloom.shared.clock import Clock
from stageloom.shared.errors import DecodeError, KeyRevoked, RefusedError, TokenError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import enrol
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.token import JoinToken

_TOKEN_CODES = {RefusalCode.TOKEN_WRONG, RefusalCode.TOKEN_USED, RefusalCode.TOKEN_EXPIRED}
_AGAIN_CODES = {RefusalCode.RATE, RefusalCode.INTERNAL}


def join(
    token: JoinToken,
    device: DeviceId,
    keys: KeyPair,
    *,
    clock: Clock,
    rng: Random,
    agent_version: str = "",
    device_class: str = "",
    timeout_s: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Membership:
    """Enrol `keys` under `device`, or under the name that the token fixes. Safe to repeat.

    Raises:
        TokenError: the token is wrong, used by another key, or expired.
        KeyRevoked: the planner took this key away; another one may join.
        RefusedError: the planner says no for another reason.
        UnavailableError: nothing answers in time, or what answers shows another certificate than the token's.
    """
    request = enrol.EnrolRequest(
        correlation=rng.getrandbits(50),
        secret=token.secret,
        public_key=keys.public,
        device=device,
        agent_version=agent_version,
        device_class=device_class,
    )
    reply = _ask_until(token, request, clock.monotonic_s() + timeout_s, clock, rng, sleep)
    if isinstance(reply, enrol.EnrolReply):
        planner_key = z85_key(token.planner_key)
        return Membership(device=reply.device, planner_key=planner_key, endpoints=token.endpoints)
    text = reply.reason or reply.code.value
    if reply.code in _TOKEN_CODES:
        raise TokenError(text.split("; ")[0], remedy="make a new token with `stageloom device token`")
    refused = KeyRevoked if reply.code is RefusalCode.REVOKED else RefusedError
    raise refused(f"the planner refuses to enrol {device}: {text}")


def _ask_until(
    token: JoinToken,
    request: enrol.EnrolRequest,
    deadline_s: float,
    clock: Clock,
    rng: Random,
    sleep: Callable[[float], None],
) -> enrol.EnrolReply | Refused:
    """Ask until answered: the request is idempotent, and the first may meet a planner that is starting.

    One that says to try again later has not answered yet, unless it says so until the end.
    """
    delays_s = backoff_s(rng, first_s=0.2, cap_s=2.0)
    while True:
        problem: Refused | Exception
        try:
            reply = ask(token, request, max(deadline_s - clock.monotonic_s(), 0.1))
            if not isinstance(reply, Refused) or reply.code not in _AGAIN_CODES:
                return reply
            problem = reply
        except (OSError, EOFError, DecodeError) as error:  # ssl.SSLError is an OSError
            problem = error
        delay_s = next(delays_s)
        if clock.monotonic_s() + delay_s >= deadline_s:
            if isinstance(problem, Refused):
                return problem
            raise UnavailableError(
                f"no answer from {token.enrol}: {problem}", remedy="is the planner up, and this port open?"
            ) from problem
        sleep(delay_s)


def ask(token: JoinToken, request: enrol.EnrolRequest, timeout_s: float) -> enrol.EnrolReply | Refused:
    """One connection, one request, one reply.

    Raises:
        UnavailableError: what answers shows another certificate; the secret was not sent.
        OSError, EOFError, DecodeError: no connection, or no whole reply.
    """
    host, _, port = token.enrol.removeprefix("tls://").rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the digest below is the check
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection,
        context.wrap_socket(connection) as secured,
    ):
        certificate = secured.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(certificate).digest(), token.certificate):
            raise UnavailableError(
                f"{token.enrol} shows another certificate than the token names",
                remedy="make a new token on the planner that runs there",
            )
        frame = enrol.TO_PLANNER.encode(request)
        secured.sendall(enrol.LENGTH.pack(len(frame)) + frame)
        (length,) = enrol.LENGTH.unpack(_exactly(secured, enrol.LENGTH.size))
        if length > enrol.TO_DEVICE.limits.frame_bytes:
            raise DecodeError(f"a reply of {length} bytes is announced")
        return enrol.TO_DEVICE.decode(_exactly(secured, length))


def _exactly(connection: ssl.SSLSocket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data
