"""Trials by the real link core, manager and trial core on a played engine, with kills at any moment."""

import re
from random import Random
from typing import Any

import pytest

from stageloom.edge_agent.lifecycle import events as link
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.events import Action, JournalNote, LoadInEngine
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.states import LinkState, Proven
from stageloom.edge_agent.worker.messages import PauseLaunches, PlanTooLarge, SwitchPlan, Unload
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.engine.trial import TrialConfig
from stageloom.shared.messages.control import Activation, DeviceState
from tests.lifecycle import orders
from tests.lifecycle.orders import Tell, manager_alone
from tests.lifecycle.world import GOOD, SOUND, Nature, World, desired, facts, plan, world_of

BETTER, SAME, WORSE = Nature(speed=1.3), SOUND, Nature(speed=0.7)
CRASHES = Nature(crashes_after_s=0.1)
SHORT = TrialConfig(limit_s=10.0)


def trial_world(seed: int, nature: Nature, disk: LinkState = GOOD, **changes: Any) -> World:
    return world_of(seed, {"a": nature, "b": BETTER}, disk, comparable=True, trial=SHORT, **changes)


def push(
    world: World,
    letter: str,
    generation: int,
    activation: Activation = Activation.TRIAL,
    needs_load: bool = False,
) -> None:
    wanted = desired(letter, generation)
    given = {"activation": activation, "needs_load": needs_load}
    world.tell(link.Received(type(wanted)(**_fields(wanted) | given)))


def _fields(wanted: Any) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in wanted.__struct_fields__}


def state(world: World) -> DeviceState | None:
    return world.core.state.state


def settle_while(world: World, *states: DeviceState) -> None:
    """Let time pass until it is in none of these."""
    for _ in range(10_000):
        if state(world) not in states:
            return
        world.settle(0.5)
    raise AssertionError(f"it stays {state(world)}")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("nature", "ends", "verdict"),
    [
        (BETTER, DeviceState.COMMITTED, "commit"),
        (SAME, DeviceState.NO_GAIN, "no_gain"),
        (WORSE, DeviceState.REJECTED, "reject"),
        (CRASHES, DeviceState.REJECTED, "reject"),
    ],
)
def test_trial_decides_and_the_winner_runs(
    seed: int, nature: Nature, ends: DeviceState, verdict: str
) -> None:
    world = trial_world(seed, nature)
    push(world, "a", 1)
    world.settle()
    assert state(world) is ends, world.core.state.reason
    (row,) = world.rows
    assert (row.how, row.verdict, row.candidate, row.control) == (
        "trial",
        verdict,
        plan("a").ref.digest,
        plan("g").ref.digest,
    )
    winner = "a" if ends is DeviceState.COMMITTED else "g"
    assert world.running == winner
    assert list(world.loaded.values()) == [winner], "the loser is freed"
    assert not world.kept, "the bounds of the winner's own queues hold"
    assert world.core.report().active == plan(winner).ref.digest
    assert world.core.state.trial is None
    if nature is not CRASHES:
        assert row.pairs >= 4
        assert row.ratio is not None
        assert row.ratio_low is not None
        assert row.ratio == pytest.approx(nature.speed, rel=0.1)
        assert row.ratio_low < row.ratio


def test_record_is_on_disk_before_the_candidate_first_runs() -> None:
    world = trial_world(1, BETTER)
    push(world, "a", 1)
    while "a" not in world.ran:
        world.step()
        if "a" not in world.ran:
            continue
    assert world.disk.state is DeviceState.TRIAL
    assert world.disk.trial is not None
    assert world.disk.trial.candidate == plan("a").ref.digest


