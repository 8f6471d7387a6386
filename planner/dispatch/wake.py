"""Waking a thread that waits in a poller, from other threads."""

import socket


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
