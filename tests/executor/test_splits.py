"""Operators split over two resources: joined they are the operators, and in a plan the model is the model.

Quickly here for a few models of a quarter of their width; with the marker `full` for all of the zoo, and ten
plans of each.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from benchmarks import zoo
from stageloom.edge_agent.executor.base import require_whole
from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.executor.onnx import program, session_executor
from stageloom.edge_agent.executor.onnx.cache import activation_bytes
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor, OnnxSession
from stageloom.edge_agent.executor.onnx.program import JoinRun, SessionProgram
from stageloom.edge_agent.executor.onnx.split_model import split_artifact
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.edge_agent.executor.threads import assign
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared import partition_rules
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.engine.steps import PlanKey, Step, StepMember
from stageloom.shared.errors import ExecutorError, StageloomError
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.partition import Axis, AxisRange, NodeReads, NodeRun, OnnxNode, Split
from stageloom.shared.plan import ExecutorOptions, Resource, decode_plan
from stageloom.shared.split_graph import SplitRole
from tests.executor.contract.cases import Subject, compare, zoo_subject
from tests.executor.installed import installed
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.split_cases import (
    LEAST_SENSITIVITY,
    TOLERANCE,
    SplitSubject,
    bound_split,
    boundaries,
    joined_of,
    random_splits,
    split_plan,
    values_for,
    whole_of,
    worst_difference,
    write_model,
)
from tests.scratch import scratch

pytestmark = pytest.mark.more

CORES = tuple(sorted(os.sched_getaffinity(0)))
QUICK = ("squeezenet_bypass", "googlenet")
SLOW = [pytest.mark.full, pytest.mark.timeout(600)]
MODELS = [*QUICK, *(pytest.param(name, marks=SLOW) for name in sorted(zoo.ZOO) if name not in QUICK)]
FEW, MANY = 2, 10


@cache
def split_subject(name: str) -> SplitSubject:
    return SplitSubject.of(subject(name).artifact)


@cache
def subject(name: str) -> Subject:
    side = None if zoo.ZOO[name].size > 224 else 75
    return zoo_subject(name, scratch(), width=0.25, side=side)


@pytest.fixture
def executor() -> Iterator[OnnxExecutor]:
    made = OnnxExecutor()
    yield made
    made.close()


# Operators alone


@pytest.mark.promise("split-operator-is-the-operator")
@pytest.mark.parametrize("name", MODELS)
def test_each_operator_alone_is_what_its_halves_make(name: str) -> None:
    """Every distinct operator of a model, at the first quantum, the middle, the last quantum and 1."""
    model, numbers = split_subject(name), np.random.default_rng(0)
    graph, seen = model.artifact.graph, set()
    for signature, op in model.signatures():
        if signature in seen:
            continue
        seen.add(signature)
        inputs = [values_for(graph, model.inputs(op, op), numbers) for _ in range(2)]
        wanted, other = (whole_of(model.parts, (op,), one) for one in inputs)
        assert worst_difference(other, wanted) > LEAST_SENSITIVITY, f"operator {op} says nothing"
        for axis in model.reader.axes(op):
            for boundary in boundaries(axis):
                split = Split(op, op, axis.axis, boundary)
                assert worst_difference(joined_of(model.parts, split, inputs[0]), wanted) < TOLERANCE, split
    assert len(seen) > 10


# Whole models


class Watched(OnnxExecutor):
    """Keeps what every join makes."""

    def __init__(self) -> None:
        super().__init__()
        self.joins: dict[str, list[np.ndarray]] = {}
        self.lock = threading.Lock()

    def _settle(
        self, step: Step, member: StepMember, slot: Values, *, wanted: bool
    ) -> Mapping[str, np.ndarray]:
        model = self._plans[step.program.plan].bound.models[member.member.model]
        with self.lock:
            for op in model.blocks[member.member.block].operators:
                joined = model.origins[op].role is SplitRole.JOIN
                for tensor, *_ in model.origins[op].halves if joined else ():
                    if tensor in slot:
                        self.joins.setdefault(model.graph.tensors[tensor].name, []).append(slot[tensor])
        return super()._settle(step, member, slot, wanted=wanted)


def run_split(
    model: Subject, seed: int, *, repeats: int, executors: tuple[str, str] = ("onnx", "onnx")
) -> None:
    """A plan of the model in two blocks with every operator split: compare borders, joins and bits."""
    splits = random_splits(split_subject(model.name), random.Random(seed), model.half)
    plan = split_plan(model.artifact, splits, model.half, executors=executors)
    plan = decode_plan(plan.wire, plan.digest)
    assert not split_subject(model.name).reader.violations(splits, model.half)
    watched = Watched()
    try:
        outcome = compare(watched, bound_split(model.artifact, plan), [model], repeats=repeats, seed=seed)
    finally:
        watched.close()
    assert outcome.agrees, outcome.worst
    _check_joins(model, watched)


def _check_joins(model: Subject, watched: Watched) -> None:
    names = sorted(watched.joins)
    assert names
    for which, feeds in enumerate(model.pair.feeds):
        wanted = reference(model.artifact, dict(feeds), names)
        for name in names:
            assert difference(watched.joins[name][which], wanted[name]) < TOLERANCE, name


@pytest.mark.promise("split-model-is-the-model")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(n, marks=SLOW) for n in range(FEW, MANY))])
def test_a_model_of_which_every_operator_is_split_is_the_model(name: str, seed: int) -> None:
    model = subject(name)
    assert model.pair.sensitivity > LEAST_SENSITIVITY
    run_split(model, seed, repeats=4)


@pytest.mark.parametrize("least", [0, 1 << 40])
def test_halves_that_are_written_into_the_join_make_what_halves_that_are_copied_make(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    run_into = OnnxSession.run_into

    def noted(session: OnnxSession, values: Values, outs: Mapping[TensorId, np.ndarray]) -> None:
        written.append(len(outs))
        run_into(session, values, outs)

    monkeypatch.setattr(program, "_LEAST_IN_PLACE_BYTES", least)
    monkeypatch.setattr(OnnxSession, "run_into", noted)
    run_split(subject("googlenet"), 3, repeats=4)
    assert bool(written) == (least == 0)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_batch_is_split_in_each_of_its_buckets(fallback: bool) -> None:
    model = subject("squeezenet_bypass")
    splits = random_splits(split_subject(model.name), random.Random(5), model.half)
    bound = bound_split(model.artifact, split_plan(model.artifact, splits, model.half, batch=4))
    executor = OnnxExecutor()
    try:
        for tasks in (1, 3, 4):
            outcome = compare(executor, bound, [model], repeats=2, tasks=tasks, fallback=fallback)
            assert outcome.agrees, (tasks, outcome.worst)
    finally:
        executor.close()


# Threads and executors


class OnCores(OnnxExecutor):
    """Notes on which cores each session ran."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: dict[tuple[int, ...], set[frozenset[int]]] = {}

    def _run_item(self, program: SessionProgram, index: int, slots: Mapping[int, Values]) -> None:
        resource = program.items[index].resource
        self.cores.setdefault((resource,), set()).add(frozenset(os.sched_getaffinity(0)))
        super()._run_item(program, index, slots)


