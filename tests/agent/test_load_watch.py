"""What the agent makes of the engine's statistics."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.lifecycle.events import EnvironmentChanged
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.session import AlarmBox
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.replan.load_watch import ChosenFile, LoadWatch
from stageloom.edge_agent.worker.messages import Stats, StepStats
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Alarm, AlarmAck, Origin
from stageloom.shared.messages.telemetry import CoreRange, MachineFacts, RowData, StepTimings
from stageloom.shared.policy.trigger import Trigger
from tests.agent.test_alarms import DAY, NIGHT, SERVICE_S, Device
from tests.lifecycle.test_alarms import raised


def _watch(rows: list[RowData]) -> LoadWatch:
    """With no plan loaded any more."""
    parts: Any = SimpleNamespace(
        config=AgentConfig(),
        machine=SimpleNamespace(power_mode=""),
        plans=SimpleNamespace(plan_of=lambda key: None, facts_of=lambda digest: None),
        profiles=SimpleNamespace(drift=SimpleNamespace(add=lambda *_, **__: None)),
        journal=SimpleNamespace(record=rows.extend),
    )
    return LoadWatch(parts)


def test_the_last_steps_of_a_plan_that_was_freed_since_are_told() -> None:
    rows: list[RowData] = []
    watch = _watch(rows)
    for key, digest in ((1, "a" * 64), (2, "b" * 64)):
        watch.plan_active(PlanKey(key), PlanFacts(Digest(digest), {}, {}))
    watch.stats_arrived(Stats(1.0, 2, 1.0, (), (StepStats(1, 0, 1, 3), StepStats(2, 0, 1, 4))))
    assert [(row.plan[0], row.count) for row in rows if isinstance(row, StepTimings)] == [("a", 3), ("b", 4)]


def test_another_power_mode_is_told_once_and_is_no_drift() -> None:
    """Steps take another time in it: a drift that is told beside it would end the re-plan for the mode."""
    answered, handled, rows = list[float](), list[object](), list[RowData]()
    machine = SimpleNamespace(power_mode="", environment=lambda: "in another mode")
    parts: Any = SimpleNamespace(
        config=AgentConfig(),
        machine=machine,
        profiles=SimpleNamespace(drift=SimpleNamespace(answered=lambda: answered.append(1.0))),
        lifecycle=SimpleNamespace(handle=handled.append),
        journal=SimpleNamespace(record=rows.extend),
    )
    watch = LoadWatch(parts)
    for mode in ("", "fast", "fast"):
        machine.power_mode = mode
        watch.tell_mode()
    assert handled == [EnvironmentChanged("in another mode")] and len(answered) == len(rows) == 1


def test_the_cores_that_another_power_mode_leaves_are_told_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the planner would go on to plan for those that the agent had at its start."""
    told: list[object] = []
    machine = SimpleNamespace(power_mode="MAXN", environment=lambda: "in another mode")
    parts: Any = SimpleNamespace(
        config=AgentConfig(intra_op_threads=2),
        machine=machine,
        profiles=SimpleNamespace(drift=SimpleNamespace(answered=lambda: None)),
        lifecycle=SimpleNamespace(handle=told.append),
        journal=SimpleNamespace(record=told.extend),
    )
    watch = LoadWatch(parts)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    watch.tell_mode()
    assert not told
    machine.power_mode = "10W"
    watch.tell_mode()
    facts, changed = told
    assert isinstance(facts, MachineFacts) and isinstance(changed, EnvironmentChanged)
    assert (facts.cores, facts.intra_op_threads) == ((CoreRange(0, 1),), 2)


def test_keys_of_an_engine_process_that_is_gone_name_no_plan() -> None:
    rows: list[RowData] = []
    watch = _watch(rows)
    watch.plan_active(PlanKey(1), PlanFacts(Digest("a" * 64), {}, {}))
    watch.engine_exited()
    watch.stats_arrived(Stats(1.0, 1, 1.0, (), (StepStats(1, 0, 1, 3),)))
    assert rows == []


