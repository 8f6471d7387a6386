"""Which account is at the other end of a TCP connection within this machine: the kernel's socket table knows.

One netlink request (sock_diag(7), `inet_diag_req_v2`) looks a single socket up by its four numbers.
"""

import ipaddress
import socket
import struct
from typing import Final

_SOCK_DIAG: Final = 4  # of NETLINK_, <linux/netlink.h>
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY, <linux/sock_diag.h>
_REQUEST: Final = 1  # NLM_F_REQUEST
_ALL_STATES: Final = 0xFFFFFFFF
_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_QUERY: Final = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_SOCKET: Final = struct.Struct("!HH16s16s")  # inet_diag_sockid: ports and addresses, in network order
_NO_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, INET_DIAG_NOCOOKIE
_UID_AT: Final = _HEADER.size + 4 + 48 + 12  # in the answer: after inet_diag_msg's states, id and queues


def uid_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The account whose socket `client` is, connected to `server`; None if it is none of this machine."""
    try:
        ours, theirs = ipaddress.ip_address(client[0]), ipaddress.ip_address(server[0])
    except ValueError:
        return None
    family = socket.AF_INET if ours.version == 4 else socket.AF_INET6
    id_part = _SOCKET.pack(client[1], server[1], ours.packed.ljust(16, b"\0"), theirs.packed.ljust(16, b"\0"))
    body = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + id_part + _NO_COOKIE
    request = _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asked:
            asked.settimeout(1.0)
            asked.sendto(request, (0, 0))
            answer = asked.recv(4096)
    except OSError:
        return None  # a container may forbid it: nobody is known then
    if len(answer) < _UID_AT + 4 or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return uid