@pytest.mark.promise("split-model-is-the-model")
@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_the_half_of_the_other_resource_runs_on_its_cores_alone() -> None:
    artifact, made = artifact_of("squeezenet"), OnCores()
    splits = random_splits(SplitSubject.of(artifact), random.Random(1))
    plan = split_plan(artifact, splits, resources=(Resource(cores=CORES[:1]), Resource(cores=CORES[1:2])))
    with InProcessEngine(Executors(lambda name: made)) as engine:
        engine.activate(engine.load(plan, {artifact.digest: artifact}))
        for seed in range(3):
            inputs = random_inputs(artifact.graph, seed)
            got = engine.submit("m", inputs).result(60.0)
            wanted = reference(artifact, inputs, list(got))
            assert all(difference(got[name], wanted[name]) < TOLERANCE for name in got)
    assert made.cores[(1,)] == {frozenset(CORES[1:2])}
    assert made.cores[(0,)] == {frozenset(CORES[:1])}


@pytest.mark.parametrize("executors", [("openvino", "openvino"), ("onnx", "openvino"), ("openvino", "onnx")])
def test_another_executor_runs_the_groups_of_its_resource(
    executors: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_LEAST_IN_PLACE_BYTES", 0)
    artifact = artifact_of("squeezenet")
    splits = random_splits(SplitSubject.of(artifact), random.Random(2))[:9]
    plan = split_plan(artifact, splits, executors=executors)
    plan = decode_plan(plan.wire, plan.digest)
    with InProcessEngine(Executors(installed)) as engine:
        engine.activate(engine.load(plan, {artifact.digest: artifact}))
        inputs = random_inputs(artifact.graph, 1)
        got = engine.submit("m", inputs).result(60.0)
        wanted = reference(artifact, inputs, list(got))
        assert all(difference(got[name], wanted[name]) < TOLERANCE for name in got)


@pytest.mark.promise("split-model-is-the-model")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=SLOW) for n in range(1, 4))])
def test_a_model_is_split_on_torch_too(name: str, seed: int) -> None:
    """Halves write slices of the join's buffer where its layout allows that."""
    model = subject(name)
    splits = random_splits(split_subject(name), random.Random(seed), model.half)
    plan = split_plan(model.artifact, splits, model.half, executors=("torch_cpu", "torch_cpu"))
    executor = installed("torch_cpu")
    try:
        outcome = compare(executor, bound_split(model.artifact, plan), [model], repeats=3, seed=seed)
        assert outcome.agrees, outcome.worst
    finally:
        executor.close()


