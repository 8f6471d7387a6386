"""TCP sockets that listen for devices, made here so that the kernel can filter what libzmq gets.

libzmq 4.3.5 aborts the process ("Assertion failed: !_io_error") when a connection breaks while its receive
queue is full and a PING lies behind what is queued. Any peer past the handshake can do so: fill the queue,
send PINGs, reset the connection. No option of libzmq or TCP hides a reset, so a socket filter drops segments
with the RST flag before TCP sees them; the connections that a listening socket accepts inherit its filter. A
connection that TCP gives up (keepalive, unanswered data) counts as broken, too. So TCP waits for minutes, and
`RECEIVE_BYTES` bounds what the planner has to read in that time before nothing is queued any more.

Source of the filter: classic BPF as in `linux/filter.h`; on a TCP socket it starts at the TCP header
(`net/core/filter.c`, `sk_filter_trim_cap`). No privilege is needed.
"""

import contextlib
import ctypes
import logging
import socket
import struct
import sys
from typing import Final

from stageloom.shared.errors import UnavailableError

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
