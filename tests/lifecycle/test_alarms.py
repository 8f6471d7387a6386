"""An alarm on its way to the planner, through the device's core: lost, late, repeated, superseded."""

from typing import Any

import pytest

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.shared.messages import control
from tests.lifecycle.driver import Driver

BOOT = 11  # the driver's


def raised(value: float = 1.0, **fields: Any) -> control.Alarm:
    given: dict[str, Any] = {
        "boot": 0,
        "number": 1,
        "at_us": 1,
        "cause": "variance",
        "value": value,
        "threshold": 0.0625,
        "plan": None,
        "loads": (control.ModelLoad("m", 10.0, 5_000.0, 20, 400_000),),
        "samples": (control.AlarmSample((1,), (0.5,)),) * 10,
    }
    return control.Alarm(**(given | fields))


def alarms(actions: list[ev.Action]) -> list[control.Alarm]:
    return [
        action.message
        for action in actions
        if isinstance(action, ev.SendMessage) and isinstance(action.message, control.Alarm)
    ]


def ack(number: int, boot: int = BOOT) -> ev.Received:
    return ev.Received(control.AlarmAck(boot=boot, number=number))


@pytest.mark.promise("alarm-sent-until-acknowledged")
def test_an_alarm_is_sent_at_once_and_again_until_it_is_acknowledged() -> None:
    driver = Driver().online()
    (first,) = alarms(driver.do(raised()))
    assert (first.boot, first.number, first.cause) == (BOOT, 1, "variance")
    assert len(first.loads) == 1 and len(first.samples) == 10
    assert alarms(driver.do(ev.TimePassed(), after_s=0.5)) == []
    assert alarms(driver.do(ev.TimePassed(), after_s=0.6)) == [first]
    assert alarms(driver.do(ev.TimePassed(), after_s=1.1)) == [first]
    driver.do(ack(1))
    driver.do(ack(1))
    assert alarms(driver.do(ev.TimePassed(), after_s=5.0)) == []


def test_an_alarm_that_is_raised_while_the_planner_is_away_is_sent_when_it_is_back() -> None:
    driver = Driver()
    assert alarms(driver.do(raised())) == []
    assert alarms(driver.do(ev.TimePassed(), after_s=100.0)) == []
    assert alarms(driver.do(ev.Connected())) == [], "not before the session stands"
    welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
    (sent,) = alarms(driver.do(ev.Received(welcome)))
    assert sent.number == 1


def test_a_reconnect_repeats_the_same_alarm_at_once() -> None:
    driver = Driver().online()
    (first,) = alarms(driver.do(raised()))
    driver.do(ev.Lost(), after_s=0.1)
    driver.do(ev.Connected())
    welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
    assert alarms(driver.do(ev.Received(welcome))) == [first]


def test_only_the_newest_alarm_is_repeated_and_a_late_ack_of_an_older_one_does_not_silence_it() -> None:
    driver = Driver().online()
    driver.do(raised(1.0))
    (second,) = alarms(driver.do(raised(2.0), after_s=0.1))
    assert (second.number, second.value) == (2, 2.0)
    driver.do(ack(1), after_s=0.1)
    assert alarms(driver.do(ev.TimePassed(), after_s=2.0)) == [second]
    driver.do(ack(2))
    assert alarms(driver.do(ev.TimePassed(), after_s=2.0)) == []


@pytest.mark.promise("alarm-sent-until-acknowledged")
def test_a_drift_that_is_not_acknowledged_is_told_before_the_alarms_that_follow_it() -> None:
    """Only a drift renews costs, and the device raises it once."""
    driver = Driver()
    driver.do(raised(cause="drift"))
    driver.do(raised(cause="age"))
    driver.do(raised(cause="variance"))
    driver.do(ev.Connected())
    welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
    drift, newest = alarms(driver.do(ev.Received(welcome)))
    assert [(one.number, one.cause) for one in (drift, newest)] == [(1, "drift"), (3, "variance")]
    driver.do(ack(3))
    assert alarms(driver.do(ev.TimePassed(), after_s=1.1)) == [drift]
    driver.do(ack(1, boot=BOOT + 1))
    driver.do(ack(2))
    assert alarms(driver.do(ev.TimePassed(), after_s=1.1)) == [drift]
    driver.do(ack(1))
    assert alarms(driver.do(ev.TimePassed(), after_s=1.1)) == []


