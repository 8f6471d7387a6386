"""The lifecycle core with a played engine: deployments, crashes, kills, any order."""

from random import Random

import pytest

from stageloom.edge_agent.lifecycle import events as link
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.events import (
    CheckPlan,
    JournalNote,
    LoadInEngine,
    StartEngine,
    StopEngine,
)
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.probation import ProbationConfig
from stageloom.edge_agent.lifecycle.states import LOCAL_EPOCH, AttemptId, LinkState, PlanRef, RunnablePlan
from stageloom.edge_agent.worker.messages import SwitchPlan
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import DeviceState, Origin
from stageloom.shared.messages.telemetry import PlanActivated, Row, decode_row, encode_row
from tests.lifecycle import orders
from tests.lifecycle.orders import Tell, manager_alone, said
from tests.lifecycle.world import BAD, SOUND, Nature, deploy, facts, plan, world_of


@pytest.mark.parametrize("seed", range(20))
def test_sound_plan_is_committed_and_becomes_last_known_good(seed: int) -> None:
    world = world_of(seed, {"a": SOUND})
    deploy(world, "a", 1)
    world.settle()
    assert world.core.state.state is DeviceState.COMMITTED
    assert world.core.state.last_good == plan("a")
    assert world.running == "a"
    assert world.fallback == plan("g")
    assert list(world.loaded.values()) == ["a"]


