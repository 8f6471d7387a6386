"""The local socket itself: addresses, connecting, packets with descriptors. Standard library only."""

import array
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from stageloom.edge_agent.ingest.messages import MAX_PACKET_BYTES
from stageloom.shared.errors import UnavailableError

SOCKET_NAME = "agent.sock"
_LONGEST_ADDRESS_BYTES = 107  # sun_path holds 108 with its end


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for `path` that fits into `sockaddr_un`, however deep the directory is.

    A long one goes through a descriptor of the directory, valid while the context is open.
    """
    text = str(path)
    if len(os.fsencode(text)) <= _LONGEST_ADDRESS_BYTES:
        yield text
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connected, blocking socket.

    Raises:
        UnavailableError: no agent listens there, or the file may not be opened.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_s)
    try:
        with socket_address(path) as address:
            sock.connect(address)
    except PermissionError as error:
        sock.close()
        raise UnavailableError(
            f"no permission to open {path}", remedy="run as the user who runs the agent"
        ) from error
    except OSError as error:
        sock.close()
        raise UnavailableError(
            f"no agent answers at {path.absolute()}: {error.strerror or error}",
            remedy="start one with `stageloom-agent run`, or name its home in STAGELOOM_AGENT_HOME",
        ) from error
    return sock


def send_with_descriptor(sock: socket.socket, packet: bytes, descriptor: int) -> None:
    """Send one packet and a copy of `descriptor`."""
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which the caller owns; an empty packet is the end.

    A packet that was too long for the buffer comes back with one byte more than is allowed, so that decoding
    refuses it.
    """
    packet, ancillary, flags, _ = sock.recvmsg(
        MAX_PACKET_BYTES + 1, socket.CMSG_SPACE(array.array("i").itemsize * 2), socket.MSG_CMSG_CLOEXEC
    )
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            descriptors.extend(numbers)
    if flags & socket.MSG_TRUNC:
        packet = bytes(MAX_PACKET_BYTES + 1)
    return packet, descriptors
