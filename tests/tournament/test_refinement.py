"""Refinement: what is drawn and scheduled, where it ends, and what is said of it."""

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from stageloom.planner.api.jobs import Job
from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.replan.predict import serves
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.schema.plan import ArrivalRate, ModelOptions, PlanCreateRequest, PlanReply
from stageloom.planner.split_search import Entrants
from stageloom.planner.store.predictions import considered_plans
from stageloom.planner.tournament import stored
from stageloom.planner.tournament.candidates import REFINED, SEED_BUDGET, plan_candidates
from stageloom.planner.tournament.evaluator import (
    EvaluationSettings,
    Scenario,
    evaluate_again,
    evaluate_candidate,
)
from stageloom.planner.tournament.refinement import MEMBERS_LEAST, NeighbourJob, Refinement
from stageloom.planner.tournament.runner import TournamentResult, TournamentRun
from stageloom.planner.tournament.score import improves
from stageloom.planner.twin.arrivals import Poisson
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import UnavailableError
from stageloom.shared.plan import Member, Plan, decode_plan
from stageloom.shared.schedule import StageSchedule, StreamSchedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.compose import Combination, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS
from stageloom.shared.search.job import run_search
from stageloom.shared.search.neighbours import neighbours, shape_of
from tests.planner.jobs import running_job
from tests.planner.world import World
from tests.search.test_rivals import LEFT, RIGHT, choice
from tests.twin.cases import device

pytestmark = pytest.mark.more

T = TypeVar("T")

TOY = device(launch_s=1e-3, barrier_s=1e-4)
COSTS = CostTable(rates=TOY.rates())
GRAPHS = dict((LEFT, RIGHT))
BOTH = (choice(LEFT, partition="base"), choice(RIGHT, partition="base"))
CHOICE = EvaluationSettings(seeds=(1, 2), warm_up_s=0.5, window_s=0.5, windows=2)
FRESH = EvaluationSettings(seeds=(3, 4), warm_up_s=0.5, window_s=0.5, windows=2)
SCENARIO = Scenario(
    times=StepTimes(TOY, COSTS),
    arrivals={"left": Poisson(rate_per_s=90.0), "right": Poisson(rate_per_s=90.0)},
    graphs=GRAPHS,
    service_s=(4e-3, 4e-3),
)
"""More than the device serves one operator after another."""


class Here:
    """A pool that runs everything at once, through pickles, and counts a second for an evaluation."""

    where = "here"

    def __init__(self, clock: ManualClock, workers: int = 1, most_again: int = 3) -> None:
        """`most_again`: so many plans are evaluated again, and then no worker is left."""
        self.clock, self.workers, self.most_again = clock, workers, most_again
        self.jobs: list[Any] = []
        self.again: list[Any] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        future: SearchFuture[T] = SearchFuture()
        if function is evaluate_again:
            self.again.append(arguments[0])
            if len(self.again) > self.most_again:
                future.fail(UnavailableError("a search process ended with code -9"))
                return future
        future.settle(function(*pickle.loads(pickle.dumps(arguments))))
        if function is evaluate_candidate:
            self.jobs.append(arguments[0])
            self.clock.advance(1.0)
        return future

    def close(self) -> None:
        """Nothing runs."""


def refined(
    *policies: str, budget_s: float = 10_000.0, seed: int = 0, workers: int = 1, most_again: int = 3
) -> tuple[TournamentResult, Here]:
    """A tournament of these policies, then of all neighbours that the budget allows."""
    clock = ManualClock()
    pool = Here(clock, workers, most_again)
    listed = plan_candidates(BOTH, COSTS, policy_names=policies, searches=True)
    first = run_search(listed[0].job, lambda: 0.0)
    refinement = Refinement(GRAPHS, COSTS, TOP_LIMITS, seed=seed)
    run = TournamentRun(
        listed,
        first,
        SCENARIO,
        pool,
        clock,
        budget_s=budget_s,
        refinement=refinement,
        choice=CHOICE,
        fresh=FRESH,
    )
    return run.to_end(), pool


