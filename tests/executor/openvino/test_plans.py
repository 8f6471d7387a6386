"""Plans on `openvino`: copies for replicas, what is stated and held, operators' times, strangers' models."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx import executor as onnx_executor
from stageloom.edge_agent.executor.onnx.cache import SessionKey, activation_bytes
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.program import copies_of
from stageloom.edge_agent.executor.openvino.executor import OpenvinoExecutor
from stageloom.edge_agent.verify.check import verify_artifact
from stageloom.edge_agent.verify.inputs import ValueRange
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.plan import ExecutorOptions, Member, Plan
from tests.executor.contract.schedules import StepMaker, bound_of, plan_of
from tests.executor.drive import KEY, halves, load, run
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.openvino.small import artifact_from, one_node
from tests.executor.small_models import SHARED_BYTES, unrolled
from tests.importer.classes import CLASSES
from tests.importer.models import info, model_of
from tests.importer.test_classes import HALF_TOLERANCE, _imported


@pytest.fixture
def openvino() -> Iterator[OpenvinoExecutor]:
    """A new one."""
    made = OpenvinoExecutor()
    yield made
    made.close()


@pytest.fixture
def model() -> Artifact:
    return artifact_of("squeezenet")


def replicated(model: Artifact, replicas: int, lanes: int) -> Plan:
    """Two blocks, each combined block with one member."""
    cut = halves(model)
    groups = [[Member(0, replica, block)] for replica in range(replicas) for block in (0, 1)]
    plan = plan_of([model], [cut], groups, replicas=replicas, lanes=lanes)
    return replace(plan, executor=ExecutorOptions(name="openvino"))


@pytest.mark.parametrize(
    ("replicas", "lanes", "copies"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2), (3, 2, 2), (2, 4, 2)]
)
def test_replicas_in_several_lanes_have_sessions_of_their_own(
    replicas: int, lanes: int, copies: int, openvino: OpenvinoExecutor, model: Artifact
) -> None:
    """As a session serves one caller at a time: with one session two lanes would be as fast as one."""
    plan = replicated(model, replicas, lanes)
    bound = bound_of(plan, [model])
    assert sorted(set(copies_of(bound).values())) == list(range(copies))
    stated = openvino.stated_bytes(bound)
    load(openvino, plan, [model])
    assert openvino.sessions == 2 * copies
    assert openvino.held_bytes == stated and openvino.stated_bytes(bound) == 0
    openvino.unload(KEY)
    assert openvino.sessions == 0


def test_weights_that_many_operators_read_count_as_in_the_file_and_as_in_the_kernels(
    openvino: OpenvinoExecutor,
) -> None:
    model = unrolled()
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    stated = openvino.stated_bytes(
        bound_of(replace(plan, executor=ExecutorOptions(name="openvino")), [model])
    )
    assert 2 * SHARED_BYTES < stated < 4 * SHARED_BYTES


def test_models_of_one_artifact_count_together(model: Artifact) -> None:
    groups = [[Member(index, 0, 0)] for index in (0, 1)]
    bound = bound_of(plan_of([model, model], [(), ()], groups, lanes=2), [model])
    assert copies_of(bound) == {(0, 0): 0, (1, 0): 1}


def test_a_plan_with_more_replicas_reuses_the_sessions_there_are(
    openvino: OpenvinoExecutor, model: Artifact
) -> None:
    load(openvino, replicated(model, 1, 2), [model])
    alone = openvino.stated_bytes(bound_of(replicated(model, 2, 2), [model]), alone=True)
    assert 0 < openvino.stated_bytes(bound_of(replicated(model, 2, 2), [model])) < alone
    load(openvino, replicated(model, 2, 2), [model], PlanKey(2))
    assert openvino.sessions == 4


def test_every_replica_computes_what_the_model_does(openvino: OpenvinoExecutor, model: Artifact) -> None:
    bound = load(openvino, replicated(model, 2, 2), [model])
    steps = StepMaker(KEY, bound)
    inputs = random_inputs(model.graph, 1)
    made = []
    for replica in (0, 1):
        one = InstanceId(replica + 1)
        run(openvino, steps.step(2 * replica, {0: (one, 1)}, lane=replica), {one: [inputs]})
        (row,) = run(openvino, steps.step(2 * replica + 1, {0: (one, 1)}, lane=replica), {})[one]
        made.append(row["logits"])
    wanted = reference(model, inputs, ["logits"])["logits"]
    assert difference(made[0], wanted) < 1e-4 and np.array_equal(made[0], made[1])


@pytest.mark.parametrize("precision", ["tf32", "fp16", "int8"])
def test_a_precision_that_it_does_not_know_is_refused(
    precision: str, openvino: OpenvinoExecutor, model: Artifact
) -> None:
    options = ExecutorOptions(name="openvino", precision=precision)
    with pytest.raises(ExecutorError, match=f"openvino executor does not know the precision '{precision}'"):
        load(openvino, replace(replicated(model, 1, 1), executor=options), [model])
    assert openvino.sessions == 0


@pytest.mark.promise("openvino-refuses-at-load")
def test_a_model_that_it_cannot_run_is_refused_when_its_plan_is_loaded(
    openvino: OpenvinoExecutor, tmp_path: Path
) -> None:
    model = artifact_from(one_node("Relu", {"x": ("float64", (1, 3))}, ("float64", (1, 3))), tmp_path)
    with pytest.raises(ExecutorError, match="is float64, in which openvino does not compute") as raised:
        load(openvino, plan_of([model], [()], [[Member(0, 0, 0)]]), [model])
    assert raised.value.remedy == "use the executor onnx for this model"
    assert openvino.sessions == 0 and openvino.held_bytes == 0


def test_operators_are_timed(openvino: OpenvinoExecutor, model: Artifact) -> None:
    times = openvino.time_operators(model, TimingRequest(repeats=2), lambda: True)
    assert {time.runs for time in times} == {2} and min(time.median_us for time in times) > 0


REFUSED = {
    "branch_that_never_runs": "doesn't support If operation with dynamic rank",
    "float64": "is float64",
    "int8_qoperator": "computes QLinearAdd",
    "short_time_fourier": "Conversion is failed for: STFT",
    "strings": "No conversion rule found for operations: ai.onnx.ml.LabelEncoder",
    "trees": "No conversion rule found for operations: ai.onnx.ml.",
}


@pytest.mark.promise("openvino-refuses-at-load")
@pytest.mark.parametrize("name", CLASSES)
def test_a_model_of_every_class_agrees_or_is_refused_when_it_is_loaded(
    name: str, openvino: OpenvinoExecutor, tmp_path: Path
) -> None:
    sample = CLASSES[name]()
    path = tmp_path / "m.onnx"
    path.write_bytes(sample.model.SerializeToString())
    _, model = _imported(path, sample, tmp_path)
    ranges = {name: ValueRange(*ends) for name, ends in sample.ranges.items()}
    if name in REFUSED:
        with pytest.raises(ExecutorError) as raised:
            verify_artifact(model, "greedy", openvino, ranges=ranges, repeats=2)
        assert REFUSED[name] in raised.value.cause and raised.value.remedy.startswith("use the executor onnx")
        return
    report = verify_artifact(model, "greedy", openvino, ranges=ranges, repeats=2)
    assert not report.failed_tasks, report.reason
    assert report.stable
    assert report.difference <= (HALF_TOLERANCE if name == "float16" else 1e-5)


def negation(folder: Path) -> Artifact:
    return artifact_from(one_node("Neg", {"x": ("int64", (3,))}, ("int64", (3,))), folder)


def negated(openvino: OpenvinoExecutor, bound: BoundPlan, x: np.ndarray) -> np.ndarray:
    one = InstanceId(1)
    (row,) = run(openvino, StepMaker(KEY, bound).step(0, {0: (one, 1)}), {one: [{"x": x}]})[one]
    (made,) = row.values()
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[SessionKey]:
    """What onnxruntime stands in for, as its sessions are opened."""
    keys: list[SessionKey] = []
    open_session = onnx_executor.open_session

    def noted(key: SessionKey, source: ModelParts) -> onnx_executor.OnnxSession:
        keys.append(key)
        return open_session(key, source)

    monkeypatch.setattr(onnx_executor, "open_session", noted)
    return keys


def test_integers_beyond_32_bits_are_computed_by_onnxruntime_and_others_are_not(
    openvino: OpenvinoExecutor, opened: list[SessionKey], tmp_path: Path
) -> None:
    model = negation(tmp_path)
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    bound = load(openvino, replace(plan, executor=ExecutorOptions(name="openvino")), [model])
    held = openvino.held_bytes
    assert np.array_equal(negated(openvino, bound, np.array([1, -2, 3])), [-1, 2, -3])
    assert not opened
    for _ in range(2):
        assert negated(openvino, bound, np.array([1, 1 << 40, 3])).tolist() == [-1, -(1 << 40), -3]
    assert len(opened) == 1 and openvino.held_bytes == held
    openvino.unload(KEY)
    openvino.drop_idle()
    assert openvino.held_bytes == 0
    load(openvino, plan, [model])
    negated(openvino, bound, np.array([1, 1 << 40, 3]))
    assert len(opened) == 2, "the first one was let go"


def twice_negated(folder: Path) -> tuple[Artifact, Plan]:
    """Two models of one artifact, the second in two blocks: no session is of both."""
    nodes = [helper.make_node("Neg", ["x"], ["h"]), helper.make_node("Neg", ["h"], ["y"])]
    given, made = (info(name, (3,), TensorProto.INT64) for name in "xy")
    model = artifact_from(model_of(nodes, [given], [made]), folder)
    groups = [[Member(0, 0, 0)], [Member(1, 0, 0)], [Member(1, 0, 1)]]
    plan = plan_of([model, model], [(), (1,)], groups, lanes=2)
    return model, replace(plan, executor=ExecutorOptions(name="openvino"))


def test_what_stands_in_for_a_session_of_which_there_is_no_first_copy_is_stated_and_stays(
    openvino: OpenvinoExecutor, opened: list[SessionKey], tmp_path: Path
) -> None:
    model, plan = twice_negated(tmp_path)
    stated = openvino.stated_bytes(bound_of(replace(plan, lanes=1), [model]))
    bound = load(openvino, plan, [model])
    assert openvino.held_bytes == stated + activation_bytes(model.graph, 1)
    x = np.array([1, 1 << 40, 3])
    for _ in range(2):
        steps, one = StepMaker(KEY, bound), InstanceId(1)
        run(openvino, steps.step(1, {0: (one, 1)}), {one: [{"x": x}]})
        (row,) = run(openvino, steps.step(2, {0: (one, 1)}), {})[one]
        assert row["y"].tolist() == x.tolist()
        openvino.drop_idle()
    assert len(opened) == 2


def test_the_weights_of_a_session_in_its_place_are_stated_once_for_all_copies(
    openvino: OpenvinoExecutor, tmp_path: Path
) -> None:
    table = np.zeros((1000, 100), np.float32)
    gather = one_node("Gather", {"x": ("int64", (3,))}, weights={"w": table}, reads=["w", "x"])
    model = artifact_from(gather, tmp_path)
    options = ExecutorOptions(name="openvino")
    stated = [
        openvino.stated_bytes(bound_of(replace(plan, executor=options), [model]))
        for lanes in (1, 2)
        for plan in [
            plan_of([model], [()], [[Member(0, one, 0)] for one in range(lanes)], replicas=lanes, lanes=lanes)
        ]
    ]
    assert 2 * table.nbytes < stated[0] < 2.2 * table.nbytes + (1 << 21)
    assert 3 * table.nbytes < stated[1] < 3.2 * table.nbytes + (1 << 22)


def test_without_onnxruntime_a_run_beyond_32_bits_fails_and_says_what_to_install(
    openvino: OpenvinoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = negation(tmp_path)
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    bound = load(openvino, replace(plan, executor=ExecutorOptions(name="openvino")), [model])
    monkeypatch.setitem(sys.modules, "stageloom.edge_agent.executor.onnx.executor", None)
    with pytest.raises(ExecutorError, match="so large, and onnxruntime, which does, is missing"):
        negated(openvino, bound, np.array([1, 1 << 40, 3]))
