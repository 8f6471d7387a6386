"""The plan of a device on which nothing was searched yet."""

import math
from dataclasses import replace
from itertools import pairwise
from math import fsum

import pytest

from benchmarks import zoo
from stageloom.shared.bound import bind
from stageloom.shared.ids import Digest
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, Member, Plan, QueueRule, StepChoice, decode_plan
from stageloom.shared.search.arrangements import (
    BORDERS_S,
    GPU_BATCH,
    GPU_LANES,
    UNEVEN,
    Times,
    arrangements,
    batch_within,
    block_counts,
    computing_lanes,
    even_cuts,
    express_models,
    express_of,
    fastest,
    likely_blocks_s,
    widths,
)
from stageloom.shared.search.auto import auto_plan, best_arrangement
from stageloom.shared.search.compose import ModelChoice
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT = model("left", DIAMOND, cuts=[1, 3])
RIGHT = model("right", CHAIN, cuts=[2])
MODELS = [
    ModelChoice(name=name, artifact=made[0], graph=made[1]) for name, made in [("l", LEFT), ("r", RIGHT)]
]


ONNX, OPENVINO = ExecutorOptions(name="onnx"), ExecutorOptions(name="openvino")
GPU = ExecutorOptions(name="torch_cuda")


def wide(options: ExecutorOptions, threads: int = 2) -> ExecutorOptions:
    return replace(options, intra_op_threads=threads)


def of_models(known: dict[Digest, Times]) -> list[Times]:
    return [known.get(one.artifact, {}) for one in MODELS]


def plan_for(cores: list[int], known: dict[Digest, Times] | None = None) -> Plan:
    plan = auto_plan(MODELS, of_models(known or {}), ONNX, cores)
    bind(plan, dict([LEFT, RIGHT]))
    return decode_plan(plan.wire)


@pytest.mark.parametrize("cores", [[0], [0, 1], [2, 3, 5, 7]])
def test_there_is_a_pinned_lane_and_a_replica_of_every_model_for_each_core(cores: list[int]) -> None:
    plan = plan_for(cores)
    assert [plan.cores_of(lane) for lane in range(plan.lanes)] == [(core,) for core in cores]
    assert {block.members for block in plan.combined} == {
        (Member(index, replica, 0),) for index in range(2) for replica in range(len(cores))
    }
    assert plan.step_choice is StepChoice.DEADLINE
    assert {one.queue.rule for one in plan.models} == {QueueRule.DEADLINE}


def test_there_are_no_more_lanes_than_a_plan_may_have() -> None:
    assert plan_for(list(range(64))).lanes == MAX_LANES


def test_each_model_runs_on_its_own_executor() -> None:
    plan = plan_for([0, 1], {RIGHT[0]: {OPENVINO: 1.0}})
    by_model = {(one.members[0].model, plan.executors[one.executor].name) for one in plan.combined}
    assert by_model == {(0, "onnx"), (1, "openvino")}
    assert plan_for([0], {LEFT[0]: {OPENVINO: 1.0}, RIGHT[0]: {OPENVINO: 1.0}}).executors == (OPENVINO,)


def test_a_model_that_would_hold_up_an_urgent_one_is_cut() -> None:
    known: dict[Digest, Times] = {LEFT[0]: {ONNX: 0.006}, RIGHT[0]: {ONNX: 0.040}}  # the one is not short
    assert [one.cuts for one in plan_for([0], known).models] == [(), (2,)]
    assert [one.cuts for one in auto_plan(MODELS, of_models(known), ONNX, [0], whole=True).models] == [(), ()]


