"""What an idle lane sleeps on: a ring and a command both wake it, and neither is lost beside the other."""

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from stageloom.edge_agent.worker.bells import Bell, CommandBell, LockBell
from stageloom.edge_agent.worker.channel import channel_pair


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The agent's end, and the engine process's."""
    ours, theirs = channel_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture(params=["lock", "commands"])
def bell(request: pytest.FixtureRequest, channel: tuple[socket.socket, socket.socket]) -> Iterator[Bell]:
    made: Bell = LockBell() if request.param == "lock" else CommandBell(channel[1].fileno())
    yield made
    made.close()


def test_a_ring_wakes_a_sleeper_and_one_before_the_sleep_is_not_lost(bell: Bell) -> None:
    woken: list[bool] = []
    for rings_first in (True, False):
        if rings_first:
            bell.ring()
        sleeper = threading.Thread(target=lambda: woken.append(bell.wait()))
        sleeper.start()
        if not rings_first:
            bell.ring()
        sleeper.join(20.0)
    assert woken == [False, False]


def test_a_command_is_told_of_also_beside_a_ring(channel: tuple[socket.socket, socket.socket]) -> None:
    """Otherwise nobody would read it: it has woken no other sleeper."""
    ours, theirs = channel
    bell = CommandBell(theirs.fileno())
    ours.send(b"command")
    bell.ring()
    assert bell.wait()
    assert theirs.recv(100) == b"command"
    bell.ring()
    assert not bell.wait()
    bell.close()


def test_a_command_that_nobody_read_wakes_the_next_one_who_sleeps(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = channel
    bells = [CommandBell(theirs.fileno()) for _ in range(2)]
    ours.send(b"command")  # while nobody sleeps
    assert all(bell.wait() for bell in bells)
    for bell in bells:
        bell.close()


def test_a_bell_that_cannot_be_made_leaves_no_descriptor(
    channel: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    made: list[int] = []
    make = os.eventfd

    def noted(value: int, flags: int) -> int:
        made.append(make(value, flags))
        return made[-1]

    monkeypatch.setattr(os, "eventfd", noted)
    monkeypatch.setattr(select, "epoll", none_left)
    with pytest.raises(OSError, match="too many open files"):
        CommandBell(channel[1].fileno())
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
