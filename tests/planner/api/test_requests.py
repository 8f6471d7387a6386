"""Requests of the API: what is refused and how, keys that make a repeat harmless, the audit log, jobs."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.access import Principal
from stageloom.planner.api.application import KEY_HEADER
from stageloom.planner.api.bounds import RequestLimits
from stageloom.planner.api.idempotency import KeyUse, request_digest
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.problem import MEDIA_TYPE, ApiRefused
from stageloom.planner.api.route import unbind
from stageloom.planner.api.server import ServerLimits
from stageloom.planner.schema.access import AccessRevokeRequest, AuditListRequest, Role
from stageloom.planner.schema.base import Done
from stageloom.planner.schema.job import JobCancelRequest, JobEventsRequest, JobShowRequest, JobState
from stageloom.planner.schema.service import BackupRequest
from stageloom.planner.store import access as access_log
from stageloom.planner.store.access import audit_entries, note_request, take_key
from stageloom.shared.errors import (
    DecodeError,
    ExitCode,
    InputError,
    NotFoundError,
    RefusedError,
    StageloomError,
    StorageError,
    UnavailableError,
)
from tests.planner.api.http import Answer, asked, events
from tests.planner.api.rig import (
    READ,
    SECRET,
    STORED,
    UPLOAD,
    WORK,
    WRITE,
    ApiRig,
    Gate,
    TryRequest,
    served,
)
from tests.store.migrated import new_store

ONE = TryRequest(name="one")
READ_PATH, WRITE_PATH = unbind(READ, ONE)[0], unbind(WRITE, ONE)[0]


def refused(answer: Answer, status: int, detail: str) -> None:
    """Fails unless the answer is this problem."""
    assert (answer.status, answer.headers["content-type"]) == (status, MEDIA_TYPE), answer
    problem = answer.document
    assert problem["status"] == status and problem["title"] and detail in problem["detail"], problem
    assert problem["remedy"] and 1 <= problem["exit_code"] <= 255


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "detail"),
    [
        ("GET", "/v1/nothing", None, 404, "there is nothing at /v1/nothing"),
        ("GET", "/v1/try/read/one/", None, 404, "there is nothing at"),
        ("POST", READ_PATH, b"{}", 405, "POST is not possible at"),
        ("GET", f"{READ_PATH}?number=many", None, 422, "number: expected int"),
        ("GET", f"{READ_PATH}?number=-1", None, 422, "number: expected int >= 0"),
        ("GET", f"{READ_PATH}?number=1&number=2", None, 422, "gives 'number' twice"),
        ("GET", f"{READ_PATH}?name=two", None, 422, "gives 'name' twice"),
        ("GET", f"{READ_PATH}?colour=red", None, 422, "unknown field colour"),
        ("GET", "/v1/try/read/a%20b", None, 422, "name: not of the form that the schema asks for"),
        ("GET", "/v1/try/read/%00", None, 422, "name: not of the form that the schema asks for"),
        ("POST", WRITE_PATH, b"{", 422, "the body is no JSON"),
        ("POST", WRITE_PATH, b"\xff\xfe", 422, "the body is no JSON"),
        ("POST", WRITE_PATH, b"[" * 100_000, 422, "the body is no JSON"),
        ("POST", WRITE_PATH, b"[]", 422, "the body is no JSON object"),
        ("POST", WRITE_PATH, b'{"number": "1"}', 422, "number: expected int, got str"),
        ("POST", WRITE_PATH, b'{"number": NaN}', 422, "the body is no JSON"),
        ("POST", WRITE_PATH, b'{"name": "two"}', 422, "name is named by the path"),
        ("POST", WRITE_PATH, b'{"colour": "red"}', 422, "unknown field colour"),
        ("POST", f"{WRITE_PATH}?number=1", b"{}", 422, "takes no query parameters"),
    ],
)
def test_what_is_no_request_is_a_problem_with_cause_and_remedy(
    tmp_path: Path, method: str, target: str, body: bytes | None, status: int, detail: str
) -> None:
    with served(tmp_path) as rig:
        refused(asked(rig.path, method, target, body), status, detail)
        assert rig.calls == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFoundError("there is no device 'x'", remedy="see `stageloom device list`"), 404),
        (InputError("it does not fit", remedy="make it fit"), 422),
        (DecodeError("the plan is cut off", remedy="send it again"), 422),
        (RefusedError("it runs already", remedy="wait"), 409),
        (StageloomError("it cannot be", remedy="leave it"), 409),
        (UnavailableError("nobody answers", remedy="start it"), 503),
        (StorageError("the disk is full", remedy="make room"), 507),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_keeps_its_cause_its_remedy_and_its_exit_code(
    tmp_path: Path, error: StageloomError, status: int
) -> None:
    def fail(_: TryRequest) -> Done:
        raise error

    with served(tmp_path, {READ: fail}) as rig, rig.client() as client:
        with pytest.raises(ApiRefused) as caught:
            client.call(READ, ONE)
        assert (caught.value.status, str(caught.value)) == (status, str(error))
        assert caught.value.exit_code is error.exit_code


def test_a_failing_handler_fails_one_request_and_tells_nothing_of_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: TryRequest) -> Done:
        if request.number:
            raise ZeroDivisionError("secret")
        return Done()

    with served(tmp_path, {READ: fail}) as rig:
        failed = asked(rig.path, "GET", f"{READ_PATH}?number=1")
        refused(failed, 500, "the planner failed: ZeroDivisionError")
        assert b"secret" not in failed.body
        assert asked(rig.path, "GET", READ_PATH).status == 200
    assert [record.message for record in caplog.records if record.exc_info] == ["try.read failed"]


def test_a_body_may_have_so_many_bytes_and_no_more(tmp_path: Path) -> None:
    with served(tmp_path, requests=RequestLimits(body_bytes=64, upload_bytes=64)) as rig:
        fitting = b'{"number": 1}'.ljust(64)
        assert asked(rig.path, "POST", WRITE_PATH, fitting).status == 201
        refused(asked(rig.path, "POST", WRITE_PATH, fitting + b" "), 413, "larger than 64 bytes")
        target = unbind(UPLOAD, ONE)[0]
        assert asked(rig.path, "PUT", target, bytes(64)).status == 200
        refused(asked(rig.path, "PUT", target, bytes(65)), 413, "larger than 64 bytes")
    assert list(tmp_path.glob(".upload-*")) == []


def test_an_upload_is_a_file_while_it_is_handled(tmp_path: Path) -> None:
    bodies: list[tuple[int, bytes]] = []

    def take(request: TryRequest) -> Done:
        upload = rig.calls[-1].upload
        assert upload is not None and upload.is_relative_to(tmp_path)
        bodies.append((request.number, upload.read_bytes()))
        return Done()

    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 1000)
    with served(tmp_path, {UPLOAD: take}) as rig, rig.client() as client:
        client.upload(UPLOAD, TryRequest(name="one", number=3), file)
        refused(
            asked(rig.path, "PUT", unbind(UPLOAD, ONE)[0] + "?number=x", b"body"), 422, "number: expected"
        )
    assert bodies == [(3, file.read_bytes())]
    assert list(tmp_path.glob(".upload-*")) == []


def test_an_upload_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with served(tmp_path, requests=RequestLimits(free_bytes=2 * free, free_share=1.0)) as rig:
        answer = asked(rig.path, "PUT", unbind(UPLOAD, ONE)[0], b"body")
        refused(answer, 507, "the disk is full: an upload would leave less than")
        assert rig.calls == []
    assert list(tmp_path.glob(".upload-*")) == []


def test_an_upload_that_is_refused_before_it_was_sent_says_why(tmp_path: Path) -> None:
    """The server does not take the rest for long, and hangs up; what it said first is read all the same."""
    file = tmp_path / "file"
    with file.open("wb") as body:
        body.truncate(64 << 20)
    with served(tmp_path, tls=True, connections=ServerLimits(head_s=0.02)) as rig:
        _, dot, pinned = rig.token("ci").partition(".")
        with (
            rig.client(f"stl_{'x' * 43}{dot}{pinned}") as stranger,
            pytest.raises(ApiRefused, match="no valid access token"),
        ):
            stranger.upload(UPLOAD, ONE, file)


def test_a_list_in_a_query_is_repeated(tmp_path: Path) -> None:
    names = []

    def take(request: TryRequest) -> Done:
        names.append(request.names)
        return Done()

    with served(tmp_path, {READ: take}) as rig, rig.client() as client:
        client.call(READ, TryRequest(name="one", names=("a", "b")))
    assert names == [("a", "b")]


# -- keys -------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[ApiRig]:
    """`WRITE` and `SECRET` tell how often they were carried out."""
    carried_out: list[TryRequest] = []

    def carry_out(request: TryRequest) -> dict[str, int]:
        if request.number == 13:
            raise InputError("13 is out of luck", remedy="choose another")
        carried_out.append(request)
        return {"times": len(carried_out)}

    with served(tmp_path, {WRITE: carry_out, SECRET: carry_out}) as rig:
        yield rig


def write(rig: ApiRig, key: str, body: bytes = b"{}", path: str = WRITE_PATH) -> Answer:
    return asked(rig.path, "POST", path, body, {KEY_HEADER: key})


def test_a_request_that_is_repeated_with_its_key_is_carried_out_once(counted: ApiRig) -> None:
    first = write(counted, "k")
    assert (first.status, first.document) == (201, {"times": 1})
    again = write(counted, "k")
    assert (again.status, again.document) == (201, {"times": 1})
    assert write(counted, "other").document == {"times": 2}
    assert asked(counted.path, "POST", WRITE_PATH, b"{}").document == {"times": 3}


def test_a_key_is_for_one_request(counted: ApiRig) -> None:
    assert write(counted, "k").status == 201
    refused(write(counted, "k", b'{"number": 1}'), 422, "used for another request")
    secret = unbind(SECRET, ONE)[0]
    refused(write(counted, "k", path=secret), 422, "used for another request")


def test_a_request_that_failed_may_be_repeated_with_its_key(counted: ApiRig) -> None:
    refused(write(counted, "k", b'{"number": 13}'), 422, "out of luck")
    assert write(counted, "k").document == {"times": 1}


def test_a_secret_is_told_once(counted: ApiRig) -> None:
    secret = unbind(SECRET, ONE)[0]
    assert write(counted, "k", path=secret).document == {"times": 1}
    refused(write(counted, "k", path=secret), 422, "its secret is told once")


@pytest.mark.parametrize("key", ["x" * 129, "sch\u00f6n"])
def test_a_key_that_is_none_is_refused(counted: ApiRig, key: str) -> None:
    refused(write(counted, key), 422, "the idempotency key is not acceptable")
    assert counted.calls == []


def test_a_key_whose_request_is_being_carried_out_is_refused(tmp_path: Path) -> None:
    gate = Gate()
    answers: list[Answer] = []
    with served(tmp_path, {WRITE: gate}) as rig:
        first = threading.Thread(target=lambda: answers.append(write(rig, "k")))
        first.start()
        assert gate.taken.wait(20)
        refused(write(rig, "k"), 409, "is being carried out")
        gate.open.set()
        first.join()
        assert [answer.status for answer in answers] == [201]
        assert write(rig, "k").status == 201 and len(rig.calls) == 1


def test_an_answer_is_kept_over_a_restart(tmp_path: Path) -> None:
    with served(tmp_path, {WRITE: lambda request: {"life": 1}}) as rig:
        assert write(rig, "k").document == {"life": 1}
    with served(tmp_path, {WRITE: lambda request: {"life": 2}}) as rig:
        assert write(rig, "k").document == {"life": 1}
        assert write(rig, "new").document == {"life": 2}


def test_a_request_during_which_the_planner_ended_is_not_carried_out_again(tmp_path: Path) -> None:
    with served(tmp_path) as rig:
        use = KeyUse("local", "k", request_digest(WRITE, ONE))
        assert rig.store.write(take_key, *use) is None  # and here the planner dies
    with served(tmp_path) as rig:
        refused(write(rig, "k"), 409, "and may have done so")
        assert rig.calls == [] and write(rig, "new").status == 201


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("the store did not commit within 60 s", remedy="try again"),
        StorageError("the connection broke", remedy="see the log"),
        ZeroDivisionError("amid it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_request_that_may_have_been_carried_out_is_not_carried_out_again(
    tmp_path: Path, error: Exception
) -> None:
    def fail(_: TryRequest) -> Done:
        raise error

    with served(tmp_path, {WRITE: fail}) as rig:
        assert write(rig, "k").status >= 500
        refused(write(rig, "k"), 409, "and may have done so")
        assert len(rig.calls) == 1


def test_a_job_that_ended_with_the_planner_is_not_answered_as_if_it_ran(tmp_path: Path) -> None:
    path = unbind(STORED, ONE)[0]
    with served(tmp_path, {STORED: lambda request: lambda job: Done()}) as rig:
        first = write(rig, "k", path=path)
        assert first.status == 202 and write(rig, "k", path=path).document == first.document
    with served(tmp_path) as rig:
        refused(write(rig, "k", path=path), 409, "which the planner no longer knows")


def test_a_key_on_what_may_be_repeated_anyway_is_not_kept(tmp_path: Path) -> None:
    """An upload above all: two files may come with equal requests."""
    with served(tmp_path) as rig:
        for body in (b"one", b"other"):
            asked(rig.path, "PUT", unbind(UPLOAD, ONE)[0], body, {KEY_HEADER: "k"})
        assert len(rig.calls) == 2


# -- who asks, and the audit log --------------------------------------------------------------------------


def entries(rig: ApiRig) -> list[tuple[str, str, str, str, str, int]]:
    """The audit log, oldest first."""
    with rig.client() as client:
        found = [*client.pages(routes.AUDIT_LIST, AuditListRequest(limit=3))]
    return [
        (entry.who, entry.role, entry.source, entry.operation, entry.target, entry.status)
        for entry in reversed(found)
    ]


def test_the_audit_log_tells_who_changed_what_from_where_and_how_it_was_answered(tmp_path: Path) -> None:
    """Reads are not in it, but for those that were refused to who asked."""
    with served(tmp_path, tls=True) as rig:
        token = rig.token("ci")
        with rig.client(token) as viewer:
            viewer.call(READ, ONE)
            viewer.call(WRITE, ONE)
            with pytest.raises(ApiRefused, match=r"access\.list is for the role admin, and ci is viewer"):
                [*viewer.pages(routes.ACCESS_LIST, routes.ACCESS_LIST.request())]
        with rig.client() as owner:
            owner.call(routes.ACCESS_REVOKE, AccessRevokeRequest(name="ci"))
        with rig.client(token) as stranger, pytest.raises(ApiRefused) as caught:
            stranger.call(READ, ONE)
        assert (caught.value.status, caught.value.exit_code) == (401, ExitCode.DENIED)
        assert entries(rig) == [
            ("local", "admin", "local", "access.create", "ci", 201),
            ("ci", "viewer", "127.0.0.1", "try.write", "one", 201),
            ("ci", "viewer", "127.0.0.1", "access.list", "", 403),
            ("local", "admin", "local", "access.revoke", "ci", 200),
            ("", "", "127.0.0.1", "try.read", "one", 401),
        ]


def test_a_stranger_cannot_make_the_audit_log_unreadable(tmp_path: Path) -> None:
    with served(tmp_path, tls=True) as rig, closing(rig.https()) as connection:
        for name in ("a%00b", "%ff", "x" * 4000):
            connection.request("POST", f"/v1/devices/{name}/revoke")
            assert connection.getresponse().read()
        assert [(target, status) for *_, target, status in entries(rig)] == [
            ("a\ufffdb", 401),
            ("\ufffd", 401),
            ("x" * 128, 401),
        ]


def test_a_stranger_is_told_nothing_whatever_is_asked(tmp_path: Path) -> None:
    with served(tmp_path, tls=True) as rig, closing(rig.https()) as connection:
        for method, path in (
            ("GET", "/schema"),
            ("GET", "/v1/nothing"),
            ("PUT", "/v1/status"),
            ("HEAD", "/"),
        ):
            connection.request(method, path)
            answer = connection.getresponse()
            assert (answer.status, b"nothing" in answer.read()) == (401, False), path


def test_a_token_may_be_sent_with_what_it_pins_and_none_is_called_as_the_planners_owner(
    tmp_path: Path,
) -> None:
    with served(tmp_path, tls=True) as rig, closing(rig.https()) as connection:
        for token in (rig.token("ci"), rig.token("ci-2").partition(".")[0]):
            connection.request("GET", "/schema", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            assert (answer.status, answer.read()[:1]) == (200, b"{")
        with pytest.raises(ApiRefused, match="'local' is who asks where the planner runs"):
            rig.token("local", Role.ADMIN)


def test_a_file_is_sent_whole_or_not_at_all(tmp_path: Path) -> None:
    """It is made for each request: a part of one and the rest of another are neither."""
    with served(tmp_path) as rig:
        answer = asked(rig.path, "GET", "/v1/backup", headers={"Range": "bytes=0-9"})
        assert answer.status == 200 and len(answer.body) > 10 and "accept-ranges" not in answer.headers
        for path in ("/v1/backup", "/v1/watch/events"):
            refused_head = asked(rig.path, "HEAD", path)
            assert (refused_head.status, refused_head.headers["allow"]) == (405, "GET")
    assert list(tmp_path.glob(".backup-*")) == []


def test_a_backup_which_holds_the_keys_is_in_the_audit_log(tmp_path: Path) -> None:
    with served(tmp_path) as rig, rig.client() as owner:
        owner.download(routes.BACKUP, BackupRequest(), tmp_path / "backup.tar")
        assert entries(rig) == [("local", "admin", "local", "backup", "", 200)]


def test_a_flood_of_one_client_takes_no_entry_of_another_from_the_audit_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one of what the client itself did, where it floods with what is refused."""
    monkeypatch.setattr(access_log, "AUDIT_ROWS", 3)
    monkeypatch.setattr(access_log, "_THIN_EVERY", 1)
    with closing(new_store(tmp_path)) as store:
        for who, status in (("ci", 201), ("other", 201), *(("ci", 403),) * 9):
            store.write(note_request, Principal(who, Role.VIEWER, "::1"), "try", "it", status)
        found, _ = store.read(audit_entries)
        assert [(entry.who, entry.status) for entry in found] == [("ci", 403)] * 3 + [
            ("other", 201),
            ("ci", 201),
        ]


