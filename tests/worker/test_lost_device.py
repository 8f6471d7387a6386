"""Failures of an executor: the engine goes on, unless the device is lost; then its process ends."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.edge_agent.executor.base import Rows, StepResult
from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker import messages, profiling
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.output_comparer import OutputComparer
from stageloom.edge_agent.worker.profiling import Profiler
from stageloom.edge_agent.worker.resources import ArtifactTable
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step
from stageloom.shared.errors import ExecutorError, TaskFailed
from stageloom.shared.ids import StepId, TaskId
from tests.engine.plans import chains
from tests.executor.models import artifact_of, random_inputs
from tests.shared.strangers import install
from tests.worker.engine import TIMEOUT_S, RealEngine
from tests.worker.test_output_comparer import Tasks
from tests.worker.test_process import ARENA, IN, OUT, SIZE, _memory, _plan, _serve

TEXT = "CUDA error: an illegal memory access was encountered"


class _Failing(NullExecutor):
    """Fails once, in what is named, on a device that is lost or not."""

    def __init__(self, fails: str, *, lost: bool) -> None:
        super().__init__()
        self._fails, self._lost = fails, lost
        self.asked = 0

    def lost(self) -> bool:
        self.asked += 1
        return self._lost

    def _meet(self, what: str) -> None:
        if what == self._fails:
            self._fails = ""
            raise RuntimeError(TEXT)

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        self._meet("issue")
        super().issue(step, feeds)

    def wait(self, step: StepId) -> StepResult:
        result = super().wait(step)
        self._meet("wait")
        return result

    def prepare(self, program: ProgramKey) -> None:
        self._meet("prepare")
        super().prepare(program)

    def unload(self, key: PlanKey) -> None:
        self._meet("unload")
        super().unload(key)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("fails", ["issue", "wait", "prepare"])
def test_after_a_failure_the_device_is_asked_once_and_told_of_where_it_is_lost(
    fails: str, lost: bool
) -> None:
    executor, model, told = _Failing(fails, lost=lost), artifact_of("squeezenet"), list[str]()
    with InProcessEngine(executor) as engine:
        engine._driver._on_lost = told.append
        engine.activate(engine.load(_plan(model, "whole"), {model.digest: model}))
        task = engine.submit("net", random_inputs(model.graph, 1))
        with contextlib.suppress(TaskFailed):
            task.result(TIMEOUT_S)
        assert executor.asked == 1
        assert told == [f"RuntimeError: {TEXT}"] * lost


@pytest.mark.parametrize("lost", [False, True])
def test_a_plan_that_cannot_be_freed_is_released_and_another_one_prepared(lost: bool) -> None:
    executor, bound = _Failing("unload", lost=lost), chains(2)
    told, released = list[str](), list[PlanKey]()
    driver = EngineRuntime(executor, on_released=released.append, on_lost=told.append)
    for key in (PlanKey(1), PlanKey(2)):
        driver.load(key, bound, {})
        if key == 1:
            driver.unload(key)
    assert driver.wait_prepared(PlanKey(2), TIMEOUT_S) == 0
    driver.close()
    assert released == [PlanKey(1)]
    assert told == [f"RuntimeError: {TEXT}"] * lost


class Ended(BaseException):
    """The engine process, which has answered nothing since."""


def end(problem: str) -> None:
    raise Ended(problem)


@pytest.mark.parametrize(
    ("fails", "parts"), [("load", 0), ("wait", 0), ("unload", 0), ("time_operators", 0), ("parts", 5)]
)
@pytest.mark.parametrize("lost", [False, True])
def test_after_a_failure_of_a_measurement_the_device_is_asked_while_that_is_what_is_worked_on(
    monkeypatch: pytest.MonkeyPatch, fails: str, parts: int, lost: bool
) -> None:
    class Failing(NullExecutor):
        def lost(self) -> bool:
            return lost

        def close(self) -> None: ...

    def fail(*asked: object) -> None:
        raise RuntimeError(TEXT)

    if fails == "parts":
        monkeypatch.setattr(profiling, "timed_parts", fail)
    else:
        monkeypatch.setattr(Failing, fails, fail)
    monkeypatch.setattr(profiling, "make_executor", lambda name: Failing())
    reports, model = list[messages.Report](), artifact_of("squeezenet")
    profiler = Profiler(
        reports.append, lambda: None, Executors(), ArtifactTable(), lambda: True, 0, on_lost=end
    )
    asked = messages.Profile(5, model.digest, str(model.path), "null", parts=parts)
    with pytest.raises(Ended, match=TEXT) if lost else contextlib.nullcontext():
        profiler._work_on(5, lambda: profiler._time_operators(asked))
    working = [report for report in reports if isinstance(report, messages.Profiling)]
    assert working.pop() == messages.Profiling(5 * lost)
    assert any(isinstance(report, messages.OperatorTimes) for report in reports) is not lost


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_failure_of_a_comparison_the_device_is_asked_before_its_answer(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Whichever version fails: here the one that runs, then both as they are loaded."""

    def fail(*asked: object) -> None:
        raise ExecutorError(TEXT)

    model, executors, reports = artifact_of("squeezenet"), Executors(), list[messages.Report]()
    bound, artifacts = bind(_plan(model), {model.digest: model.graph}), ArtifactTable()
    driver: Any = SimpleNamespace(plan=lambda key: bound)
    failing: Any = SimpleNamespace(run=fail)
    artifacts.use("plan", model.digest, {model.digest: str(model.path)})
    monkeypatch.setattr(executors, "load", fail)
    monkeypatch.setattr(executors, "lost", lambda: lost)
    comparer = OutputComparer(
        reports.append, lambda: driver, executors, artifacts, lambda: True, 0, on_lost=end
    )
    order = messages.CompareOutputs(1, 1, 2, ("net",), 1e-3, 1, 0.2)
    comparer.handlers[messages.CompareOutputs](order, [])
    with pytest.raises(Ended, match=TEXT) if lost else contextlib.nullcontext():
        comparer._answer(order, driver, Tasks(), [failing, failing])
    with pytest.raises(Ended, match=TEXT) if lost else contextlib.nullcontext():
        comparer._carry_out(order)
    assert len(reports) == (not lost)


LOST = """
from stageloom.edge_agent.executor.null import NullExecutor

class Lost(NullExecutor):
    name = "lost"

    def {fails}(self, *asked):
        raise RuntimeError({text!r})

    def lost(self):
        return True
"""


@pytest.mark.parametrize("fails", ["load", "wait"])
def test_an_engine_process_whose_device_is_lost_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: str
) -> None:
    """Of a load that failed it tells nothing: so it is the plan's that is still being loaded."""
    source = LOST.format(fails=fails, text=TEXT)
    install(tmp_path, "lost-device", "stageloom.executors", {"lost": "lost_device:Lost"}, source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine, model, fd = RealEngine(), artifact_of("squeezenet"), _memory()
    engine.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    if fails == "load":
        _serve(engine, 1, _plan(model, executor="null"), model)
        engine.load(2, _plan(model, executor="lost"), model)
    else:
        _serve(engine, 1, _plan(model, executor="lost"), model)
        engine.send(messages.AddLayout(1, ("net",), (IN,), (OUT,)))
        engine.send(messages.RunTask(TaskId(1), 1))
    assert engine.wait_for(messages.Exited).returncode == 70
    assert not any(isinstance(report, messages.PlanFailed) for report in engine.reports)
    engine.stop()
    told = capfd.readouterr().err
    assert f"the device is lost to the engine process, which ends: RuntimeError: {TEXT}" in told
