"""Where a tournament takes place: whose times, whose arrivals, and what is said of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stageloom.planner.api.jobs import Job
from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.plan_search import limits_of
from stageloom.planner.schema.plan import ArrivalRate, ModelOptions, PlanCreateRequest, PlanReply
from stageloom.planner.split_search import Entrants
from stageloom.planner.store.predictions import searches_of
from stageloom.planner.tournament import evaluator, stored
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.runner import CHOICE, FRESH, TournamentResult, TournamentRun
from stageloom.planner.tournament.stored import ASSUMED_LOAD, StoredScenario, stored_scenario
from stageloom.planner.twin.arrivals import Counted, Poisson
from stageloom.planner.twin.stored import stored_times
from stageloom.shared.bound import bind
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import RowKind, TaskCounters
from stageloom.shared.plan import ExecutorOptions, Plan, QueuePlan
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.interface import TOP_LIMITS, Limits
from stageloom.shared.search.job import run_search
from tests.planner.jobs import running_job
from tests.planner.world import KINDS, World
from tests.store.helpers import NANO

T = TypeVar("T")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One model, one device."""
    return World(tmp_path / "home")


def _staged(
    world: World,
    rates: tuple[ArrivalRate, ...] = (),
    device: DeviceId | None = NANO,
    plan: Plan | None = None,
) -> StoredScenario:
    first, graphs = plan or world.plan("sequential"), {world.digest: world.graph}
    return stored_scenario(world.store, device, bind(first, graphs), graphs, rates)


def _result(world: World, pool: "Broken", *policies: str) -> tuple[TournamentResult, Plan, int]:
    """A tournament at five tasks a second, the plan it begins with, and how many take part."""
    choice = ModelChoice(name="diamond", artifact=world.digest, graph=world.graph)
    scenario = _staged(world, (ArrivalRate(model="diamond", per_s=5.0),)).scenario
    taking_part = plan_candidates((choice,), scenario.times.costs, policy_names=policies, searches=True)
    first = run_search(taking_part[0].job, lambda: 0.0)
    run = TournamentRun(taking_part, first, scenario, pool, ManualClock(), budget_s=60.0)
    return run.to_end(), first, len(taking_part)


def test_arrivals_that_were_counted_are_those_of_the_tournament(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, TaskCounters, RowKind.TASK_COUNTERS)
    world.tells(TaskCounters("diamond", 2_000_000, 30, 20, 0, 0, 0, 0))
    staged = _staged(world)
    assert staged.arrivals == f"the last 2 s of {NANO}"
    assert staged.scenario.arrivals == {"diamond": Counted(spans=((0.0, 2.0, 30),), length_s=2.0)}


@pytest.mark.promise("contest-answer-before-anything")
def test_arrivals_that_nobody_knows_are_assumed_below_what_the_device_can_do_and_said_to_be(
    world: World,
) -> None:
    staged = _staged(world)
    assert staged.arrivals.startswith("assumed")
    scenario = staged.scenario
    assert scenario.arrivals["diamond"] == Poisson(rate_per_s=ASSUMED_LOAD / scenario.service_s[0])


def test_a_device_that_nobody_named_is_assumed_and_said_to_be(world: World) -> None:
    assert _staged(world, device=None).twin.startswith("assumed")


def test_a_rate_of_another_model_is_refused_with_the_remedy(world: World) -> None:
    with pytest.raises(InputError, match="no model 'other'"):
        _staged(world, (ArrivalRate(model="other", per_s=1.0),))