def test_an_entry_that_cannot_be_kept_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full", remedy="make room")

    with served(tmp_path) as rig, pytest.MonkeyPatch.context() as patched:
        patched.setattr("stageloom.planner.api.application.note_request", fail)
        assert asked(rig.path, "POST", WRITE_PATH).status == 201
    assert "the audit log lacks an entry: the disk is full" in caplog.text


def test_an_address_is_that_of_the_connection_whatever_a_client_claims(tmp_path: Path) -> None:
    with served(tmp_path, tls=True) as rig, rig.client(rig.token("ci")) as client:
        claims = {
            "X-Forwarded-For": "203.0.113.9",
            "X-Forwarded-Proto": "http",
            "Forwarded": "for=203.0.113.9",
        }
        sent = client._sent

        def claiming(method: str, path: str, body: Any, headers: dict[str, str], timeout_s: float) -> Any:
            return sent(method, path, body, {**headers, **claims}, timeout_s)

        client._sent = claiming  # type: ignore[method-assign]
        client.call(WRITE, ONE)
        assert entries(rig)[-1][:3] == ("ci", "viewer", "127.0.0.1")


# -- jobs -------------------------------------------------------------------------------------------------


def test_a_job_tells_its_progress_and_ends_with_its_result(tmp_path: Path) -> None:
    looked = threading.Event()

    def work(job: Job) -> Done:
        job.progress("half", done=1, size=2, figures={"best": 0.5})
        assert looked.wait(20)
        return Done()

    with served(tmp_path, {WORK: lambda request: work}) as rig, rig.client() as client:
        started = asked(rig.path, "POST", unbind(WORK, ONE)[0])
        assert started.status == 202
        info = started.document
        assert started.headers["location"] == f"/v1/jobs/{info['job']}"
        assert (info["operation"], info["who"]) == ("try.work", "local")
        told = []
        with events(rig.path, f"/v1/jobs/{info['job']}/events") as followed:
            for name, value in followed:
                told.append((name, value["state"], value["progress"]["text"]))
                if value["progress"]["text"]:
                    assert value["progress"]["figures"] == {"best": 0.5}
                    looked.set()
        assert told[-1] == ("end", "done", "half") and ("progress", "running", "half") in told
        shown = client.call(routes.JOB_SHOW, JobShowRequest(job=info["job"]))
        assert (shown.state, shown.result) == (JobState.DONE, {})
        assert client.call(WORK, ONE) == Done()