def test_a_drift_gives_way_to_a_newer_one_and_to_another_environment() -> None:
    driver = Driver()
    driver.do(raised(cause="variance"))
    driver.do(raised(1.0, cause="drift"))
    driver.do(raised(2.0, cause="drift"))
    driver.online()
    assert [one.value for one in alarms(driver.do(ev.TimePassed(), after_s=1.1))] == [2.0]
    driver.do(ev.EnvironmentChanged("env at 15 W"))
    (newest,) = alarms(driver.do(raised(cause="power_mode"), after_s=1.1))
    assert newest.number == 4


@pytest.mark.parametrize(
    ("causes", "after_s", "sent"),
    [
        (["variance"], 121.0, []),
        (["oldest_age"], 121.0, []),
        (["regime"], 7200.0, ["regime"]),
        (["power_mode", "variance"], 7200.0, ["power_mode"]),
        (["regime", "variance", "oldest_age"], 118.0, ["oldest_age"]),
        (["drift", "variance"], 7200.0, ["drift"]),
        (["variance", "regime"], 7200.0, ["regime"]),
    ],
)
def test_what_queues_were_minutes_ago_is_not_told_when_the_planner_is_back_and_what_is_told_once_is(
    causes: list[str], after_s: float, sent: list[str]
) -> None:
    driver = Driver()
    for cause in causes:
        driver.do(raised(cause=cause))
    driver.do(ev.TimePassed(), after_s=after_s)
    actions = driver.online().do(ev.TimePassed(), after_s=1.1)
    told = alarms(actions)
    assert [one.cause for one in told] == sent
    for one in told:
        driver.do(ack(one.number))
    assert alarms(driver.do(ev.TimePassed(), after_s=1.1)) == [], "nor what stood behind it"
    dropped = causes[-1] in ("variance", "oldest_age") and after_s > 120.0
    assert driver.core.alarms.dropped == int(dropped), "the trigger learns that nobody was asked"


def test_an_ack_of_another_boot_acknowledges_nothing() -> None:
    driver = Driver().online()
    driver.do(raised())
    driver.do(ack(1, boot=BOOT + 1))
    assert len(alarms(driver.do(ev.TimePassed(), after_s=2.0))) == 1


def test_a_new_boot_numbers_its_alarms_from_one_and_forgets_the_old_ones() -> None:
    driver = Driver().online()
    driver.do(raised())
    revived = Driver(driver.disk).online()
    assert alarms(revived.do(ev.TimePassed(), after_s=2.0)) == []
    (first,) = alarms(revived.do(raised()))
    assert first.number == 1


def test_a_full_disk_does_not_keep_an_alarm_from_the_planner() -> None:
    driver = Driver().online()
    driver.full = True
    driver.do(ev.EnvironmentChanged("other"))
    assert driver.core.disk.error
    assert len(alarms(driver.do(raised()))) == 1


@pytest.mark.promise("another-power-mode-planned")
def test_a_change_of_power_mode_is_said_before_the_alarm_that_it_causes_and_in_it() -> None:
    """And once: the same environment again is nothing new."""
    driver = Driver().online()
    actions = driver.do(ev.EnvironmentChanged("env at 15 W"))
    hellos = [one.message for one in actions if isinstance(one, ev.SendMessage)]
    assert [(type(one), one.device_class) for one in hellos] == [(control.Hello, "env at 15 W")]  # type: ignore[union-attr]
    (alarm,) = alarms(driver.do(raised(cause="power_mode")))
    assert (alarm.cause, alarm.environment) == ("power_mode", "env at 15 W")
    assert driver.do(ev.EnvironmentChanged("env at 15 W")) == []
