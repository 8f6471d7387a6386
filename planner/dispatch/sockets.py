"""How the planner's sockets are bound: CURVE, a named domain that is enforced, bounds, keepalive."""

import resource

import zmq

from stageloom.planner.dispatch.listening import listen
from stageloom.shared.errors import SettingError
from stageloom.shared.keyfile import KeyPair

# Connections whose other end is gone are found by TCP, and not soon: one that times out while it still has
# messages queued ends the process (see `listening.py`), so the limits are far above the time that the planner
# takes to read what a connection may have queued. Whether a device lives is told by the messages of the
# control lane. ZeroMQ's own heartbeats stay off: one that falls due on a broken connection whose queue is
# full ends the process, too. They also cost as much as one of ours.
KEEPALIVE_IDLE_S = 300
KEEPALIVE_IVL_S = 60
KEEPALIVE_PROBES = 5
UNANSWERED_MS = 600_000
# A handshake takes half a millisecond of work at either end. When a whole fleet returns they queue up; cut
# off while they queue, they begin anew, and no one ever gets in.
HANDSHAKE_MS = 10_000
_BACKLOG = 4096  # a whole fleet returns at once after a restart
NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: combining flags of an enum takes as long as a send
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_SPARE_FILES = 128
_FILES_PER_DEVICE = 4  # a connection per socket, and one that TCP has not given up yet
_MANY_DEVICES = 16_000


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
    """A ROUTER on `address` (`tcp://HOST:PORT`); the queue bounds are per connection.

    Raises:
        UnavailableError: the address cannot be bound.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    listening = listen(host, int(port), backlog=_BACKLOG, guarded=True)
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
    router.zap_domain = domain.encode()
    # Without it a server whose ZAP handler is missing lets every key in.
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody raises instead of vanishing
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)  # idle strangers do not keep their file descriptor
    router.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    router.setsockopt(zmq.RCVHWM, receive_messages)
    router.setsockopt(zmq.SNDHWM, send_messages)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)
    router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_IVL_S)
    router.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    router.setsockopt(zmq.TCP_MAXRT, UNANSWERED_MS)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, 1)
    router.setsockopt(zmq.USE_FD, listening.detach())  # libzmq closes it with the ROUTER
    router.bind(address)
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
