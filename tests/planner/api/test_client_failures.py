"""What the client makes of a planner that breaks off, hangs up, keeps it out or answers something else."""

import errno
import select
import socket
from pathlib import Path

import pytest

from stageloom.planner.api.client import PlannerClient, result
from stageloom.planner.api.routes import BACKUP, DEVICE_PROFILE, STATUS
from stageloom.planner.api.server import ServerLimits
from stageloom.planner.schema.base import Done
from stageloom.planner.schema.job import JobInfo, JobProgress, JobState
from stageloom.planner.schema.service import BackupRequest, StatusRequest
from stageloom.shared.errors import UnavailableError
from tests.planner.api.broken_planner import answering
from tests.planner.api.rig import CHANGE, READ, TryRequest, served

ONE = TryRequest(name="one")
TEN_OF_A_HUNDRED = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 10


def test_a_file_that_breaks_off_on_its_way_is_an_error_and_not_kept(tmp_path: Path) -> None:
    with answering(tmp_path, TEN_OF_A_HUNDRED), PlannerClient(data_dir=tmp_path) as client:
        with pytest.raises(UnavailableError, match="90 bytes are missing; see its log, and ask again"):
            client.download(BACKUP, BackupRequest(), tmp_path / "backup.tar")
    assert not (tmp_path / "backup.tar").exists()


def test_a_job_that_ends_with_something_else_is_an_error_with_a_remedy() -> None:
    end = JobInfo(
        job="0",
        operation="device.profile",
        state=JobState.DONE,
        who="local",
        began_at_us=0,
        progress=JobProgress(),
        result={"requests": "many"},
    )
    with pytest.raises(UnavailableError, match=r"something else: .*; use the command of the"):
        result(DEVICE_PROFILE, end)


def test_whom_the_local_socket_keeps_out_is_told_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept_out(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with PlannerClient(data_dir=tmp_path) as client:
        monkeypatch.setattr("stageloom.planner.api.client.socket.socket.connect", kept_out)
        with pytest.raises(UnavailableError, match="for its owner alone; run as the planner's account"):
            client.call(STATUS, StatusRequest())


@pytest.mark.parametrize("tls", [False, True])
def test_a_change_is_sent_over_a_connection_that_the_planner_has_not_closed(
    tmp_path: Path, tls: bool
) -> None:
    """1. The planner closes a connection that is idle; 2. a verb that cannot be sent twice is done once."""
    with served(tmp_path, tls=tls, connections=ServerLimits(idle_s=0.05)) as rig:
        with rig.client(rig.token("ann") if tls else "") as client:
            client.call(READ, ONE)
            connection = client._connection
            assert connection is not None and select.select([connection.sock], [], [], 20.0)[0]
            assert client.call(CHANGE, ONE) == Done()
            assert client._connection is not connection and len(rig.calls) == 2