def test_lanes_get_several_cores_where_one_fast_lane_carries_more() -> None:
    # Two cores: alone a long step holds up urgent tasks, with two threads it does not, and cannot be cut.
    known: dict[Digest, Times] = {
        LEFT[0]: {ONNX: 0.0050, wide(ONNX): 0.0025},
        RIGHT[0]: {ONNX: 0.0420, wide(ONNX): 0.0195},
    }
    plan = auto_plan(MODELS, of_models(known), ONNX, [2, 3], whole=True)
    bind(plan, dict([LEFT, RIGHT]))
    assert plan.lanes == 1 and plan.cores_of(0) == (2, 3)
    assert plan.executors == (wide(ONNX),)
    assert {one.replicas for one in plan.models} == {1}


def test_a_model_that_does_not_split_runs_on_one_thread_of_a_wide_lane() -> None:
    known: list[Times] = [{ONNX: 0.0050, wide(ONNX): 0.0055}, {ONNX: 0.042, wide(ONNX): 0.015}]
    found = best_arrangement(known, [1, 1], ONNX, 2)
    assert (found.lanes, found.width, found.run_by) == (1, 2, (ONNX, wide(ONNX)))


def test_a_cut_model_runs_where_borders_cost_least() -> None:
    known: list[Times] = [{ONNX: 0.006}, {ONNX: 0.108, OPENVINO: 0.100}]
    whole = best_arrangement(known, [1, 1], ONNX, 2)
    cut = best_arrangement(known, [1, 30], ONNX, 2)
    assert (whole.blocks[1], whole.run_by[1]) == (1, OPENVINO)
    assert cut.blocks[1] > 4 and cut.run_by[1] == ONNX


def urgent_beside_heavy(heavy_s: float = 0.085, urgent_s: float = 0.0001) -> dict[Digest, Times]:
    return {LEFT[0]: {ONNX: heavy_s}, RIGHT[0]: {ONNX: urgent_s}}


def test_a_model_that_is_short_beside_the_others_has_an_express_lane_without_a_core() -> None:
    plan = auto_plan(MODELS, of_models(urgent_beside_heavy()), ONNX, [0, 1], whole=True)
    bind(plan, dict([LEFT, RIGHT]))
    assert [plan.cores_of(lane) for lane in range(plan.lanes)] == [(0,), (1,), ()]
    assert {block.members: block.resources for block in plan.combined} == {
        (Member(0, 0, 0),): (0, 1),
        (Member(0, 1, 0),): (0, 1),
        (Member(1, 0, 0),): (2,),
    }
    assert express_of(plan) == {1} and computing_lanes(plan) == 2
    assert decode_plan(plan.wire) == plan


def test_models_of_like_length_have_no_express_lane() -> None:
    plan = auto_plan(MODELS, of_models(urgent_beside_heavy(0.012, 0.004)), ONNX, [0, 1], whole=True)
    assert plan.lanes == computing_lanes(plan) == 2 and not express_of(plan)


@pytest.mark.parametrize(
    ("seconds", "lanes", "found"),
    [
        ([0.080, 0.0001], 2, [{1}]),
        ([0.080, 0.0001, 0.0004], 2, [{1}, {1, 2}]),  # either leap
        ([0.080, 0.001, 0.002], 2, [{1, 2}]),
        ([0.080, 0.020, 0.006], 2, []),  # no leap, or too long
        ([0.080, 0.006], 2, []),
        ([0.080, None], 2, []),
        ([0.001], 2, []),  # nothing that it could wait for
        ([0.080, 0.0001], MAX_LANES, []),
    ],
)
def test_a_model_is_express_by_a_leap_and_while_it_is_short(
    seconds: list[float | None], lanes: int, found: list[set[int]]
) -> None:
    assert list(express_models(seconds, lanes)) == found


def test_what_an_express_model_waits_for_is_not_cut_for_its_sake() -> None:
    known: list[Times] = [{ONNX: 0.085}, {ONNX: 0.0001}]
    found = list(arrangements(known, [17, 1], ONNX, 2, [0.425, 0.020]))
    assert {one.blocks for one in found if one.express} == {(1, 1)}
    assert {one.blocks for one in found if not one.express} == {(1, 1), (5, 1), (9, 1), (17, 1)}


