"""Plans with split operators on the twin: what halves, joins and the operators around them take."""

from dataclasses import replace

import pytest

from stageloom.planner.replan.predict import block_costs, predict
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import OpId
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.split_costs import split_costs
from stageloom.shared.search.split_plan import ResourcePair
from stageloom.shared.search.split_plan import split_plan as split_plan_of
from stageloom.shared.search.split_problem import SplitChoice, Whole
from tests.search.graphs import model
from tests.shared.test_splits import DIGEST, image_chain, split_plan
from tests.twin.cases import device

WHOLE_S = 0.008


def bound_and_costs(splits: str) -> tuple[BoundPlan, CostTable]:
    """Three operators of 8 ms each, some of them split."""
    graph = image_chain(3)
    table = {(DIGEST, OpId(op)): WHOLE_S for op in range(3)}
    return bind(split_plan(graph, splits), {DIGEST: graph}), CostTable(
        measured_s=table, rates=device().rates()
    )


def test_a_half_costs_its_share_and_a_whole_operator_what_it_did() -> None:
    bound, costs = bound_and_costs("1c2")
    table = split_costs(costs, bound)
    key = bound.models[0].graph_key
    found = [table.measured_s.get((key, OpId(op))) for op in range(5)]
    assert found == [WHOLE_S, pytest.approx(WHOLE_S / 4), pytest.approx(WHOLE_S * 3 / 4), None, WHOLE_S]
    assert table.measured_s.items() >= costs.measured_s.items()
    assert list(block_costs(bound, 0, costs).operators_s[:2]) == pytest.approx([WHOLE_S, WHOLE_S / 4])


def test_a_split_step_takes_the_longer_half_and_the_join() -> None:
    bound, costs = bound_and_costs("1c2")
    step = StepTimes(device(), costs).of_plan(bound).step(0, 1, (1,))
    graph = bound.models[0].graph
    join_s = costs.estimate_s(graph, OpId(3))
    assert 0.0 < join_s < WHOLE_S
    assert step.seconds == pytest.approx(2 * WHOLE_S + WHOLE_S * 3 / 4 + join_s)


@pytest.mark.parametrize(
    ("sides", "seconds"),
    [
        (((1,), (2,)), 0.002 + 0.003 + 0.002 + 0.002 + 0.002),
        (((1, 2), (3, 4)), 0.002 + 0.006 + 0.002),
        (((1, 2, 3), (4,)), 0.002 + 0.006 + 0.002),
    ],
)
def test_chains_beside_each_other_take_what_the_busier_resource_takes_for_its_own(
    sides: tuple[tuple[int, ...], tuple[int, ...]], seconds: float
) -> None:
    """Of four branches of a model that is not split, 2 ms at home and 3 ms each on the other executor."""
    artifact, graph = model("fork", [[], [0], [0], [0], [0], [1, 2, 3, 4]])
    home, other = ExecutorOptions(), ExecutorOptions(name="openvino")
    states = tuple(Whole(int(op in sides[1])) for op in range(len(graph.operators)))
    choice = SplitChoice(states=states, splits=(), seconds=0.0, beside=(sides,))
    plan = split_plan_of("fork", artifact, graph, choice, ResourcePair((home, other), ((0,), (1,))))
    tables = [
        CostTable(
            measured_s={(artifact, OpId(op)): op_s for op in range(len(graph.operators))},
            rates=device().rates(),
            executor=executor,
        )
        for executor, op_s in ((home, 0.002), (other, 0.003))
    ]
    costs = replace(tables[0], beside={other: tables[1]})
    times = StepTimes(device(), costs).of_plan(bind(plan, {artifact: graph}))
    assert times.step(0, 1, (1,)).seconds == pytest.approx(seconds)
    assert predict(plan, {artifact: graph}, costs, ()).busy == pytest.approx(seconds)


def test_two_plans_that_split_a_model_differently_have_costs_of_their_own() -> None:
    times = StepTimes(device(), bound_and_costs("1c2")[1])
    seconds = [times.of_plan(bound_and_costs(s)[0]).step(0, 1, (1,)).seconds for s in ("1c2", "1c4", "1c2")]
    assert seconds[0] == seconds[2] > seconds[1]


def test_a_twin_serves_a_split_plan() -> None:
    bound, costs = bound_and_costs("0c4,1-2h6")
    twin = Twin(StepTimes(device(), costs), {"m": Periodic(rate_per_s=20.0)})
    twin.deploy(bound)
    window = twin.run(5.0)
    assert window.completed == 100
    assert window.p99_s < 3 * WHOLE_S
