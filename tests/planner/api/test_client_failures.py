"""What the client makes of a planner that breaks off, hangs up, keeps it out or answers something else."""

import errno
import io
import select
import socket
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.api import client as client_module
from stageloom.planner.api.client import PlannerClient, new_file, result
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.api.routes import BACKUP, DEVICE_PROFILE, STATUS
from stageloom.planner.api.server import ServerLimits
from stageloom.planner.schema.base import Done
from stageloom.planner.schema.job import JobInfo, JobProgress, JobState
from stageloom.planner.schema.service import BackupRequest, StatusRequest
from stageloom.shared.errors import ExitCode, UnavailableError
from tests.planner.api.broken_planner import answering
from tests.planner.api.rig import CHANGE, READ, TryRequest, served

ONE = TryRequest(name="one")
TEN_OF_A_HUNDRED = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 10


def test_a_file_that_breaks_off_on_its_way_is_an_error_and_not_kept(tmp_path: Path) -> None:
    with answering(tmp_path, TEN_OF_A_HUNDRED), PlannerClient(data_dir=tmp_path) as client:
        with pytest.raises(UnavailableError, match="90 bytes are missing; see its log, and ask again"):
            client.download(BACKUP, BackupRequest(), tmp_path / "backup.tar")
    assert not (tmp_path / "backup.tar").exists()


BUSY = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def test_whoever_asks_too_often_waits_as_the_planner_says_and_asks_again(tmp_path: Path) -> None:
    """As a wait for many devices does."""
    waited: list[float] = []
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    with answering(tmp_path, BUSY, BUSY, answer):
        with PlannerClient(data_dir=tmp_path, sleep=waited.append) as client:
            assert client.call(READ, ONE) == Done()
    assert waited == [2.0, 2.0]


def test_a_planner_that_stays_busy_is_told_in_the_end(tmp_path: Path) -> None:
    waited: list[float] = []
    with answering(tmp_path, BUSY), PlannerClient(data_dir=tmp_path, sleep=waited.append) as client:
        with pytest.raises(ApiRefused, match="429"):
            client.call(READ, ONE)
    assert len(waited) == 10


def test_a_file_system_that_takes_a_part_of_what_is_written_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk does that is nearly full: what it takes no more of is an error at the next write."""

    class TakesLittle(io.FileIO):
        def write(self, part: Any) -> int:
            return super().write(part[:3])

    def opened(descriptor: int, mode: str, buffering: int) -> TakesLittle:
        return TakesLittle(descriptor, mode)

    monkeypatch.setattr(client_module, "open", opened, raising=False)
    with new_file(tmp_path / "kept") as write:
        assert write(b"a backup") == 8
    assert (tmp_path / "kept").read_bytes() == b"a backup"


def test_a_handler_whose_disk_is_full_says_so_with_the_exit_code_of_storage(tmp_path: Path) -> None:
    def full(request: TryRequest) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with served(tmp_path, {READ: full}) as rig, rig.client() as client:
        with pytest.raises(ApiRefused, match="No space left on device; see its log for which") as caught:
            client.call(READ, ONE)
    assert caught.value.exit_code is ExitCode.STORAGE


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
