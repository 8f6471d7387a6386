"""The admin socket: typed requests and replies, errors that keep their exit codes, mode 0600."""

import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import zmq

from stageloom.planner.dispatch.admin import AdminRefused, AdminServer, call
from stageloom.shared.errors import ExitCode, InputError, SettingError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin

HOLD = threading.Event()


def _handle(request: admin.AdminRequest) -> admin.AdminReply:
    match request:
        case admin.DeviceListRequest():
            return admin.DeviceListReply(devices=())
        case admin.DeviceRevokeRequest():
            raise InputError(f"no such device: {request.device}", remedy="see `stageloom device list`")
        case admin.PlanShowRequest():
            HOLD.wait(20)
            return admin.Done()
    raise ZeroDivisionError


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    HOLD.clear()
    where = tmp_path / "admin.sock"
    server = AdminServer(where, _handle)
    server.start()
    yield where
    HOLD.set()
    server.stop()
    assert not where.exists()


def test_only_the_owner_may_open_the_socket(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) & 0o177 == 0


def test_a_request_gets_its_typed_reply(path: Path) -> None:
    assert call(path, admin.DeviceListRequest(correlation=7), admin.DeviceListReply).correlation == 7


def test_an_error_keeps_its_sentence_and_exit_code(path: Path) -> None:
    with pytest.raises(AdminRefused, match=r"no such device: x; see `stageloom device list`") as caught:
        call(path, admin.DeviceRevokeRequest(device=DeviceId("x")), admin.Done)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_failing_handler_fails_one_request(path: Path) -> None:
    with pytest.raises(AdminRefused, match="ZeroDivisionError"):
        call(path, admin.StatusRequest(), admin.StatusReply)
    assert call(path, admin.DeviceListRequest(), admin.DeviceListReply)


def test_a_slow_request_does_not_hold_up_the_others(path: Path) -> None:
    slow = threading.Thread(target=lambda: call(path, admin.PlanShowRequest(plan="p"), admin.Done))
    slow.start()
    assert call(path, admin.DeviceListRequest(), admin.DeviceListReply)
    assert slow.is_alive()
    HOLD.set()
    slow.join()


def test_garbage_is_answered_and_forgotten(path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        requester = context.socket(zmq.REQ)
        requester.connect(f"ipc://{path}")
        requester.send(b"\x00\xc1")
        assert isinstance(admin.REPLIES.decode(requester.recv()), admin.Failed)
    finally:
        context.destroy(linger=0)
    assert call(path, admin.DeviceListRequest(), admin.DeviceListReply)


def test_no_planner_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="start one with `stageloom up`"):
        call(tmp_path / "none.sock", admin.StatusRequest(), admin.StatusReply)


def test_a_silent_planner_is_an_error_in_time(path: Path) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        call(path, admin.PlanShowRequest(plan="p"), admin.Done, timeout_s=0.2)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="too long"):
        AdminServer(tmp_path / ("x" * 120), _handle)


@pytest.mark.promise("requests-wait-store-wait")
def test_requests_that_wait_for_the_store_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Many more pushes than threads; none is answered before the last one was taken."""
    many, taken = 200, list[Future[admin.AdminReply]]()
    last = threading.Event()

    def handle(_request: admin.AdminRequest) -> Future[admin.AdminReply]:
        taken.append(Future())
        if len(taken) == many:
            last.set()
        return taken[-1]

    server = AdminServer(tmp_path / "admin.sock", handle)
    server.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as requests:
        requests.setsockopt(zmq.LINGER, 0)
        requests.connect(f"ipc://{tmp_path / 'admin.sock'}")
        for number in range(many):
            push = admin.PlanPushRequest(correlation=number, plan="p", device=DeviceId("d"))
            requests.send_multipart([b"", admin.REQUESTS.encode(push)])
        assert last.wait(20)
        taken[0].set_exception(InputError("no such plan: p"))
        for future in taken[1:]:
            future.set_result(admin.Done())
        replies = [admin.REPLIES.decode(requests.recv_multipart()[1]) for _ in range(many)]
    server.stop()
    assert {reply.correlation for reply in replies} == set(range(many))
    assert [type(reply) for reply in replies].count(admin.Failed) == 1