@pytest.mark.promise("plans-reach-desired-verdict")
@pytest.mark.parametrize("nature", BAD)
@pytest.mark.parametrize("seed", range(10))
def test_bad_plan_gets_a_verdict_with_a_reason_and_the_good_one_serves(seed: int, nature: Nature) -> None:
    world = world_of(seed, {"a": nature})
    deploy(world, "a", 1)
    world.settle()
    assert world.core.state.state in (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
    assert world.core.state.reason
    assert world.core.state.last_good == plan("g")
    assert world.running == "g"
    report = world.core.report()
    assert report.active == plan("g").ref.digest, "a rolled-back device must not report the other plan"


def test_bad_plan_without_a_good_one_ends_idle(seed: int = 0) -> None:
    world = world_of(seed, {"a": Nature(fails_tasks=True)}, LinkState())
    deploy(world, "a", 1)
    world.settle()
    assert world.core.state.state is DeviceState.ROLLED_BACK
    assert world.running is None
    assert world.manager.engine_up


def test_last_good_plan_that_keeps_crashing_gives_way_to_the_one_before() -> None:
    world = world_of(3, {"a": Nature(crashes_after_s=20.0), "g": SOUND})
    deploy(world, "a", 1)
    world.settle(8.0)
    assert world.core.state.last_good == plan("a"), "it outlived its probation"
    world.settle()
    assert world.running == "g"
    active = world.core.report()
    assert (active.active, active.origin) == (plan("g").ref.digest, Origin.FALLBACK)


@pytest.mark.promise("crashing-engines-restarted-guard")
def test_last_good_plan_that_keeps_crashing_with_nothing_before_it_ends_idle_not_in_a_loop() -> None:
    world = world_of(3, {"g": Nature(crashes_after_s=1.0)})
    world.settle()
    assert world.running is None
    assert world.manager.engine_up
    assert world.life < 10


@pytest.mark.promise("plans-reach-desired-verdict")
@pytest.mark.parametrize("seed", range(60))
def test_kills_at_any_moment_end_in_the_desired_plan_or_a_verdict(seed: int) -> None:
    rng = Random(seed)
    nature = rng.choice((SOUND, SOUND, *BAD))
    world = world_of(seed, {"a": nature})
    deploy(world, "a", 1)
    for _ in range(rng.randint(1, 60)):
        world.step()
    if rng.random() < 0.5:
        world.boot()  # kill -9 of the main process, which takes the engine with it
    else:
        world.exit("signal 9")
    world.settle()
    state = world.core.state
    if nature.sound and state.state is DeviceState.COMMITTED:
        assert world.running == "a"
        assert state.last_good == plan("a")
    else:
        assert state.state in (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
        assert world.running == "g"
    assert world.core.report().active == plan(world.running).ref.digest


@pytest.mark.promise("plans-reach-desired-verdict")
@pytest.mark.parametrize("seed", range(60))
def test_newer_generations_overtake_older_ones_in_any_order_of_events(seed: int) -> None:
    rng = Random(seed)
    natures = {letter: rng.choice((SOUND, *BAD)) for letter in "abc"}
    world = world_of(seed, {**natures, "d": SOUND})
    for generation, letter in enumerate("abc", 1):
        deploy(world, letter, generation)
        for _ in range(rng.randint(0, 40)):
            world.step()
    deploy(world, "d", 4)
    world.settle()
    if world.core.state.state is not DeviceState.COMMITTED:
        # What ran until then brought the engine down in the very moment in which `d` was loaded.
        assert "crashed while it was loaded" in world.core.state.reason
        assert world.running == "g"
        return
    assert world.running == "d"
    assert list(world.loaded.values()) == ["d"], "what was staged in between is freed"
    assert world.core.report().active == plan("d").ref.digest


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nature", [SOUND, Nature(fails_tasks=True), Nature(crashes_after_s=2.0)])
def test_plan_desired_again_while_on_probation_still_gets_a_verdict(nature: Nature, seed: int) -> None:
    """A second push, or a profile that is asked for, makes a new generation of the plan that already runs."""
    rng = Random(seed)
    world = world_of(seed, {"a": nature})
    deploy(world, "a", 1)
    while world.running != "a":
        world.step()
    for _ in range(rng.randint(0, 8)):
        world.step()
    deploy(world, "a", 2)
    world.settle()
    if nature.sound:
        assert world.core.state.state is DeviceState.COMMITTED
        assert world.core.state.last_good == plan("a")
    else:
        assert world.core.state.state in (
            DeviceState.REJECTED,
            DeviceState.ROLLED_BACK,
            DeviceState.COMMITTED,
        )
    assert world.core.report().active == plan(world.running or "-").ref.digest


def test_damaged_artifact_is_asked_for_again_and_the_plan_is_not_blamed() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.verify((1, 1), plan("a"))
    artifact = Digest("f" * 64)
    actions = manager.check_failed(plan("a").ref.digest, "damaged", frozenset({artifact}))
    assert said(manager) == [orders.ArtifactGone(artifact), orders.ManagerRestarted()]
    assert not any(isinstance(a, Tell) and isinstance(a.event, orders.PlanFailed) for a in actions)


def test_repeated_orders_change_nothing() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    assert manager.verify((1, 1), plan("a")) == [CheckPlan(plan("a"))]
    assert manager.verify((1, 1), plan("a")) == []
    manager.checked(facts("a"))
    (load,) = manager.stage((1, 1), plan("a"))
    assert isinstance(load, LoadInEngine)
    assert manager.stage((1, 1), plan("a")) == []
    assert Tell(link.PlanStaged((1, 1), alone=True)) in manager.loaded(load.key)
    assert manager.activate((1, 1), plan("a")) == [SwitchPlan(load.key)]
    assert manager.activate((1, 1), plan("a")) == []
    manager.activated(load.key, 0.0)
    assert manager.activate((1, 1), plan("a")) == []
    assert manager.phase == "probation"


def manager_under_probation() -> tuple[PlanManager, PlanKey, PlanKey]:
    """The good plan `g` ran, `n` is under probation; their keys."""
    manager = manager_alone(Supervisor(Random(0)), probation=ProbationConfig(min_failed=1))
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    assert isinstance(load, LoadInEngine)
    assert manager.loaded(load.key) == [SwitchPlan(load.key)]
    manager.activated(load.key, 0.0)
    manager.activate((1, 1), plan("n"))
    (new,) = manager.checked(facts("n"))
    assert isinstance(new, LoadInEngine)
    assert manager.loaded(new.key) == [SwitchPlan(new.key)]
    manager.activated(new.key, 1.0)
    assert manager.phase == "probation"
    return manager, load.key, new.key


def test_task_of_the_old_plan_that_fails_after_the_swap_does_not_speak_against_the_new_one() -> None:
    manager, old, new = manager_under_probation()
    for key in (old, None):
        assert manager.task_ended(Outcome.FAILED, "late", key) == []
    assert manager.phase == "probation"
    actions = manager.task_ended(Outcome.FAILED, "wrong", new)
    assert [a.event for a in actions if isinstance(a, Tell)] == [
        orders.PlanFailed((1, 1), "1 of 1 tasks failed: wrong")
    ]


def test_plan_to_return_to_that_was_freed_meanwhile_is_loaded_again_and_not_given_up() -> None:
    manager, old, new = manager_under_probation()
    assert SwitchPlan(old) in manager.task_ended(Outcome.FAILED, "wrong", new)
    actions = manager.load_failed(old, f"plan {old} is not loaded, or it is in use")
    (again,) = actions
    assert isinstance(again, LoadInEngine)
    assert again.plan == plan("g")
    assert manager.released(old) == []
    assert manager.loaded(again.key) == [SwitchPlan(again.key)]


def test_tasks_are_checked_against_the_plan_that_they_will_meet() -> None:
    manager, _, new = manager_under_probation()
    assert list(manager.models) == ["n"]
    manager.task_ended(Outcome.FAILED, "wrong", new)  # asks to swap back
    assert manager.active == plan("n")
    assert list(manager.models) == ["g"], "what is sent now comes after the order to swap"


def test_load_that_hangs_is_ended_with_its_engine_and_the_good_plan_comes_back() -> None:
    manager = manager_alone(Supervisor(Random(0)), load_limit_s=10.0)
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    assert isinstance(load, LoadInEngine)
    manager.loaded(load.key)
    manager.activated(load.key, 0.0)
    manager.stage((1, 1), plan("n"))
    manager.checked(facts("n"))
    assert manager.tick(100.0) == []
    assert manager.tick(110.0) == [], "the limit counts from when its turn to load came"
    note, told, stop = manager.tick(110.1)
    assert isinstance(note, JournalNote)
    assert isinstance(told, Tell)
    assert isinstance(told.event, orders.PlanFailed)
    assert "not loaded within 10 s" in told.event.reason
    assert stop == StopEngine()
    assert manager.tick(130.0) == [], "it is ended once"
    assert manager.exited("stopped", 130.0) == [StartEngine(0.0)]
    (again,) = manager.ready()
    assert isinstance(again, LoadInEngine)
    assert again.plan == plan("g")


def test_plan_that_waits_for_its_turn_to_load_is_not_blamed_for_the_one_that_hangs() -> None:
    manager = manager_alone(Supervisor(Random(0)), load_limit_s=10.0)
    manager.ready()
    manager.stage((1, 1), plan("h"))
    manager.checked(facts("h"))
    manager.tick(0.0)
    manager.stage((1, 2), plan("n"))
    manager.checked(facts("n"))
    actions = manager.tick(10.1)
    assert [type(action) for action in actions] == [JournalNote, StopEngine]
    manager.exited("stopped", 10.2)
    (load,) = manager.ready()
    assert isinstance(load, LoadInEngine)
    assert load.plan == plan("n")


def test_plan_that_waits_for_its_turn_to_load_is_not_blamed_for_the_one_that_crashes() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.stage((1, 1), plan("h"))
    manager.checked(facts("h"))
    manager.stage((1, 2), plan("n"))
    manager.checked(facts("n"))
    actions = manager.exited("signal 11", 1.0)
    assert [type(action) for action in actions] == [JournalNote, StartEngine]
    (load,) = manager.ready()
    assert isinstance(load, LoadInEngine)
    assert load.plan == plan("n")
    told = manager.exited("signal 11", 2.0)[1]
    assert isinstance(told, Tell)
    assert told.event == orders.PlanFailed((1, 2), "the engine crashed while it was loaded: signal 11")


def test_newcomer_that_crashes_while_it_loads_is_blamed_after_its_attempt_has_ended_and_not_what_runs() -> (
    None
):
    supervisor = Supervisor(Random(0))
    manager = manager_alone(supervisor)
    manager.restore(plan("g"))
    manager.checked(facts("g"))
    for number in range(1, 4):
        (load,) = manager.ready()
        assert isinstance(load, LoadInEngine)
        manager.loaded(load.key)
        manager.activated(load.key, float(number))
        manager.stage((1, number), plan("h"))
        manager.checked(facts("h"))
        manager.abandon((1, number))
        manager.exited("signal 11", float(number))
    assert supervisor.condemned(plan("h").ref.digest)
    assert not supervisor.condemned(plan("g").ref.digest)


def test_plan_under_probation_is_loaded_again_after_an_engine_that_ended_at_a_measurement() -> None:
    manager, _, _ = manager_under_probation()
    note, start = manager.exited("signal 11", 2.0, measuring=True)
    assert isinstance(note, JournalNote) and "as it measured" in note.text
    assert start == StartEngine(0.0)
    (load,) = manager.ready()
    assert isinstance(load, LoadInEngine) and load.plan == plan("n")
    manager.loaded(load.key)
    manager.activated(load.key, 3.0)
    assert manager.phase == "probation"


def test_engines_that_end_at_measurements_condemn_no_plan() -> None:
    supervisor = Supervisor(Random(0))
    manager = manager_alone(supervisor)
    manager.restore(plan("g"))
    manager.checked(facts("g"))
    for second in range(supervisor.max_crashes):
        (load,) = manager.ready()
        assert isinstance(load, LoadInEngine) and load.plan == plan("g")
        manager.loaded(load.key)
        manager.activated(load.key, float(second))
        manager.exited("signal 11", float(second), measuring=True)
    assert not supervisor.condemned(plan("g").ref.digest)


def test_plans_that_were_refused_are_forgotten() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    (running,) = manager.checked(facts("g"))
    assert isinstance(running, LoadInEngine)
    manager.loaded(running.key)
    manager.activated(running.key, 0.0)
    for number in range(100):
        letter = f"{number:02}"
        one = RunnablePlan(PlanRef(Digest(letter * 32), Origin.PLANNER), letter.encode(), ())
        manager.stage((1, number), one)
        if number % 2:
            manager.check_failed(one.ref.digest, "illegal", frozenset())
            continue
        (load,) = manager.checked(PlanFacts(one.ref.digest, {}, {}))
        assert isinstance(load, LoadInEngine)
        assert manager.facts_of(one.ref.digest) is not None
        manager.load_failed(load.key, "out of memory")
        assert manager.facts_of(one.ref.digest) is None
    assert set(manager._checked) == {plan("g").ref.digest} and not manager._unusable


def test_nothing_is_reported_as_running_once_nothing_runs() -> None:
    manager, old, new = manager_under_probation()
    manager.task_ended(Outcome.FAILED, "wrong", new)
    (again,) = manager.load_failed(old, "not loaded")
    assert isinstance(again, LoadInEngine)
    assert StopEngine() in manager.load_failed(again.key, "out of memory")
    manager.exited("stopped", 2.0)
    assert orders.ActiveChanged(None) in said(manager)[-2:]


def test_plan_that_ran_on_from_an_earlier_attempt_goes_when_it_fails_in_a_later_one() -> None:
    """Desired twice: the second attempt's failure must not leave the first one's run going on."""
    manager, old, new = manager_under_probation()
    manager.abandon((1, 1))
    manager.activate((1, 2), plan("n"))
    manager.tick(1.5)
    assert manager.phase == "probation"
    assert SwitchPlan(old) in manager.task_ended(Outcome.FAILED, "wrong", new)


def test_plan_that_ran_on_is_reported_once_more_when_its_successor_fails() -> None:
    """The core takes last-known-good to run then, and there may be none.

    1. `n` is on probation; a newer value is desired, and `n` runs on.
    2. The newer plan is to be activated, and its artifacts are found damaged.
    3. `n` still runs, and that is said.
    """
    manager, _, _ = manager_under_probation()
    manager.abandon((1, 1))
    manager.activate((1, 2), plan("m"))
    manager.check_failed(plan("m").ref.digest, "damaged", frozenset())
    assert manager.active == plan("n")
    assert said(manager)[-1] == orders.ActiveChanged(plan("n").ref)


def test_nothing_is_reported_as_running_after_a_crash_that_leaves_nothing_to_run() -> None:
    """The third crash may come while the plan is being loaded again, when nothing runs already."""
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    manager.checked(facts("g"))
    for second in range(3):
        manager.exited("signal 9", float(second))
        manager.ready()
    assert orders.ActiveChanged(None) in said(manager)[-2:]


@pytest.mark.parametrize(("attempt", "told"), [((1, 7), (1, 7)), ((LOCAL_EPOCH, 3), (0, 0))])
def test_activation_names_the_desired_value_and_none_for_a_plan_that_was_made_here(
    attempt: AttemptId, told: tuple[int, int]
) -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.activate(attempt, plan("a"))
    (load,) = manager.checked(facts("a"))
    assert isinstance(load, LoadInEngine)
    manager.loaded(load.key)
    (row,) = manager.activated(load.key, 0.0)
    assert isinstance(row, PlanActivated)
    assert (row.epoch, row.generation) == told
    assert decode_row(encode_row(Row(1, row))).data == row, "it may leave the device"
