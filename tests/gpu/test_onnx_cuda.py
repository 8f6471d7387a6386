"""`onnx_cuda` on a real device: the same rules as on simulated streams."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.cuda.executor import launched_step
from stageloom.edge_agent.executor.onnx_cuda.cuda import PROVIDER, CudaSessionDevice, why_not
from stageloom.edge_agent.executor.onnx_cuda.engines import BlockEngines
from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxCudaExecutor
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions
from tests.executor.contract.schedules import StepMaker, graph_of, plan_of, random_streams
from tests.executor.models import artifact_of, difference, random_inputs
from tests.executor.torch.steps import KEY, answer_of, halves, load, members, run, wrong

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

REPLAYS = 100

OFF = {"tf32": 3e-2, "fp16": 5e-2}
"""How far answers may be from float32: 1.7 and 2.4 % on an H200, since seeded weights make rounding grow."""


@pytest.fixture
def executor() -> Iterator[OnnxCudaExecutor]:
    """On CUDA, or a reason why there is none."""
    cause, remedy = why_not()
    if cause:
        pytest.skip(f"{cause}; {remedy}")
    made = OnnxCudaExecutor(CudaSessionDevice())
    yield made
    made.close()


@pytest.fixture
def model() -> Artifact:
    """A model with branches, of full width."""
    return artifact_of("googlenet", width=1.0, side=224)


def _streamed(executor: OnnxCudaExecutor, model: Artifact, precision: str = "fp32") -> StepMaker:
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(1))
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA)
    options = ExecutorOptions(name="onnx_cuda", precision=precision)
    return StepMaker(KEY, load(executor, replace(plan, executor=options), [model]))


def _logits(executor: OnnxCudaExecutor, steps: StepMaker, number: int, model: Artifact) -> np.ndarray:
    instance, inputs = InstanceId(number), random_inputs(model.graph, 7)
    rows = run(executor, steps.step(0, {0: (instance, 1)}), {instance: [inputs]})[instance]
    return np.array(rows[0]["logits"])


def test_answers_are_bit_stable_under_random_delays_on_every_stream(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    steps = _streamed(executor, model)
    rng = random.Random(3)
    executor.pause = lambda: time.sleep(rng.random() * 1e-3)
    made = [_logits(executor, steps, number, model) for number in range(1, REPLAYS + 1)]
    assert not wrong(model, random_inputs(model.graph, 7), [{"logits": made[0]}])
    assert len({one.tobytes() for one in made}) == 1


def test_sessions_run_on_cuda_and_on_several_streams(executor: OnnxCudaExecutor, model: Artifact) -> None:
    _streamed(executor, model)
    sessions = executor._cache._values
    assert {one.session.get_providers()[0] for one in sessions.values()} == {PROVIDER}
    assert len({key.stream for key in sessions}) > 2


def test_steps_are_launched_while_the_device_still_works_on_the_last(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    """The first step is held up on the device; the second is launched all the same, and both are right."""
    if tuple(map(int, version("cuda-bindings").split(".")[:2])) < (13, 5):
        pytest.skip("before 13.5 a host function, by which a stream is held up, holds the interpreter's lock")
    plan = plan_of([model], [halves(model)], [[m] for m in members(2)])
    steps = StepMaker(KEY, load(executor, plan, [model]))
    one, inputs = InstanceId(1), random_inputs(model.graph, 1)
    first = steps.step(0, {0: (one, 1)})
    second = steps.step(1, {0: (one, 1)}, after=[first.id])
    for step in (first, second):
        executor.prepare(step.program)
    executor._on.sleep(executor._on.stream(0), 0.5)
    executor.issue(first, {one: [inputs]})
    executor.issue(second, {})
    ends = [launched_step(executor._launched[step.id]).ended for step in (first, second)]
    cuda = executor._on._cuda  # type: ignore[attr-defined]
    assert [cuda.cudaEventQuery(end.handle)[0] for end in ends] == [cuda.cudaError_t.cudaErrorNotReady] * 2
    executor.wait(first.id)
    assert not wrong(model, inputs, executor.wait(second.id).outputs[one])


def test_answers_with_tf32_are_near(executor: OnnxCudaExecutor, model: Artifact) -> None:
    steps = _streamed(executor, model, "tf32")
    wanted = answer_of(model, random_inputs(model.graph, 7))
    made = _logits(executor, steps, 1, model)
    assert difference(made, wanted) < OFF["tf32"]


def test_answers_in_half_precision_are_near_and_the_same_every_time(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    steps = _streamed(executor, model, "fp16")
    wanted = answer_of(model, random_inputs(model.graph, 7))
    made = [_logits(executor, steps, number, model) for number in range(1, 11)]
    assert difference(made[0], wanted) < OFF["fp16"]
    assert len({one.tobytes() for one in made}) == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_plan_takes_no_more_of_the_device_than_it_stated(
    precision: str, executor: OnnxCudaExecutor, model: Artifact
) -> None:
    """Handles of cuBLAS, cuBLASLt and cuDNN count with every session; what a first session loads does not.

    The device's free memory says it, so no other process may use the device meanwhile.
    """
    load(executor, plan_of([model], [()], [members(1)]), [model], PlanKey(9))
    before = executor._on.free_bytes()
    steps = _streamed(executor, model, precision)
    _logits(executor, steps, 1, model)
    assert before - executor._on.free_bytes() <= executor.stated_bytes(executor._plans[KEY].bound, alone=True)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_an_engine_of_tensorrt_is_tried_beside_the_plain_session(
    precision: str,
    executor: OnnxCudaExecutor,
    model: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Right whichever wins; built anew from the disk in little time."""
    if not executor._chooser.builds(precision):
        pytest.skip("TensorRT is not installed")
    caplog.set_level("INFO")
    executor._chooser = BlockEngines(executor._sessions_on, executor._options, tmp_path)
    plan = plan_of([model], [()], [members(1)])
    options = ExecutorOptions(name="onnx_cuda", precision=precision)
    steps = StepMaker(KEY, load(executor, replace(plan, executor=options), [model]))
    wanted = answer_of(model, random_inputs(model.graph, 7))
    for number in (1, 2):  # by the plain session, then by what won
        made = _logits(executor, steps, number, model)
        assert difference(made, wanted) < OFF[precision]
        executor.await_engines()
    assert "engine model=googlenet" in caplog.text, "it was built and compared"
    assert list(tmp_path.glob("*/*.engine")) and list(tmp_path.glob("*.timing"))


def test_every_operator_has_a_time(executor: OnnxCudaExecutor, model: Artifact) -> None:
    times = executor.time_operators(model, TimingRequest(repeats=3, limit_s=300.0), lambda: True)
    assert len(times) == len(model.graph.operators)
    assert all(time.runs == 3 and time.median_us > 0 for time in times)