def drawn(parent: Plan, count: int) -> tuple[Refinement, list[NeighbourJob]]:
    refinement = Refinement(GRAPHS, COSTS, TOP_LIMITS)
    jobs: list[NeighbourJob] = []
    while len(jobs) < count and (found := refinement.draw(parent)) is not None:
        jobs.append(found.job)
        refinement.keep(found.job, found.job.plan())
    return refinement, jobs


def made_of(plan: Plan, members: Sequence[Member]) -> tuple[object, ...]:
    """What members compute, at which batches."""
    found = []
    for member in members:
        model = plan.models[member.model]
        borders = (0, *model.cuts, len(GRAPHS[model.artifact].operators))
        found.append((model.artifact, model.batch, borders[member.block], borders[member.block + 1]))
    return tuple(found)


def test_no_combined_block_is_scheduled_twice_and_none_of_the_parent_again() -> None:
    parent = compose([replace(one, replicas=2) for one in BOTH], combination=Combination.ALIGNED, costs=COSTS)
    _, jobs = drawn(parent, 10_000)
    before = {made_of(parent, block.members) for block in parent.combined}
    searched: Counter[tuple[object, ...]] = Counter()
    for job in jobs:
        plan = job.plan()
        rows = {made_of(plan, members) for members in job.shape.combined if members not in job.known}
        searched.update(rows)
    assert len(jobs) > 50
    assert set(searched.values()) == {1}
    assert not before & set(searched)


def test_every_neighbour_is_drawn_once_until_none_is_left() -> None:
    parent = compose(BOTH, costs=COSTS)
    refinement, jobs = drawn(parent, 10_000)
    shape = shape_of(parent)
    assert shape is not None
    expected = {
        one
        for _, one in neighbours(shape, GRAPHS, members_max=MEMBERS_LEAST, wait=parent.wait, rng=Random(9))
    }
    assert {job.shape for job in jobs} == expected and len(jobs) == len(expected)
    assert refinement.draw(parent) is None
    better = jobs[0].plan()
    after = []
    while (found := refinement.draw(better)) is not None:
        after.append(found.job.shape)
    assert after and not set(after) & {*expected, shape}, "neither those nor what they come from again"


def test_neighbours_are_legal_and_keep_schedules_and_rules_of_what_did_not_change() -> None:
    parent = replace(compose(BOTH, scheduler="opara", costs=COSTS), run_ahead=5)
    _, jobs = drawn(parent, 10_000)
    streams = 0
    for job in jobs:
        plan = job.plan()
        bind(plan, GRAPHS)
        assert (plan.run_ahead, plan.executor) == (5, parent.executor)
        before = {made_of(parent, block.members): block.schedule for block in parent.combined}
        for block in plan.combined:
            same = before.get(made_of(plan, block.members))
            if same is not None:
                assert block.schedule == same
                streams += isinstance(block.schedule, StreamSchedule)
    assert streams


def test_a_plan_that_splits_operators_has_no_neighbours() -> None:
    parent = compose(BOTH, costs=COSTS)
    bound = replace(parent, further_executors=(replace(parent.executor, name="null"),))
    assert Refinement(GRAPHS, COSTS, TOP_LIMITS).draw(bound) is None


def test_it_ends_where_no_neighbour_is_better_and_every_other_one_was_tried() -> None:
    """A local optimum: every neighbour of the answer is searched and evaluated again, apart from the run."""
    result, pool = refined("sequential")
    tournament = result.tournament
    assert pool.clock.monotonic_s() < 9_000.0, "not the budget ended it"
    best, held = result.plans[tournament.best], tournament.curve[-1].score
    assert result.candidates[tournament.best].policy == REFINED
    _, jobs = drawn(best, 10_000)
    tried = {job.shape for job in pool.jobs if isinstance(job, NeighbourJob)}
    first = shape_of(result.plans[0])
    assert first is not None
    tried.add(first)
    top = max((score for _, score in tournament.evaluated.values()), key=lambda one: one.throughput_per_s)
    for job in jobs:
        assert job.shape in tried
        assert not improves(SCENARIO.evaluate(job.plan(), CHOICE), held, top)


