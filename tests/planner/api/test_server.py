"""The API's sockets: who may open them, many clients at once, slow ones, very many, and a stop."""

import contextlib
import os
import socket
import stat
import threading
from concurrent.futures import Future
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.api.application import KEY_HEADER
from stageloom.planner.api.bounds import RequestLimits
from stageloom.planner.api.client import PlannerClient, is_running
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.route import unbind
from stageloom.planner.api.routes import ACCESS_REVOKE, JOB_EVENTS, STATUS
from stageloom.planner.api.server import ServerLimits
from stageloom.planner.schema.access import AccessRevokeRequest
from stageloom.planner.schema.base import Done
from stageloom.planner.schema.job import JobEventsRequest
from stageloom.planner.schema.service import StatusRequest
from stageloom.shared.errors import InputError, UnavailableError
from tests.planner.api.http import LocalHttp, asked, connected, events, read_to_end
from tests.planner.api.rig import FOLLOW, READ, UPLOAD, WORK, WRITE, Gate, TryRequest, served, unverified
from tests.planner.processes import until

ONE = TryRequest(name="one")
PATH, _ = unbind(READ, ONE)
GET = f"GET {PATH} HTTP/1.1\r\nhost: planner\r\n\r\n".encode()


def post(length: int, path: str = unbind(WRITE, ONE)[0]) -> bytes:
    """The head of a request with a body of so many bytes."""
    return f"POST {path} HTTP/1.1\r\nhost: planner\r\ncontent-length: {length}\r\n\r\n".encode()


# -- who may open it --------------------------------------------------------------------------------------


def test_only_the_owner_may_open_the_socket_from_its_first_moment_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    class Watched(socket.socket):
        def bind(self, address: Any) -> None:
            super().bind(address)
            modes.append(stat.S_IMODE(os.stat(address).st_mode))

    before = os.umask(0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("stageloom.planner.api.server.socket.socket", Watched)
            with served(tmp_path) as rig:
                modes.append(stat.S_IMODE(rig.path.stat().st_mode))
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use a shorter --data-dir"):
        PlannerClient(data_dir=tmp_path / ("x" * 120))


def test_what_a_killed_planner_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "api.sock"))
    assert not is_running(tmp_path / "api.sock")
    with served(tmp_path) as rig:
        assert asked(rig.path, "GET", PATH).status == 200


def test_no_planner_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with (
        PlannerClient(data_dir=tmp_path) as client,
        pytest.raises(UnavailableError, match="start it with `stageloom up`"),
    ):
        client.call(READ, ONE)


# -- many at once -----------------------------------------------------------------------------------------


def test_a_slow_request_does_not_hold_up_the_others(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, {WRITE: gate}) as rig, closing(LocalHttp(rig.path)) as slow:
        slow.request("POST", unbind(WRITE, ONE)[0])
        assert gate.taken.wait(20)
        assert asked(rig.path, "GET", PATH).status == 200
        gate.open.set()
        assert slow.getresponse().status == 201


def test_a_silent_planner_is_an_error_in_time(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, {READ: gate}) as rig, rig.client() as client:
        with pytest.raises(UnavailableError, match=r"does not answer within 0.2 s"):
            client.call(READ, ONE, timeout_s=0.2)
        gate.open.set()


