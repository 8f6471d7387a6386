"""One end of the socket pair between the two agent processes: whole messages, with file descriptors.

SOCK_SEQPACKET keeps message borders and order, and reports the other end's death as an empty message.
Sending never blocks: what the socket does not take waits in a bounded backlog, so that a stopped peer
cannot stall a lane or the link.
"""

import array
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence

from stageloom.edge_agent.ingest.channel import descriptors_in
from stageloom.edge_agent.worker.messages import MAX_MESSAGE_BYTES
from stageloom.shared.errors import UnavailableError

MAX_BACKLOG = 16384
_MAX_FDS = 4
_FD_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)  # enums are slow to compare
_CUT_OFF, _NO_FDS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)

_log = logging.getLogger(__name__)


class ChannelClosed(UnavailableError):
    """The other process is gone."""

    def __init__(self) -> None:
        super().__init__("the other process closed the channel")


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; both are closed on exec unless passed on by name."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """Not thread-safe: the caller guards `send` and `flush` with one lock, `receive` with another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        """Readable when a message waits."""
        return self._sock.fileno()

    @property
    def backlog(self) -> int:
        """Messages not yet taken by the socket; `flush` when it is writable."""
        return len(self._backlog)

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send now or keep for `flush`. `fds` are duplicated: the caller still closes its own.

        Raises:
            ChannelClosed: the other process is gone.
            UnavailableError: the other process has not read for so long that the backlog is full.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is larger than {MAX_MESSAGE_BYTES}")
        if not self._backlog and self._try_send(message, fds):
            return
        if len(self._backlog) >= MAX_BACKLOG:
            raise UnavailableError("the engine process does not read its messages", remedy="restart it")
        self._backlog.append((message, tuple(os.dup(fd) for fd in fds)))

    def try_send(self, message: bytes) -> bool:
        """Send now, without descriptors and before what waits for `flush`; False if it cannot be."""
        try:
            return self._try_send(message, ())
        except ChannelClosed:
            return False

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it.

        Raises:
            ChannelClosed: the other process is gone.
        """
        while self._backlog:
            message, fds = self._backlog[0]
            if not self._try_send(message, fds):
                return
            self._backlog.popleft()
            for fd in fds:
                os.close(fd)

    def _try_send(self, message: bytes, fds: Sequence[int]) -> bool:
        try:
            if fds:
                socket.send_fds(self._sock, [message], list(fds))
            else:
                self._sock.send(message)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error
        return True

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next message with its file descriptors, or None when none waits.

        Without any where this process may open no further file: whoever wanted them says what is lost.

        Raises:
            ChannelClosed: the other process is gone.
            ValueError: the message was larger than the limit; it is lost.
        """
        try:
            message, ancillary, flags, _ = self._sock.recvmsg(MAX_MESSAGE_BYTES, _FD_SPACE, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return self.receive()  # told once, and first: the other process ended with messages unread
        if not message:
            raise ChannelClosed
        fds = descriptors_in(ancillary) if ancillary else []
        if flags & (_CUT_OFF | _NO_FDS):
            for fd in fds:
                os.close(fd)
            if flags & _CUT_OFF:
                raise ValueError("a message was cut off at the size limit")
            _log.error("a message came without its descriptors: too many files are open")
            return message, []
        return message, fds

    def close(self) -> None:
        """Close this end and what waits in the backlog."""
        for _, fds in self._backlog:
            for fd in fds:
                os.close(fd)
        self._backlog.clear()
        self._sock.close()