def _watched(
    handled: list[object],
    *,
    mode: str = "",
    environment: str = "",
    chosen: ChosenFile | None = None,
    box: AlarmBox | None = None,
    **plans: Any,
) -> Device:
    """A device whose glances go to a watch of a machine in this power mode; what that raises is `handled`."""
    device, alarms = Device(), box or AlarmBox(1)
    ignored: Any = lambda *_, **__: None  # noqa: E731
    machine = SimpleNamespace(power_mode=mode, mode_then=lambda before: before)

    def handle(alarm: Any) -> None:
        handled.append(alarm)
        alarms.take(alarm, "", device.driver.now)

    held: dict[str, Any] = {"incumbent": None, "phase": None, "facts_of": ignored, "plan_of": ignored}
    parts: Any = SimpleNamespace(
        config=AgentConfig(),
        machine=machine,
        plans=SimpleNamespace(**held | plans),
        profiles=SimpleNamespace(drift=SimpleNamespace(ratio=1.0)),
        journal=SimpleNamespace(note=ignored),
        waiting=SimpleNamespace(seen=ignored),
        lifecycle=SimpleNamespace(handle=handle, core=SimpleNamespace(alarms=alarms)),
        local=SimpleNamespace(fired=ignored),
        background=SimpleNamespace(run=lambda work, then: then(work())),
    )
    watch: Any = LoadWatch(parts, environment, chosen)
    watch._service = SimpleNamespace(per_task_us=lambda: {name: one * 1e6 for name, one in SERVICE_S.items()})
    device.alarms = SimpleNamespace(  # type: ignore[assignment]
        glance=lambda seen, *_, **__: watch.glanced(seen, alarms=True, disturbed=False)
    )
    return device


def test_a_trial_is_told_since_when_other_tasks_come_and_of_no_burst() -> None:
    told: list[float] = []
    handled: list[object] = []
    device = _watched(handled, tried=object(), arrivals_moved=told.append)
    device.run(60.0, NIGHT)
    device.run(3.0, NIGHT | {"a": 40.0})
    device.run(20.0, NIGHT)
    assert told == handled == []
    began_s = device.driver.now
    device.run(20.0, DAY)
    (since_s,), (alarm,) = told, handled
    assert isinstance(alarm, Alarm) and alarm.cause == "regime"
    assert began_s <= since_s <= began_s + 5.0


@pytest.mark.parametrize(("after", "causes"), [(DAY, []), (NIGHT, ["regime"])])
def test_a_restart_compares_arrivals_with_those_that_the_plan_was_chosen_for(
    tmp_path: Path, after: dict[str, float], causes: list[str]
) -> None:
    plan = RunnablePlan(PlanRef(Digest("a" * 64), Origin.PLANNER), b"", ())
    facts = PlanFacts(plan.ref.digest, {}, {}, structure=Digest("d" * 64))
    handled: list[object] = []
    for per_s in (DAY, after):
        file = ChosenFile(tmp_path / "chosen_for")
        plans: dict[str, Any] = {"tried": None, "plan_of": lambda key: plan, "facts_of": lambda digest: facts}
        device = _watched(handled, chosen=file, arrivals_moved=lambda since_s: None, **plans)
        device.run(60.0, per_s)
    assert [one.cause for one in handled if isinstance(one, Alarm)] == causes


def test_a_power_mode_that_took_a_reboot_is_told_once_after_it() -> None:
    for environment, causes in (("15W", ["power_mode"]), ("", [])):
        handled: list[object] = []
        _watched(handled, mode="MAXN", environment=environment, tried=None).run(60.0, NIGHT)
        assert [one.cause for one in handled if isinstance(one, Alarm)] == causes


