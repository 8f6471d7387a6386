"""Saturated heads, half precision and int8: right schedules are never called wrong, broken ones always."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.verify.analysis import ending_of, makers_of
from stageloom.edge_agent.verify.check import verify_artifact
from stageloom.edge_agent.verify.report import VerifyReport
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits
from stageloom.shared.errors import ExitCode
from stageloom.shared.graph import Graph, Operator
from stageloom.shared.ids import TensorId
from tests.importer.models import model_of
from tests.verify.broken import Broken, DroppedEdge, OtherRounding, StaleSlot, SwappedGroups
from tests.verify.heads import ROUNDED, SATURATED, head_artifact
from tests.verify.models import image, imported_model, make_model
from tests.verify.test_defects import first_in_session

pytestmark = pytest.mark.more

SEEDS = range(10)
KINDS = (*SATURATED, *ROUNDED)


def check(
    artifact: Artifact,
    executor: OnnxExecutor,
    seed: int = 0,
    schedule: str = "greedy",
    partition: str = "base",
) -> VerifyReport:
    return verify_artifact(
        artifact, schedule, executor, partition=partition, seed=seed, repeats=2, delays=False
    )


@pytest.mark.promise("saturated-head-half-precision")
@pytest.mark.parametrize("schedule", ["sequential", "greedy", "ios"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_schedule_is_never_called_wrong(kind: str, schedule: str) -> None:
    for seed in SEEDS if schedule == "greedy" else SEEDS[:3]:
        report = check(head_artifact(kind), OnnxExecutor(), seed, schedule)
        assert report.exit_code is ExitCode.OK, report.to_text()


def before_heads(artifact: Artifact) -> list[int]:
    """Operators that start a session and that a head's input, or an output without a head, depends on."""
    graph = artifact.graph
    makers = makers_of(onnx.ModelProto.FromString(artifact.onnx_bytes()))
    reads = {head.reads for t in graph.outputs for head in ending_of(makers, graph.tensors[t].name).heads}
    inside = [
        op
        for op, operator in enumerate(graph.operators)
        if any(read in makers[name].output for read in reads for name in _made(graph, operator, makers))
    ]
    last = inside or [len(graph.operators) - 1]
    wanted = {op for end in last for op in (end, *bits(graph.ancestors[end]))}
    return [op for op in first_in_session(artifact, "base") if op in wanted]


def _made(graph: Graph, operator: Operator, makers: "dict[str, onnx.NodeProto]") -> list[str]:
    """Every value that the operator makes, inner ones included."""
    outputs = [graph.tensors[t].name for t in operator.outputs]
    inner = [name for output in outputs for name in makers[output].input if name in makers]
    read = {graph.tensors[t].name for t in operator.inputs}
    return [name for name in (*outputs, *inner) if name not in read]


def branches(graph: Graph) -> tuple[TensorId, TensorId]:
    """What the two branches of `heads.net` make."""
    left, right = (
        next(TensorId(i) for i, t in enumerate(graph.tensors) if side in t.name) for side in ("left", "right")
    )
    assert graph.tensors[left].shape == graph.tensors[right].shape
    return left, right


def defects(artifact: Artifact) -> "dict[str, list[Callable[[], Broken]]]":
    """Every place before a head where each defect can be planted, by defect."""
    graph = artifact.graph
    ops = before_heads(artifact)
    blocks = [block for block, cut in enumerate((0, *graph.base_cuts)) if cut <= max(ops)]
    return {
        "dropped": [partial(DroppedEdge, graph, op, stale=stale) for op in ops for stale in (False, True)],
        "stale": [partial(StaleSlot, block) for block in blocks],
        "swapped": [partial(SwappedGroups, *branches(graph))],
    }


