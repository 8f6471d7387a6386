"""Last-known-good that does not load, while nothing else runs: patience, tries, and what the link hears."""

from random import Random
from typing import Any

import pytest

from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.events import Action, CheckPlan, LoadInEngine, StartEngine, StopEngine
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.states import LinkState, Planned, PlanRef, RunnablePlan
from stageloom.edge_agent.worker.messages import PlanTooLarge, SwitchPlan
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.messages.control import DeviceState, Origin
from tests.lifecycle import orders
from tests.lifecycle.orders import Tell, manager_alone, said
from tests.lifecycle.world import SOUND, Nature, World, desired, facts, plan, world_of

_REASON = "no CUDA-capable device is detected"


def failed_start(fallback: str | None = None) -> PlanManager:
    """The agent has started, and `g` did not load."""
    manager = manager_alone(
        Supervisor(Random(0)), plan(fallback) if fallback else None, restore_patience_s=60.0
    )
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    fail(manager, load)
    return manager


def fail(manager: PlanManager, load: Action) -> list[Action]:
    assert isinstance(load, LoadInEngine)
    return manager.load_failed(load.key, _REASON)


def active(world: World) -> PlanRef | None:
    return world.core.state.active


def told(actions: list[Action]) -> list[Any]:
    return [action.event for action in actions if isinstance(action, Tell)]


def fresh_try(manager: PlanManager, now_s: float) -> Action:
    """The engine process ends as ordered, a new one starts and is to load the plan."""
    assert manager.exited("stopped", now_s) == [StartEngine(0.0)]
    (load,) = manager.ready()
    return load


@pytest.mark.promise("last-known-good-plan")
def test_plan_whose_driver_comes_late_runs_in_a_fresh_process_and_no_verdict_is_told() -> None:
    manager = failed_start()
    assert manager.trouble == _REASON
    assert manager.tick(0.0) == []
    assert manager.tick(0.9) == []
    assert manager.tick(1.0) == [StopEngine()]
    load = fresh_try(manager, 1.1)
    assert isinstance(load, LoadInEngine)
    assert manager.loaded(load.key) == [SwitchPlan(load.key)]
    manager.activated(load.key, 1.2)
    assert said(manager)[-1] == orders.ActiveChanged(plan("g").ref)
    assert manager.active == plan("g")
    assert manager.trouble == ""
    assert manager.tick(1000.0) == []


@pytest.mark.promise("last-known-good-plan")
def test_tries_become_rarer_and_the_link_hears_once_that_they_fail() -> None:
    manager = failed_start()
    began_s, heard_s = [], []
    for quarter in range(4 * 400):
        now_s = quarter / 4
        actions = manager.tick(now_s)
        if orders.RestoreFailed(_REASON) in told(actions):
            heard_s.append(now_s)
        if StopEngine() in actions:
            began_s.append(now_s)
            assert orders.RestoreFailed(_REASON) not in told(fail(manager, fresh_try(manager, now_s)))
    assert heard_s == [60.0]
    gaps = [round(after - before) for before, after in zip([0.0, *began_s], began_s, strict=False)]
    assert gaps == [1, 2, 4, 8, 16, 32, *[60] * 5]


def test_fallback_that_runs_instead_is_left_alone_and_the_link_hears_at_once() -> None:
    manager = failed_start(fallback="f")
    (load,) = manager.checked(facts("f"))
    assert isinstance(load, LoadInEngine)
    manager.loaded(load.key)
    manager.activated(load.key, 0.5)
    assert manager.tick(0.75) == [Tell(orders.RestoreFailed(_REASON))]
    assert [action for quarter in range(4 * 100) for action in manager.tick(1.0 + quarter / 4)] == []


def test_both_plans_are_tried_again_where_neither_loads() -> None:
    manager = failed_start(fallback="f")
    (load,) = manager.checked(facts("f"))
    fail(manager, load)
    manager.tick(0.0)
    assert manager.tick(1.0) == [StopEngine()]
    load = fresh_try(manager, 1.1)
    assert isinstance(load, LoadInEngine) and load.plan == plan("g")
    (load,) = fail(manager, load)[-1:]
    assert isinstance(load, LoadInEngine) and load.plan == plan("f")