@pytest.mark.promise("record-trial-disk-before")
@pytest.mark.parametrize("seed", range(120))
def test_kill_at_any_moment_of_a_trial_ends_in_a_verdict_and_is_never_tried_again(seed: int) -> None:
    """kill -9 leaves the last persisted state; a candidate that was on trial then is not run again."""
    rng = Random(seed)
    world = trial_world(seed, rng.choice((BETTER, SAME, WORSE, CRASHES)))
    push(world, "a", 1)
    for _ in range(rng.randint(1, 160)):
        world.step()
    found = world.disk.state
    world.boot()
    before = len(world.ran)
    world.settle()
    final, running = state(world), world.running
    if found is DeviceState.TRIAL:
        assert final is DeviceState.REJECTED
        assert "stopped during the trial" in world.core.state.reason
        assert world.rows[-1].verdict == "reject"
        assert "a" not in world.ran[before:], "never tried again at boot"
    assert final in (
        DeviceState.COMMITTED,
        DeviceState.NO_GAIN,
        DeviceState.REJECTED,
        DeviceState.ROLLED_BACK,
    )
    assert running == ("a" if final is DeviceState.COMMITTED else "g")
    assert world.core.report().active == plan(running).ref.digest
    assert world.core.state.last_good == plan(running)
    assert list(world.loaded.values()) == [running]


