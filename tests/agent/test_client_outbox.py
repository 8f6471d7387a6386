"""What a client sends: in order, within the timeout, and without a wait where it must not wait."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from stageloom.edge_agent.ingest import channel
from stageloom.edge_agent.ingest.client_outbox import Outbox
from stageloom.shared.errors import UnavailableError

Pair = tuple[Outbox, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """An outbox that gives up after 50 ms, and the agent's end of its socket."""
    ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agents.settimeout(20)
    outbox = Outbox(ours, 0.05)
    yield outbox, agents
    outbox.close()
    agents.close()


def _fill(outbox: Outbox) -> int:
    """Put in numbered packets until the socket takes no more; how many there are."""
    count = 0
    while not outbox.flush():
        outbox.put(str(count).encode())
        count += 1
    return count


def test_a_socket_that_stays_full_is_an_error_after_the_timeout(pair: Pair) -> None:
    outbox, agents = pair
    _fill(outbox)
    with pytest.raises(UnavailableError, match=r"it has taken nothing for 0\.05 s; look at its log"):
        outbox.send()
    with pytest.raises(UnavailableError, match="taken nothing"):  # without another wait
        outbox.put(b"more")
    while agents.recv(100):
        pass  # the connection has ended


def test_what_the_socket_did_not_take_goes_before_the_next_packet(pair: Pair) -> None:
    outbox, agents = pair
    count = _fill(outbox)
    assert outbox.flush()
    outbox.put(str(count).encode())
    found = [int(agents.recv(100)) for _ in range(count // 2)]
    outbox.send()
    found += [int(agents.recv(100)) for _ in range(count + 1 - len(found))]
    assert found == list(range(count + 1))


def test_flush_does_not_wait_for_a_thread_that_sends_which_sends_the_rest(pair: Pair) -> None:
    outbox, agents = pair
    outbox.put(b"first")
    with outbox._sending:
        sender = threading.Thread(target=outbox.send)
        sender.start()
        outbox.put(b"second")
        assert not outbox.flush()
    assert [agents.recv(100), agents.recv(100)] == [b"first", b"second"]
    sender.join(20)


def test_all_who_wait_fail_with_the_first_error(pair: Pair) -> None:
    outbox, agents = pair
    agents.close()
    outbox.put(b"first")
    outbox.put(b"second")
    for act in (outbox.send, outbox.send, outbox.flush, lambda: outbox.put(b"third")):
        with pytest.raises(UnavailableError, match="Broken pipe; submit again"):
            act()


def test_a_descriptor_is_a_copy_that_is_closed_once_it_is_sent_or_cannot_be(pair: Pair) -> None:
    outbox, agents = pair
    before = len(os.listdir("/proc/self/fd"))
    descriptor = os.memfd_create("sent")
    outbox.put(b"sent", descriptor)
    os.close(descriptor)
    outbox.send()
    packet, (received,) = channel.receive(agents)
    assert packet == b"sent" and os.readlink(f"/proc/self/fd/{received}").startswith("/memfd:sent")
    outbox.put(b"left", received)
    os.close(received)
    agents.close()
    with pytest.raises(UnavailableError):
        outbox.send()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "only the agent's end is gone"
