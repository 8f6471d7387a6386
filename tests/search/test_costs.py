"""Cost formulas at their exact ends, and the order of sources."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import split
from shared.errors import InputError
from shared.ids import OpId
from shared.schedule import stage_schedule
from shared.search.analytic import DeviceRates
from shared.search.costs import CostTable, StageCosts
from tests.search.graphs import DIAMOND, model

SECONDS = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6)


@given(SECONDS)
def test_full_contention_costs_the_sum_and_none_costs_the_longest(seconds: list[float]) -> None:
    groups = [(op,) for op in range(len(seconds))]
    assert StageCosts(tuple(seconds), contention=1.0).stage_s(groups) == pytest.approx(sum(seconds))
    assert StageCosts(tuple(seconds), contention=0.0).stage_s(groups) == pytest.approx(max(seconds))


def test_barrier_is_paid_only_where_groups_meet() -> None:
    costs = StageCosts((1.0, 2.0, 4.0), contention=0.0, barrier_s=0.5)
    assert costs.stage_s([(0, 1, 2)]) == 7.0
    assert costs.stage_s([(0, 1), (2,)]) == 4.5
    assert costs.schedule_s(stage_schedule([[[0, 1], [2]], [[0]]])) == 5.5


def test_measurement_takes_the_place_of_the_estimate_for_that_operator_only() -> None:
    artifact, graph = model("m", DIAMOND)
    estimates = CostTable().for_members([(artifact, graph, split(graph, ())[0])])
    table = CostTable(measured_s={(artifact, OpId(2)): 0.25})
    costs = table.for_members([(artifact, graph, split(graph, ())[0])])
    assert costs.operators_s == (*estimates.operators_s[:2], 0.25, estimates.operators_s[3])


def test_estimate_is_the_launch_plus_the_longer_of_computing_and_moving() -> None:
    # 1e6 flop; operator 3 of the diamond reads two tensors of 16 bytes and writes one: 48 bytes.
    artifact, graph = model("m", DIAMOND)
    computing = CostTable(rates=DeviceRates(flop_per_s=1e6, bytes_per_s=1e9, launch_s=0.5))
    moving = CostTable(rates=DeviceRates(flop_per_s=1e12, bytes_per_s=16.0, launch_s=0.5))
    assert computing.operator_s(artifact, graph, OpId(3)) == 1.5
    assert moving.operator_s(artifact, graph, OpId(3)) == 3.5


def test_combined_costs_follow_the_numbering_of_the_members() -> None:
    left, right = model("left", DIAMOND, cuts=[1]), model("right", DIAMOND)
    table = CostTable(
        measured_s={
            (artifact, OpId(op)): base + op
            for artifact, base in ((left[0], 10.0), (right[0], 20.0))
            for op in range(4)
        }
    )
    second = split(left[1], (1,))[1]
    whole = split(right[1], ())[0]
    costs = table.for_members([(*left, second), (*right, whole)])
    assert costs.operators_s == (11.0, 12.0, 13.0, 20.0, 21.0, 22.0, 23.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e-9])
def test_cost_that_is_no_duration_is_refused(seconds: float) -> None:
    artifact, _ = model("m", DIAMOND)
    with pytest.raises(InputError, match="measure it again"):
        CostTable(measured_s={(artifact, OpId(0)): seconds})
