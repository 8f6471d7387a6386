"""The local socket: where it lies, how to connect, packets with descriptors, and which descriptors to trust.

Only memory files are used: they are regular files that lie in memory, so that nothing done with one waits
for a reader, a disk or a server. Of any other file even `fstat` and `close` may wait for as long as its
owner likes (a file system in user space, a socket that lingers).
"""

import array
import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from stageloom.edge_agent.ingest.messages import (
    MAX_PACKET_BYTES,
    PROTOCOL_VERSION,
    ClientHello,
    Goodbye,
    ToAgent,
    ToApplication,
    decode_to_application,
    encode,
)
from stageloom.shared.errors import DecodeError, UnavailableError

SOCKET_NAME = "agent.sock"
Answer = TypeVar("Answer", bound=ToApplication)
_LONGEST_ADDRESS_BYTES = 107  # sun_path holds 108 with its end
_RETRY_S = 0.01  # while the queue of connections is full
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize * 2)
_CLOSE_ON_EXEC, _CUT_OFF = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_TRUNC)  # enums are slow to compare


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


def connect(path: Path, timeout_s: float, wait: Callable[[float], None] = time.sleep) -> socket.socket:
    """A connected, blocking socket; `wait` lets seconds pass.

    Raises:
        UnavailableError: no agent listens there or takes it in time, or the file may not be opened.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_s)
    try:
        with socket_address(path) as address:
            _connect(sock, address, timeout_s, wait)
    except BlockingIOError as error:
        sock.close()
        raise UnavailableError(
            f"the agent at {path.absolute()} takes no connection now: "
            f"its queue has been full for {timeout_s:g} s",
            remedy="try again later; look at its log, and restart it if it stands still",
        ) from error
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


def _connect(sock: socket.socket, address: str, timeout_s: float, wait: Callable[[float], None]) -> None:
    """A full queue of connections is an error at once: a socket with a timeout does not wait for it."""
    for _ in range(round(timeout_s / _RETRY_S)):
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
            return
        wait(_RETRY_S)
    sock.connect(address)


def send_with_descriptor(sock: socket.socket, packet: bytes, descriptor: int, flags: int = 0) -> None:
    """Send one packet and a copy of `descriptor`."""
    ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    sock.sendmsg([packet], [ancillary], flags)  # `socket.send_fds` does without the flags


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which the caller owns; an empty packet is the end.

    A packet that was too long for the buffer comes back with one byte more than is allowed, so that decoding
    refuses it.
    """
    packet, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES + 1, _FD_SPACE, _CLOSE_ON_EXEC)
    if flags & _CUT_OFF:
        packet = bytes(MAX_PACKET_BYTES + 1)
    return packet, descriptors_in(ancillary) if ancillary else []


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what `recvmsg` returns beside a packet; the caller owns them."""
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers)


def ask(
    path: Path, question: ToAgent, answer: type[Answer], timeout_s: float, descriptor: int | None = None
) -> Answer:
    """Connect, ask one question, and wait for the first message of type `answer`.

    Raises:
        UnavailableError: no agent answers in time, or it ends the connection.
    """
    with connect(path, timeout_s) as sock:
        try:
            sock.send(encode(ClientHello(PROTOCOL_VERSION)))
            if descriptor is None:
                sock.send(encode(question))
            else:
                send_with_descriptor(sock, encode(question), descriptor)
            while packet := receive(sock)[0]:
                message = decode_to_application(packet)
                if isinstance(message, answer):
                    return message
                if isinstance(message, Goodbye):
                    raise UnavailableError(f"the agent at {path} turned us away: {message.reason}")
        except (OSError, DecodeError) as error:
            raise UnavailableError(
                f"the agent at {path} does not answer: {error}", remedy="look at its log"
            ) from error
        raise UnavailableError(f"the agent at {path} hung up", remedy="look at its log")


HOME_VARIABLE = "STAGELOOM_AGENT_HOME"
SOCKET_VARIABLE = "STAGELOOM_AGENT_SOCKET"


def default_home() -> Path:
    """`$STAGELOOM_AGENT_HOME`, else `var/agent` below the working directory."""
    return Path(os.environ.get(HOME_VARIABLE) or "var/agent")


def runtime_directory(home: Path) -> Path:
    """Holds the socket; only the owner may enter it."""
    return home / "run"


def socket_of(home: Path) -> Path:
    """The socket of the agent that uses `home`."""
    return runtime_directory(home) / SOCKET_NAME


def default_socket() -> Path:
    """`$STAGELOOM_AGENT_SOCKET`, else the socket in the default home."""
    chosen = os.environ.get(SOCKET_VARIABLE)
    return Path(chosen) if chosen else socket_of(default_home())


def seals_of(descriptor: int) -> int | None:
    """The seals of a memory file; None for any other file. Never waits: the kernel answers by itself."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return None


def close_received(descriptors: Iterable[int]) -> None:
    """Close descriptors of an application without waiting for it."""
    for descriptor in descriptors:
        if seals_of(descriptor) is not None:
            os.close(descriptor)
        else:
            threading.Thread(target=os.close, args=(descriptor,), name="close", daemon=True).start()