def test_newer_plan_is_not_held_up_and_is_judged_by_a_fresh_process() -> None:
    """The present one has found no GPU, and would say the same of any plan."""
    manager = failed_start()
    manager.tick(0.0)
    manager.stage((1, 1), plan("n"))
    assert [action for second in range(50) for action in manager.tick(float(second))] == []
    assert manager.checked(facts("n")) == [StopEngine()]
    load = fresh_try(manager, 50.0)
    assert isinstance(load, LoadInEngine) and load.plan == plan("n")
    assert orders.PlanFailed((1, 1), _REASON) in told(fail(manager, load)), "now it is a verdict"


def test_plan_that_is_not_legal_any_more_is_no_matter_of_time() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    actions = manager.check_failed(plan("g").ref.digest, "illegal", frozenset())
    assert told(actions) == [orders.RestoreFailed("illegal")]
    assert said(manager) == [orders.ActiveChanged(None)]
    assert [action for second in range(1000) for action in manager.tick(float(second))] == []


def test_plan_whose_artifact_cannot_be_read_now_is_tried_again() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    actions = manager.check_failed(plan("g").ref.digest, "too many open files", frozenset(), may_pass=True)
    assert told(actions) == []
    manager.tick(0.0)
    assert manager.tick(1.0) == [StopEngine()]
    manager.exited("stopped", 1.1)
    assert manager.ready() == [CheckPlan(plan("g"))]


def test_plan_for_which_memory_is_short_is_tried_again() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    assert isinstance(load, LoadInEngine)
    manager.too_large(PlanTooLarge(load.key, 150, 0, 150, 100))
    assert "needs 150 bytes" in manager.trouble
    manager.tick(0.0)
    assert manager.tick(1.0) == [StopEngine()]


def test_load_that_hangs_after_one_that_failed_is_told_once() -> None:
    manager = failed_start()
    manager.tick(0.0)
    manager.tick(1.0)
    fresh_try(manager, 1.0)
    told_of = [event for second in range(2, 400) for event in told(manager.tick(float(second)))]
    assert len([event for event in told_of if isinstance(event, orders.RestoreFailed)]) == 1


def test_old_plan_is_tried_again_when_the_one_that_ran_instead_has_failed() -> None:
    manager = failed_start()
    manager.tick(0.0)
    manager.activate((1, 1), plan("n"))
    manager.checked(facts("n"))
    (load,) = manager.ready()
    assert isinstance(load, LoadInEngine) and load.plan == plan("n")
    manager.loaded(load.key)
    manager.activated(load.key, 10.0)
    manager.tick(10.25)
    manager.task_ended(Outcome.FAILED, "wrong", load.key)
    manager.tick(20.0)
    (again,) = manager.restore(plan("g"))
    assert isinstance(again, LoadInEngine) and again.plan == plan("g")


def test_device_whose_driver_comes_within_the_patience_stays_committed() -> None:
    world = world_of(0, {"g": Nature(loads=False)})
    world.disk = LinkState(last_good=plan("g"), state=DeviceState.COMMITTED)
    world.boot()
    world.settle(20.0)
    assert world.core.state.state is DeviceState.COMMITTED
    assert active(world) is None
    world.natures["g"] = SOUND
    world.settle(40.0)
    assert world.core.state.state is DeviceState.COMMITTED
    assert active(world) == plan("g").ref
    assert world.running == "g"


@pytest.mark.promise("last-known-good-plan")
@pytest.mark.parametrize("seed", range(5))
def test_device_on_a_plan_of_its_own_runs_again_whenever_the_driver_comes(seed: int) -> None:
    """The link goes back from its own plan to the desired one, which does not load either."""
    world = world_of(seed, {"g": Nature(loads=False), "d": Nature(loads=False)})
    mine = RunnablePlan(PlanRef(plan("g").ref.digest, Origin.LOCAL, 1), b"g", ())
    world.disk = LinkState(
        desired=desired("d", 1),
        state=DeviceState.COMMITTED,
        last_good=mine,
        active=mine.ref,
        planned=Planned(epoch=1, generation=1, cause="age"),
    )
    world.fallback = plan("d")
    world.boot()
    world.settle(10.0)
    assert active(world) is None, "nothing runs, and that is what is reported"
    world.settle(500.0)
    assert world.core.state.last_good == plan("d")
    assert active(world) is None
    world.natures["d"] = SOUND
    world.settle(100.0)
    assert world.running == "d"
    assert active(world) == plan("d").ref