def test_equal_seeds_and_one_worker_give_equal_answers_and_another_seed_another_course() -> None:
    first, again, other = (refined("sequential", budget_s=40.0, seed=seed)[0] for seed in (1, 1, 2))
    assert first.tournament.evaluated == again.tournament.evaluated
    assert {n: plan.digest for n, plan in first.plans.items()} == {
        n: plan.digest for n, plan in again.plans.items()
    }
    assert first.tournament.evaluated != other.tournament.evaluated


def test_the_budget_in_evaluations_is_kept_and_listed_candidates_come_first() -> None:
    result, pool = refined("sequential", "instances", budget_s=23.0)  # three are looked at again
    assert len(pool.jobs) == 20
    kinds = [isinstance(job, NeighbourJob) for job in pool.jobs]
    assert kinds == sorted(kinds) and not all(kinds)
    assert result.tournament.left == 0
    assert result.tournament.neighbours == kinds.count(True)


def test_several_workers_draw_neighbours_of_what_was_best_when_they_began() -> None:
    result, pool = refined("sequential", workers=3)
    parents = [job.parent.digest for job in pool.jobs if isinstance(job, NeighbourJob)]
    assert len(set(parents)) > 1
    assert result.candidates[result.tournament.best].policy == REFINED


def test_plans_are_looked_at_again_in_tasks_of_their_own_and_where_one_fails_what_chose_decides() -> None:
    result, pool = refined("sequential", budget_s=40.0)
    finalists = list(result.outcome.fresh)
    assert len(finalists) > 1 and not result.outcome.unchecked
    assert [plan.digest for plan in pool.again] == [result.plans[number].digest for number in finalists]
    unseen, _ = refined("sequential", budget_s=40.0, most_again=len(finalists) - 1)
    assert "ended with code -9" in unseen.outcome.unchecked and unseen.outcome.fresh == {}
    assert unseen.outcome.candidate == unseen.tournament.best != 0


def test_what_is_combined_anew_takes_what_the_small_beam_finds() -> None:
    _, jobs = drawn(compose(BOTH, costs=COSTS), 20)
    searched = 0
    for job in jobs:
        plan = job.plan()
        bound = bind(plan, GRAPHS)
        for block in bound.combined:
            if block.members not in job.known:
                costs = COSTS.for_members(
                    [
                        (model.plan.artifact, model.graph, model.blocks[member.block])
                        for member in block.members
                        for model in (bound.models[member.model],)
                    ]
                )
                expected = beam(block.graph, costs, TOP_LIMITS, SEED_BUDGET)
                schedule = block.plan.schedule
                assert isinstance(schedule, StageSchedule)
                assert costs.schedule_s(schedule) == pytest.approx(costs.schedule_s(expected))
                searched += 1
    assert searched


def test_the_reply_and_the_record_say_which_plan_a_neighbour_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "home")
    told: list[str] = []
    monkeypatch.setattr(Job, "progress", lambda self, text="", **figures: told.append(text))
    monkeypatch.setattr(
        stored,
        "plan_candidates",
        lambda *models, **rest: plan_candidates(*models, **{**rest, "policy_names": ["instances"]}),
    )
    clock = ManualClock()
    request = PlanCreateRequest(
        models=(ModelOptions(model="diamond"),),
        budget_s=60.0,
        rates=(ArrivalRate(model="diamond", per_s=1000.0),),
    )
    reply: PlanReply = stored.create(
        world.store, Here(clock), clock, request, running_job(clock), Entrants((), {})
    )
    assert reply.contest is not None
    led = [one for one in reply.contest.judged if one.policy == REFINED]
    assert led and reply.contest.neighbours >= len(led)
    names = {one.name for one in reply.contest.judged}
    assert all(one.led and one.parent in names and one.move for one in led)
    assert any(one.startswith("refining ") and "neighbour" in one for one in told)
    kept = world.store.read(considered_plans, serves(decode_plan(reply.plan.wire)), "")
    rows = {row.scheduler.removesuffix(" r=3 s=8"): row.verdict for row, _ in kept}  # the winner's limits
    assert {one.name for one in led} <= set(rows)
    assert rows[reply.contest.winner] is EvaluationVerdict.FOUND