@pytest.mark.parametrize("executors", [("onnx", "openvino"), ("openvino", "onnx")])
def test_sessions_of_groups_weigh_what_the_executor_that_runs_them_says(executors: tuple[str, str]) -> None:
    artifact = artifact_of("squeezenet")
    splits = random_splits(SplitSubject.of(artifact), random.Random(2))[:9]
    bound = bound_split(artifact, split_plan(artifact, splits, executors=executors))
    engine = Executors(installed)
    try:
        stated = engine.stated_bytes(bound)
        engine.load(PlanKey(1), bound, {artifact.digest: artifact})
        assert engine.held_bytes == stated
        engine.unload(PlanKey(1))
        # What is kept now has been weighed by the executor that has it.
        assert engine.held_bytes == stated - activation_bytes(bound.models[0].graph, 1)
    finally:
        engine.close()


def test_an_executor_that_does_not_split_says_so() -> None:
    artifact = artifact_of("squeezenet")
    plan = split_plan(artifact, (Split(1, 1, Axis.CHANNELS, 2),), executors=("torch_cpu", "onnx"))
    made = installed("torch_cpu")
    with pytest.raises(ExecutorError, match="does not run groups of blocks that torch_cpu runs"):
        made.load(PlanKey(1), bound_split(artifact, plan), {artifact.digest: artifact})
    made.close()
    with pytest.raises(ExecutorError, match="the onnx_cuda executor does not split operators"):
        require_whole(bound_split(artifact, plan), "onnx_cuda")


def test_groups_of_other_options_than_their_block_has_are_refused_by_torch() -> None:
    artifact = artifact_of("squeezenet")
    plan = split_plan(artifact, (Split(1, 1, Axis.CHANNELS, 2),), executors=("torch_cpu", "onnx"))
    other = ExecutorOptions(name="torch_cpu", intra_op_threads=2)
    made = installed("torch_cpu")
    with pytest.raises(ExecutorError, match="several of intra_op_threads"):
        made.stated_bytes(bound_split(artifact, replace(plan, further_executors=(other,))))
    made.close()


def test_options_of_an_executor_that_runs_groups_alone_are_looked_at(executor: OnnxExecutor) -> None:
    artifact = artifact_of("squeezenet")
    plan = split_plan(artifact, (Split(1, 1, Axis.CHANNELS, 2),), executors=("openvino", "onnx"))
    own, beside = (ExecutorOptions(name=name, precision="bf16") for name in ("openvino", "onnx"))
    bound = bound_split(artifact, replace(plan, executor=own, further_executors=(beside,)))
    with pytest.raises(ExecutorError, match="the onnx executor does not know the precision 'bf16'"):
        executor.load(PlanKey(1), bound, {artifact.digest: artifact})