def test_blocks_are_taken_to_be_uneven_and_to_sum_to_the_model_with_its_borders() -> None:
    assert likely_blocks_s(ONNX, 0.1, 1) == (0.1,)
    four = likely_blocks_s(ONNX, 0.1, 4)
    assert fsum(four) == pytest.approx(0.1 + 3 * BORDERS_S["onnx"])
    assert max(four) == pytest.approx((1.0 + UNEVEN) * fsum(four) / 4)


def test_a_gpu_beside_cores_is_no_express_lane_and_neither_is_a_lane_that_takes_all_models() -> None:
    plan = auto_plan(MODELS, of_models(urgent_beside_heavy()), ONNX, [0, 1], whole=True)
    on_gpu = tuple(replace(block, executor=block.members[0].model) for block in plan.combined)
    assert computing_lanes(replace(plan, further_executors=(GPU,), combined=on_gpu)) == 3
    anywhere = tuple(replace(block, resources=()) for block in plan.combined)
    assert computing_lanes(replace(plan, combined=anywhere)) == 3


@pytest.mark.parametrize("on_gpu", [{}, {GPU: math.inf}])
def test_a_gpu_that_one_model_cannot_use_does_not_keep_arrangements_on_cores_from_being_compared(
    on_gpu: Times,
) -> None:
    """Wider lanes carry more; tasks that were due by the GPU's time would be late in all of them."""
    on_cores: Times = {ONNX: 0.200, wide(ONNX): 0.090}
    without = best_arrangement([on_cores, on_cores], [1, 1], ONNX, 2)
    assert without.width == 2
    assert best_arrangement([{**on_cores, GPU: 0.002}, {**on_cores, **on_gpu}], [1, 1], ONNX, 2) == without


def test_nothing_is_tried_while_a_model_is_unknown() -> None:
    found = best_arrangement([{}, {ONNX: 0.2, wide(ONNX): 0.1}], [9, 9], ONNX, 2)
    assert (found.lanes, found.blocks) == (2, (1, 1))


def test_a_model_that_runs_nowhere_stays_on_the_default() -> None:
    found = best_arrangement([{ONNX: math.inf, OPENVINO: math.inf}, {ONNX: 0.1}], [1, 1], ONNX, 1)
    assert found.run_by == (ONNX, ONNX)


@pytest.mark.parametrize(
    ("cores", "found"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (6, [1, 2, 6]), (8, [1, 2, 4, 8])]
)
def test_lanes_may_have_as_many_cores_as_leave_none_over(cores: int, found: list[int]) -> None:
    assert widths(cores) == found


@pytest.mark.parametrize(
    ("seconds", "patience_s", "share", "blocks"),
    [
        ([0.001, 0.2], [0.020, 1.0], 0.5, [1, 20]),
        ([0.001, 0.2], [0.020, 1.0], 1.0, [1, 10]),
        ([0.001, 0.2, 0.3], [0.020, 1.0, 1.5], 1.0, [1, 10, 15]),
        ([0.2, 0.2], [1.0, 1.0], 0.5, [1, 1]),
        ([None, 0.2], [None, 1.0], 1.0, [1, 1]),
        ([], [], 1.0, []),
    ],
)
def test_blocks_take_a_share_of_the_shortest_patience(
    seconds: list[float | None], patience_s: list[float | None], share: float, blocks: list[int]
) -> None:
    assert block_counts(seconds, patience_s, share) == blocks


def test_blocks_have_about_equal_shares_of_the_arithmetic() -> None:
    graph = zoo.graph_of("googlenet", width=0.25, size=64)
    assert even_cuts(graph, 1) == ()
    cuts = even_cuts(graph, 4)
    assert len(cuts) == 3 and set(cuts) <= set(graph.base_cuts)
    places = (0, *cuts, len(graph.operators))
    shares = [fsum(one.flop for one in graph.operators[a:b]) for a, b in pairwise(places)]
    assert max(shares) < 0.3 * fsum(shares)


