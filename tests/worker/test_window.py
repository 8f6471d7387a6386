"""What a window of a trial shows: figures cut at two instants, and the process that measures and admits."""

import math
import mmap
import os
import time
from collections.abc import Iterator

import pytest

from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.accounting import WindowTimer
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import OpenWindow, WindowMeasured, WorkerConfig
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import Outcome
from tests.executor.models import artifact_of, random_inputs
from tests.worker.engine import RealEngine
from tests.worker.test_process import ARENA, SIZE, _memory, _plan, _submit
from tests.worker.test_shell import _Gated, _until
from tests.worker.test_shell import _plan as _shell_plan


@pytest.fixture(scope="module")
def model() -> Artifact:
    return artifact_of("squeezenet")


@pytest.fixture
def gated(model: Artifact) -> Iterator[tuple[InProcessEngine, _Gated]]:
    executor = _Gated()
    with InProcessEngine(executor) as shell:
        shell.activate(shell.load(_shell_plan([model]), {model.digest: model}))
        yield shell, executor
        executor.gate.set()


def test_window_counts_what_ends_in_it_and_not_what_ended_before(
    gated: tuple[InProcessEngine, _Gated], model: Artifact
) -> None:
    shell, executor = gated
    driver, inputs = shell._driver, random_inputs(model.graph, 1)
    executor.gate.set()
    shell.submit(model.graph.name, inputs).result(60)
    driver.begin_window(math.inf)
    for _ in range(3):
        shell.submit(model.graph.name, inputs).result(60)
    seen = driver.end_window(7)
    assert seen is not None
    (figures,) = seen.models
    assert (seen.number, figures.completed, figures.instances, seen.failed) == (7, 3, 3, 0)
    assert 0 < figures.busy_s <= seen.busy_s * 1.001 <= seen.measured_s
    assert 0 < seen.p99_s <= seen.measured_s
    assert not seen.saturated, "nothing waited between the tasks"
    assert driver.end_window(8) is None


def test_window_in_which_tasks_wait_all_the_time_is_saturated(
    gated: tuple[InProcessEngine, _Gated], model: Artifact
) -> None:
    shell, executor = gated
    inputs = random_inputs(model.graph, 1)
    futures = [shell.submit(model.graph.name, inputs) for _ in range(8)]
    shell._driver.begin_window(math.inf)
    assert shell._driver.sample_window() > 0
    assert shell._driver.sample().oldest_age_s > 0, "what a guard compares"
    seen = shell._driver.end_window(1)
    assert seen is not None
    assert seen.saturated
    assert seen.oldest_age_s > 0
    assert seen.busy_s == pytest.approx(seen.measured_s, rel=0.01), "a step is in flight all along"
    shell._driver.begin_window(math.inf)
    executor.gate.set()
    for future in futures:
        future.result(60)
    seen = shell._driver.end_window(2)
    assert seen is not None
    assert not seen.saturated, "the queue ran empty"


def test_failed_tasks_of_a_window_are_counted(gated: tuple[InProcessEngine, _Gated], model: Artifact) -> None:
    shell, executor = gated
    executor.broken = True
    executor.gate.set()
    shell._driver.begin_window(math.inf)
    future = shell.submit(model.graph.name, random_inputs(model.graph, 1))
    assert future.exception(60) is not None
    _until(lambda: shell.idle)
    seen = shell._driver.end_window(1)
    assert seen is not None
    assert (seen.failed, seen.models[0].completed, seen.p99_s) == (1, 0, 0.0)


class _Clocked:
    """A driver of which only the window matters."""

    def __init__(self) -> None:
        self.age_s = 0.0
        self.open = False

    def begin_window(self, to_s: float) -> None:
        self.open = True

    def sample_window(self) -> float:
        return self.age_s

    def end_window(self, number: int) -> WindowMeasured:
        self.open = False
        return WindowMeasured(number, 1, 1.0, 1.0, True, 0, 0.0, self.age_s, ())


def _measuring() -> tuple[WindowTimer, _Clocked, list[int]]:
    driver, reported = _Clocked(), list[int]()
    measuring = WindowTimer(
        lambda: driver,  # type: ignore[arg-type, return-value]
        lambda figures: reported.append(figures.number),
    )
    return measuring, driver, reported


def test_window_begins_and_ends_at_its_instants() -> None:
    measuring, driver, reported = _measuring()
    measuring.order(OpenWindow(1, 10.0, 11.0))
    assert measuring.due_s == 10.0
    opened = []
    for now in (9.9, 10.0):
        measuring.advance(now)
        opened.append(driver.open)
    assert opened == [False, True]
    while not reported:
        assert measuring.due_s <= 11.0
        measuring.advance(measuring.due_s)
    assert (reported, measuring.due_s, measuring.busy) == ([1], math.inf, False)


def test_window_ends_early_once_a_task_has_waited_too_long() -> None:
    measuring, driver, reported = _measuring()
    measuring.order(OpenWindow(1, 10.0, 11.0, 0.5))
    measuring.advance(10.0)
    driver.age_s = 0.6
    measuring.advance(measuring.due_s)
    assert reported == [1]


def test_newer_window_takes_the_place_of_an_older_one() -> None:
    measuring, _, reported = _measuring()
    measuring.order(OpenWindow(1, 10.0, 11.0))
    measuring.advance(10.0)
    measuring.order(OpenWindow(2, 12.0, 13.0))
    measuring.advance(12.0)
    measuring.advance(13.0)
    assert reported == [2]


def test_windows_alternate_between_two_plans_in_one_process_and_no_task_is_lost(model: Artifact) -> None:
    """As in a trial: activate, wait for the other plan to be empty, measure, with tasks all along."""
    engine = RealEngine()
    try:
        engine.wait_for(messages.Ready)
        fd = _memory()
        memory = mmap.mmap(fd, SIZE)
        engine.send(messages.AddArena(ARENA, SIZE), [fd])
        os.close(fd)
        for key, partition in ((1, "whole"), (2, "paper")):
            engine.load(key, _plan(model, partition), model)
            assert engine.wait_for(messages.PlanLoaded).memory_bytes > 0
        engine.send(messages.SwitchPlan(1))
        engine.wait_for(messages.PlanActive)
        for number, key in enumerate((1, 2, 2, 1), 1):
            _submit(engine, number)
            engine.send(messages.SwitchPlan(key, keep=True))
            active = engine.wait_for(messages.PlanActive)
            assert (active.key, active.paused_s) == (key, 0.0)
            assert engine.wait_for(messages.Settled).key == key
            _submit(engine, 10 * number)
            for _ in range(2):
                assert engine.wait_for(messages.TaskDone).outcome is Outcome.COMPLETED
            now = time.monotonic()
            engine.send(OpenWindow(number, now, now + 0.02))
            seen = engine.wait_for(WindowMeasured)
            assert (seen.number, seen.key) == (number, key)
            assert seen.measured_s > 0.0
        engine.send(messages.SwitchPlan(1))
        assert engine.wait_for(messages.PlanActive).paused_s == 0
        engine.send(messages.Unload(2))
        assert engine.wait_for(messages.PlanReleased).key == 2
        memory.close()
    finally:
        engine.stop()


def test_plan_that_does_not_fit_beside_another_is_named_with_its_sizes_and_loads_once_there_is_room(
    model: Artifact,
) -> None:
    engine = RealEngine(WorkerConfig(memory_bytes=1 << 40))
    plans = {1: _plan(model, "whole"), 2: _plan(model, "paper")}
    stated = {}
    for key in plans:
        engine.load(key, plans[key], model)
        stated[key] = engine.wait_for(messages.PlanLoaded).stated_bytes
    engine.stop()
    assert all(size > 1 << 20 for size in stated.values()), "weights count"
    between = max(stated.values()) + stated[2] // 2
    engine = RealEngine(WorkerConfig(memory_bytes=between))
    try:
        engine.load(1, plans[1], model)
        loaded = engine.wait_for(messages.PlanLoaded)
        assert (loaded.stated_bytes, loaded.memory_bytes) == (stated[1], between)
        engine.load(2, plans[2], model)
        refused = engine.wait_for(messages.PlanTooLarge)
        assert refused.added_bytes > refused.room_bytes == between - stated[1]
        assert refused.alone_bytes <= refused.memory_bytes == between
        engine.send(messages.SwitchPlan(1))
        engine.wait_for(messages.PlanActive)
        engine.send(messages.PauseLaunches(refuse=False))
        engine.wait_for(messages.Drained)
        engine.send(messages.Unload(1))
        assert engine.wait_for(messages.PlanReleased).key == 1
        engine.load(2, plans[2], model)
        assert engine.wait_for(messages.PlanLoaded).key == 2
    finally:
        engine.stop()


def test_driver_without_a_window_has_nothing_to_say() -> None:
    driver = EngineRuntime(NullExecutor())
    assert driver.sample_window() == 0.0
    assert driver.end_window(1) is None
    driver.close()
