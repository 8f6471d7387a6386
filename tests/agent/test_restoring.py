"""Last-known-good that does not load, while nothing else runs: patience, tries, and what the link hears."""

from random import Random

from edge_agent.link import events as link
from edge_agent.link.events import LinkState
from edge_agent.plans.actions import Action, LoadPlan, StartEngine, StopEngine, SwapTo, Tell
from edge_agent.plans.candidate import ManagerConfig
from edge_agent.plans.manager import PlanManager
from edge_agent.plans.supervisor import Supervisor
from shared.messages.control import DeviceState
from tests.agent.world import SOUND, Nature, facts, plan, world_of

_REASON = "no CUDA-capable device is detected"


def failed_start(fallback: str | None = None) -> PlanManager:
    """The agent has started, and `g` did not load."""
    manager = PlanManager(
        Supervisor(Random(0)), ManagerConfig(restore_patience_s=60.0), plan(fallback) if fallback else None
    )
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    fail(manager, load)
    return manager


def fail(manager: PlanManager, load: Action) -> list[Action]:
    assert isinstance(load, LoadPlan)
    return manager.load_failed(load.key, _REASON)


def told(actions: list[Action]) -> list[link.Event]:
    return [action.event for action in actions if isinstance(action, Tell)]


def fresh_try(manager: PlanManager, now_s: float) -> Action:
    """The engine process ends as ordered, a new one starts and is to load the plan."""
    assert manager.exited("stopped", now_s) == [StartEngine(0.0)]
    (load,) = manager.ready()
    return load


def test_plan_whose_driver_comes_late_runs_in_a_fresh_process_and_no_verdict_is_told() -> None:
    manager = failed_start()
    assert manager.trouble == _REASON
    assert manager.tick(0.0) == []
    assert manager.tick(0.9) == []
    assert manager.tick(1.0) == [StopEngine()]
    load = fresh_try(manager, 1.1)
    assert isinstance(load, LoadPlan)
    assert manager.loaded(load.key) == [SwapTo(load.key)]
    assert told(manager.activated(load.key, 1.2)) == [link.ActiveChanged(plan("g").ref)]
    assert manager.active == plan("g")
    assert manager.trouble == ""
    assert manager.tick(1000.0) == []


def test_tries_become_rarer_and_the_link_hears_once_that_they_fail() -> None:
    manager = failed_start()
    began_s, heard_s = [], []
    for quarter in range(4 * 400):
        now_s = quarter / 4
        actions = manager.tick(now_s)
        if link.RestoreFailed(_REASON) in told(actions):
            heard_s.append(now_s)
        if StopEngine() in actions:
            began_s.append(now_s)
            assert link.RestoreFailed(_REASON) not in told(fail(manager, fresh_try(manager, now_s)))
    assert heard_s == [60.0]
    gaps = [round(after - before) for before, after in zip([0.0, *began_s], began_s, strict=False)]
    assert gaps == [1, 2, 4, 8, 16, 32, *[60] * 5]


def test_fallback_that_runs_instead_is_left_alone_and_the_link_hears_at_once() -> None:
    manager = failed_start(fallback="f")
    (load,) = manager.checked(facts("f"))
    assert isinstance(load, LoadPlan)
    manager.loaded(load.key)
    manager.activated(load.key, 0.5)
    assert manager.tick(0.75) == [Tell(link.RestoreFailed(_REASON))]
    assert [action for quarter in range(4 * 100) for action in manager.tick(1.0 + quarter / 4)] == []


def test_both_plans_are_tried_again_where_neither_loads() -> None:
    manager = failed_start(fallback="f")
    (load,) = manager.checked(facts("f"))
    fail(manager, load)
    manager.tick(0.0)
    assert manager.tick(1.0) == [StopEngine()]
    load = fresh_try(manager, 1.1)
    assert isinstance(load, LoadPlan) and load.plan == plan("g")
    (load,) = fail(manager, load)[-1:]
    assert isinstance(load, LoadPlan) and load.plan == plan("f")


def test_newer_plan_is_not_held_up_by_tries_with_the_old_one() -> None:
    manager = failed_start()
    manager.tick(0.0)
    manager.stage((1, 1), plan("n"))
    assert [action for second in range(50) for action in manager.tick(float(second))] == []
    (load,) = manager.checked(facts("n"))
    assert isinstance(load, LoadPlan) and load.plan == plan("n")


def test_device_whose_driver_comes_within_the_patience_stays_committed() -> None:
    world = world_of(0, {"g": Nature(loads=False)})
    world.disk = LinkState(last_good=plan("g"), state=DeviceState.COMMITTED)
    world.boot()
    world.settle(20.0)
    assert world.core.state.state is DeviceState.COMMITTED
    assert world.core.state.active is None
    world.natures["g"] = SOUND
    world.settle(40.0)
    assert world.core.state.state is DeviceState.COMMITTED
    assert world.core.state.active == plan("g").ref
    assert world.running == "g"
