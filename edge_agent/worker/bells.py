"""What an idle lane sleeps on: until it is rung for a step, or also until a command comes to the process.

A lane that takes the commands itself runs the step that comes of them without waking another thread. A
command wakes one sleeper: of those that watch the channel the one that has watched it longest.
"""

import os
import select
import threading
from typing import Protocol


class Bell(Protocol):
    """One lane's; rung at most once between two waits."""

    def ring(self) -> None:
        """Wake the lane; from any thread."""

    def wait(self) -> bool:
        """Sleep until there is something to do; whether it is a command, which the caller takes then."""

    def close(self) -> None:
        """Nobody waits any more."""


class LockBell:
    """A lock on which the lane sleeps: there are no commands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        self._lock.release()

    def wait(self) -> bool:
        self._lock.acquire()
        return False

    def close(self) -> None: ...


class CommandBell:
    """Watches the descriptor that commands come from, too."""

    def __init__(self, commands: int) -> None:
        self._epoll = select.epoll()  # first: unlike a bare descriptor it is closed with its object
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._rung, select.EPOLLIN)
        self._epoll.register(commands, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def ring(self) -> None:
        os.eventfd_write(self._rung, 1)

    def wait(self) -> bool:
        """A command that woke this lane woke no other: it is told of also where the bell was rung."""
        command = False
        for fd, _ in self._epoll.poll(None, 2):
            if fd == self._rung:
                os.eventfd_read(self._rung)
            else:
                command = True
        return command

    def close(self) -> None:
        self._epoll.close()
        os.close(self._rung)
