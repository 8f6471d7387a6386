"""Merge stages on onnxruntime: one session of one convolution, with the outputs of the operators alone."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from stageloom.edge_agent.executor.onnx.cache import SessionKey, weight_bytes
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor, open_session
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.shared.artifact import Artifact, open_artifact, write_artifact
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import OpId
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.merge import may_merge, merged, padding
from stageloom.shared.plan import Member
from stageloom.shared.schedule import Stage, StageSchedule
from tests.executor.contract.schedules import StepMaker, bound_of, plan_of
from tests.executor.models import artifact_of, difference, random_inputs, reference

KEY = PlanKey(1)
CHANNELS = 5


def siblings_of(
    folder: Path,
    rows: Sequence[dict[str, object]],
    extents: tuple[int, ...],
    *,
    tail: str = "",
    bias: bool = True,
    opset: int = 17,
) -> Artifact:
    """A model of convolutions over its input, which is called as a merge would call its own values."""
    rng = np.random.default_rng(len(rows))
    nodes, weights, outputs = [], [], []
    for index, row in enumerate(rows):
        kernel = list(row["kernel_shape"])  # type: ignore[call-overload]
        shape = (3 + index, CHANNELS, *kernel)
        weights.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), f"w{index}"))
        inputs = ["merged.kernels", f"w{index}"]
        if bias and index % 2 == 0:
            weights.append(
                numpy_helper.from_array(rng.standard_normal(shape[:1]).astype(np.float32), f"b{index}")
            )
            inputs.append(f"b{index}")
        nodes.append(helper.make_node("Conv", inputs, [f"c{index}"], **row))
        made = f"c{index}"
        if tail == "silu":
            nodes.append(helper.make_node("Sigmoid", [made], [f"s{index}"]))
            nodes.append(helper.make_node("Mul", [made, f"s{index}"], [f"y{index}"]))
            made = f"y{index}"
        elif tail:
            nodes.append(helper.make_node(tail, [made], [f"y{index}"]))
            made = f"y{index}"
        free = [f"d{axis}" for axis in range(len(extents) + 2)]
        outputs.append(helper.make_tensor_value_info(made, onnx.TensorProto.FLOAT, free))
    graph = helper.make_graph(
        nodes,
        "siblings",
        [helper.make_tensor_value_info("merged.kernels", onnx.TensorProto.FLOAT, [1, CHANNELS, *extents])],
        outputs,
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


def same(*kernel: int, **more: object) -> dict[str, object]:
    pads = [size // 2 for size in kernel]
    return {"kernel_shape": list(kernel), "pads": [*pads, *pads], **more}


CASES: dict[str, tuple[list[dict[str, object]], tuple[int, ...], dict[str, object]]] = {
    "mixed sizes": ([same(1, 1), same(3, 3), same(5, 1)], (9, 9), {"tail": "Relu"}),
    "strides": ([same(3, 3, strides=[2, 2]), same(1, 1, strides=[2, 2])], (9, 8), {}),
    "gated": ([same(3, 3), same(3, 3)], (6, 6), {"tail": "silu", "bias": False}),
    "one axis": ([same(1), same(5), same(3)], (20,), {"tail": "Sigmoid"}),
    "dilated": (
        [
            {"kernel_shape": [3, 3], "dilations": [2, 2], "pads": [2, 2, 2, 2]},
            {"kernel_shape": [1, 5], "dilations": [2, 2], "pads": [0, 4, 0, 4]},
        ],
        (9, 9),
        {},
    ),
    "even kernels": (
        [
            {"kernel_shape": [2, 4], "pads": [0, 1, 1, 2]},
            {"kernel_shape": [1, 2], "pads": [0, 0, 0, 1]},
        ],
        (7, 7),
        {"tail": "Relu"},
    ),
    "sizes of the split as an attribute": ([same(1, 1), same(3, 3)], (5, 5), {"opset": 11}),
}


@pytest.mark.promise("merge-stage-convolution-equal")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_merged_session_computes_what_its_operators_compute_alone(
    name: str, batch: int, tmp_path: Path
) -> None:
    rows, extents, options = CASES[name]
    artifact = siblings_of(tmp_path, rows, extents, **options)  # type: ignore[arg-type]
    graph = artifact.graph
    ops = tuple(range(len(rows)))
    assert len(graph.operators) == len(rows) and may_merge(graph, [OpId(op) for op in ops])
    assert graph.batchable
    parts = ModelParts(artifact)
    session = open_session(SessionKey(artifact.digest, ops, batch, 1, merge=True), parts)
    opset, kinds = _written(parts, ops, batch)
    assert opset == options.get("opset", 17)
    assert kinds.count("Conv") == 1 and kinds[-1] == "Split"
    image = np.random.default_rng(1).standard_normal((batch, CHANNELS, *extents)).astype(np.float32)
    together = {graph.inputs[0]: image}
    session.run(together)
    for op in ops:
        alone = {graph.inputs[0]: image}
        open_session(SessionKey(artifact.digest, (op,), batch, 1), parts).run(alone)
        (made,) = graph.operators[op].outputs
        assert together[made].shape == alone[made].shape
        assert difference(together[made], alone[made]) < 1e-5


def _written(parts: ModelParts, ops: tuple[int, ...], batch: int) -> tuple[int, list[str]]:
    """Version of the operator set, and kinds of the nodes, of the model that is written."""
    fd = os.memfd_create("test")
    try:
        parts.write(fd, ops, batch, merge=True)
        model = onnx.ModelProto.FromString(os.pread(fd, os.fstat(fd).st_size, 0))
        return model.opset_import[0].version, [node.op_type for node in model.graph.node]
    finally:
        os.close(fd)


def test_a_merge_is_one_session_that_plans_share_and_that_states_its_zeros() -> None:
    """1. A plan merges two operators. 2. Another one merges them, too. 3. A third one runs them apart."""
    model = artifact_of("squeezenet")
    graph = model.graph
    pair = next(
        (OpId(op), OpId(op + 1))
        for op in range(len(graph.operators) - 1)
        if may_merge(graph, [OpId(op), OpId(op + 1)])
    )
    key = SessionKey(model.digest, pair, 1, 1, merge=True)
    apart = weight_bytes(SessionKey(model.digest, pair, 1, 1), graph)
    _, zeros = padding(graph, merged(graph, pair))
    assert zeros > 0, "1x1 beside 3x3"
    assert weight_bytes(key, graph) == apart + zeros
    alone = [Stage(((op,),)) for op in range(len(graph.operators)) if op not in pair]
    stages = StageSchedule(
        (*alone[: pair[0]], Stage(((pair[0],), (pair[1],)), merge=True), *alone[pair[0] :])
    )
    executor = OnnxExecutor()
    try:
        plans = [plan_of([model], [()], [[Member(0, 0, 0)]], [stages], lanes=lanes) for lanes in (1, 2)]
        for number, plan in enumerate(plans, 1):
            executor.load(PlanKey(number), bound_of(plan, [model]), {model.digest: model})
            assert executor.sessions == 3, "what comes before, the merge, what comes after"
        assert executor._cache.get(key) is not None
        step = StepMaker(KEY, bound_of(plans[0], [model])).step(0, {0: (InstanceId(1), 1)})
        inputs = random_inputs(graph, 4)
        executor.prepare(step.program)
        executor.issue(step, {InstanceId(1): [inputs]})
        (row,) = executor.wait(step.id).outputs[InstanceId(1)]
        assert difference(row["logits"], reference(model, inputs, ["logits"])["logits"]) < 1e-4
        third = plan_of([model], [()], [[Member(0, 0, 0)]])
        executor.load(PlanKey(3), bound_of(third, [model]), {model.digest: model})
        assert executor.sessions == 4
    finally:
        executor.close()


def test_a_graph_that_lies_about_its_kernels_is_refused(tmp_path: Path) -> None:
    """1. A graph says 3x3 where the file has 1x1 weights. 2. A plan merges. 3. Loading names the operator."""
    artifact = siblings_of(tmp_path, [same(1, 1), same(3, 3)], (5, 5))
    graph = artifact.graph
    wrong = replace(graph.operators[0], convolution=graph.operators[1].convolution)
    lying = replace(graph, operators=(wrong, graph.operators[1]))
    write_artifact(tmp_path / "lying", lying, artifact.onnx_bytes())
    found = open_artifact(tmp_path / "lying")
    schedule = StageSchedule((Stage(((0,), (1,)), merge=True),))
    plan = plan_of([found], [()], [[Member(0, 0, 0)]], [schedule])
    executor = OnnxExecutor()
    try:
        with pytest.raises(ExecutorError, match=r"operator 0 .* other weights"):
            executor.load(KEY, bound_of(plan, [found]), {found.digest: found})
        assert executor.sessions == 0
    finally:
        executor.close()
