"""Joining: a token and our own key become an enrolled device."""

from random import Random

import zmq

from edge_agent.link.membership import Membership
from edge_agent.link.sockets import make_dealer, monitor_event, z85_key
from shared.clock import Clock
from shared.errors import DecodeError, KeyRevoked, RefusedError, TokenError, UnavailableError
from shared.ids import DeviceId
from shared.keyfile import KeyPair
from shared.messages import enrol
from shared.messages.base import RefusalCode, Refused
from shared.token import JoinToken

_AGAIN_S = 2.0
_TOKEN_CODES = {RefusalCode.TOKEN_WRONG, RefusalCode.TOKEN_USED, RefusalCode.TOKEN_EXPIRED}


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
) -> Membership:
    """Enrol `keys` under `device`, or under the name that the token fixes. Safe to repeat.

    Raises:
        TokenError: the token is wrong, used by another key, or expired.
        KeyRevoked: the planner took this key away; another one may join.
        RefusedError: the planner says no for another reason.
        UnavailableError: nothing answers in time, or what answers has another key than the token names.
    """
    planner_key = z85_key(token.planner_key)
    request = enrol.EnrolRequest(
        correlation=rng.getrandbits(50),
        secret=token.secret,
        public_key=keys.public,
        device=device,
        agent_version=agent_version,
        device_class=device_class,
    )
    limit = enrol.TO_DEVICE.limits.frame_bytes
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monitor: zmq.Socket[bytes] | None = None
    try:
        dealer = make_dealer(
            context, keys=keys, planner_key=planner_key, frame_bytes=limit, send_messages=4, rng=rng
        )
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED)
        dealer.connect(token.enrol)
        reply = _exchange(dealer, monitor, request, token.enrol, clock, timeout_s)
    finally:
        if monitor is not None:
            dealer.disable_monitor()
            monitor.close(linger=0)
        context.destroy(linger=0)
    if isinstance(reply, enrol.EnrolReply):
        return Membership(device=reply.device, planner_key=planner_key, endpoints=token.endpoints)
    text = reply.reason or reply.code.value
    if reply.code in _TOKEN_CODES:
        raise TokenError(text.split("; ")[0], remedy="make a new token with `stageloom device token`")
    refused = KeyRevoked if reply.code is RefusalCode.REVOKED else RefusedError
    raise refused(f"the planner refuses to enrol {device}: {text}")


def _exchange(
    dealer: "zmq.Socket[bytes]",
    monitor: "zmq.Socket[bytes]",
    request: enrol.EnrolRequest,
    endpoint: str,
    clock: Clock,
    timeout_s: float,
) -> enrol.EnrolReply | Refused:
    """Ask until answered: the request is idempotent, and the first may meet a planner that is starting."""
    frame = enrol.TO_PLANNER.encode(request)
    deadline_s = clock.monotonic_s() + timeout_s
    ask_s = float("-inf")
    broken_handshake = False
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while (now_s := clock.monotonic_s()) < deadline_s:
        if now_s - ask_s >= _AGAIN_S:
            try:
                dealer.send(frame, zmq.NOBLOCK)
                ask_s = now_s
            except zmq.Again:
                pass  # not connected yet
        ready = dict(poller.poll(100))
        if monitor in ready:
            monitor_event(monitor)
            broken_handshake = True
        if dealer in ready:
            try:
                reply = enrol.TO_DEVICE.decode(dealer.recv())
            except DecodeError:
                continue
            if reply.correlation == request.correlation:
                return reply
    if broken_handshake:
        raise UnavailableError(
            f"{endpoint} ends the handshake: it does not hold the key that the token names",
            remedy="make a new token on the planner that runs there",
        )
    raise UnavailableError(f"no answer from {endpoint} in {timeout_s:g} s", remedy="is the planner up?")