@pytest.mark.promise("saturated-head-half-precision")
@pytest.mark.parametrize("defect", ["dropped", "stale", "swapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_defect_before_the_head_is_caught_wherever_it_is(kind: str, defect: str) -> None:
    for plant in defects(head_artifact(kind))[defect]:
        executor = plant()
        partition = "whole" if defect == "swapped" else "base"  # both branches in one combined block
        report = check(head_artifact(kind), executor, partition=partition)
        assert executor.hits, "the defect never struck"
        assert report.exit_code is ExitCode.FAILED, report.to_text()


@pytest.mark.promise("saturated-head-half-precision")
@pytest.mark.parametrize("kind", ["sigmoid", "int8 sigmoid"])
def test_defect_that_a_saturated_sigmoid_hides_shows_before_it(kind: str) -> None:
    """The model is one block: no border lies between the defect and the head, and the answer looks right."""
    artifact = head_artifact(kind)
    executor = SwappedGroups(*branches(artifact.graph))
    report = check(artifact, executor, partition="whole")
    assert executor.hits
    found = {one.tensor: one for one in report.compared if one.block is None}
    assert found["y"].agrees
    assert found[report.before[0].tensor].difference > 1e-2
    assert report.exit_code is ExitCode.FAILED


def graph_of(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    return make_model(nodes, [image("x", 1, 8)], [image("y", 1, 8)], {"shape": np.array([1, 8], np.int64)})


@pytest.mark.parametrize(
    ("nodes", "heads", "only"),
    [
        ([("Relu", ["x"], "z"), ("Softmax", ["z"], "y")], ["z"], True),
        ([("Relu", ["x"], "z"), ("Sigmoid", ["z"], "s"), ("Reshape", ["s", "shape"], "y")], ["z"], True),
        ([("Sigmoid", ["x"], "s"), ("Transpose", ["s"], "t"), ("Identity", ["t"], "y")], ["x"], True),
        ([("Softmax", ["x"], "z"), ("Relu", ["z"], "y")], [], False),
        ([("Relu", ["x"], "z"), ("Identity", ["z"], "y")], [], False),
        ([("Relu", ["x"], "z"), ("Tanh", ["z"], "s"), ("Concat", ["s", "x"], "y")], ["z"], False),
    ],
)
def test_heads_are_seen_through_what_only_rearranges(
    nodes: list[tuple[str, list[str], str]], heads: list[str], only: bool
) -> None:
    made = [
        helper.make_node(kind, reads, [name], **({"axis": 0} if kind == "Concat" else {}))
        for kind, reads, name in nodes
    ]
    ending = ending_of(makers_of(helper.make_model(helper.make_graph(made, "g", [], []))), "y")
    assert [head.reads for head in ending.heads] == heads
    assert ending.only_heads is only


def test_report_says_where_it_looked() -> None:
    report = check(head_artifact("sigmoid"), OnnxExecutor())
    assert "before the final Sigmoid of y, at " in report.to_text()
    found = report.to_json()
    assert found["before"][0]["kind"] == "Sigmoid"
    named = {one["tensor"]: one for one in found["compared"]}
    assert {"difference", "noise", "tolerance"} <= named[found["before"][0]["tensor"]].keys()


@pytest.mark.promise("saturated-head-half-precision")
def test_right_schedule_on_other_kernels_is_never_called_wrong() -> None:
    for kind in SATURATED:
        for seed in SEEDS:
            report = check(head_artifact(kind), OtherRounding(), seed)
            assert report.exit_code is ExitCode.OK, report.to_text()


@pytest.mark.promise("saturated-head-half-precision")
def test_what_onnxruntime_computes_in_two_ways_itself_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    """The sine of millions: rounding decides it, so a wrong schedule would look as a right one does."""
    rng = np.random.default_rng(5)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("MaxPool", ["c"], ["r"], kernel_shape=[1, 1]),
        helper.make_node("Mul", ["r", "large"], ["m"]),
        helper.make_node("Sin", ["m"], ["y"]),
    ]
    stored = {
        "w": rng.standard_normal((16, 16, 3, 3)).astype(np.float32),
        "large": np.array([1e6], np.float32),
    }
    model = make_model(nodes, [image("x", 1, 16, 20, 20)], [image("y", 1, 16, 18, 18)], stored)
    report = check(imported_model(model, tmp_path), OtherRounding())
    assert report.exit_code is ExitCode.CANNOT_FAIL, report.to_text()
    assert report.doubtful and not report.agrees
    assert report.noise > report.tolerance
    assert "CANNOT JUDGE" in report.to_text()


def behind_a_convolution(nodes: list[onnx.NodeProto], shape: list[int], folder: Path) -> Artifact:
    """`nodes` make y of `shape` out of c [1, 4, 6, 6]."""
    weights = {
        "w": np.random.default_rng(5).standard_normal((4, 4, 1, 1)).astype(np.float32),
        "flat": np.array([-1]),
        "none": np.zeros((), np.float32),
        "first": np.array([0]),
        "second": np.array([1]),
    }
    model = model_of(
        [helper.make_node("Conv", ["x", "w"], ["c"]), *nodes],
        [image("x", 1, 4, 6, 6)],
        [image("y", *shape)],
        weights,
        extra_domains=["com.microsoft"],
    )
    return imported_model(model, folder)


def test_what_a_head_reads_behind_a_custom_operator_is_compared(tmp_path: Path) -> None:
    """Inference knows no shape from there on; the import does."""
    nodes = [
        helper.make_node("FastGelu", ["c"], ["g"], domain="com.microsoft"),
        helper.make_node("Conv", ["g", "w"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["y"]),
    ]
    report = check(behind_a_convolution(nodes, [1, 4, 6, 6], tmp_path), OnnxExecutor())
    assert [before.tensor for before in report.before] == ["z"]
    assert {one.tensor for one in report.compared} == {"c", "g", "y", "z"}
    assert report.exit_code is ExitCode.OK, report.to_text()


def test_a_head_that_reads_what_varies_in_shape_is_judged_itself(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["c", "flat"], ["f"]),
        helper.make_node("Greater", ["f", "none"], ["above"]),
        helper.make_node("Compress", ["f", "above"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["s"]),
        helper.make_node("Slice", ["s", "first", "second"], ["y"]),
    ]
    report = check(behind_a_convolution(nodes, [1], tmp_path), OnnxExecutor())
    assert report.before == ()
    assert report.exit_code is ExitCode.OK, report.to_text()
