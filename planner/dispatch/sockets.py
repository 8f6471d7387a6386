"""The planner's sockets: TCP sockets that survive resets, ROUTERs with CURVE, admission, and a waker.

libzmq 4.3.5 aborts the process ("Assertion failed: !_io_error") when a connection breaks while its receive
queue is full and a PING lies behind what is queued. Any peer past the handshake can do so: fill the queue,
send PINGs, reset the connection. No option of libzmq or TCP hides a reset, so a socket filter drops segments
with the RST flag before TCP sees them; the connections that a listening socket accepts inherit its filter. A
connection that TCP gives up (keepalive, unanswered data) counts as broken, too. So TCP waits for minutes, and
`RECEIVE_BYTES` bounds what the planner has to read in that time before nothing is queued any more.

Sources. The filter is classic BPF as in `linux/filter.h`; on a TCP socket it starts at the TCP header
(`net/core/filter.c`, `sk_filter_trim_cap`) and needs no privilege. Admission is ZAP,
https://rfc.zeromq.org/spec/27/. Request: version, request id, domain, address, identity, mechanism,
credentials. Reply: version, request id, status, text, user id, metadata.
"""

import contextlib
import ctypes
import logging
import resource
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils import z85

from stageloom.shared.errors import SettingError, UnavailableError
from stageloom.shared.keyfile import KeyPair

log = logging.getLogger(__name__)


RECEIVE_BYTES: Final = 64 << 10  # per connection; the kernel doubles it for its own bookkeeping

_SO_ATTACH_FILTER: Final = 26

_TCP_FLAGS_AT: Final = 13

_RST: Final = 0x04

# (code, jump if true, jump if false, operand) of each instruction.
_DROP_RESETS: Final = (
    (0x30, 0, 0, _TCP_FLAGS_AT),  # BPF_LD | BPF_B | BPF_ABS: load the byte of flags
    (0x45, 0, 1, _RST),  # BPF_JMP | BPF_JSET: is RST set?
    (0x06, 0, 0, 0),  # BPF_RET: keep no byte, so the segment is dropped
    (0x06, 0, 0, 0xFFFFFFFF),  # BPF_RET: keep all of it
)


def listen(host: str, port: int, *, backlog: int, guarded: bool) -> socket.socket:
    """A listening socket, not blocking. `host` is a name, an address or `*`; `port` 0 takes any free one.

    The connections of a `guarded` one see no reset and hold at most `RECEIVE_BYTES` unread.

    Raises:
        UnavailableError: the address cannot be bound.
    """
    try:
        if host == "*":
            bound = _bound(socket.AF_INET6, ("::", port))
        else:
            family, _, _, _, address = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = _bound(family, address)
        if guarded:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            _drop_resets(bound)
        bound.listen(backlog)
    except OSError as error:
        raise UnavailableError(
            f"{host}:{port} cannot be bound: {error.strerror}",
            remedy="stop what uses it, or set another address",
        ) from error
    bound.setblocking(False)
    return bound


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _drop_resets(bound: socket.socket) -> None:
    """Have the kernel drop resets on `bound` and, once it listens, on every connection that it accepts."""
    instructions = b"".join(struct.pack("=HBBI", *one) for one in _DROP_RESETS)
    program = ctypes.create_string_buffer(instructions)
    filter_of = struct.pack("@HP", len(_DROP_RESETS), ctypes.addressof(program))  # struct sock_fprog
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_of)
            return
    log.warning(
        "this system cannot drop TCP resets: an enrolled device that resets connections can end the planner"
    )


# Connections whose other end is gone are found by TCP, and not soon: one that times out while it still has
# messages queued ends the process, so the limits are far above the time that the planner
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

_NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: combining flags of an enum takes as long as a send

_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

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
    route = router.recv(_NOBLOCK)
    frame = router.recv(_NOBLOCK, copy=False)  # the parts of a message come together
    frames = 1
    while frame.more:
        frame = router.recv(_NOBLOCK, copy=False)
        frames += 1
    return route, frame if frames == 1 else None


def send(router: "zmq.Socket[bytes]", route: bytes, frame: bytes) -> None:
    """Send a message of one frame.

    Raises:
        zmq.Again: the connection's queue is full.
        zmq.ZMQError: EHOSTUNREACH, there is no such connection.
    """
    try:
        router.send(route, _NOBLOCK_MORE)  # whatever is wrong is known from here on
    except zmq.Again:
        # Between two polls libzmq looks once a millisecond at what was taken from its queues: a device that
        # asks and reads fast has a queue that only seems full. Reading the events makes it look.
        router.getsockopt(zmq.EVENTS)
        router.send(route, _NOBLOCK_MORE)
    router.send(frame, _NOBLOCK)


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


ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"

ZAP_DOMAIN: Final = "stageloom.devices"

_ZAP_VERSION: Final = b"1.0"


def zap_reply(
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
        return [_ZAP_VERSION, request_id, b"400", b"No access", b"", b""]
    if not in_time(key):
        return [_ZAP_VERSION, request_id, b"300", b"Too often", b"", b""]
    return [_ZAP_VERSION, request_id, b"200", b"OK", key.encode("ascii"), b""]


def _admitted_key(request: Sequence[bytes], may_connect: Callable[[str], bool]) -> str | None:
    if len(request) != 7 or request[0] != _ZAP_VERSION or request[5] != b"CURVE" or len(request[6]) != 32:
        return None
    domain, key = request[2], z85.encode(request[6]).decode("ascii")
    if domain == ZAP_DOMAIN.encode() and may_connect(key):
        return key
    return None


class Waker:
    """A byte down a socket pair, once per sleep: a thousand events that come together wake once.

    Each send gives up the interpreter, and beside a busy thread it takes up to a switch interval to get it
    back. The sleeper calls `clear` first and then looks for what it was woken for, the others leave that
    first and then call `wake`; so nothing is missed.
    """

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self._awake = False

    def fileno(self) -> int:
        """The file that becomes readable."""
        return self._out.fileno()

    def wake(self) -> None:
        """Have the sleeper look; may be called from any thread."""
        if self._awake:
            return
        self._awake = True
        try:
            self._in.send(b"\x00")
        except OSError:
            pass  # full: it is awake; closed: it is gone

    def clear(self) -> None:
        """The sleeper is about to look."""
        try:
            while self._out.recv(4096):
                pass
        except BlockingIOError:
            pass
        self._awake = False

    def close(self) -> None:
        """Wake no more."""
        self._in.close()
        self._out.close()
