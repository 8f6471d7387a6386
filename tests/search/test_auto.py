"""The plan of a device on which nothing was searched yet."""

import math
from itertools import pairwise
from math import fsum

import pytest

from benchmarks import zoo
from stageloom.shared.bound import bind
from stageloom.shared.ids import Digest
from stageloom.shared.plan import MAX_LANES, Member, Plan, QueueRule, StepChoice, decode_plan
from stageloom.shared.search.auto import KnownModel, auto_plan, block_counts, even_cuts, fastest
from stageloom.shared.search.compose import ModelChoice
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT = model("left", DIAMOND, cuts=[1, 3])
RIGHT = model("right", CHAIN, cuts=[2])
MODELS = [
    ModelChoice(name=name, artifact=made[0], graph=made[1]) for name, made in [("l", LEFT), ("r", RIGHT)]
]


def plan_for(cores: list[int], known: dict[Digest, tuple[str, float]] | None = None) -> Plan:
    plan = auto_plan(MODELS, {k: KnownModel(*v) for k, v in (known or {}).items()}, "onnx", cores)
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
    plan = plan_for([0, 1], {RIGHT[0]: ("openvino", 1.0)})
    by_model = {(one.members[0].model, plan.executors[one.executor].name) for one in plan.combined}
    assert by_model == {(0, "onnx"), (1, "openvino")}
    assert [one.name for one in plan_for([0], {LEFT[0]: ("x", 1.0), RIGHT[0]: ("x", 1.0)}).executors] == ["x"]


def test_a_model_that_would_hold_up_an_urgent_one_is_cut() -> None:
    known = {LEFT[0]: ("onnx", 0.001), RIGHT[0]: ("onnx", 0.025)}
    assert [one.cuts for one in plan_for([0], known).models] == [(), (2,)]
    assert [one.cuts for one in plan_for([0, 1], known).models] == [(), ()], "a lane is free soon"


@pytest.mark.parametrize(
    ("seconds", "lanes", "blocks"),
    [
        ([0.001, 0.2], 2, [1, 20]),  # (1 - 0.019 / 0.2)^2 = 0.82; blocks of 10 ms
        ([0.001, 0.2], 1, [1, 20]),
        ([0.001, 0.025], 2, [1, 1]),  # (1 - 0.019 / 0.025)^2 = 0.06
        ([0.001, 0.025], 1, [1, 3]),  # 0.24
        ([0.001, 0.2, 0.3], 2, [1, 20, 30]),
        ([0.001, 0.2], 40, [1, 1]),  # a lane is free soon
        ([0.2, 0.2], 2, [1, 1]),  # 0.8 s can be waited for
        ([0.2], 2, [1]),
        ([None, 0.2], 2, [1, 1]),
        ([], 2, []),
    ],
)
def test_what_holds_up_others_is_cut_into_blocks_that_fit(
    seconds: list[float | None], lanes: int, blocks: list[int]
) -> None:
    assert block_counts(seconds, lanes) == blocks


def test_blocks_have_about_equal_shares_of_the_arithmetic() -> None:
    graph = zoo.graph_of("googlenet", width=0.25, size=64)
    assert even_cuts(graph, 1) == ()
    cuts = even_cuts(graph, 4)
    assert len(cuts) == 3 and set(cuts) <= set(graph.base_cuts)
    places = (0, *cuts, len(graph.operators))
    shares = [fsum(one.flop for one in graph.operators[a:b]) for a, b in pairwise(places)]
    assert max(shares) < 0.3 * fsum(shares)


@pytest.mark.parametrize(
    ("times_s", "chosen"),
    [
        ({}, "onnx"),
        ({"onnx": 1.0, "openvino": 0.5}, "openvino"),
        ({"onnx": 1.0, "openvino": 0.98}, "onnx"),
        ({"onnx": 1.0, "openvino": 0.96}, "openvino"),
        ({"onnx": 1.0, "openvino": math.inf}, "onnx"),
        ({"onnx": math.inf, "openvino": 1.0}, "openvino"),
        ({"openvino": 1.0}, "openvino"),
    ],
)
def test_another_executor_must_be_clearly_faster(times_s: dict[str, float], chosen: str) -> None:
    assert fastest(times_s, "onnx") == chosen
