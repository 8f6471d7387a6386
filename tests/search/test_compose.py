"""Plans made from models and a scheduler's name."""

from itertools import count

import pytest

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError, SettingError
from stageloom.shared.ids import OpId
from stageloom.shared.plan import Member, QueuePlan, QueueRule, decode_plan
from stageloom.shared.schedule import StageSchedule, stage_schedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.job import FIRST_EXPANSIONS, SearchJob, run_search
from stageloom.shared.search.registry import schedulers
from stageloom.shared.stage_string import to_string
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT = model("left", DIAMOND, cuts=[1, 3])
RIGHT = model("right", CHAIN, cuts=[2])


def choices(left_replicas: int = 1) -> list[ModelChoice]:
    return [
        ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1], partition="base", replicas=left_replicas),
        ModelChoice(name="right", artifact=RIGHT[0], graph=RIGHT[1], partition="base"),
    ]


def test_alone_gives_every_block_of_every_replica_its_own_combined_block() -> None:
    plan = compose(choices(left_replicas=2), scheduler="greedy")
    assert [block.members for block in plan.combined] == [
        *((Member(0, replica, block),) for replica in range(2) for block in range(3)),
        (Member(1, 0, 0),),
        (Member(1, 0, 1),),
    ]
    assert plan.combined[1].schedule == stage_schedule([[[0], [1]]])


def test_aligned_puts_same_numbered_blocks_of_different_models_together_up_to_h() -> None:
    plan = compose(choices(left_replicas=2), scheduler="greedy", combination=Combination.ALIGNED)
    assert [block.members for block in plan.combined] == [
        (Member(0, 0, 0), Member(1, 0, 0)),
        (Member(0, 1, 0),),
        (Member(0, 0, 1), Member(1, 0, 1)),
        (Member(0, 1, 1),),
        (Member(0, 0, 2),),
        (Member(0, 1, 2),),
    ]
    assert plan.combined[0].schedule == stage_schedule([[[0], [1]], [[2]]])


def test_abreast_puts_blocks_together_that_are_as_far_through_their_models() -> None:
    """The left one's blocks have their middles at 1/6, 3/6 and 5/6 of it, the right one's at 1/4 and 3/4."""
    plan = compose(choices(), scheduler="greedy", combination=Combination.ABREAST)
    assert [block.members for block in plan.combined] == [
        (Member(0, 0, 0), Member(1, 0, 0)),
        (Member(0, 0, 1), Member(1, 0, 1)),
        (Member(0, 0, 2),),
    ]


def test_pipelined_puts_neighbouring_blocks_of_one_replica_together() -> None:
    plan = compose(choices(left_replicas=2), scheduler="greedy", combination=Combination.PIPELINED)
    assert [block.members for block in plan.combined] == [
        (Member(0, 0, 0), Member(0, 0, 1)),
        (Member(0, 0, 2),),
        (Member(0, 1, 0), Member(0, 1, 1)),
        (Member(0, 1, 2),),
        (Member(1, 0, 0), Member(1, 0, 1)),
    ]


def test_aligned_splits_in_order_what_is_more_than_h() -> None:
    three = [
        ModelChoice(name=f"m{i}", artifact=artifact, graph=graph)
        for i, (artifact, graph) in enumerate(model(f"m{i}", CHAIN) for i in range(3))
    ]
    plan = compose(three, combination=Combination.ALIGNED, members_max=2)
    assert [len(block.members) for block in plan.combined] == [2, 1]


@pytest.mark.parametrize("combination", list(Combination))
@pytest.mark.parametrize("name", sorted(schedulers()))
def test_composed_plan_is_legal_and_survives_the_wire(name: str, combination: Combination) -> None:
    plan = compose(choices(left_replicas=3), scheduler=name, combination=combination, members_max=3)
    assert decode_plan(plan.wire, plan.digest) == plan
    bind(plan, dict([LEFT, RIGHT]))


def test_blocks_of_equal_edges_and_costs_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[tuple[float, ...]] = []

    def watched(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
        searched.append(costs.operators_s)
        return sequential(graph, costs, limits, budget)

    monkeypatch.setattr("stageloom.shared.search.compose.find_scheduler", lambda name, checkpoint: watched)
    artifact, graph = model("cells", [[], [0], [1], [2], [3], [4]], cuts=[2, 4])
    cells = ModelChoice(name="cells", artifact=artifact, graph=graph, partition="base", replicas=2)
    seconds = {0: 1.0, 1: 2.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: 3.0}  # the last cell has another cost
    costs = CostTable(measured_s={(artifact, OpId(op)): cost for op, cost in seconds.items()})
    compose([cells], costs=costs)
    assert searched == [(1.0, 2.0), (1.0, 3.0)]


def test_choice_reaches_the_plan_field_by_field() -> None:
    queue = QueuePlan(rule=QueueRule.DEADLINE, max_tasks=7, max_bytes=99)
    choice = ModelChoice(
        name="left",
        artifact=LEFT[0],
        graph=LEFT[1],
        partition=(3,),
        replicas=2,
        batch=4,
        batch_max_delay_us=5,
        launch_interval_us=6,
        work_conserving=False,
        weight=8,
        queue=queue,
    )
    plan = compose([choice], lanes=2)
    made = plan.models[0]
    assert plan.lanes == 2
    assert (made.name, made.artifact, made.cuts, made.replicas) == ("left", LEFT[0], (3,), 2)
    assert (made.batch, made.batch_max_delay_us, made.launch_interval_us) == (4, 5, 6)
    assert (made.work_conserving, made.weight, made.queue) == (False, 8, queue)


def test_unknown_partition_is_refused_with_the_list_of_offered_ones() -> None:
    choice = ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1], partition="paper")
    with pytest.raises(PlanError, match="no partition 'paper'; choose one of whole, base"):
        compose([choice])


def test_cut_that_is_no_base_cut_is_refused() -> None:
    choice = ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1], partition=(2,))
    with pytest.raises(PlanError, match="not ascending base cuts"):
        compose([choice])


def test_combined_block_without_members_is_refused() -> None:
    with pytest.raises(SettingError, match="0 members"):
        compose(choices(), members_max=0)


def test_a_search_by_seconds_answers_with_the_cheapest_of_each_block_and_not_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small search and a larger one, which is better on one model and worse on the other."""

    def moody(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
        small, diamond = budget.expansions == FIRST_EXPANSIONS, graph.size == len(DIAMOND)
        return (greedy if small == diamond else sequential)(graph, costs, limits, budget)

    monkeypatch.setattr("stageloom.shared.search.compose.find_scheduler", lambda name, checkpoint: moody)
    wide = model("wide", [[], [], []])
    models = (
        ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1]),
        ModelChoice(name="wide", artifact=wide[0], graph=wide[1]),
    )
    costs = CostTable(rates=DeviceRates(contention=0.0, barrier_s=0.0))
    job = SearchJob(models=models, scheduler="ios", costs=costs, budget_s=1e6)
    plan = run_search(job, map(float, count()).__next__)
    assert [to_string(block.schedule) for block in plan.combined] == ["0/1|2/3", "0|1|2"]
