"""How the planner's sockets are bound: CURVE, a named domain that is enforced, bounds, heartbeats."""

import resource

import zmq

from shared.errors import SettingError, UnavailableError
from shared.keyfile import KeyPair

HEARTBEAT_IVL_MS = 5000
HEARTBEAT_TIMEOUT_MS = 15000
HANDSHAKE_IVL_MS = 10000
_SPARE_FILES = 128


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    *,
    keys: KeyPair,
    domain: str,
    frame_bytes: int,
    receive_messages: int,
    send_messages: int,
) -> "zmq.Socket[bytes]":
    """A ROUTER on `address`; the queue bounds are per connection.

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
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_IVL_MS)  # idle strangers do not keep their file descriptor
    router.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    router.setsockopt(zmq.RCVHWM, receive_messages)
    router.setsockopt(zmq.SNDHWM, send_messages)
    router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_IVL_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    router.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    router.setsockopt(zmq.BACKLOG, 1024)  # a whole fleet returns at once after a restart
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
    route = router.recv(zmq.NOBLOCK, copy=False)
    frame = router.recv(zmq.NOBLOCK, copy=False)  # the parts of a message come together
    frames = 1
    while frame.more:
        frame = router.recv(zmq.NOBLOCK, copy=False)
        frames += 1
    return route.bytes, frame if frames == 1 else None


def require_files(devices: int) -> int:
    """Make sure that the process may open a connection per device and lane; returns the limit in force.

    Out of file descriptors libzmq spins on accept and serves nobody, so this is found out at the start.

    Raises:
        SettingError: the hard limit is too low.
    """
    needed = 4 * devices + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return soft
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SettingError(
            f"{devices} devices need {needed} open files, the limit is {hard}",
            remedy="raise it (ulimit -Hn, LimitNOFILE=) or lower max_devices",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed
