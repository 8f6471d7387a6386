"""What the planner answers to a request, whatever the listener passes on."""

import pytest

from stageloom.planner.dispatch.ports import EnrolAttempt
from stageloom.planner.enrolment.service import BURST_PER_PEER, PER_S, EnrolmentDesk
from stageloom.shared.clock import ManualClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import enrol
from stageloom.shared.messages.base import RefusalCode, Refused

SECRET = b"s" * 16
KEY = "n" * 40


class Store:
    """Takes every secret; remembers what it was given."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.attempts: list[EnrolAttempt] = []
        self.failure = failure

    def enrol(self, attempt: EnrolAttempt) -> DeviceId:
        self.attempts.append(attempt)
        if self.failure is not None:
            raise self.failure
        return attempt.device


def _frame(correlation: int = 7) -> bytes:
    return enrol.TO_PLANNER.encode(
        enrol.EnrolRequest(correlation=correlation, secret=SECRET, public_key=KEY, device=DeviceId("new"))
    )


def _code(frame: bytes) -> RefusalCode:
    reply = enrol.TO_DEVICE.decode(frame)
    assert isinstance(reply, Refused)
    return reply.code


def test_a_key_is_admitted_before_its_device_is_told() -> None:
    store, admitted = Store(), []
    desk = EnrolmentDesk(store.enrol, lambda device, key: admitted.append((device, key)), ManualClock())
    reply = enrol.TO_DEVICE.decode(desk.answer("10.0.0.1", _frame()))
    assert reply == enrol.EnrolReply(correlation=7, device=DeviceId("new"))
    assert admitted == [("new", KEY)]


@pytest.mark.promise("key-files-enrolment-certificate")
def test_only_the_digest_of_a_secret_reaches_the_store() -> None:
    store = Store()
    EnrolmentDesk(store.enrol, lambda device, key: None, ManualClock()).answer("10.0.0.1", _frame())
    assert [one.secret_digest for one in store.attempts] == [digest_bytes([SECRET])]
    assert "ssss" not in repr(store.attempts)


@pytest.mark.promise("key-files-enrolment-certificate")
def test_a_peer_enrols_at_a_limited_rate_and_others_are_served() -> None:
    clock = ManualClock()
    desk = EnrolmentDesk(Store().enrol, lambda device, key: None, clock)
    replies = [desk.answer("10.0.0.1", _frame()) for _ in range(BURST_PER_PEER + 1)]
    assert _code(replies[-1]) is RefusalCode.RATE
    assert isinstance(enrol.TO_DEVICE.decode(replies[-2]), enrol.EnrolReply)
    assert isinstance(enrol.TO_DEVICE.decode(desk.answer("10.0.0.2", _frame())), enrol.EnrolReply)
    clock.advance(1.0)
    assert isinstance(enrol.TO_DEVICE.decode(desk.answer("10.0.0.1", _frame())), enrol.EnrolReply)


@pytest.mark.promise("key-files-enrolment-certificate")
def test_all_peers_together_reach_the_store_at_a_limited_rate() -> None:
    store = Store()
    desk = EnrolmentDesk(store.enrol, lambda device, key: None, ManualClock())
    for number in range(500):
        desk.answer(f"10.0.{number // 250}.{number % 250}", _frame())
    assert len(store.attempts) == PER_S


def test_what_is_no_request_never_reaches_the_store() -> None:
    store = Store()
    desk = EnrolmentDesk(store.enrol, lambda device, key: None, ManualClock())
    for frame in (b"", b"\x00\xc1", b"\x01" + bytes(100), _frame()[:-1], bytes(2000)):
        assert _code(desk.answer("10.0.0.1", frame)) is RefusalCode.MALFORMED
    assert store.attempts == []


def test_a_store_that_fails_is_no_fault_of_the_token() -> None:
    desk = EnrolmentDesk(
        Store(StorageError("disk full", remedy="")).enrol, lambda device, key: None, ManualClock()
    )
    assert _code(desk.answer("10.0.0.1", _frame())) is RefusalCode.INTERNAL