# What the graph alone does not show, and planted defects


def _artifact_of(nodes: Sequence[Any], weights: Mapping[str, np.ndarray], shape: Sequence[int]) -> Artifact:
    folder = scratch()
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * len(shape))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = write_model(folder, model.SerializeToString())
    import_here(path, {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


@cache
def sensitive() -> SplitSubject:
    """A model in which each defect below shows: padding, bias, slope, pools that round and that count."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((8, 4, 3, 3)).astype(np.float32),
        "b": 3 * rng.standard_normal(8).astype(np.float32),
        "slope": rng.standard_normal((8, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("PRelu", ["c", "slope"], ["p"]),
        helper.make_node(
            "AveragePool", ["p"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1
        ),
        helper.make_node("MaxPool", ["a"], ["y"], kernel_shape=[3, 1], strides=[2, 1], ceil_mode=1),
    ]
    return SplitSubject.of(_artifact_of(nodes, weights, [1, 4, 14, 10]))


SENSITIVE_SPLITS = (
    (Split(0, 0, Axis.ROWS, 6), Split(1, 1, Axis.ROWS, 7), Split(2, 2, Axis.ROWS, 3)),
    (Split(0, 0, Axis.CHANNELS, 3), Split(1, 1, Axis.CHANNELS, 5), Split(2, 2, Axis.CHANNELS, 2)),
)


def _found() -> bool:
    """Whether a plan fails, or makes something else than the model."""
    return any(map(_differs, SENSITIVE_SPLITS))


def _differs(splits: tuple[Split, ...]) -> bool:
    artifact = sensitive().artifact
    try:
        with InProcessEngine(Executors(lambda name: OnnxExecutor())) as engine:
            engine.activate(engine.load(split_plan(artifact, splits), {artifact.digest: artifact}))
            return any(_wrong(engine, artifact, seed) for seed in range(3))
    except StageloomError:
        return True


def _wrong(engine: InProcessEngine, artifact: Artifact, seed: int) -> bool:
    inputs = random_inputs(artifact.graph, seed)
    got = engine.submit("m", inputs).result(60.0)["y"]
    wanted = reference(artifact, inputs, ["y"])["y"]
    return got.shape != wanted.shape or difference(got, wanted) > TOLERANCE


_WINDOW = partition_rules._window
_RULES = partition_rules.RULES


def _narrowed(begin: int, end: int, rows: NodeReads, spatial: int, axis: int) -> NodeReads:
    """The rows with some fewer at both ends, and padding in their place."""
    read = rows.reads[0]
    assert read is not None
    given = rows.attributes["pads"]
    assert isinstance(given, tuple)
    pads = list(given)
    pads[axis] += begin
    pads[spatial + axis] += end
    changed: dict[str, int | str | tuple[int, ...]] = {**rows.attributes, "pads": tuple(pads)}
    return NodeReads((AxisRange(read.dim, read.start + begin, read.stop - end),), attributes=changed)


def _halo_one_row_short(patch: pytest.MonkeyPatch) -> None:
    def window(run: NodeRun, node: OnnxNode, kernel: Sequence[int], at: AxisRange, data: str) -> NodeReads:
        rows = _WINDOW(run, node, kernel, at, data)
        return _narrowed(0, int(at.start == 0), rows, len(kernel), at.dim - 2)

    patch.setattr(partition_rules, "_window", window)


def _padding_at_the_inner_border(patch: pytest.MonkeyPatch) -> None:
    def window(run: NodeRun, node: OnnxNode, kernel: Sequence[int], at: AxisRange, data: str) -> NodeReads:
        rows = _WINDOW(run, node, kernel, at, data)
        halo = kernel[at.dim - 2] // 2 if node.kind == "Conv" else 0
        begin, end = (halo, 0) if at.start else (0, halo)
        return _narrowed(begin, end, rows, len(kernel), at.dim - 2)

    patch.setattr(partition_rules, "_window", window)


def _bias_not_sliced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partition_rules, "_per_channel", lambda run, name, at: AxisRange(0, 0, at.extent))


Change = Callable[[AxisRange, NodeReads], NodeReads]


def _changed_rule(patch: pytest.MonkeyPatch, kind: str, change: Change) -> None:
    rule = _RULES[kind]
    changed = {**_RULES, kind: lambda run, node, at: change(at, rule(run, node, at))}
    patch.setattr(partition_rules, "RULES", changed)


def _slope_not_sliced(patch: pytest.MonkeyPatch) -> None:
    def change(at: AxisRange, reads: NodeReads) -> NodeReads:
        if reads.reads[1] is None:
            return reads
        return reads._replace(reads=(reads.reads[0], AxisRange(0, 0, at.extent)))

    _changed_rule(patch, "PRelu", change)


def _count_include_pad_ignored(patch: pytest.MonkeyPatch) -> None:
    _changed_rule(
        patch,
        "AveragePool",
        lambda at, reads: reads._replace(attributes={**reads.attributes, "count_include_pad": 0}),
    )


def _ceil_mode_ignored(patch: pytest.MonkeyPatch) -> None:
    _changed_rule(
        patch, "MaxPool", lambda at, reads: reads._replace(attributes={**reads.attributes, "ceil_mode": 0})
    )


def _halves_swapped(patch: pytest.MonkeyPatch) -> None:
    join = session_executor.join_halves

    def swapped(run: JoinRun, values: Values) -> None:
        join(replace(run, halves=tuple((row[0], row[2], row[1]) for row in run.halves)), values)

    patch.setattr(session_executor, "join_halves", swapped)


def _join_before_the_second_half(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program, "assign", lambda items: assign([replace(item, waits=()) for item in items]))


DEFECTS = [
    _halo_one_row_short,
    _padding_at_the_inner_border,
    _bias_not_sliced,
    _slope_not_sliced,
    _count_include_pad_ignored,
    _ceil_mode_ignored,
    _halves_swapped,
    _join_before_the_second_half,
]


@pytest.mark.promise("split-operator-is-the-operator")
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__.strip("_"))
def test_a_planted_defect_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _found()
    defect(monkeypatch)
    assert _found()


def test_a_weight_that_only_a_branch_reads_is_in_the_split_model(tmp_path: Path) -> None:
    """As scripted models are exported: torch's executors lower what `split_artifact` writes."""

    def branch(kind: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(kind, ["c", "captured"], ["z"])], kind, [], [out])

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("ReduceMean", ["c"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "zero"], ["above"]),
        helper.make_node("If", ["above"], ["y"], then_branch=branch("Add"), else_branch=branch("Mul")),
    ]
    numbers = np.random.default_rng(0)
    weights = {
        "w": numbers.standard_normal((8, 3, 3, 3)),
        "captured": numbers.standard_normal((1, 8, 1, 1)),
        "zero": np.array(0.0),
    }
    graph = helper.make_graph(
        nodes,
        "branching",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 8, 16, 16])],
        [numpy_helper.from_array(one.astype(np.float32), name) for name, one in weights.items()],
    )
    file = tmp_path / "branching.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), file)
    import_here(file, {}, tmp_path, ImportLimits(), lambda line: None)
    artifact = open_artifact(tmp_path / ARTIFACT_NAME)
    bound = bound_split(artifact, split_plan(artifact, (Split(0, 0, Axis.ROWS, 8),), ()))
    made = split_artifact(bound.models[0], artifact, tmp_path / "split")
    inputs = random_inputs(artifact.graph, 1)
    whole = onnx.ModelProto.FromString(made.onnx_bytes())
    for node in whole.graph.node:
        node.ClearField("name")  # both halves have that of the operator, which no operator by itself minds
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], inputs)
    np.testing.assert_allclose(found, reference(artifact, inputs, ["y"])["y"], atol=1e-5)
