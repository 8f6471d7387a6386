"""The notify protocol, against a real socket."""

from pathlib import Path

import pytest

from stageloom.shared.systemd.notify import Notifier, manager_of
from tests.systemd.manager import Manager


@pytest.mark.parametrize("abstract", [False, True])
def test_fields_arrive_as_one_datagram_of_lines(tmp_path: Path, abstract: bool) -> None:
    with Manager(tmp_path, abstract=abstract) as manager:
        notifier = manager_of({"NOTIFY_SOCKET": manager.address})
        notifier.send(READY="1", STATUS="ready: two\nlines = one")
        notifier.close()
        assert manager.take() == [{"READY": "1", "STATUS": "ready: two lines = one"}]


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative/path"])
def test_without_a_socket_nothing_is_said_and_nothing_breaks(address: str) -> None:
    notifier = manager_of({"NOTIFY_SOCKET": address})
    notifier.send(READY="1")
    assert not notifier.listens
    notifier.close()


def test_manager_that_went_away_or_does_not_read_never_stops_the_service(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        notifier = Notifier(manager.address)
        for _ in range(5000):  # more than a socket's queue holds; a blocking send would hang here
            notifier.send(WATCHDOG="1")
        assert 0 < len(manager.take()) < 5000
    notifier.send(WATCHDOG="1")
    notifier.close()
    notifier.send(WATCHDOG="1")


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_is_kept_where_it_is_meant_for_this_process(
    environment: dict[str, str], watchdog_s: float | None
) -> None:
    assert manager_of(environment, pid=7).watchdog_s == watchdog_s
