"""What a client has still to send to the agent, in order."""

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from typing import Final

from stageloom.edge_agent.ingest.channel import send_with_descriptor
from stageloom.shared.errors import UnavailableError

_WAITING: Final = int(socket.MSG_NOSIGNAL)  # enums are slow to pass
_AT_ONCE: Final = int(socket.MSG_NOSIGNAL) | int(socket.MSG_DONTWAIT)
_SHORTEST_S: Final = 1e-6  # the kernel takes 0 for no limit


class Outbox:
    """Packets of one connection: sent in the order of `put`, by whichever thread sends next.

    The agent stops reading from an application that does not read its replies. So the thread that reads them
    never waits for room in the socket: it calls `flush`, and goes on reading. Others call `send`.

    Args:
        sock: a connected socket, which becomes a blocking one and is closed by `close`.
        timeout_s: how long the agent may take nothing before the connection is given up.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._sending = threading.Lock()  # held while packets are sent
        self._putting = threading.Lock()  # held for moments, under `_sending` or alone
        self._packets: deque[tuple[bytes, int | None]] = deque()
        self.failure = ""  # why nothing can be sent any more
        self._remedy = "submit again"
        sock.settimeout(None)
        seconds, micros = divmod(round(max(timeout_s, _SHORTEST_S) * 1e6), 1_000_000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, micros))

    def put(self, packet: bytes, descriptor: int | None = None) -> None:
        """Put a packet behind all others, with a copy of `descriptor`; never waits.

        Raises:
            UnavailableError: the connection is over.
        """
        with self._putting:
            self._check()
            self._packets.append((packet, None if descriptor is None else os.dup(descriptor)))

    def send(self) -> None:
        """Send all packets, and wait until the socket has taken them.

        Raises:
            UnavailableError: the agent is gone, or takes nothing within the timeout.
        """
        while self._packets:  # also those that were put in while another thread was about to leave
            with self._sending:
                self._send_all(_WAITING)

    def flush(self) -> bool:
        """Send what the socket takes at once; never waits. A thread that is in `send` sends what is left.

        Returns: whether packets are left because the socket is full.

        Raises:
            UnavailableError: the agent is gone.
        """
        while self._packets and self._sending.acquire(blocking=False):
            try:
                if not self._send_all(_AT_ONCE):
                    return True
            finally:
                self._sending.release()
        return False

    def give_up(self) -> None:
        """End the connection to an agent that takes nothing: sending fails, and reading comes to an end."""
        self._fail(BlockingIOError())

    def close(self) -> None:
        """Close the socket; what is left concerns this connection alone, of which the agent forgets all."""
        self._fail(OSError("the connection ended"))
        with self._sending:  # nobody is sending through a descriptor while it is closed
            self._close_descriptors()
            self._sock.close()

    def _send_all(self, flags: int) -> bool:
        """Under `_sending`. False: `_AT_ONCE` the socket does not take all."""
        self._check()
        try:
            while self._packets:
                packet, descriptor = self._packets[0]
                if descriptor is None:
                    self._sock.send(packet, flags)
                else:
                    send_with_descriptor(self._sock, packet, descriptor, flags)
                    os.close(descriptor)
                self._packets.popleft()
        except OSError as error:
            if flags == _AT_ONCE and isinstance(error, BlockingIOError):
                return False
            self._fail(error)
            self._close_descriptors()
            raise self._error() from error
        return True

    def _check(self) -> None:
        if self.failure:
            raise self._error()

    def _error(self) -> UnavailableError:
        return UnavailableError(f"the agent is gone: {self.failure}", remedy=self._remedy)

    def _fail(self, error: OSError) -> None:
        """The first error is told to all; whoever waits fails with it."""
        with self._putting:
            if self.failure:
                return
            self.failure = str(error) or type(error).__name__
            if isinstance(error, BlockingIOError):
                self.failure = f"it has taken nothing for {self._timeout_s:g} s"
                self._remedy = "look at its log, restart it if it stands still, and submit again"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _close_descriptors(self) -> None:
        """Under `_sending`, once nothing is put in any more."""
        with self._putting:
            for _, descriptor in self._packets:
                if descriptor is not None:
                    os.close(descriptor)
            self._packets = deque((packet, None) for packet, _ in self._packets)
