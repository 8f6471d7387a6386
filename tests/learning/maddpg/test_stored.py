"""A problem from the store: the plan that a device runs, what it measured, what it counted."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from stageloom.planner.learning.kept_run import BEGUN_WITH_FILE, FOLDER
from stageloom.planner.learning.maddpg import stored_training
from stageloom.planner.learning.maddpg.course import TrainingCourse
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.stored import TOP_MEMBERS, stored_problem
from stageloom.planner.learning.maddpg.stored_check import checked_on
from stageloom.planner.learning.maddpg.stored_training import about_training
from stageloom.planner.learning.maddpg.train import FILE, provenance_of
from stageloom.planner.replan.learned import adopted
from stageloom.planner.schema.plan import ArrivalRate, ModelOptions
from stageloom.planner.schema.policy import PolicyCheckRequest
from stageloom.planner.schema.training import MaddpgTrainingRequest
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.policies import store_policy
from stageloom.planner.twin.device_file import Kind, device_names, device_toml, load_device
from stageloom.planner.twin.reference import TwinDevices
from stageloom.shared.bound import bind
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError
from stageloom.shared.messages.telemetry import TaskCounters
from stageloom.shared.plan import ExecutorOptions, StepChoice, Wait
from stageloom.shared.policy.gpg.checkpoint import decode, encode
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.search.gpg import packaged_checkpoint
from tests.learning.maddpg.toy import problem
from tests.policy.maddpg.cases import network
from tests.store.helpers import NANO
from tests.twin.test_simulate_command import SECOND, Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path, ManualClock())


def test_the_plan_a_device_runs_its_measured_costs_and_counted_tasks_are_the_problem(home: Home) -> None:
    """Operators of 1 ms; 30 and then 60 tasks a second for 2 s each."""
    home.profile(0.001)
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    for second in range(1, 5):
        arrived = 30 if second < 3 else 60
        home.send(second * SECOND, TaskCounters("relu", SECOND, arrived, arrived, 0, 0, 0, 0))
    found = stored_problem(home.store, MaddpgTrainingRequest(device=NANO, twin="nano"))
    assert found.problem.template == home.plan
    assert found.problem.arrivals_per_s == pytest.approx((45.0,))
    assert found.problem.service_s == pytest.approx((0.004,))
    assert found.problem.space.members_max == 2, "TOP's H of a Nano"
    assert "operators measured" in found.times and "counted" in found.arrivals
    assert isinstance(found.problem.make_device, TwinDevices)


@pytest.mark.promise("counted-arrivals-keep-bursts")
def test_a_training_meets_the_bursts_that_the_device_counted(home: Home) -> None:
    """Nothing for four seconds, then 60 tasks a second for two: each seed meets them, at another time."""
    home.profile(0.001)
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    for second in range(1, 7):
        arrived = 60 if second > 4 else 0
        home.send(second * SECOND, TaskCounters("relu", SECOND, arrived, arrived, 0, 0, 0, 0))
    problem = stored_problem(home.store, MaddpgTrainingRequest(device=NANO, twin="nano")).problem
    assert isinstance(problem.make_device, TwinDevices)
    make = replace(problem.make_device, compiled=False)
    met = []
    for seed in range(3):
        device = make(seed)
        device.deploy(bind(problem.template, problem.graphs))
        met.append([device.run(1.0).models[0].submitted for _ in range(6)])
    assert all(sum(row) == 120 and max(row) >= 50 and row.count(0) >= 3 for row in met)
    assert len(set(map(tuple, met))) == 3


def test_models_that_are_named_are_cut_as_asked_and_run_as_the_device_runs(home: Home) -> None:
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    wanted = MaddpgTrainingRequest(
        device=NANO,
        models=(ModelOptions(model="relu", partition="base", replicas=2),),
        twin="tx2",
        rates=(ArrivalRate(model="relu", per_s=50.0),),
        members_max=5,
    )
    problem = stored_problem(home.store, wanted).problem
    assert [(one.cuts, one.replicas) for one in problem.space.models] == [((2,), 2)]
    assert problem.template.executor == home.plan.executor
    assert problem.space.members_max == 5 and problem.arrivals_per_s == (50.0,)


def test_stages_come_from_the_policy_that_is_kept_for_the_devices_class_where_gpg_is_asked_for(
    home: Home,
) -> None:
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    rates = (ArrivalRate(model="relu", per_s=50.0),)
    wanted = MaddpgTrainingRequest(device=NANO, twin="nano", rates=rates, scheduler="gpg")
    scheduler = stored_problem(home.store, wanted).problem.scheduler
    assert isinstance(scheduler, partial) and scheduler.keywords == {"checkpoint": b""}
    packaged = decode(packaged_checkpoint())
    body = encode(replace(packaged, provenance={**packaged.provenance, "steps": 1}))
    home.store.write(
        store_policy,
        body,
        policy="gpg",
        device_class=home.store.read(device_info, NANO).device_class,
        provenance={"models": [], "settings": {}, "versions": {}, "steps": 1, "validation_ratio": 1.0},
        curves=[],
        trained_at_us=1,
    )
    scheduler = stored_problem(home.store, wanted).problem.scheduler
    assert isinstance(scheduler, partial) and scheduler.keywords == {"checkpoint": body}


def test_a_plan_that_waits_for_its_models_says_what_to_do_instead() -> None:
    """Not to train a policy, which is what the operator is about."""
    known = problem()
    with pytest.raises(InputError, match="nothing to learn on this plan: the plan waits") as caught:
        replace(known, template=replace(known.template, wait=Wait.ALL))
    assert "name the models" in str(caught.value) and "train" not in str(caught.value)


def test_a_plan_whose_blocks_have_an_executor_of_their_own_has_nothing_to_learn() -> None:
    """What a policy combines would run on the first one."""
    known = problem()
    first, *others = known.template.combined
    template = replace(
        known.template,
        further_executors=(ExecutorOptions(name="openvino"),),
        combined=(replace(first, executor=1), *others),
    )
    with pytest.raises(InputError, match="nothing to learn on this plan: a block runs on openvino"):
        replace(known, template=template)


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ({"relu": 5.0, "other": 5.0}, "the plan has no model 'other'"),
        (None, "counted no task of these models"),
    ],
)
def test_arrivals_that_are_not_those_of_the_models_are_refused(
    home: Home, rates: dict[str, float] | None, why: str
) -> None:
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    given = tuple(ArrivalRate(model=model, per_s=per_s) for model, per_s in (rates or {}).items())
    with pytest.raises(InputError, match=why):
        stored_problem(home.store, MaddpgTrainingRequest(device=NANO, twin="nano", rates=given))


@pytest.mark.parametrize("unreadable", ["", "begun_with", "maddpg.run"])
def test_a_training_goes_on_with_the_arrivals_that_it_began_with(
    home: Home, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    """30 tasks a second came when it was killed, and 60 since: what it scored says nothing of these. Where
    what it began with, or its state, cannot be read any more, it begins anew; killed before it has kept a
    state of its own, it does so again."""
    home.profile(0.001)
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    begun: list[tuple[float, bytes | None]] = []

    def killed(found: Problem, *_: object, state: bytes | None, save: Any, **__: object) -> None:
        begun.append((found.arrivals_per_s[0], state))
        if len(begun) == 1:
            settings = MaddpgSettings.of_length(request.transitions)
            learned = TrainingCourse(found, settings, request.seed).state()
            save(learned if unreadable != FILE else b"of another version")
        raise KeyboardInterrupt

    monkeypatch.setattr(stored_training, "train", killed)
    request = MaddpgTrainingRequest(device=NANO, twin="nano", workers=1, last_s=2.0)
    for second in range(1, 7):
        arrived = 30 if second < 4 else 60
        home.send(second * SECOND, TaskCounters("relu", SECOND, arrived, arrived, 0, 0, 0, 0))
        if second in (3, 5, 6):
            with pytest.raises(KeyboardInterrupt):
                stored_training.train_stored(home.store, request, lambda _: None)
            if second == 3 and unreadable == BEGUN_WITH_FILE:
                (kept,) = (home.store.data_dir / FOLDER).glob(f"*/{BEGUN_WITH_FILE}")
                kept.write_bytes(b"of another version")
    rates, states = zip(*begun, strict=True)
    if unreadable:
        assert rates == (30.0, 60.0, 60.0) and states == (None, None, None)
    else:
        assert rates == (30.0, 30.0, 30.0) and states[0] is None and states[1] == states[2] is not None


def test_every_device_of_the_paper_has_a_file() -> None:
    assert set(TOP_MEMBERS) <= set(device_names())


@pytest.mark.parametrize("what", ["executor", "lanes", "scheduler", "nothing"])
def test_a_training_of_another_template_or_scheduler_is_another_training(home: Home, what: str) -> None:
    """What one has found, and how well it scored, says nothing of the other."""
    home.profile(0.001)
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    rates = (ArrivalRate(model="relu", per_s=10.0),)
    request = MaddpgTrainingRequest(device=NANO, twin="nano", rates=rates)
    settings = MaddpgSettings.of_length(request.transitions)
    found = stored_problem(home.store, request)
    before = about_training(request, found, settings)
    if what == "scheduler":
        request = structs.replace(request, scheduler="gpg")
    template = found.problem.template
    changes: dict[str, Any] = {
        "executor": {"executor": ExecutorOptions(name="openvino")},
        "lanes": {"lanes": 2},
    }
    after = about_training(
        request,
        replace(found, problem=replace(found.problem, template=replace(template, **changes.get(what, {})))),
        settings,
    )
    differs = {name for name in before if before[name] != after[name]}
    assert differs == {"nothing": set(), "scheduler": {"scheduler"}}.get(what, {"template"})


@pytest.mark.parametrize("how", ["told", "untold", "adopted"])
def test_a_policy_is_checked_on_the_plan_that_it_was_trained_on(home: Home, how: str) -> None:
    """Lanes and rules make the problem; a policy of before its file told them is checked on what is known, as
    is one that tells those of another device class."""
    home.profile(0.001)
    home.store.write(push, Push(device=NANO, plan="tuned", decided_by="test"))
    rates = (ArrivalRate(model="relu", per_s=10.0),)
    found = stored_problem(home.store, MaddpgTrainingRequest(device=NANO, twin="nano", rates=rates))
    trained = replace(found.problem.template, lanes=2, step_choice=StepChoice.DEADLINE)
    course = TrainingCourse(replace(found.problem, template=trained), MaddpgSettings.of_length(512), seed=0)
    provenance = provenance_of(course, "done")
    if how == "untold":
        del provenance["template"]
    own = found.problem.space
    space = replace(own, device_class="elsewhere") if how == "adopted" else own
    policy = MaddpgCheckpoint(space, network(space), provenance=provenance)
    policy = adopted(policy, own.device_class, found.problem.graphs)
    on = checked_on(home.store, policy, PolicyCheckRequest(policy="0" * 12, device=NANO, rates=rates))
    assert on.problem.template == (trained if how == "told" else found.problem.template)


@pytest.mark.parametrize("kind", Kind)
def test_a_check_on_a_device_file_says_whether_that_was_derived_or_measured(home: Home, kind: Kind) -> None:
    rates = (ArrivalRate(model="relu", per_s=10.0),)
    space = Space.of(home.plan, "elsewhere")
    policy = MaddpgCheckpoint(space, network(space))
    twin = device_toml(replace(load_device("nano"), kind=kind))
    on = checked_on(home.store, policy, PolicyCheckRequest(policy="0" * 12, twin=twin, rates=rates))
    assert on.twin == f"{kind.value} from nano"