def test_a_job_that_fails_tells_why_to_who_follows_it(tmp_path: Path) -> None:
    def work(_: Job) -> Done:
        raise NotFoundError("there is no device 'x'", remedy="see `stageloom device list`")

    with served(tmp_path, {WORK: lambda request: work}) as rig, rig.client() as client:
        with pytest.raises(ApiRefused, match="there is no device 'x'; see") as caught:
            client.call(WORK, ONE)
        assert (caught.value.status, caught.value.exit_code) == (404, ExitCode.USAGE)


def test_a_job_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    began, ended = threading.Event(), threading.Event()

    def work(job: Job) -> Done:
        job.when_cancelled(ended.set)
        began.set()
        assert ended.wait(20)
        job.check()
        return Done()

    with served(tmp_path, {WORK: lambda request: work}) as rig, rig.client() as client:
        info = client.start(WORK, ONE)
        assert began.wait(20)
        client.call(routes.JOB_CANCEL, JobCancelRequest(job=info.job))
        *_, end = client.follow(info.job)
        assert end.state is JobState.CANCELLED and end.problem is not None
        assert client.call(routes.JOB_CANCEL, JobCancelRequest(job=info.job)).state is JobState.CANCELLED


def test_a_job_that_there_is_not_is_not_found_before_a_stream_begins(tmp_path: Path) -> None:
    with served(tmp_path) as rig:
        target, _ = unbind(routes.JOB_EVENTS, JobEventsRequest(job="0"))
        refused(asked(rig.path, "GET", target), 404, "there is no job 0")
        refused(asked(rig.path, "GET", "/v1/watch/events?device=ghost"), 404, "there is no device 'ghost'")


def test_jobs_end_with_the_planner(tmp_path: Path) -> None:
    began = threading.Event()

    def work(job: Job) -> Done:
        ended = threading.Event()
        job.when_cancelled(ended.set)
        began.set()
        assert ended.wait(20)
        job.check()
        return Done()

    with served(tmp_path, {WORK: lambda request: work}) as rig, rig.client() as client:
        info = client.start(WORK, ONE)
        assert began.wait(20)
        rig.context.jobs.close()
        assert rig.context.jobs.get(info.job).info.state is JobState.CANCELLED
        refused(asked(rig.path, "POST", unbind(WORK, ONE)[0]), 409, "jobs run already")
