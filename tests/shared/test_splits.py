"""Splits of operators: the derived graph, every word of legality, and what halves read in closed form."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from stageloom.shared.attributes import Attributes
from stageloom.shared.blocks import slot_reads, split
from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError, Unsplittable
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import TensorId
from stageloom.shared.legality import split_violations, violations
from stageloom.shared.operator_parts import halves_of, part_of, split_axes
from stageloom.shared.partition import (
    Axis,
    AxisRange,
    NodeRun,
    OnnxNode,
    Split,
    dimension_of,
    parse_splits,
    splits_text,
)
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Resource
from stageloom.shared.split_graph import SplitRole, derive
from stageloom.shared.split_schedule import split_schedule
from stageloom.shared.stage_string import parse, to_string
from tests.shared.randoms import name_digest

DIGEST = name_digest("split")


def image_chain(
    count: int,
    *,
    kinds: Mapping[int, str] | None = None,
    groups: int = 1,
    skip: tuple[int, int] | None = None,
) -> Graph:
    """Operators in a row over [1, 8, 12, 12]; with `skip` one also reads what an earlier one makes."""
    tensors = tuple(Tensor(f"t{i}", "float32", (1, 8, 12, 12)) for i in range(count + 1))
    operators = []
    for op in range(count):
        reads = {op} | ({skip[0] + 1} if skip and skip[1] == op else set())
        operators.append(
            Operator(
                (kinds or {}).get(op, "Conv"),
                f"op{op}",
                (op,),
                tuple(TensorId(t) for t in sorted(reads)),
                (TensorId(op + 1),),
                96,
                960,
                op,
                attributes=Attributes(groups=groups),
            )
        )
    return Graph(
        name="chain",
        tensors=tensors,
        operators=tuple(operators),
        inputs=(TensorId(0),),
        outputs=(TensorId(count),),
        base_cuts=tuple(range(1, count)),
    )


def split_plan(graph: Graph, splits: str, *, cuts: tuple[int, ...] = (), schedule: str = "") -> Plan:
    derived = derive(graph, parse_splits(splits))
    borders = (0, *derived.cuts(cuts), len(derived.origins))
    return Plan(
        models=(ModelPlan(name="m", artifact=DIGEST, splits=parse_splits(splits), cuts=cuts),),
        combined=tuple(
            CombinedBlock(
                (Member(0, 0, block),),
                parse(schedule) if schedule else split_schedule(derived.origins[start:stop]),
            )
            for block, (start, stop) in enumerate(pairwise(borders))
        ),
        resources=(Resource(cores=(0,)), Resource(cores=(1,))),
        lane_resources=(0,),
    )


# The derived graph


def test_each_split_becomes_three_operators_in_place_and_tensors_keep_their_numbers() -> None:
    graph = image_chain(5)
    derived = derive(graph, parse_splits("1c3,2-3h5"))
    assert [origin.role.value for origin in derived.origins] == [
        "whole", "first", "second", "join", "first", "second", "join", "whole",
    ]  # fmt: skip
    assert [origin.ops for origin in derived.origins] == [(0,), *[(1,)] * 3, *[(2, 3)] * 3, (4,)]
    assert derived.graph.tensors[: len(graph.tensors)] == graph.tensors
    halves = [
        derived.graph.tensors[t].shape for op in (1, 2, 4, 5) for t in derived.graph.operators[op].outputs
    ]
    assert halves == [(1, 3, 12, 12), (1, 5, 12, 12), (1, 8, 5, 12), (1, 8, 7, 12)]
    assert [derived.graph.operators[op].outputs for op in (3, 6)] == [(2,), (4,)]
    assert derived.graph.predecessors == (0, 0b1, 0b1, 0b110, 0b1000, 0b1000, 0b110000, 0b1000000)
    assert derived.positions == (0, 1, 4, 4, 7, 8)
    assert derived.graph.base_cuts == (1, 4, 7)
    assert sum(o.flop for o in derived.graph.operators) <= sum(o.flop for o in graph.operators)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_and_slots_of_a_split_model_are_those_of_the_model(seed: int) -> None:
    random = Random(seed)
    count = random.randint(3, 12)
    skip = sorted(random.sample(range(count), 2))
    graph = image_chain(count, skip=(skip[0], skip[1]))
    cuts = tuple(sorted(random.sample(range(1, count), random.randint(0, count - 1))))
    splits = []
    op = 0
    while op < count:
        last = op
        if random.random() < 0.6:
            splits.append(Split(op, last, random.choice((Axis.CHANNELS, Axis.ROWS)), random.randint(1, 7)))
        op = last + 1
    assert not split_violations(splits, graph, cuts)
    derived = derive(graph, splits)
    whole, parted = split(graph, cuts), split(derived.graph, derived.cuts(cuts))
    for one, other in zip(whole, parted, strict=True):
        assert (one.live_in, one.live_out) == (other.live_in, other.live_out)
        assert (one.makes, one.reads) == (other.makes, other.reads)
    assert slot_reads(graph, whole) == slot_reads(derived.graph, parted)
    assert all(p < 1 << op for op, p in enumerate(derived.graph.predecessors)), "the numbering is topological"


def test_a_split_plan_lowers_to_halves_on_their_resources_and_a_join_after_both() -> None:
    graph = image_chain(3)
    bound = bind(split_plan(graph, "1c3"), {DIGEST: graph})
    assert to_string(bound.plan.combined[0].schedule) == "0/1@0|2@1/3/4"
    items = bound.launches(0, 1)
    assert [(item.ops, item.stream, item.resource, item.waits) for item in items] == [
        ((0,), 0, -1, ()),
        ((1,), 0, 0, ()),
        ((2,), 1, 1, (0,)),
        ((3, 4), 0, -1, (2,)),
    ]
    assert bound.models[0].source is graph


def test_splits_survive_text() -> None:
    splits = (Split(0, 0, Axis.BATCH, 2), Split(12, 14, Axis.CHANNELS, 96), Split(20, 20, Axis.ROWS, 28))
    assert splits_text(splits) == "0n2,12-14c96,20h28"
    assert parse_splits(splits_text(splits)) == splits
    assert parse_splits("") == ()


# Legality


SPLIT_VIOLATIONS = [
    ("axis", image_chain(2, kinds={0: "LSTM"}), "0c3"),
    ("axis", image_chain(2, kinds={0: "GatherElements"}), "0-1c3"),
    ("axis", replace(image_chain(2), tensors=(Tensor("t0", "float32", (1, 8)),) * 3), "0h3"),
    ("boundary", image_chain(2), "0c8"),
    ("boundary", image_chain(2), "0n1"),
    ("boundary", image_chain(2, groups=4), "0c3"),
    ("aligned", image_chain(4, skip=(0, 3)), "0-2h3"),
    ("aligned", replace(image_chain(3), outputs=(TensorId(1), TensorId(3))), "0-1c3"),
    ("order", image_chain(2), "0c3,0c3"),
    ("order", image_chain(2), "1-2c3"),
]


@pytest.mark.parametrize(("rule", "graph", "text"), SPLIT_VIOLATIONS)
def test_every_illegal_split_is_named(rule: str, graph: Graph, text: str) -> None:
    assert {one.rule for one in split_violations(parse_splits(text), graph, ())} == {rule}
    with pytest.raises(PlanError, match="model 'm'"):
        bind(
            Plan(
                models=(ModelPlan(name="m", artifact=DIGEST, splits=parse_splits(text)),),
                combined=(CombinedBlock((Member(0, 0, 0),), parse("0")),),
            ),
            {DIGEST: graph},
        )


def test_a_cut_inside_a_split_is_not_aligned() -> None:
    assert [one.rule for one in split_violations(parse_splits("0-1h3"), image_chain(2), (1,))] == ["aligned"]


def test_a_group_on_an_unknown_resource_is_illegal() -> None:
    graph = image_chain(2)
    plan = split_plan(graph, "0c3", schedule="0@0|1@2/2/3")
    assert [
        one.rule
        for one in violations(
            parse("0@2"),
            bind(split_plan(image_chain(1), "0c3"), {DIGEST: image_chain(1)}).combined[0].graph,
            resources=2,
        )
        if one.rule == "resource"
    ] == ["resource"]
    with pytest.raises(PlanError, match="resource 2 of a plan with 2"):
        bind(plan, {DIGEST: graph})


def test_a_resource_of_groups_has_a_core_for_every_lane_that_uses_it() -> None:
    graph = image_chain(2)
    plan = split_plan(graph, "0c3")
    wide = replace(
        plan,
        lanes=2,
        lane_resources=(0, 0),
        resources=(Resource(cores=(0, 2)), Resource(cores=(1,))),
    )
    with pytest.raises(PlanError, match="resource 1 has 1 cores for 2 lanes"):
        bind(wide, {DIGEST: graph})
    with pytest.raises(PlanError, match="has 1 cores for 2 lanes"):
        bind(replace(plan, lanes=2, lane_resources=(0, 1)), {DIGEST: graph})


def test_groups_of_one_block_are_computed_in_one_precision() -> None:
    graph = image_chain(2)
    plan = replace(
        split_plan(graph, "0c3"),
        further_executors=(ExecutorOptions(name="openvino", precision="bf16"),),
        resources=(Resource(cores=(0,)), Resource(cores=(1,), executor=1)),
    )
    with pytest.raises(PlanError, match="one precision"):
        bind(plan, {DIGEST: graph})
    with pytest.raises(PlanError, match="names executor 1 of a plan with 1"):
        bind(replace(plan, further_executors=()), {DIGEST: graph})


def test_a_batch_that_fills_in_part_is_not_split_along_itself() -> None:
    graph = replace(image_chain(1), batchable=True)
    tensors = tuple(replace(tensor, shape=(4, 8, 12, 12)) for tensor in graph.tensors)
    graph = replace(graph, tensors=tensors)
    plan = split_plan(graph, "0n2")
    bind(plan, {DIGEST: graph})
    with pytest.raises(PlanError, match="split along a batch"):
        bind(replace(plan, models=(replace(plan.models[0], batch=2),)), {DIGEST: graph})


# What halves read


def conv_run(
    rows: int, *, kernel: int, stride: int = 1, dilation: int = 1, before: int = 0, behind: int = 0
) -> NodeRun:
    """A convolution along the rows of [1, 4, rows, 5]."""
    made = (rows + before + behind - dilation * (kernel - 1) - 1) // stride + 1
    node = OnnxNode(
        "Conv",
        ("x", "w"),
        ("y",),
        {
            "pads": (before, 0, behind, 0),
            "strides": (stride, 1),
            "dilations": (dilation, 1),
            "kernel_shape": (kernel, 1),
        },
    )
    shapes = {"x": (1, 4, rows, 5), "w": (6, 4, kernel, 1), "y": (1, 6, made, 5)}
    return NodeRun((node,), shapes, frozenset({"w"}), {}, ("y",))


@pytest.mark.parametrize("seed", range(200))
def test_rows_that_a_half_of_a_convolution_reads_are_those_under_its_windows(seed: int) -> None:
    """Brute force: mark the input rows under every window; what lies outside is padding."""
    random = Random(seed)
    kernel, stride, dilation = random.randint(1, 5), random.randint(1, 3), random.randint(1, 2)
    before, behind = random.randint(0, kernel - 1), random.randint(0, kernel - 1)
    rows = random.randint(dilation * (kernel - 1) + 1, 20)
    run = conv_run(rows, kernel=kernel, stride=stride, dilation=dilation, before=before, behind=behind)
    made = run.shapes["y"][2]
    if made < 2:
        return
    start = random.randint(0, made - 1)
    stop = random.randint(start + 1, made)
    windows = [a * stride - before + dilation * k for a in range(start, stop) for k in range(kernel)]
    inside = [row for row in windows if 0 <= row < rows]
    if not inside:
        with pytest.raises(Unsplittable, match="nothing but padding"):
            part_of(run, AxisRange(2, start, stop))
        return
    part = part_of(run, AxisRange(2, start, stop))
    read = part.held["x"] or AxisRange(2, 0, rows)
    pads = part.nodes[0].attributes.get("pads", (before, 0, behind, 0))
    assert isinstance(pads, tuple)
    assert read.start == max(0, min(windows))
    assert read.stop == (min(rows, max(windows) + 1) if stop < made else rows)
    assert pads[0] == max(0, -min(windows))
    assert (read.extent + pads[0] + pads[2] - dilation * (kernel - 1) - 1) // stride + 1 == stop - start


def test_groups_are_split_whole_with_their_input() -> None:
    node = OnnxNode("Conv", ("x", "w", "b"), ("y",), {"group": 4, "kernel_shape": (1, 1)})
    shapes = {"x": (1, 8, 5, 5), "w": (12, 2, 1, 1), "b": (12,), "y": (1, 12, 5, 5)}
    run = NodeRun((node,), shapes, frozenset({"w", "b"}), {}, ("y",))
    first, second = halves_of(run, 1, 3)
    assert (first.held["x"], second.held["x"]) == (AxisRange(1, 0, 2), AxisRange(1, 2, 8))
    assert [part.nodes[0].attributes["group"] for part in (first, second)] == [1, 3]
    assert second.nodes[0].reads[1:] == (AxisRange(0, 3, 12), AxisRange(0, 3, 12))
    with pytest.raises(Unsplittable, match="is not cut"):
        halves_of(run, 1, 4)
    assert [(axis.axis, axis.quantum) for axis in split_axes(run, "Conv")] == [
        (Axis.CHANNELS, 3),
        (Axis.ROWS, 1),
    ]


def test_a_chain_with_a_halo_is_not_aligned_and_one_without_is() -> None:
    def chained(kernel: int) -> NodeRun:
        pad = kernel // 2
        nodes = tuple(
            OnnxNode("Conv", (x, w), (y,), {"pads": (pad, 0, pad, 0), "kernel_shape": (kernel, 1)})
            for x, w, y in (("x", "v", "m"), ("m", "w", "y"))
        )
        shapes = {name: (1, 4, 9, 5) for name in "xmy"} | {name: (4, 4, kernel, 1) for name in "vw"}
        return NodeRun(nodes, shapes, frozenset("vw"), {}, ("y",), frozenset("m"))

    with pytest.raises(Unsplittable) as error:
        halves_of(chained(3), 2, 4)
    assert error.value.rule == "aligned"
    first, second = halves_of(chained(1), 2, 4)
    assert (first.held["m"], second.held["m"]) == (AxisRange(2, 0, 4), AxisRange(2, 4, 9))
    with pytest.raises(Unsplittable, match="both halves would need all"):
        halves_of(chained(1), 1, 2)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_softmax_is_never_split_along_what_it_normalises(dim: int) -> None:
    node = OnnxNode("Softmax", ("x",), ("y",), {"axis": dim})
    run = NodeRun((node,), {"x": (4, 4, 4), "y": (4, 4, 4)}, frozenset(), {}, ("y",))
    assert {axis.dim for axis in split_axes(run, "Softmax")} == {0, 1, 2} - {dim}
    old = replace(run, opset=11)
    assert {axis.dim for axis in split_axes(old, "Softmax")} == set(range(dim))


def test_axes_are_dimensions_by_rank_and_by_kind() -> None:
    assert [dimension_of(axis, "Conv", 4) for axis in Axis] == [0, 1, 2]
    assert [dimension_of(axis, "Conv", 3) for axis in Axis] == [0, 1, 2]
    assert [dimension_of(axis, "MatMul", 3) for axis in Axis] == [0, 2, 1]
    assert [dimension_of(axis, "Gemm", 2) for axis in Axis] == [0, 1, None]
    assert [dimension_of(axis, "Relu", 1) for axis in Axis] == [0, None, None]


def test_a_sum_over_an_axis_is_not_split_there() -> None:
    node = OnnxNode("ReduceMean", ("x",), ("y",), {"axes": (1,), "keepdims": 1})
    run = NodeRun((node,), {"x": (1, 8, 6, 6), "y": (1, 1, 6, 6)}, frozenset(), {}, ("y",))
    assert {axis.axis for axis in split_axes(run, "ReduceMean")} == {Axis.ROWS}


@pytest.mark.parametrize(
    ("inputs", "attributes", "named"),
    [
        (("x",), {}, False),
        (("x", ""), {}, False),
        (("x", "none"), {}, False),
        (("x", "axes"), {}, True),
        (("x",), {"axes": (2, 3)}, True),
    ],
)
def test_a_squeeze_is_split_only_if_it_names_its_axes(
    inputs: tuple[str, ...], attributes: Mapping[str, tuple[int, ...]], named: bool
) -> None:
    """Otherwise a half of extent 1 loses the dimension that the halves are joined along."""
    node = OnnxNode("Squeeze", inputs, ("y",), attributes)
    shapes = {"x": (4, 8, 1, 1), "y": (4, 8), "axes": (2,), "none": (0,)}
    run = NodeRun((node,), shapes, frozenset({"axes", "none"}), {"axes": (2, 3), "none": ()}, ("y",))
    assert [axis.axis for axis in split_axes(run, "Conv")] == ([Axis.BATCH, Axis.CHANNELS] if named else [])
    if not named:
        with pytest.raises(Unsplittable, match="Squeeze is not split") as error:
            halves_of(run, 1, 1)
        assert error.value.rule == "axis"


def test_roles_of_a_plan_without_splits_are_whole() -> None:
    graph = image_chain(2)
    plan = Plan(
        models=(ModelPlan(name="m", artifact=DIGEST),),
        combined=(CombinedBlock((Member(0, 0, 0),), parse("0/1")),),
    )
    bound = bind(plan, {DIGEST: graph})
    assert bound.models[0].graph is graph and not bound.splits
    assert bound.models[0].origin(1).role is SplitRole.WHOLE