def test_the_trigger_learns_once_that_an_alarm_for_queues_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would wait as long with the next as if the planner had found nothing for this one."""
    unheard: list[Trigger] = []
    monkeypatch.setattr(Trigger, "unheard", lambda trigger: unheard.append(trigger))
    box = AlarmBox(1)
    device = _watched([], box=box, tried=None)
    box.take(raised(), "", 0.0)
    device.run(1.0, NIGHT)
    assert not unheard
    assert box.due(121.0, 1.0) is None
    device.run(1.0, NIGHT)
    assert len(unheard) == 1


@pytest.mark.parametrize("drifts", [True, False])
@pytest.mark.parametrize("heard", [True, False])
def test_other_arrivals_are_told_again_after_a_restart_unless_the_planner_has_heard_of_them(
    tmp_path: Path, *, heard: bool, drifts: bool
) -> None:
    """1. By day. 2. By night, and the planner may be away. A drift may take the alarm's place. 3. By night,
    after another start of the agent."""
    plan = RunnablePlan(PlanRef(Digest("a" * 64), Origin.PLANNER), b"", ())
    facts = PlanFacts(plan.ref.digest, {}, {}, structure=Digest("d" * 64))
    for per_s, causes in ((DAY, []), (NIGHT, ["regime"]), (NIGHT, [] if heard else ["regime"])):
        handled: list[object] = []
        box, file = AlarmBox(1), ChosenFile(tmp_path / "chosen_for")
        plans: dict[str, Any] = {"tried": None, "plan_of": lambda key: plan, "facts_of": lambda digest: facts}
        device = _watched(handled, chosen=file, box=box, arrivals_moved=lambda since_s: None, **plans)
        device.run(60.0, per_s)
        assert [one.cause for one in handled if isinstance(one, Alarm)] == causes
        if drifts and causes:
            box.take(raised(cause="drift"), "", device.driver.now)
        if heard:
            box.acknowledged(AlarmAck(boot=1, number=2 if drifts else 1))
        device.run(10.0, per_s)


@pytest.mark.parametrize(
    ("whose", "after", "then"),
    [
        (Origin.LOCAL, NIGHT, []),
        (Origin.LOCAL, DAY, ["regime"]),
        (Origin.PLANNER, NIGHT, ["regime"]),
        (Origin.PLANNER, DAY, []),
    ],
)
def test_a_start_compares_with_the_arrivals_that_the_plan_was_found_for_which_won_since_they_moved(
    tmp_path: Path, whose: Origin, after: dict[str, float], then: list[str]
) -> None:
    """1. By day. 2. By night, which the planner does not hear of, another plan takes over: one of the
    device's own, or one of the planner's that was on trial. 3. Another start."""
    runs = {"plan": "d" * 64}
    plan = RunnablePlan(PlanRef(Digest("a" * 64), whose), b"", ())

    def facts_of(digest: Digest) -> PlanFacts:
        return PlanFacts(digest, {}, {}, structure=Digest(runs["plan"]))

    for per_s, causes in ((DAY, []), (NIGHT, ["regime"]), (after, then)):
        handled: list[object] = []
        plans: dict[str, Any] = {"tried": None, "plan_of": lambda key: plan, "facts_of": facts_of}
        file = ChosenFile(tmp_path / "chosen_for")
        device = _watched(handled, chosen=file, arrivals_moved=lambda since_s: None, **plans)
        device.run(60.0, per_s)
        assert [one.cause for one in handled if isinstance(one, Alarm)] == causes
        if per_s is NIGHT:
            runs["plan"] = "e" * 64
            device.run(10.0, per_s)


def test_what_is_told_once_is_not_heard_of_before_the_drift_that_took_its_place_is() -> None:
    box, untold = AlarmBox(1), list[bool]()
    for cause in ("drift", "regime", "drift"):
        box.take(raised(cause=cause), "", 0.0)
        untold.append(box.told_once)
    for number in (1, 3):
        box.acknowledged(AlarmAck(boot=1, number=number))
        untold.append(box.told_once)
    assert untold == [False, True, True, True, False]


@pytest.mark.parametrize("heard", [True, False])
def test_another_power_mode_is_told_again_after_a_restart_unless_the_planner_has_heard_of_it(
    tmp_path: Path, *, heard: bool
) -> None:
    """The state on disk names the new environment from the change on. Whatever plan runs by then."""
    starts: tuple[tuple[str, str, list[str]], ...] = (
        ("15W", "15W", []),
        ("MAXN", "15W", ["power_mode"]),
        ("MAXN", "MAXN", [] if heard else ["power_mode"]),
    )
    plan = RunnablePlan(PlanRef(Digest("a" * 64), Origin.PLANNER), b"", ())
    held: dict[str, Any] = {"tried": None, "plan_of": lambda key: plan}
    for start, (mode, environment, causes) in enumerate(starts):
        handled: list[object] = []
        box, file = AlarmBox(1), ChosenFile(tmp_path / "chosen_for")
        facts = PlanFacts(plan.ref.digest, {}, {}, structure=Digest(f"{start}" * 64))
        held["facts_of"] = lambda digest, facts=facts: facts
        device = _watched(handled, mode=mode, environment=environment, chosen=file, box=box, **held)
        device.run(60.0, NIGHT)
        assert [one.cause for one in handled if isinstance(one, Alarm)] == causes
        if heard:
            box.acknowledged(AlarmAck(boot=1, number=1))
        device.run(1.0, NIGHT)
