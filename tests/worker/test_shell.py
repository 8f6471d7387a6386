"""The engine with its threads inside this process: nothing lost, nothing answered twice, results equal."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine, Outputs
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError, TaskCancelled, TaskExpired, TaskFailed, TaskRefused
from stageloom.shared.ids import StepId
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from tests.executor.models import artifact_of, difference, random_inputs, reference

TIMEOUT_S = 60.0


class _Gated(NullExecutor):
    """Steps end only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.broken = False

    def wait(self, step: StepId) -> StepResult:
        self.waiting.set()
        assert self.gate.wait(TIMEOUT_S)
        result = super().wait(step)
        if self.broken:
            raise RuntimeError("the backend\nbroke")
        return result


@pytest.fixture
def gated() -> Iterator[tuple[InProcessEngine, _Gated]]:
    """An engine with one model in one block, whose steps wait for the gate."""
    executor = _Gated()
    with InProcessEngine(executor) as shell:
        model = artifact_of("squeezenet")
        shell.activate(shell.load(_plan([model]), {model.digest: model}))
        yield shell, executor
        executor.gate.set()


def _plan(models: list[Artifact], partition: str = "whole", lanes: int = 1, **rules: int) -> Plan:
    choices = [
        ModelChoice(name=m.graph.name, artifact=m.digest, graph=m.graph, partition=partition, **rules)  # type: ignore[arg-type]
        for m in models
    ]
    return compose(choices, combination=Combination.ALIGNED, members_max=2, lanes=lanes)


def _until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends_s, "the condition never came true"
        threading.Event().wait(0.001)


def _check(model: Artifact, inputs: dict[str, np.ndarray], future: "Future[Outputs]") -> None:
    wanted = reference(model, inputs, ["logits"])["logits"]
    assert difference(future.result(TIMEOUT_S)["logits"], wanted) < 1e-4


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_complete_every_task_in_order_of_the_blocks(seed: int) -> None:
    rng = random.Random(seed)
    models = [artifact_of("squeezenet"), artifact_of("googlenet"), artifact_of("squeezenet_bypass")]
    chosen = rng.sample(models, rng.randint(1, 3))
    plan = _plan(
        chosen,
        rng.choice(["whole", "paper", "base"]),
        rng.randint(1, 3),
        replicas=rng.randint(1, 3),
        batch=rng.choice([1, 1, 3]),
    )
    plan = replace(plan, run_ahead=rng.randint(1, 3))
    with InProcessEngine(NullExecutor()) as shell:
        shell.activate(shell.load(plan, {m.digest: m for m in chosen}))
        futures = [
            shell.submit(model.graph.name, random_inputs(model.graph, 1))
            for model in rng.choices(chosen, k=60)
        ]
        for future in futures:
            assert future.result(TIMEOUT_S)["logits"].shape == (1, 1000)
        _until(lambda: shell.idle)
        assert shell.stats().ended.completed == len(futures)


def test_swaps_between_different_partitions_keep_every_result_right() -> None:
    """Tasks keep coming while plans with other blocks, replicas and batches take over one after another."""
    models = [artifact_of("squeezenet"), artifact_of("googlenet")]
    artifacts = {m.digest: m for m in models}
    plans = [
        _plan(models, "paper", 2, replicas=2),
        _plan(models, "whole", 2),
        _plan(models, "base", 1, batch=2),
        _plan(models, "paper", 1, replicas=3),
    ]
    with InProcessEngine(OnnxExecutor()) as shell:
        shell.activate(shell.load(plans[0], artifacts))
        running = []
        for turn, plan in enumerate(plans[1:] * 2):
            for i in range(10):
                for model in models:
                    inputs = random_inputs(model.graph, 100 * turn + i)
                    running.append((model, inputs, shell.submit(model.graph.name, inputs)))
            shell.activate(shell.load(plan, artifacts))
        for model, inputs, future in running:
            _check(model, inputs, future)
        _until(lambda: len(shell.stats().loaded) == 1)


@pytest.mark.parametrize("seed", range(6))
def test_random_swaps_lose_nothing_and_leave_one_plan(seed: int) -> None:
    """The null executor checks that every instance goes on where it stood, through every move."""
    rng = random.Random(seed)
    models = [artifact_of("squeezenet"), artifact_of("googlenet")]
    artifacts = {m.digest: m for m in models}
    with InProcessEngine(NullExecutor()) as shell:
        futures = []
        for _ in range(8):
            plan = _plan(
                models,
                rng.choice(["whole", "paper", "base"]),
                rng.randint(1, 3),
                replicas=rng.randint(1, 3),
            )
            shell.activate(shell.load(plan, artifacts))
            futures += [
                shell.submit(m.graph.name, random_inputs(m.graph, 1)) for m in rng.choices(models, k=20)
            ]
        for future in futures:
            assert future.result(TIMEOUT_S)["logits"].shape == (1, 1000)
        _until(lambda: shell.idle and len(shell.stats().loaded) == 1)
        assert shell.stats().ended.completed == len(futures)


def test_sessions_of_a_plan_are_freed_when_its_last_instance_has_left() -> None:
    model = artifact_of("squeezenet")
    executor = OnnxExecutor()
    with InProcessEngine(executor) as shell:
        shell.activate(shell.load(_plan([model], "paper"), {model.digest: model}))
        blocks = executor.sessions
        shell.activate(shell.load(_plan([model], "whole"), {model.digest: model}))
        _until(lambda: executor.sessions == 1)
        assert blocks == len(model.graph.partition("paper")) + 1


def test_a_task_for_two_models_reads_one_input_and_ends_once() -> None:
    models = [artifact_of("squeezenet"), artifact_of("googlenet")]
    inputs = random_inputs(models[0].graph, 3)
    with InProcessEngine(OnnxExecutor()) as shell:
        shell.activate(shell.load(_plan(models), {m.digest: m for m in models}))
        outputs = shell.submit([m.graph.name for m in models], inputs).result(TIMEOUT_S)
    for model in models:
        wanted = reference(model, inputs, ["logits"])["logits"]
        assert difference(outputs[f"{model.graph.name}/logits"], wanted) < 1e-4


def test_a_queued_task_expires_while_every_lane_is_busy(gated: tuple[InProcessEngine, _Gated]) -> None:
    shell, executor = gated
    inputs = random_inputs(artifact_of("squeezenet").graph, 1)
    first = shell.submit("squeezenet", inputs)
    assert executor.waiting.wait(TIMEOUT_S)
    late = [shell.submit("squeezenet", inputs, deadline_s=time.monotonic() + 0.02) for _ in range(3)]
    for future in late:
        with pytest.raises(TaskExpired):
            future.result(TIMEOUT_S)
    executor.gate.set()
    assert first.result(TIMEOUT_S)


def test_a_task_in_flight_is_cancelled_at_once_and_its_slot_freed(
    gated: tuple[InProcessEngine, _Gated],
) -> None:
    shell, executor = gated
    inputs = random_inputs(artifact_of("squeezenet").graph, 1)
    first, second = shell.submit("squeezenet", inputs), shell.submit("squeezenet", inputs)
    assert executor.waiting.wait(TIMEOUT_S)
    shell.cancel(first)
    with pytest.raises(TaskCancelled):
        first.result(TIMEOUT_S)
    executor.gate.set()
    assert second.result(TIMEOUT_S)


def test_a_task_that_has_ended_counts_among_those_that_came(gated: tuple[InProcessEngine, _Gated]) -> None:
    shell, executor = gated
    executor.gate.set()
    assert shell._driver.arrived == 0
    shell.submit("squeezenet", random_inputs(artifact_of("squeezenet").graph, 1)).result(TIMEOUT_S)
    _until(lambda: shell._driver.quiet)
    assert shell._driver.arrived == 1


def test_a_failed_step_fails_its_task_in_one_line_and_the_engine_goes_on(
    gated: tuple[InProcessEngine, _Gated],
) -> None:
    shell, executor = gated
    inputs = random_inputs(artifact_of("squeezenet").graph, 1)
    executor.broken = True
    executor.gate.set()
    with pytest.raises(TaskFailed, match="RuntimeError: the backend broke"):
        shell.submit("squeezenet", inputs).result(TIMEOUT_S)
    executor.broken = False
    assert shell.submit("squeezenet", inputs).result(TIMEOUT_S)


def test_wrong_inputs_are_refused_before_they_reach_the_engine(gated: tuple[InProcessEngine, _Gated]) -> None:
    shell, _ = gated
    cases: list[tuple[dict[str, np.ndarray], str]] = [
        ({}, "needs the input 'image'"),
        ({"image": np.zeros((1, 3, 4, 4), np.float32)}, "is float32"),
        ({"image": np.zeros((1, 3, 75, 75), np.float64)}, "is float64"),
    ]
    for inputs, cause in cases:
        with pytest.raises(TaskRefused, match=cause):
            shell.submit("squeezenet", inputs).result(TIMEOUT_S)
    with pytest.raises(TaskRefused, match="no active plan serves model 'none'"):
        shell.submit("none", {}).result(TIMEOUT_S)


def test_a_load_that_gets_no_thread_changes_nothing_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, start = artifact_of("squeezenet"), threading.Thread.start
    plan, inputs = _plan([model], lanes=2), random_inputs(model.graph, 1)
    started: list[threading.Thread] = []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with InProcessEngine(NullExecutor()) as shell:
        with monkeypatch.context() as patched, pytest.raises(ExecutorError, match="can't start new thread"):
            patched.setattr(threading.Thread, "start", start_one)
            shell.load(plan, {model.digest: model})
        assert not shell.stats().loaded
        shell.activate(shell.load(plan, {model.digest: model}))
        futures = [shell.submit("squeezenet", inputs) for _ in range(8)]
        assert all(future.result(TIMEOUT_S) for future in futures)


@pytest.mark.promise("engine-closed-begins-further")
def test_closing_begins_no_step_that_was_not_issued_before(gated: tuple[InProcessEngine, _Gated]) -> None:
    """A lane whose thread has ended would never run it; another lane's step could wait for it for ever."""
    shell, executor = gated
    inputs = random_inputs(artifact_of("squeezenet").graph, 1)
    futures = [shell.submit("squeezenet", inputs) for _ in range(8)]
    assert executor.waiting.wait(TIMEOUT_S)
    closing = threading.Thread(target=shell.close)
    closing.start()
    _until(lambda: shell._driver._stopping)
    executor.gate.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert sum(future.done() for future in futures) < len(futures)
