"""The channel between the two processes: whole messages, descriptors, a peer that is slow or gone."""

import os

import pytest

from stageloom.edge_agent.worker import channel as module
from stageloom.edge_agent.worker.channel import Channel, ChannelClosed, channel_pair
from stageloom.edge_agent.worker.messages import MAX_MESSAGE_BYTES
from stageloom.shared.errors import UnavailableError


def _pair() -> tuple[Channel, Channel]:
    one, other = channel_pair()
    return Channel(one), Channel(other)


def test_messages_keep_their_borders_and_order_and_carry_descriptors() -> None:
    one, other = _pair()
    fd = os.memfd_create("test")
    os.write(fd, b"bulk")
    one.send(b"a")
    one.send(b"b", [fd])
    os.close(fd)
    assert other.receive() == (b"a", [])
    received = other.receive()
    assert received is not None
    message, (copy,) = received
    assert (message, os.pread(copy, 9, 0)) == (b"b", b"bulk")
    assert other.receive() is None
    os.close(copy)
    one.close()
    other.close()


def test_a_peer_that_does_not_read_blocks_nobody_and_loses_nothing() -> None:
    """1. More is sent than the socket takes. 2. The peer reads while one flushes. 3. All arrive."""
    one, other = _pair()
    sent = [b"%d" % i + bytes(4000) for i in range(500)]
    for message in sent:
        one.send(message)
    assert one.backlog
    received: list[bytes] = []
    while len(received) < len(sent):
        one.flush()
        found = other.receive()
        assert found is not None
        received.append(found[0])
    assert received == sent
    one.close()
    other.close()


def test_what_a_peer_said_is_read_though_it_ended_before_it_had_read_everything() -> None:
    one, other = _pair()
    one.send(b"unread")
    other.send(b"a")
    other.send(b"b")
    other.close()
    assert [one.receive(), one.receive()] == [(b"a", []), (b"b", [])]
    with pytest.raises(ChannelClosed):
        one.receive()
    one.close()


def test_the_backlog_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 3)
    one, other = _pair()
    with pytest.raises(UnavailableError, match="does not read"):
        for _ in range(10_000):
            one.send(bytes(4000))
    assert one.backlog == 3
    one.close()
    other.close()


def test_a_peer_that_is_gone_is_an_error_of_its_own() -> None:
    one, other = _pair()
    other.send(b"last words")
    other.close()
    with pytest.raises(ChannelClosed):
        one.send(b"hello")
    assert one.receive() == (b"last words", [])
    with pytest.raises(ChannelClosed):
        one.receive()
    one.close()


def test_a_message_beyond_the_limit_is_a_mistake_of_the_sender() -> None:
    one, other = _pair()
    with pytest.raises(ValueError, match="larger than"):
        one.send(bytes(MAX_MESSAGE_BYTES + 1))
    one.close()
    other.close()
