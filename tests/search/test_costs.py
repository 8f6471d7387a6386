"""Cost formulas at their exact ends, and the order of sources."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.blocks import combine, split
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import ExecutorOptions, IssueOrder
from stageloom.shared.schedule import Stage, StageSchedule, stage_schedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, MeasuredStage, StageCosts, mergeable, samples
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import ios, ios_merge, ios_parallel
from tests.search.graphs import DIAMOND, model
from tests.shared.test_merge import same, siblings

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


def test_groups_of_one_resource_come_in_turn_beside_those_of_another() -> None:
    """Whatever groups of one device lose to each other: these have cores of their own."""
    groups = ((0,), (1,), (2,), (3,))
    of_one_device = ((groups, 0.125),)
    for contention in (0.0, 1.0):
        costs = StageCosts((1.0, 2.0, 3.0, 5.0), contention=contention, barrier_s=0.5, measured=of_one_device)
        assert costs.one_stage_s(Stage(groups, resources=(-1, -1, 1, 1))) == 8.5
        assert costs.one_stage_s(Stage(groups, resources=(-1, 1, 1, -1))) == 6.5
        assert costs.one_stage_s(Stage(groups[:2], resources=(-1, 1))) == 2.5
        assert costs.one_stage_s(Stage(groups[:2], resources=(0, 1))) == 2.5
        assert costs.one_stage_s(Stage(groups[:2], resources=(1, 1))) == 3.5
        assert costs.one_stage_s(Stage(groups[:1], resources=(1,))) == 1.0, "nobody is waited for"


def test_measurement_takes_the_place_of_the_estimate_for_that_operator_only() -> None:
    artifact, graph = model("m", DIAMOND)
    estimates = CostTable().for_members([(artifact, graph, split(graph, ())[0])])
    table = CostTable(measured_s={(artifact, OpId(2)): 0.25})
    costs = table.for_members([(artifact, graph, split(graph, ())[0])])
    assert costs.operators_s == (*estimates.operators_s[:2], 0.25, estimates.operators_s[3])


def test_a_table_of_one_executor_gives_estimates_for_others_and_one_of_none_holds_for_all() -> None:
    artifact, graph = model("m", DIAMOND)
    measured = {(artifact, OpId(2)): 0.25}
    onnx, openvino = ExecutorOptions(), ExecutorOptions(name="openvino")
    estimate_s = CostTable().operator_s(artifact, graph, OpId(2))
    of_onnx = CostTable(measured_s=measured, executor=onnx, rates=DeviceRates(contention=0.3))
    assert of_onnx.under(onnx).operator_s(artifact, graph, OpId(2)) == 0.25
    assert of_onnx.under(openvino).operator_s(artifact, graph, OpId(2)) == estimate_s
    assert of_onnx.under(openvino).rates.contention == DeviceRates().contention, "that was fitted to onnx"
    assert of_onnx.under(replace(onnx, issue=IssueOrder.SCHEDULE)) is of_onnx, "costs are kept for both"
    of_any = CostTable(measured_s=measured)
    assert of_any.under(openvino) is of_any


@pytest.mark.promise("plans-were-looked-kept")
@pytest.mark.parametrize(("measured_at", "batch", "seconds"), [(1, 1, 4), (1, 8, 32), (8, 8, 4), (8, 1, 0.5)])
def test_a_measurement_is_scaled_to_another_batch_by_what_the_estimates_say(
    measured_at: int, batch: int, seconds: float
) -> None:
    """Computing alone takes time, and of it eight tasks need eight times as much as one."""
    artifact, graph = model("m", DIAMOND)
    rates = DeviceRates(flop_per_s=1e6, bytes_per_s=1e18, launch_s=0.0)
    table = CostTable(measured_s={(artifact, OpId(2)): 4.0}, measured_at={artifact: measured_at}, rates=rates)
    costs = table.for_members([(artifact, graph, split(graph, ())[0])], batches=[batch])
    assert costs.operators_s == pytest.approx((1.0 * batch, 1.0 * batch, seconds, 1.0 * batch))
    assert table.is_measured(artifact, OpId(2), batch) == (measured_at == batch)


def test_members_of_a_combined_block_have_batches_of_their_own() -> None:
    artifact, graph = model("m", DIAMOND)
    (whole,) = split(graph, ())
    table = CostTable(rates=DeviceRates(flop_per_s=1e6, bytes_per_s=1e18, launch_s=0.0))
    costs = table.for_members([(artifact, graph, whole)] * 2, batches=[1, 8])
    assert costs.operators_s == pytest.approx([1.0] * 4 + [8.0] * 4)


def test_stages_of_equal_batches_are_not_those_of_members_with_different_ones() -> None:
    """Measured with eight rows of both members: nothing of that says what eight and one take."""
    artifact, graph = model("m", DIAMOND)
    (whole,) = split(graph, ())
    groups = ((1,), (5,))
    seen = MeasuredStage(((artifact, 0, 4),) * 2, 8, groups, 0.5)
    merge = MeasuredStage(((artifact, 0, 4),) * 2, 8, ((1,), (2,)), 0.25, merge=True)
    table = CostTable(stages=(seen, merge))
    alike = table.for_members([(artifact, graph, whole)] * 2, batches=[8, 8])
    assert alike.is_measured(Stage(groups)) and alike.one_stage_s(Stage(groups)) == 0.5
    assert alike.measured_merges
    for batches in ([8, 1], [1, 8], [1, 1]):
        costs = table.for_members([(artifact, graph, whole)] * 2, batches=batches)
        assert not costs.is_measured(Stage(groups)) and not costs.measured_merges


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


ARTIFACT = Digest("ab" * 32)


def test_an_estimated_merge_is_one_padded_convolution_and_a_split() -> None:
    """Two siblings of 4 and 5 filters over 12x12, 3 channels: their own work, the zeros, and what moves."""
    graph = siblings(same((1, 1)), same((3, 3)))
    parts = [(ARTIFACT, graph, split(graph, ())[0])]
    zeros_flop = 2 * 144 * 4 * 3 * 8
    moved = 20 + 4 * 4 * 3 * 8 + 4 * 144 * 3 + 3 * 4 * 144 * (4 + 5)
    computing = DeviceRates(flop_per_s=1e3, bytes_per_s=1e12, launch_s=0.5, barrier_s=0.25)
    moving = DeviceRates(flop_per_s=1e12, bytes_per_s=1e3, launch_s=0.5, barrier_s=0.25)
    by_flop = CostTable(rates=computing).for_members(parts)
    assert by_flop.merged_s == {(0, 1): pytest.approx(0.5 + (200 + zeros_flop) / 1e3 + 0.25)}
    by_bytes = CostTable(rates=moving).for_members(parts)
    assert by_bytes.merged_s == {(0, 1): pytest.approx(0.5 + moved / 1e3 + 0.25)}


def test_a_merge_of_a_batch_reads_its_weights_once() -> None:
    graph = siblings(same((1, 1)), same((3, 3)))
    parts = [(ARTIFACT, graph, split(graph, ())[0])]
    weights, row = 20 + 4 * 4 * 3 * 8, 4 * 144 * 3 + 3 * 4 * 144 * (4 + 5)
    moving = DeviceRates(flop_per_s=1e12, bytes_per_s=1e3, launch_s=0.5, barrier_s=0.25)
    ((_, seconds),) = CostTable(rates=moving).for_members(parts, batches=[4]).merges
    assert seconds == pytest.approx(0.5 + (weights + 4 * row) / 1e3 + 0.25)


def test_operators_that_took_twice_their_estimates_double_that_of_their_merge() -> None:
    graph = siblings(same((3, 3)), same((3, 3)))
    parts = [(ARTIFACT, graph, split(graph, ())[0])]
    plain = CostTable(rates=DeviceRates(barrier_s=0.0))
    measured = {(ARTIFACT, OpId(op)): 2 * plain.estimate_s(graph, OpId(op)) for op in range(2)}
    ((_, twice_s),) = CostTable(measured_s=measured, rates=plain.rates).for_members(parts).merges
    ((_, once_s),) = plain.for_members(parts).merges
    assert twice_s == pytest.approx(2 * once_s)


def test_merges_are_numbered_as_the_members_are() -> None:
    graph = siblings(same((3, 3)), None, same((1, 1)))
    parts = [(ARTIFACT, graph, split(graph, ())[0])] * 2
    assert [ops for ops, _ in CostTable().for_members(parts).merges] == [(0, 2), (3, 5)]


def test_a_class_of_many_gives_runs_of_like_kernels_and_few_give_all_subsets() -> None:
    few = siblings(*[same((1, 1))] * 6)
    assert len(list(mergeable(few, split(few, ())[0]))) == 2**6 - 6 - 1
    many = siblings(*[same((3, 3)), same((1, 1))] * 10)
    found = list(mergeable(many, split(many, ())[0]))
    assert len(found) == 20 * 19 // 2
    assert tuple(range(1, 20, 2)) in found and tuple(range(20)) in found and (0, 1) not in found


@pytest.mark.promise("measured-merge-kept-apart")
def test_a_measured_merge_takes_the_place_of_its_estimate_and_teaches_nothing_of_contention() -> None:
    """1. Merging looks dear. 2. The device measures it as cheap. 3. The search merges, and knows it."""
    graph = siblings(same((5, 5)), same((1, 1)))
    block = split(graph, ())[0]
    parts = [(ARTIFACT, graph, block)]
    seconds = {(ARTIFACT, OpId(op)): 1.0 for op in range(2)}
    table = CostTable(measured_s=seconds, rates=DeviceRates(flop_per_s=1e3))
    combined = combine([(graph, block)])
    apart = ios(combined, table.for_members(parts), Limits(), Budget())
    assert not any(stage.merge for stage in apart.stages)
    whole = (ARTIFACT, 0, 2)
    known = [
        MeasuredStage((whole,), 1, ((0,), (1,)), 0.125, merge=True),
        MeasuredStage((whole,), 1, ((0,), (1,)), 1.75),
    ]
    learned = CostTable(measured_s=seconds, rates=table.rates, stages=(*known, *[known[0]] * 3))
    assert len(samples(learned, {ARTIFACT: graph})) == 1
    costs = learned.for_members(parts)
    merged = StageSchedule((Stage(((0,), (1,)), merge=True),))
    for scheduler in (ios, ios_merge):
        assert scheduler(combined, costs, Limits(), Budget()) == merged
    assert costs.schedule_s(merged) == 0.125
    beside = StageSchedule((Stage(((0,), (1,))),))
    assert ios_parallel(combined, costs, Limits(), Budget()) == beside
    assert costs.schedule_s(beside) == 1.75
    assert costs.is_measured(merged.stages[0]) and costs.is_measured(beside.stages[0])
    assert not table.for_members(parts).is_measured(merged.stages[0])