@pytest.mark.parametrize("counted", [False, True])
def test_arrivals_of_some_models_alone_are_refused_with_a_remedy_that_a_tournament_has(
    world: World, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    choice = ModelChoice(name="diamond", artifact=world.digest, graph=world.graph)
    both = compose([choice, replace(choice, name="other")])
    rates = () if counted else (ArrivalRate(model="diamond", per_s=5.0),)
    if counted:
        monkeypatch.setitem(KINDS, TaskCounters, RowKind.TASK_COUNTERS)
        world.tells(TaskCounters("diamond", 2_000_000, 30, 20, 0, 0, 0, 0))
    with pytest.raises(InputError, match="how often tasks of other arrive") as refused:
        _staged(world, rates, plan=both)
    assert refused.value.remedy == "give each model an entry in [[rates]] of a plan file"


@pytest.mark.parametrize(("device", "cause"), [(None, "torch_cuda needs a GPU"), (NANO, "for 'cpu-2-core'")])
def test_an_executor_on_a_gpu_without_a_twin_is_refused_with_a_remedy_that_a_tournament_has(
    world: World, device: DeviceId | None, cause: str
) -> None:
    plan = replace(world.plan("sequential"), executor=ExecutorOptions(name="torch_cuda"))
    with pytest.raises(InputError, match=cause) as refused:
        _staged(world, device=device, plan=plan)
    assert refused.value.remedy.startswith("name a --scheduler or --policy")


@pytest.mark.promise("both-twins-judge-plan")
def test_both_twins_say_the_same_and_kernels_that_were_compiled_ahead_are_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some thousand steps: score loading kernels for, not score compiling them."""
    scenario = _staged(world, (ArrivalRate(model="diamond", per_s=400.0),)).scenario
    plan = world.plan("sequential")
    found = []
    for compiled, other in ((False, "compiled.twin.CompiledTwin"), (True, "reference.Twin")):
        with monkeypatch.context() as patched:
            patched.setattr(evaluator, "is_compiled", lambda compiled=compiled: compiled)
            patched.setattr(f"stageloom.planner.twin.{other}", None)
            found.append(scenario.evaluate(plan, CHOICE).plain())
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0]["throughput_per_s"] == pytest.approx(400.0, rel=0.05)


def test_a_plan_that_the_compiled_twin_has_no_room_for_is_judged_by_the_reference_twin(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = _staged(world, (ArrivalRate(model="diamond", per_s=400.0),)).scenario
    plan = world.plan("sequential")
    models = tuple(replace(model, queue=QueuePlan(max_tasks=1 << 24)) for model in plan.models)
    monkeypatch.setattr(evaluator, "is_compiled", lambda: True)
    found = scenario.evaluate(replace(plan, models=models), CHOICE).plain()
    assert found["throughput_per_s"] == pytest.approx(400.0, rel=0.05)


def test_a_batch_that_was_not_profiled_takes_what_one_task_takes_scaled_as_the_estimates_say(
    world: World,
) -> None:
    """100 us an operator were measured at batch 1: four tasks at once are no gift, whoever asks."""
    world.profiled()
    one = ModelChoice(name="diamond", artifact=world.digest, graph=world.graph)
    four = bind(compose([replace(one, batch=4)]), {world.digest: world.graph})
    flop_s, launch_s = 1e6 / DeviceRates().flop_per_s, DeviceRates().launch_s
    scaled_s = 4 * 100e-6 * (launch_s + 4 * flop_s) / (launch_s + flop_s)
    times = stored_times(world.store, NANO, four)[0]
    asked_s = times.of_plan(four).step(0, 1, (4,)).seconds
    assert asked_s - times.device.step_s == pytest.approx(scaled_s)
    rival_s = _staged(world).scenario.times.of_plan(four).step(0, 1, (4,)).seconds
    assert rival_s == pytest.approx(asked_s)


class Broken:
    """A pool whose workers die, all but on the first `works` tasks."""

    workers, where = 2, "nowhere"

    def __init__(self, works: int) -> None:
        self.works = works

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
        """At once."""
        future: SearchFuture[T] = SearchFuture()
        self.works -= 1
        if self.works >= 0:
            future.settle(function(*arguments))
        else:
            future.fail(UnavailableError("a search process ended with code -9"))
        return future

    def close(self) -> None:
        """Nothing runs."""


def test_workers_that_die_are_told_of_and_the_first_valid_plan_remains(world: World) -> None:
    """Only the first candidate is evaluated; nobody can look again."""
    result, first, size = _result(world, Broken(1))
    assert list(result.tournament.evaluated) == [0]
    assert len(result.tournament.failures) == size - 1
    assert (result.outcome.candidate, result.plans) == (0, {0: first})
    assert "ended with code -9" in result.outcome.unchecked


@pytest.mark.promise("contest-answer-before-anything")
def test_what_is_looked_at_again_has_other_arrivals(world: World) -> None:
    assert not set(CHOICE.seeds) & set(FRESH.seeds)
    result, _, _ = _result(world, Broken(99), "sequential", "ios")
    _, before = result.tournament.evaluated[0]
    assert not result.outcome.unchecked
    assert result.outcome.fresh[0].throughput_per_s != before.throughput_per_s


class Held:
    """Two workers: the first evaluation never ends, the third ends the job; others take a second each."""

    where, workers = "here", 2

    def __init__(self, job: Job, clock: ManualClock) -> None:
        self._job, self._clock, self._evaluations = job, clock, 0

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
        future: SearchFuture[T] = SearchFuture()
        if function is evaluator.evaluate_candidate:
            self._evaluations += 1
            if self._evaluations == 3:
                self._job.cancel()
            if self._evaluations != 2:
                return future
        self._clock.advance(1.0)
        future.settle(function(*arguments))
        return future

    def close(self) -> None:
        """Nothing runs."""


def _ended_early(world: World, **asked: Any) -> PlanReply:
    """1. The second plan is evaluated, the first still is; 2. the job is ended."""
    clock = ManualClock()
    job = running_job(clock)
    rate = ArrivalRate(model="diamond", per_s=5.0)
    fields: dict[str, Any] = {"models": (ModelOptions(model="diamond"),), **asked}
    request = PlanCreateRequest(budget_s=60.0, rates=(rate,), **fields)
    return stored.create(world.store, Held(job, clock), clock, request, job, Entrants((), {}))


@pytest.mark.promise("contest-answer-before-anything")
def test_a_tournament_that_ends_before_its_first_plan_was_evaluated_tells_its_course(world: World) -> None:
    """1. The second plan is evaluated, the first still is; 2. the job is ended; 3. both are evaluated once
    more, on fresh arrivals."""
    reply = _ended_early(world)
    assert reply.contest is not None and not reply.contest.unchecked
    (judged,) = reply.contest.judged
    assert judged.at_s == 1.0
    ends = {one.name: one.at_s for one in reply.contest.fresh}
    assert ends == {"sequential, whole": reply.search_s, judged.name: 1.0}


def test_models_with_weights_take_part(world: World) -> None:
    reply = _ended_early(world, models=(ModelOptions(model="diamond", weight=3),))
    assert reply.contest is not None


@pytest.mark.parametrize(("asked", "limits"), [({}, TOP_LIMITS), ({"s": 2}, Limits(s=2))])
def test_the_row_of_the_plan_that_won_has_the_limits_of_its_search(
    world: World, asked: dict[str, int], limits: Limits
) -> None:
    reply = _ended_early(world, **asked)
    (row,) = world.store.read(searches_of, reply.plan.digest)
    assert reply.contest is not None and row.scheduler.startswith(f"{reply.contest.winner} ")
    assert limits_of(row.scheduler) == limits