@pytest.mark.promise("requests-wait-store-wait")
def test_requests_that_wait_for_the_store_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Many more pushes than threads, each with a key; none is answered before the last one was taken."""
    many, taken, last = 200, list["Future[Done]"](), threading.Event()

    def push(_: TryRequest) -> "Future[Done]":
        taken.append(Future())
        if len(taken) == many:
            last.set()
        return taken[-1]

    with served(tmp_path, {WRITE: push}) as rig, contextlib.ExitStack() as clients:
        connections = [clients.enter_context(closing(LocalHttp(rig.path))) for _ in range(many)]
        for number, connection in enumerate(connections):
            connection.request("POST", unbind(WRITE, ONE)[0], headers={KEY_HEADER: f"push {number}"})
        assert last.wait(20)
        taken[0].set_exception(InputError("there is no plan 'p'"))
        for future in taken[1:]:
            future.set_result(Done())
        statuses = [connection.getresponse().status for connection in connections]
    assert sorted(statuses) == [201] * (many - 1) + [422]


# -- slow ones --------------------------------------------------------------------------------------------

SOON = ServerLimits(head_s=0.05)


@pytest.mark.parametrize("said", [b"", b"G", GET[:-2]], ids=["nothing", "a byte", "half a head"])
def test_a_client_that_sends_no_whole_head_is_dropped(tmp_path: Path, said: bytes) -> None:
    with served(tmp_path, connections=SOON) as rig, closing(connected(rig.path)) as slow:
        slow.sendall(said)
        assert read_to_end(slow) == b""
        assert asked(rig.path, "GET", PATH).status == 200


def test_a_client_that_is_slow_with_its_second_head_is_dropped_as_well(tmp_path: Path) -> None:
    """What it said before earns it nothing: one answer, and then a byte."""
    with served(tmp_path, connections=SOON) as rig, closing(LocalHttp(rig.path)) as slow:
        assert slow.ask("GET", PATH).status == 200
        slow.sock.sendall(b"G")
        assert read_to_end(slow.sock) == b""


def test_what_is_left_of_a_refused_body_is_not_waited_for(tmp_path: Path) -> None:
    with served(tmp_path, connections=SOON) as rig, closing(connected(rig.path)) as slow:
        slow.sendall(post(1000, "/nowhere") + b"x")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        slow.sendall(b"x")
        read_to_end(slow)


def test_a_body_that_does_not_come_is_refused_in_time(tmp_path: Path) -> None:
    with served(tmp_path, requests=RequestLimits(body_s=0.05)) as rig, closing(connected(rig.path)) as slow:
        slow.sendall(post(100) + b"{")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_an_upload_that_stops_leaves_no_file(tmp_path: Path) -> None:
    limits = RequestLimits(body_s=0.05)
    with served(tmp_path, requests=limits) as rig, closing(connected(rig.path)) as slow:
        slow.sendall(post(1 << 20, unbind(UPLOAD, ONE)[0]).replace(b"POST", b"PUT", 1) + b"some")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert rig.calls == [] and list(tmp_path.glob(".upload-*")) == []


def test_a_client_that_does_not_read_its_events_is_given_up(tmp_path: Path) -> None:
    """It gets as many as the buffers take; then its stream ends, and another one may begin."""

    def flood(_: TryRequest) -> Any:
        while True:
            yield "name", TryRequest(name="x" * 64, names=("y" * 64,) * 1000)

    limits = RequestLimits(send_s=0.1, streams=1)
    with served(tmp_path, {FOLLOW: flood}, requests=limits) as rig, closing(connected(rig.path)) as slow:
        path, _ = unbind(FOLLOW, ONE)
        slow.sendall(f"GET {path} HTTP/1.1\r\nhost: planner\r\n\r\n".encode())
        assert slow.recv(12) == b"HTTP/1.1 200"
        until(lambda: asked_for_head(rig.path, path) == 200)


def asked_for_head(path: Path, target: str) -> int:
    with closing(LocalHttp(path)) as connection:
        connection.request("GET", target)
        return connection.getresponse().status


def test_a_client_that_hangs_up_amid_its_body_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    with served(tmp_path, {READ: gate}) as rig:
        with closing(connected(rig.path)) as gone:
            gone.sendall(post(100) + b"{")
        gate.open.set()
        assert asked(rig.path, "GET", PATH).status == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


TWO_LENGTHS = b"\r\ncontent-length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_after_a_head_with_two_lengths_nothing_is_served_on_that_connection(tmp_path: Path) -> None:
    """What follows may be a body to this server, and to a proxy before it another client's request."""
    head = post(0, unbind(WRITE, ONE)[0]).split(b"\r\ncontent-length")[0]
    with served(tmp_path) as rig, closing(connected(rig.path)) as connection:
        connection.sendall(head + TWO_LENGTHS + b"0\r\n\r\n" + GET)
        answers = read_to_end(connection)
        assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1") == 1
        assert b"connection: close" in answers.lower()
        assert rig.calls == []