def test_blocks_of_a_model_without_arithmetic_have_about_equal_shares_of_its_operators() -> None:
    graph = zoo.graph_of("googlenet", width=0.25, size=64)
    idle = replace(graph, operators=tuple(replace(one, flop=0) for one in graph.operators))
    places = (0, *even_cuts(idle, 4), len(idle.operators))
    assert max(b - a for a, b in pairwise(places)) < 0.4 * len(idle.operators)


@pytest.mark.parametrize(
    ("times_s", "chosen"),
    [
        ({}, "onnx"),
        ({"onnx": 1.0, "openvino": 0.5}, "openvino"),
        ({"onnx": 1.0, "openvino": 0.95}, "onnx"),
        ({"onnx": 1.0, "openvino": 0.92}, "openvino"),
        ({"onnx": 1.0, "openvino": math.inf}, "onnx"),
        ({"onnx": math.inf, "openvino": 1.0}, "openvino"),
        ({"openvino": 1.0}, "openvino"),
        ({"openvino": math.inf}, "onnx"),
    ],
)
def test_another_executor_must_be_clearly_faster(times_s: dict[str, float], chosen: str) -> None:
    by_options = {ExecutorOptions(name=name): taken for name, taken in times_s.items()}
    assert fastest(by_options, ONNX).name == chosen


def on_gpu(left_s: float, right_s: float) -> Plan:
    return plan_for([0, 1], {LEFT[0]: {ONNX: 0.030, GPU: left_s}, RIGHT[0]: {ONNX: 0.020, GPU: right_s}})


def test_a_gpu_that_carries_more_gets_whole_models_on_lanes_that_share_it_and_no_cores() -> None:
    plan = on_gpu(0.001, 0.0005)
    assert plan.executors == (GPU,)
    assert (plan.lanes, plan.resources, {one.replicas for one in plan.models}) == (GPU_LANES, (), {GPU_LANES})
    assert [(one.cuts, one.batch) for one in plan.models] == [((), GPU_BATCH), ((), GPU_BATCH)]
    assert plan.step_choice is StepChoice.DEADLINE


def test_a_gpu_is_taken_for_all_models_or_for_none() -> None:
    assert on_gpu(0.001, math.inf).executors == (ONNX,)
    assert plan_for([0, 1], {LEFT[0]: {ONNX: 0.030, GPU: 0.001}, RIGHT[0]: {ONNX: 0.020}}).executors == (
        ONNX,
    )


def test_a_gpu_that_carries_less_than_the_cores_is_left_alone() -> None:
    assert on_gpu(0.030, 0.020).executors == (ONNX,)


def test_models_that_run_nowhere_else_run_on_the_gpu() -> None:
    known: dict[Digest, Times] = {one[0]: {ONNX: math.inf, GPU: 0.030} for one in (LEFT, RIGHT)}
    assert plan_for([0, 1], known).executors == (GPU,)


def test_the_faster_of_two_ways_on_a_gpu_is_taken() -> None:
    half = replace(GPU, precision="fp16")
    known: dict[Digest, Times] = {one[0]: {ONNX: 0.03, GPU: 0.004, half: 0.002} for one in (LEFT, RIGHT)}
    assert plan_for([0, 1], known).executors == (half,)


def test_a_batch_on_a_gpu_leaves_others_in_time_though_it_were_no_faster_than_its_tasks() -> None:
    assert [batch_within(one, 0.010) for one in (0.001, 0.002, 0.004, 0.006, 0.020)] == [8, 4, 2, 1, 1]


def test_a_batch_that_somebody_chose_stays_on_a_gpu() -> None:
    known: dict[Digest, Times] = {one[0]: {ONNX: 0.030, GPU: 0.0005} for one in (LEFT, RIGHT)}
    chosen = [replace(MODELS[0], batch=2), MODELS[1]]
    assert [one.batch for one in auto_plan(chosen, of_models(known), ONNX, [0, 1]).models] == [2, GPU_BATCH]
