"""How the planner's sockets are bound: CURVE, a named domain that is enforced, bounds, keepalive."""

import resource

import zmq

from shared.errors import SettingError, UnavailableError
from shared.keyfile import KeyPair

# Connections whose other end is gone are found by TCP. Whether a device lives is told by the messages of the
# control lane. ZeroMQ's own heartbeats stay off: libzmq 4.3 aborts the process ("Assertion failed:
# !_io_error") when one falls due on a connection that has broken while its receive queue was full, which is
# what a fleet leaves behind that gave up on a planner under load. They also cost as much as one of ours.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_IVL_S = 5
KEEPALIVE_PROBES = 3
UNANSWERED_MS = 15_000
# A handshake takes half a millisecond of work at either end. When a whole fleet returns they queue up; cut
# off while they queue, they begin anew, and no one ever gets in.
DEVICE_HANDSHAKE_MS = 10_000
STRANGER_HANDSHAKE_MS = 2_000
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: combining flags of an enum takes as long as a send
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_SPARE_FILES = 128
_FILES_PER_DEVICE = 4
_MANY_DEVICES = 16_000


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    *,
    keys: KeyPair,
    domain: str,
    handshake_ms: int,
    frame_bytes: int,
    receive_messages: int,
    send_messages: int,
) -> "zmq.Socket[bytes]":
    """A ROUTER on `address`; the queue bounds are per connection, `handshake_ms` the time to prove a key.

    Raises:
        UnavailableError: the address cannot be bound.
    """
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
    router.zap_domain = domain.encode()
    # Without it a server whose ZAP handler is missing lets every key in.
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody raises instead of vanishing
    router.setsockopt(zmq.HANDSHAKE_IVL, handshake_ms)  # idle strangers do not keep their file descriptor
    router.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    router.setsockopt(zmq.RCVHWM, receive_messages)
    router.setsockopt(zmq.SNDHWM, send_messages)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)
    router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_IVL_S)
    router.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    router.setsockopt(zmq.TCP_MAXRT, UNANSWERED_MS)
    router.setsockopt(zmq.BACKLOG, 4096)  # a whole fleet returns at once after a restart
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, 1)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close()
        raise UnavailableError(
            f"{address} cannot be bound: {error}", remedy="stop what uses it, or set another address"
        ) from error
    return router


def receive(router: "zmq.Socket[bytes]") -> "tuple[bytes, zmq.Frame | None]":
    """The next message's routing id and its one frame; None for a message of another shape, which is skipped.

    Raises:
        zmq.Again: there is no message.
    """
    route = router.recv(NOBLOCK)
    frame = router.recv(NOBLOCK, copy=False)  # the parts of a message come together
    frames = 1
    while frame.more:
        frame = router.recv(NOBLOCK, copy=False)
        frames += 1
    return route, frame if frames == 1 else None


def require_files(devices: int) -> int:
    """Make sure that the process may open a connection per device and lane; returns the limit in force.

    `devices` 0: for as many as the system lets this process open files for, up to 16,000. Out of file
    descriptors libzmq spins on accept and serves nobody, so this is found out at the start.

    Raises:
        SettingError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if devices == 0:
        most = _FILES_PER_DEVICE * _MANY_DEVICES + _SPARE_FILES
        wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
        devices = max((wanted - _SPARE_FILES) // _FILES_PER_DEVICE, 1)
    needed = _FILES_PER_DEVICE * devices + _SPARE_FILES
    if soft >= needed:
        return soft
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SettingError(
            f"{devices} devices need {needed} open files, the limit is {hard}",
            remedy="raise it (ulimit -Hn, LimitNOFILE=) or lower max_devices",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed
