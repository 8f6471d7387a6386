"""Engines of whole blocks on a simulated device, which "builds" them of onnxruntime's own kernels."""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from msgspec.structs import replace as with_fields

from stageloom.edge_agent.executor.cuda.executor import pieces_of
from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import OnnxSession
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx_cuda import cuda, engines
from stageloom.edge_agent.executor.onnx_cuda.cuda import (
    ENGINE_WORKSPACE_BYTES,
    ENGINES,
    CudaSessionDevice,
    engine_builder,
)
from stageloom.edge_agent.executor.onnx_cuda.engines import BlockEngines, EngineTrial, cache_folder
from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxCudaExecutor
from stageloom.edge_agent.executor.onnx_cuda.recipe import PlanRecipes
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.plan import ExecutorOptions, Plan
from tests.executor.contract.schedules import StepMaker, bound_of, plan_of
from tests.executor.models import artifact_of, random_inputs
from tests.executor.onnx_cuda.simulated import SimulatedSessionDevice
from tests.executor.onnx_cuda.test_executor import streamed_plan
from tests.executor.torch.steps import KEY, halves, load, members, run, wrong

BUILDER = "onnxruntime 1, TensorRT 2, sm_3"
ONE = InstanceId(1)


@pytest.fixture
def model() -> Artifact:
    """A model with branches."""
    return artifact_of("squeezenet_bypass")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedSessionDevice:
    """One that builds engines, into a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return SimulatedSessionDevice(engine_builder=BUILDER)


@pytest.fixture
def executor(device: SimulatedSessionDevice) -> Iterator[OnnxCudaExecutor]:
    """On that device."""
    made = OnnxCudaExecutor(device)
    yield made
    made.close()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets how long one run of an engine and of the plain session takes."""

    def sets(engine_s: float, plain_s: float) -> None:
        taken = [engine_s, plain_s]

        def lap_s(run: object, device: object, stream: object) -> float:
            taken.append(taken.pop(0))
            return taken[-1]

        monkeypatch.setattr(engines, "lap_s", lap_s)

    return sets


def blocks(model: Artifact, precision: str = "tf32") -> Plan:
    """Two blocks under a sequential schedule: one session each."""
    plan = plan_of([model], [halves(model)], [[m] for m in members(2)])
    return replace(plan, executor=ExecutorOptions(name="onnx_cuda", precision=precision))


def _answers(executor: OnnxCudaExecutor, plan: Plan, model: Artifact, key: PlanKey = KEY) -> bool:
    """Whether a task's answer is right, before and after the engines were built."""
    steps = StepMaker(key, load(executor, plan, [model], key))
    inputs, right = random_inputs(model.graph, 1), True
    for instance in (ONE, InstanceId(2)):
        run(executor, steps.step(0, {0: (instance, 1)}), {instance: [inputs]})
        answer = run(executor, steps.step(1, {0: (instance, 1)}))[instance]
        right = right and not wrong(model, inputs, answer)
        executor.await_engines()
    return right