def test_nonsense_is_refused_and_fills_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = GET.replace(b"\r\n\r\n", b"\r\nupgrade: websocket\r\n\r\n")
    with served(tmp_path) as rig:
        for said, status in (
            (b"nonsense\r\n\r\n", 400),
            (b"GET /v1/status HTTP/1.1\r\n\r\n", 400),
            (GET.replace(b"\r\n\r\n", TWO_LENGTHS) + b"0\r\n\r\n", 400),
            (upgrade, 200),
        ):
            with closing(connected(rig.path)) as connection, closing(HTTPResponse(connection)) as answer:
                connection.sendall(said)
                answer.begin()
                assert answer.status == status
                assert status == 200 or b"this is no HTTP request" in answer.read()
        for path in (
            "/v1/nowhere",
            unbind(WRITE, ONE)[0],
        ):  # after its answer; amid a body that is waited for
            with closing(connected(rig.path)) as connection:
                connection.sendall(post(0, path).replace(b"content-length: 0", b"transfer-encoding: chunked"))
                if path == "/v1/nowhere":
                    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
                connection.sendall(b"zzz\r\n")
                read_to_end(connection)
        assert asked(rig.path, "GET", PATH).status == 200
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


def test_what_a_killed_planner_was_sending_and_taking_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".upload-abcdefgh").mkdir()
    (tmp_path / ".upload-abcdefgh" / "body").write_bytes(b"half")
    (tmp_path / ".backup-ab_d3fgh.tar").write_bytes(b"keys")
    with served(tmp_path):
        assert not [*tmp_path.glob(".upload-*"), *tmp_path.glob(".backup-*")]


# -- very many --------------------------------------------------------------------------------------------


def test_connections_are_bounded_and_come_free_again(tmp_path: Path) -> None:
    with served(tmp_path, connections=ServerLimits(local_connections=2)) as rig:
        with closing(connected(rig.path)) as one, closing(connected(rig.path)) as other:
            for each in (one, other):
                each.sendall(GET)
                assert each.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            with closing(connected(rig.path)) as third:
                assert read_to_end(third) == b""
        until(lambda: is_served(rig.path))


def is_served(path: Path) -> bool:
    with contextlib.suppress(OSError), closing(connected(path)) as connection:
        connection.sendall(GET)
        return connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    return False


def test_a_client_counts_before_its_handshake_and_may_not_take_long_for_it(tmp_path: Path) -> None:
    """1. Two of one address say nothing; 2. a third is turned away; 3. they are dropped, and it may come."""
    limits = ServerLimits(connections_of_one=2, handshake_s=0.5)
    with served(tmp_path, tls=True, connections=limits) as rig:
        silent = [socket.create_connection(rig.address, 20.0) for _ in range(2)]
        with closing(socket.create_connection(rig.address, 20.0)) as third:
            assert read_to_end(third) == b""
        for connection in silent:
            assert read_to_end(connection) == b""
            connection.close()

        def handshake() -> bool:
            with contextlib.suppress(OSError):
                raw = socket.create_connection(rig.address, 20.0)
                unverified().wrap_socket(raw).close()
                return True
            return False

        until(handshake)


