"""Who takes part in a comparison, and that every plan of theirs runs."""

from dataclasses import replace

import pytest

from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.tournament.candidates import PER_MODEL, SEARCHES, SEEDS, plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.plan import Member, Wait
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import SearchJob, run_search
from stageloom.shared.search.rivals import policies
from tests.search.test_rivals import LEFT, RIGHT, choice
from tests.twin.cases import device

TOY = device(launch_s=1e-3)
COSTS = CostTable(rates=TOY.rates())
BOTH = (choice(LEFT), choice(RIGHT))


@pytest.mark.promise("rival-takes-part-comparison")
def test_every_policy_and_every_per_model_scheduler_takes_part() -> None:
    assert {one.policy for one in plan_candidates(BOTH, COSTS)} == set(policies()) | set(PER_MODEL)


def test_searches_of_ours_take_part_where_they_are_asked_for() -> None:
    asked = {one.policy for one in plan_candidates(BOTH, COSTS, searches=True)}
    assert asked == set(policies()) | set(PER_MODEL) | set(SEARCHES) | set(SEEDS)


@pytest.mark.parametrize("partition", ["whole", "base"])
def test_what_a_training_begins_with_takes_part_without_any_training(partition: str) -> None:
    """Every way to combine that `candidates.seeds` knows, on one instance of each model and on several."""
    graphs = {model.artifact: model.graph for model in BOTH}
    found: dict[int, set[frozenset[frozenset[Member]]]] = {}
    for candidate in plan_candidates(BOTH, COSTS, searches=True):
        plan = run_search(candidate.job, lambda: 0.0)
        if candidate.partition == partition and plan.wait is Wait.NONE:
            rows = frozenset(frozenset(block.members) for block in plan.combined)
            found.setdefault(plan.models[0].replicas, set()).add(rows)
    for structure in ("sequential", "instances"):
        models = tuple(replace(model, partition=partition) for model in BOTH)
        template = run_search(policies()[structure].plan(SearchJob(models=models, costs=COSTS)), lambda: 0.0)
        bind(template, graphs)
        space = Space.of(template, "toy")
        for row in seeds(space).values():
            combined = combine_blocks(space, row[space.num_models :]).combined
            wanted = frozenset(frozenset(members) for members in combined)
            joint = partition == "whole" and structure == "sequential" and any(len(one) > 1 for one in wanted)
            assert joint or wanted in found[template.models[0].replicas]


def test_weights_are_in_plans_whose_blocks_take_turns_by_them_and_in_no_others() -> None:
    """A request for any other plan with a weight would be refused, so such a plan could not be made again."""
    heavy = tuple(replace(model, weight=3) for model in BOTH)
    for candidate in plan_candidates(heavy, COSTS, searches=True):
        weights = {model.weight for model in candidate.job.models}
        assert weights == {3 if candidate.policy == "proportional" else 1}


def test_sequential_comes_first_so_that_there_is_a_plan_at_once() -> None:
    first = plan_candidates(BOTH, COSTS)[0]
    assert (first.policy, first.partition) == ("sequential", "whole")


def test_a_joint_graph_needs_two_models_and_a_partition() -> None:
    joint = {"synchronised", "shared_input"}
    assert not joint & {one.policy for one in plan_candidates(BOTH[:1], COSTS)}
    assert "whole" not in {one.partition for one in plan_candidates(BOTH, COSTS) if one.policy in joint}


def test_policies_can_be_chosen_by_name() -> None:
    assert {one.policy for one in plan_candidates(BOTH, COSTS, policy_names=["ios", "batching"])} == {
        "ios",
        "batching",
    }


@pytest.mark.parametrize("candidate", plan_candidates(BOTH, COSTS, searches=True), ids=lambda one: one.name)
def test_every_candidate_serves_a_light_load_whole(candidate: object) -> None:
    """All tasks are served, but by a plan that waits for the rarer model."""
    job = candidate.job  # type: ignore[attr-defined]
    plan = run_search(job, lambda: 0.0)
    bound = bind(plan, {model.artifact: model.graph for model in BOTH})
    times = StepTimes(TOY, COSTS)
    arrivals = {BOTH[0].name: Periodic(rate_per_s=10.0), BOTH[1].name: Periodic(rate_per_s=20.0)}
    settings = EvaluationSettings(seeds=(1, 2), warm_up_s=1.0, window_s=1.0, windows=3)
    score = evaluate(bound, lambda seed: Twin(times, arrivals, seed=seed), settings, [0.01, 0.01])
    expected = 20.0 if plan.wait is Wait.ALL else 30.0
    assert score.throughput_per_s == pytest.approx(expected, abs=0.7)
    assert (score.variance_growth > 0.0) is (plan.wait is Wait.ALL)


def test_a_course_counts_what_it_simulates() -> None:
    assert EvaluationSettings(seeds=(1, 2, 3), warm_up_s=2.0, window_s=0.5, windows=8).simulated_s == 18.0