@pytest.mark.promise("record-trial-disk-before")
@pytest.mark.parametrize("seed", range(60))
def test_engine_killed_at_any_moment_of_a_trial_blames_only_the_plan_that_ran(seed: int) -> None:
    rng = Random(seed)
    world = trial_world(seed, BETTER)
    push(world, "a", 1)
    for _ in range(rng.randint(1, 120)):
        world.step()
    ran = world.running
    world.exit("signal 9")
    world.settle()
    if state(world) is DeviceState.COMMITTED:
        assert world.running == "a"
    else:
        assert state(world) in (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
        reason = world.core.state.reason
        assert ran == "a" or any(word in reason for word in ("loaded", "candidate", "plans changed"))
        assert world.running == "g"
    assert world.core.report().active == plan(world.running or "-").ref.digest


def test_control_that_crashes_under_three_trials_leaves_the_plan_undecided() -> None:
    world = trial_world(5, SAME)
    push(world, "a", 1)
    crashes = 0
    for _ in range(20_000):
        if state(world) in (DeviceState.REJECTED, DeviceState.NO_GAIN):
            break
        world.step()
        world.do(world.manager.tick(world.now_s))
        runner = world.manager.runner
        if runner is not None and runner.side.value == "control" and not runner.settling:
            crashes += 1
            world.now_s += 61.0  # far apart: the control itself is not condemned
            world.exit("signal 9")
    assert state(world) is DeviceState.REJECTED
    assert "undecided after 3 trials" in world.core.state.reason
    assert crashes == 3
    assert [row.verdict for row in world.rows] == ["abandoned", "abandoned", "reject"]
    world.settle()
    assert world.running == "g"


def test_engine_that_ends_at_a_measurement_as_the_candidate_runs_ends_the_trial_without_a_verdict() -> None:
    world = trial_world(5, BETTER)
    push(world, "a", 1)
    while world.running != "a":
        world.step()
    assert world.manager.runner is not None
    world.engine_gone()
    world.do(world.manager.exited("signal 9", world.now_s, measuring=True))
    world.settle()
    assert [row.verdict for row in world.rows] == ["abandoned", "commit"]
    assert state(world) is DeviceState.COMMITTED


@pytest.mark.parametrize("seed", range(20))
def test_newer_plan_ends_a_trial_without_a_verdict(seed: int) -> None:
    rng = Random(seed)
    world = trial_world(seed, SAME)
    push(world, "a", 1)
    while state(world) is not DeviceState.TRIAL:
        world.step()
    for _ in range(rng.randint(0, 60)):
        world.step()
    push(world, "b", 2)
    world.settle()
    assert state(world) is DeviceState.COMMITTED
    assert world.running == "b"
    assert [row.verdict for row in world.rows] in (["abandoned", "commit"], ["commit"])
    assert list(world.loaded.values()) == ["b"]


@pytest.mark.parametrize("seed", range(10))
def test_another_environment_ends_a_trial_and_it_begins_again_there(seed: int) -> None:
    world = trial_world(seed, BETTER)
    push(world, "a", 1)
    while state(world) is not DeviceState.TRIAL:
        world.step()
    world.tell(link.EnvironmentChanged("15 W"))
    world.settle()
    assert state(world) is DeviceState.COMMITTED
    assert [row.verdict for row in world.rows] == ["abandoned", "commit"]
    assert world.core.state.proven[-1] == Proven(plan("a").ref.digest, "15 W")


@pytest.mark.parametrize("seed", range(10))
def test_another_environment_ends_a_guard_and_the_plan_is_judged_anew_there(seed: int) -> None:
    """How long tasks waited before is of the other environment; in this one the plan is not even proven."""
    proven = LinkState(last_good=plan("g"), proven=(Proven(plan("a").ref.digest, "here"),))
    world = trial_world(seed, WORSE, proven)
    push(world, "a", 1)
    while world.running != "a":
        world.step()
    assert state(world) is DeviceState.PROBATION
    world.tell(link.EnvironmentChanged("15 W"))
    assert state(world) is not DeviceState.PROBATION
    world.settle()
    assert [(row.how, row.verdict) for row in world.rows] == [("proven", "commit"), ("trial", "reject")]
    assert world.running == "g"
    assert Proven(plan("a").ref.digest, "15 W") not in world.core.state.proven


def test_idle_device_takes_a_plan_under_guard_without_calling_it_proven() -> None:
    world = trial_world(1, BETTER, busy=False)
    push(world, "a", 1)
    settle_while(world, *(one for one in DeviceState if one is not DeviceState.PROBATION))
    began_s, announced = world.now_s, world.core.report().reason
    told = re.fullmatch(r"no load to compare under: runs guarded for (\d+) s", announced)
    assert told is not None, announced
    while state(world) is DeviceState.PROBATION:
        world.settle(0.5)
    assert world.now_s - began_s <= int(told[1]) + 1
    assert state(world) is DeviceState.COMMITTED
    assert world.ran == ["g", "a"], "no window"
    (row,) = world.rows
    assert (row.how, row.verdict, row.ratio) == ("guard", "commit", None)
    assert "no load to compare under" in row.reason
    assert world.core.state.proven == ()


def test_idle_device_frees_what_a_replan_pushed_and_takes_the_next_plan() -> None:
    world = trial_world(1, BETTER, busy=False)
    push(world, "a", 1, needs_load=True)
    world.settle()
    assert (state(world), world.ran, list(world.loaded.values())) == (DeviceState.NO_GAIN, ["g"], ["g"])
    world.busy = True
    push(world, "a", 2, needs_load=True)
    world.settle()
    assert (state(world), world.running) == (DeviceState.COMMITTED, "a")


@pytest.mark.parametrize(("age_s", "ends"), [(0.0, "a"), (0.5, "a"), (1.5, "g")])
def test_load_that_comes_to_an_idle_device_ends_a_plan_under_which_tasks_wait(
    age_s: float, ends: str
) -> None:
    """1. Nothing comes: the plan runs guarded. 2. Tasks come, and wait for so long. 3. It stays, or goes."""
    world = trial_world(1, BETTER, busy=False)
    push(world, "a", 1)
    settle_while(world, *(one for one in DeviceState if one is not DeviceState.PROBATION))
    for _ in range(40):
        world.settle(0.5)
        world.waiting.seen(world.now_s, age_s, {"m": 100})
    assert world.running == ends
    assert state(world) is (DeviceState.COMMITTED if ends == "a" else DeviceState.ROLLED_BACK)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tasks_per_s", [0.1, 1.0, 11.0])
def test_slow_load_ends_in_a_verdict_within_the_time_that_was_announced(
    seed: int, tasks_per_s: float
) -> None:
    world = trial_world(seed, BETTER, tasks_per_s=tasks_per_s)
    world.waiting.seen(0.0, 0.0, {"m": 0})
    world.waiting.seen(10.0, 0.0, {"m": 2})
    push(world, "a", 1)
    settle_while(world, DeviceState.RECEIVED, DeviceState.VERIFIED, DeviceState.STAGED)
    began_s, announced = world.now_s, world.core.report().reason
    told = re.fullmatch(r"the trial takes up to (\d+) (s|min)", announced)
    assert told is not None, announced
    settle_while(world, DeviceState.TRIAL)
    assert world.now_s - began_s <= int(told[1]) * (60 if told[2] == "min" else 1) + 1
    world.settle()
    assert state(world) is DeviceState.COMMITTED
    assert world.rows[-1].figure == "latency"
    assert world.rows[-1].latency_ratio == pytest.approx(1.3, rel=0.1)


@pytest.mark.parametrize("late", [False, True])
def test_arrivals_that_move_during_a_trial_decide_it_or_have_the_plan_tried_anew(late: bool) -> None:
    world = trial_world(1, SAME)
    push(world, "a", 1)
    settle_while(world, DeviceState.RECEIVED, DeviceState.VERIFIED, DeviceState.STAGED)
    world.settle(9.0 if late else 3.0)  # of ten seconds
    assert state(world) is DeviceState.TRIAL
    world.natures["a"] = BETTER
    world.manager.arrivals_moved(world.now_s)
    world.settle()
    assert [row.verdict for row in world.rows] == (["abandoned", "commit"] if late else ["commit"])
    assert world.rows[-1].ratio == pytest.approx(1.3, rel=0.1)


def test_proven_plan_runs_at_once_and_only_where_it_is_proven() -> None:
    proven = LinkState(last_good=plan("g"), proven=(Proven(plan("a").ref.digest, "here"),))
    world = trial_world(1, WORSE, proven)
    push(world, "a", 1)
    world.settle()
    assert state(world) is DeviceState.COMMITTED
    assert [(row.how, row.verdict) for row in world.rows] == [("proven", "commit")]
    assert world.ran == ["g", "a"], "no window"

    elsewhere = trial_world(1, WORSE, proven, environment="there")
    push(elsewhere, "a", 1)
    elsewhere.settle()
    assert state(elsewhere) is DeviceState.REJECTED
    assert elsewhere.rows[-1].how == "trial"


def test_order_of_an_operator_runs_without_a_trial() -> None:
    world = trial_world(1, WORSE)
    push(world, "a", 1, Activation.NOW)
    world.settle()
    assert state(world) is DeviceState.COMMITTED
    assert [(row.how, row.verdict, row.ratio) for row in world.rows] == [("now", "commit", None)]


def test_first_plan_of_a_device_has_nothing_to_be_compared_with() -> None:
    world = trial_world(1, WORSE, LinkState())
    push(world, "a", 1)
    world.settle()
    assert state(world) is DeviceState.COMMITTED
    assert [(row.how, row.verdict, row.ratio) for row in world.rows] == [("first", "commit", None)]


# -- memory -------------------------------------------------------------------------------------------------


def crowded_manager() -> tuple[PlanManager, PlanKey]:
    """`g` runs; `a` is checked and was found not to fit beside it."""
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g", comparable=True))
    assert isinstance(load, LoadInEngine)
    manager.loaded(load.key, 70, 100)
    manager.activated(load.key, 0.0)
    manager.stage((1, 1), plan("a"))
    (other,) = manager.checked(facts("a", comparable=True))
    assert isinstance(other, LoadInEngine)
    (told,) = manager.too_large(PlanTooLarge(other.key, 60, 30, 60, 100))
    assert told == Tell(link.PlanStaged((1, 1), plan("g").ref.digest))
    return manager, load.key


@pytest.mark.promise("plans-admitted-memory-they")
def test_trial_of_plans_that_do_not_fit_together_is_refused_with_sizes_and_a_remedy() -> None:
    manager, _ = crowded_manager()
    told = manager.run_trial((1, 1), plan("a"), "here", 0, 1.0)[0]
    assert isinstance(told, Tell)
    assert isinstance(told.event, orders.TrialDecided)
    assert told.event.result.verdict.value == "refused"
    assert "need 130 bytes, more than the 100" in told.event.result.reason
    assert "plan push --now" in told.event.result.reason


def test_ordered_plan_that_does_not_fit_beside_the_other_takes_its_place_and_the_pause_is_counted() -> None:
    manager, old = crowded_manager()
    assert manager.activate((1, 1), plan("a")) == [PauseLaunches(refuse=False)]
    assert manager.exchanging, "tasks wait"
    assert manager.drained() == [Unload(old)]
    (load,) = manager.released(old)
    assert isinstance(load, LoadInEngine)
    assert load.plan == plan("a")
    assert manager.loaded(load.key, 60, 100) == [SwitchPlan(load.key)]
    note = manager.activated(load.key, 3.0, paused_s=0.25)[0]
    assert isinstance(note, JournalNote)
    assert (note.code, "250 ms" in note.text) == ("swap_pause", True)
    assert manager.last_pause_s == 0.25
    assert not manager.exchanging


def test_old_plan_comes_back_if_the_one_that_took_its_place_cannot_be_loaded() -> None:
    manager, old = crowded_manager()
    manager.activate((1, 1), plan("a"))
    manager.drained()
    (load,) = manager.released(old)
    assert isinstance(load, LoadInEngine)
    told, again = manager.load_failed(load.key, "out of memory")
    assert told == Tell(orders.PlanFailed((1, 1), "out of memory"))
    assert isinstance(again, LoadInEngine)
    assert again.plan == plan("g")
    assert manager.loaded(again.key, 70, 100) == [SwitchPlan(again.key)]


def loads(actions: list[Action], letter: str) -> PlanKey:
    """The key under which this plan is to be loaded, as the only action."""
    (load,) = actions
    assert isinstance(load, LoadInEngine)
    assert load.plan == plan(letter)
    return load.key


def test_ordered_plan_that_measurements_leave_no_room_is_loaded_once_they_have_ended() -> None:
    """What a profile or a comparison of outputs holds stays when the old plan is gone, until it has ended."""
    manager, old = crowded_manager()
    manager.activate((1, 1), plan("a"))
    manager.drained()
    key = loads(manager.released(old), "a")
    for now_s in (10.0, 11.0, 12.0):
        assert manager.tick(now_s - 0.1) == [], "it is being loaded"
        assert manager.too_large(PlanTooLarge(key, 60, 30, 60, 100)) == []
        key = loads(manager.tick(now_s), "a")
    manager.too_large(PlanTooLarge(key, 60, 30, 60, 100))
    assert manager.tick(12.9) == [], "once a second"
    key = loads(manager.tick(13.0), "a")
    assert manager.loaded(key, 60, 100) == [SwitchPlan(key)]
    manager.activated(key, 14.0)
    assert not manager.exchanging


def test_old_plan_comes_back_if_measurements_leave_the_one_that_took_its_place_no_room() -> None:
    manager, old = crowded_manager()
    manager.activate((1, 1), plan("a"))
    manager.drained()
    actions, now_s = manager.released(old), 0.0
    while len(actions) == 1 and now_s < 10.0:
        key, now_s = loads(actions, "a"), now_s + 1.0
        actions = manager.too_large(PlanTooLarge(key, 60, 30, 60, 100)) or manager.tick(now_s)
    told, *again = actions
    assert isinstance(told, Tell)
    assert isinstance(told.event, orders.PlanFailed)
    assert "it needs 60 bytes, and what is being measured leaves 30 of 100" in told.event.reason
    assert "push the plan again" in told.event.reason
    key = loads(again, "g")
    assert manager.loaded(key, 70, 100) == [SwitchPlan(key)]


def test_plan_that_no_other_could_replace_is_loaded_whenever_measurements_leave_it_room() -> None:
    manager = manager_alone(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    key = loads(manager.checked(facts("g")), "g")
    for second in range(20):
        assert manager.too_large(PlanTooLarge(key, 70, 30, 70, 100)) == []
        key = loads(manager.tick(float(second)), "g")
    assert manager.loaded(key, 70, 100) == [SwitchPlan(key)]


def test_plan_that_does_not_fit_alone_is_refused_with_sizes_and_a_remedy() -> None:
    manager, _ = crowded_manager()
    manager.stage((1, 2), plan("b"))
    (load,) = manager.checked(facts("b", comparable=True))
    assert isinstance(load, LoadInEngine)
    told = manager.too_large(PlanTooLarge(load.key, 150, 30, 150, 100))[0]
    assert isinstance(told, Tell)
    assert isinstance(told.event, orders.PlanFailed)
    assert "needs 150 bytes, and there are 100" in told.event.reason
    assert "fewer replicas" in told.event.reason
