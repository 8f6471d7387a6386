"""Alarms and local plans in dispatch's core: answered after the commit, however often they come."""

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import FleetMember
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import control
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import Alarm, AlarmAck, Desired, LocalPlan

A, KEY = DeviceId("a"), "a" * 40
PLAN = digest_bytes([b"plan"])
ALARM = Alarm(
    boot=1, number=1, at_us=5, cause="variance", value=1.0, threshold=0.1, plan=None, loads=(), samples=()
)
LOCAL = LocalPlan(
    boot=1,
    epoch=1,
    generation=1,
    local_counter=1,
    plan_digest=PLAN,
    plan=b"p",
    artifacts=(),
    cause="variance",
)


def core_with_session() -> DispatchCore:
    core = DispatchCore([FleetMember(A, KEY)], epoch=1, config=DispatchConfig())
    hello = control.Hello(
        boot=1, connection=1, agent_version="", device_class="", report=control.Report(revision=1)
    )
    core.handle(ev.ControlReceived(b"r", KEY, hello), 0.0)
    return core


def received(message: Alarm | LocalPlan, route: bytes = b"r") -> ev.ControlReceived:
    return ev.ControlReceived(route, KEY, message)


def test_an_alarm_is_acknowledged_after_its_commit_and_not_before() -> None:
    core = core_with_session()
    assert core.handle(received(ALARM), 1.0) == [ev.StoreAlarm(A, ALARM)]
    due, ack = core.handle(ev.AlarmStored(A, ALARM, 7), 1.1)
    assert due == ev.ReplanDue(A, 7)
    assert isinstance(ack, ev.Send) and ack.message == AlarmAck(boot=1, number=1)


def test_an_alarm_that_comes_again_before_its_commit_is_stored_once_and_answered_once() -> None:
    core = core_with_session()
    core.handle(received(ALARM), 1.0)
    assert core.handle(received(ALARM), 1.1) == []
    assert len(core.handle(ev.AlarmStored(A, ALARM, 7), 1.2)) == 2
    assert core.handle(received(ALARM), 1.3) == [ev.StoreAlarm(A, ALARM)]
    (only,) = core.handle(ev.AlarmStored(A, ALARM, None), 1.4)
    assert isinstance(only, ev.Send) and isinstance(only.message, AlarmAck)


def test_a_replan_is_told_of_once_and_also_where_the_first_answer_of_the_store_was_lost() -> None:
    core = core_with_session()
    core.handle(received(ALARM), 1.0)
    assert core.handle(ev.AlarmStored(A, ALARM, ok=False), 1.1) == []
    for expected in ([ev.ReplanDue(A, 7)], []):
        core.handle(received(ALARM), 1.2)
        *due, ack = core.handle(ev.AlarmStored(A, ALARM, 7), 1.3)
        assert due == expected and isinstance(ack, ev.Send)


def test_an_alarm_that_the_store_could_not_keep_has_no_acknowledgement() -> None:
    core = core_with_session()
    core.handle(received(ALARM), 1.0)
    assert core.handle(ev.AlarmStored(A, ALARM, ok=False), 1.1) == []
    assert core.handle(received(ALARM), 2.0) == [ev.StoreAlarm(A, ALARM)]


def test_an_alarm_without_a_session_or_of_a_revoked_device_is_refused() -> None:
    core = core_with_session()
    (refusal,) = core.handle(received(ALARM, b"another route"), 1.0)
    assert isinstance(refusal, ev.Send) and isinstance(refusal.message, Refused)
    assert refusal.message.code is RefusalCode.HELLO_FIRST
    core.handle(ev.Revoked(A), 2.0)
    (refusal,) = core.handle(received(ALARM), 3.0)
    assert isinstance(refusal, ev.Send) and isinstance(refusal.message, Refused)
    assert refusal.message.code is RefusalCode.REVOKED


def test_a_local_plan_is_answered_by_the_desired_value_that_adopts_it_or_by_nothing() -> None:
    core = core_with_session()
    assert core.handle(received(LOCAL), 1.0) == [ev.AdoptLocal(A, LOCAL)]
    assert core.handle(received(LOCAL), 1.1) == [], "the store is at it"
    assert core.handle(ev.LocalSettled(A, LOCAL, None), 1.2) == []
    core.handle(received(LOCAL), 2.0)
    adopted = Desired(epoch=1, generation=2, plan_digest=PLAN, plan=b"p")
    (answer,) = core.handle(ev.LocalSettled(A, LOCAL, adopted), 2.1)
    assert isinstance(answer, ev.Send) and answer.message == adopted


def test_a_local_plan_that_may_not_be_is_refused_with_the_reason_and_counted() -> None:
    core = core_with_session()
    core.handle(received(LOCAL), 1.0)
    (answer,) = core.handle(ev.LocalSettled(A, LOCAL, refused="it may not plan alone"), 1.1)
    assert isinstance(answer, ev.Send) and answer.route == b"r" and isinstance(answer.message, Refused)
    assert answer.message.code is RefusalCode.NOT_PERMITTED
    assert answer.message.reason == "it may not plan alone"
    assert core.counts["local_plan_refused"] == 1
    assert core.handle(received(LOCAL), 2.0) == [ev.AdoptLocal(A, LOCAL)], "a repeat is asked again"