def test_a_faster_engine_runs_the_block_and_the_plain_session_stays_for_fallbacks(
    executor: OnnxCudaExecutor,
    device: SimulatedSessionDevice,
    model: Artifact,
    timed: Callable[[float, float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    timed(1e-3, 2e-3)
    caplog.set_level(logging.INFO, logger=engines.__name__)
    assert _answers(executor, blocks(model), model)
    plan_bytes = sum(size * count for size, count in pieces_of(executor._plans[KEY].bound).items())
    assert device.pinned == plan_bytes, "what the trials of engines were compared in is given back"
    chosen = dict(executor._engines._values)
    assert len(chosen) == 2 and all(key.stream == 0 for key in chosen)
    assert all(session is not executor._cache.get(key) for key, session in chosen.items())
    assert "us=1000.0 plain_us=2000.0" in caplog.text and "wins=True" in caplog.text
    step = StepMaker(KEY, executor._plans[KEY].bound).step(0, {0: (InstanceId(3), 1)})
    alone = with_fields(step, fallback=True)
    run(executor, alone, {InstanceId(3): [random_inputs(model.graph, 2)]})


def test_a_plan_serves_while_its_engine_is_built_and_may_be_unloaded_meanwhile(
    executor: OnnxCudaExecutor,
    device: SimulatedSessionDevice,
    model: Artifact,
    timed: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Building takes minutes: nothing else waits for it, neither another plan nor the end of this one."""
    timed(1.0, 2.0)
    building, go_on = threading.Event(), threading.Event()
    original = BlockEngines._open

    def slow(self: BlockEngines, key: SessionKey, source: ModelParts) -> OnnxSession:
        building.set()
        assert go_on.wait(60)
        return original(self, key, source)

    monkeypatch.setattr(BlockEngines, "_open", slow)
    steps = StepMaker(KEY, load(executor, blocks(model), [model]))
    inputs = random_inputs(model.graph, 1)
    run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [inputs]})
    assert building.wait(60)
    assert not wrong(model, inputs, run(executor, steps.step(1, {0: (ONE, 1)}))[ONE])
    load(executor, blocks(model), [model], PlanKey(2))
    executor.unload(KEY)
    go_on.set()
    executor.await_engines()
    assert not executor._engines._values and not executor._programs
    assert len(device.engines) == 1, "the other block's is not begun"


def test_an_engine_that_is_not_faster_is_given_up_and_not_built_again(
    executor: OnnxCudaExecutor,
    device: SimulatedSessionDevice,
    model: Artifact,
    timed: Callable[[float, float], None],
) -> None:
    timed(1.99e-3, 2e-3)
    assert _answers(executor, blocks(model), model)
    assert not executor._engines._values
    built = len(device.engines)
    executor.unload(KEY)
    assert _answers(executor, blocks(model), model, PlanKey(2))
    assert len(device.engines) == built == 2


def test_a_wrong_engine_never_wins_however_fast_it_is(
    executor: OnnxCudaExecutor,
    model: Artifact,
    timed: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that onnxruntime finds on disk under the name of another version's (issue 6455)."""
    timed(1e-6, 1.0)
    other = artifact_of("squeezenet_bypass", seed=9)
    original = BlockEngines._open
    monkeypatch.setattr(
        BlockEngines, "_open", lambda self, key, source: original(self, key, ModelParts(other))
    )
    assert _answers(executor, blocks(model), model)
    assert not executor._engines._values


def test_an_engine_that_cannot_be_built_leaves_the_plain_session_and_says_why(
    executor: OnnxCudaExecutor,
    model: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(self: BlockEngines, key: SessionKey, source: ModelParts) -> OnnxSession:
        raise ExecutorError("no parser for Einsum")

    monkeypatch.setattr(BlockEngines, "_open", fails)
    assert _answers(executor, blocks(model), model)
    assert "no engine for" in caplog.text and "no parser for Einsum" in caplog.text


def test_engines_are_built_of_whole_blocks_alone_and_never_in_float32(
    executor: OnnxCudaExecutor, device: SimulatedSessionDevice, model: Artifact
) -> None:
    """A group would have an engine and a workspace of its own; float32 would be rounded to TF32."""
    streamed = replace(streamed_plan(model), executor=ExecutorOptions(name="onnx_cuda", precision="tf32"))
    steps = StepMaker(KEY, load(executor, streamed, [model]))
    run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [random_inputs(model.graph, 1)]})
    executor.unload(KEY)
    assert _answers(executor, blocks(model, "fp32"), model, PlanKey(2))
    assert device.engines == []


def test_what_engines_may_take_is_stated_before_and_counted_while_the_plan_is_loaded(
    executor: OnnxCudaExecutor, model: Artifact, timed: Callable[[float, float], None]
) -> None:
    bound = bound_of(blocks(model), [model])
    without = OnnxCudaExecutor(SimulatedSessionDevice())
    sessions = sum(without._session_bytes(PlanRecipes(bound)).values())
    more = executor.stated_bytes(bound) - without.stated_bytes(bound)
    assert more == sessions + 2 * ENGINE_WORKSPACE_BYTES
    timed(1.0, 2.0)
    stated = executor.stated_bytes(bound)
    assert _answers(executor, blocks(model), model)
    assert executor.held_bytes == stated
    executor.unload(KEY)
    assert not executor._engines._values
    without.close()


def test_an_engine_that_has_lost_is_neither_held_nor_stated_again(
    executor: OnnxCudaExecutor, model: Artifact, timed: Callable[[float, float], None]
) -> None:
    bound, without = bound_of(blocks(model), [model]), OnnxCudaExecutor(SimulatedSessionDevice())
    plain_bytes = without.stated_bytes(bound)
    timed(2.0, 1.0)
    assert executor.stated_bytes(bound) > plain_bytes
    assert _answers(executor, blocks(model), model)
    assert executor.held_bytes == executor.stated_bytes(bound, alone=True) == plain_bytes
    without.close()


def test_engines_of_two_versions_or_batches_lie_in_folders_of_their_own(
    executor: OnnxCudaExecutor,
    device: SimulatedSessionDevice,
    model: Artifact,
    tmp_path: Path,
    timed: Callable[[float, float], None],
) -> None:
    """onnxruntime names an engine by the graph's structure; another version has the same."""
    timed(1.0, 2.0)
    retrained = artifact_of("squeezenet_bypass", seed=9)
    assert _answers(executor, blocks(model), model)
    assert _answers(executor, blocks(retrained), retrained, PlanKey(2))
    assert _answers(executor, blocks(model, "fp16"), model, PlanKey(3)) is False  # not to float32's tolerance
    folders = [folder for _, folder, _ in device.engines]
    assert len(set(folders)) == len(folders) == 6
    assert (
        {timings for _, _, timings in device.engines} == {cache_folder()} == {tmp_path / "stageloom/tensorrt"}
    )
    assert all(folder.parent == cache_folder() and not any(folder.iterdir()) for folder in folders)
    device.engine_builder = "another version"
    executor.unload(KEY)
    assert _answers(executor, blocks(model), model, PlanKey(4))
    assert len({folder for _, folder, _ in device.engines}) == 8


@pytest.mark.parametrize(
    ("trial", "wins"),
    [
        (EngineTrial(1e-3, 1.0, 2.0), True),
        (EngineTrial(6e-3, 1.0, 2.0), False),
        (EngineTrial(float("inf"), 1.0, 2.0), False),
        (EngineTrial(1e-3, 1.99, 2.0), False),
    ],
)
def test_an_engine_wins_where_it_is_right_and_faster(trial: EngineTrial, wins: bool) -> None:
    assert trial.wins("tf32") is wins


def test_tensorrt_is_asked_for_on_the_sessions_stream_with_both_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = object.__new__(CudaSessionDevice)
    stream: Any = 4711
    named = {"engine": Path("/c/e"), "timings": Path("/c")}
    name, options = device.engine_provider(stream, precision="fp16", **named)
    assert name == ENGINES and all(isinstance(value, str) for value in options.values())
    assert options["user_compute_stream"] == "4711" and options["trt_fp16_enable"] == "1"
    assert (options["trt_engine_cache_enable"], options["trt_engine_cache_path"]) == ("1", "/c/e")
    assert (options["trt_timing_cache_enable"], options["trt_timing_cache_path"]) == ("1", "/c")
    assert int(options["trt_max_workspace_size"]) == ENGINE_WORKSPACE_BYTES
    assert device.engine_provider(stream, precision="tf32", **named)[1]["trt_fp16_enable"] == "0"


def test_engines_need_the_provider_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels of onnxruntime-gpu bring the provider without TensorRT."""
    library = SimpleNamespace(getInferLibVersion=lambda: 101303)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [cuda.PROVIDER])
    assert engine_builder("sm_87") == ""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [ENGINES, cuda.PROVIDER])
    assert engine_builder("sm_87") == f"onnxruntime {onnxruntime.__version__}, TensorRT 101303, sm_87"

    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert engine_builder("sm_87") == ""


@pytest.mark.parametrize("jetson", [True, False])
def test_cudnn_searches_without_any_workspace_it_likes_on_a_jetson(
    jetson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "is_tegra", lambda: jetson)
    _, options = object.__new__(CudaSessionDevice).provider(4711, tf32=False)
    assert options.get("cudnn_conv_use_max_workspace") == ("0" if jetson else None)