def test_a_short_answer_is_not_held_back_for_its_acknowledgement(tmp_path: Path) -> None:
    """Head and body are two writes; without this option the second waits 40 ms for the first."""
    with served(tmp_path, tls=True) as rig:
        raw = socket.create_connection(rig.address, 20.0)
        with unverified().wrap_socket(raw) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: planner\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 ")
            with closing(accepted_from(connection.getsockname())) as taken:
                assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def accepted_from(client: tuple[str, int]) -> socket.socket:
    """This process's end of a client's connection."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            end = socket.socket(fileno=os.dup(int(fd)))
            with contextlib.suppress(OSError):
                if end.getpeername() == client:
                    return end
            end.close()
    raise AssertionError(f"nothing here is connected to {client}")


def test_streams_of_events_are_bounded(tmp_path: Path) -> None:
    path, _ = unbind(FOLLOW, ONE)
    answers = {FOLLOW: lambda request: iter([("first", Done()), 3600.0])}
    with served(tmp_path, answers, requests=RequestLimits(streams=1)) as rig, events(rig.path, path) as held:
        assert next(held) == ("first", {})
        refused = asked(rig.path, "GET", path)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")


def test_a_stream_ends_with_its_token(tmp_path: Path) -> None:
    answers = {FOLLOW: lambda request: iter([("first", Done()), 0.01, *[("more", Done()), 0.01] * 6000])}
    with served(tmp_path, answers, tls=True) as rig, closing(rig.https()) as remote, rig.client() as owner:
        token = rig.token("ci")
        remote.request("GET", unbind(FOLLOW, ONE)[0], headers={"authorization": f"Bearer {token}"})
        answer = remote.getresponse()
        assert answer.readline() == b"event: first\n"
        owner.call(ACCESS_REVOKE, AccessRevokeRequest(name="ci"))
        assert answer.read().count(b"event: more") < 6000


def test_a_client_of_many_slow_requests_leaves_the_others_a_thread(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, {READ: gate}, tls=True) as rig, contextlib.ExitStack() as held:
        headers = {"authorization": f"Bearer {rig.token('greedy')}"}
        connections = [held.enter_context(closing(rig.https())) for _ in range(12)]
        for connection in connections:
            connection.request("GET", PATH, headers=headers)
        assert gate.taken.wait(20)
        with rig.client(rig.token("other")) as other:
            other.call(STATUS, StatusRequest())
        gate.open.set()
        assert [connection.getresponse().status for connection in connections] == [200] * 12


def test_a_client_of_many_streams_leaves_the_others_theirs(tmp_path: Path) -> None:
    path, _ = unbind(FOLLOW, ONE)
    answers = {FOLLOW: lambda request: iter([("first", Done()), 3600.0])}
    limits = RequestLimits(streams_of_one=1)
    with served(tmp_path, answers, tls=True, requests=limits) as rig, contextlib.ExitStack() as held:
        greedy, other = rig.token("greedy"), rig.token("other")
        statuses = []
        for token in (greedy, greedy, other):
            remote = held.enter_context(closing(rig.https()))
            remote.request("GET", path, headers={"authorization": f"Bearer {token}"})
            statuses.append(remote.getresponse().status)
        assert statuses == [200, 429, 200]
        assert next(held.enter_context(events(rig.path, path))) == ("first", {})


# -- a stop -----------------------------------------------------------------------------------------------


@pytest.mark.promise("clean-stop-leaves-nothing")
def test_a_stop_finishes_what_is_being_answered_and_takes_nothing_new(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, {READ: gate}) as rig, closing(LocalHttp(rig.path)) as slow:
        slow.request("GET", PATH)
        assert gate.taken.wait(20)
        stopping = threading.Thread(target=rig.stop)
        stopping.start()
        until(lambda: not is_running(rig.path))
        gate.open.set()
        answer = slow.getresponse()
        assert (answer.status, answer.read()) == (200, b"{}")
        stopping.join()
    assert not rig.path.exists()


@pytest.mark.timeout(30)
def test_a_stop_waits_for_no_idle_client_and_no_endless_stream(tmp_path: Path) -> None:
    answers = {FOLLOW: lambda request: iter([("first", Done()), 3600.0])}
    with (
        served(tmp_path, answers, tls=True, connections=ServerLimits(finish_s=300.0)) as rig,
        closing(LocalHttp(rig.path)) as idle,
        closing(unverified().wrap_socket(socket.create_connection(rig.address, 20.0))) as secret,
        events(rig.path, unbind(FOLLOW, ONE)[0]) as held,
    ):
        assert idle.ask("GET", PATH).status == 200
        secret.sendall(GET)
        assert secret.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        assert next(held) == ("first", {})
        rig.stop()
        assert list(held) == []


def test_who_follows_a_job_is_told_that_it_ended_with_the_planner(tmp_path: Path) -> None:
    began = threading.Event()

    def work(job: Job) -> Done:
        ended = threading.Event()
        job.when_cancelled(ended.set)
        began.set()
        assert ended.wait(20)
        job.check()
        return Done()

    with served(tmp_path, {WORK: lambda request: work}) as rig, rig.client() as client:
        followed = JobEventsRequest(job=client.start(WORK, ONE).job)
        assert began.wait(20)
        with events(rig.path, unbind(JOB_EVENTS, followed)[0]) as held:
            assert next(held)[0] == "progress"
            rig.stop()
            name, told = list(held)[-1]
        assert (name, told["state"]) == ("end", "cancelled")


def test_a_connection_that_is_closed_twice_does_not_keep_the_server_from_stopping(tmp_path: Path) -> None:
    """As uvicorn does where a client hangs up amid an answer; the client has not said its goodbye."""
    with (
        served(tmp_path, tls=True) as rig,
        closing(unverified().wrap_socket(socket.create_connection(rig.address, 20.0))) as held,
    ):
        held.sendall(GET)
        assert held.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        (connection,) = rig.server._state.connections
        for _ in range(2):
            rig.server._loop.call_soon_threadsafe(connection.transport.close)
        rig.stop()
    assert not rig.path.exists()
