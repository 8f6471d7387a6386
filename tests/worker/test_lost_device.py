"""Failures of an executor: the engine goes on, unless the device is lost; then its process ends."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from stageloom.edge_agent.executor.base import Rows, StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step
from stageloom.shared.errors import TaskFailed
from stageloom.shared.ids import StepId
from tests.engine.plans import chains
from tests.executor.models import artifact_of, random_inputs
from tests.shared.strangers import install
from tests.worker.engine import TIMEOUT_S, RealEngine
from tests.worker.test_process import ARENA, SIZE, _memory, _plan, _serve, _submit

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


LOST = f"""
from stageloom.edge_agent.executor.null import NullExecutor

class Lost(NullExecutor):
    name = "lost"

    def wait(self, step):
        raise RuntimeError({TEXT!r})

    def lost(self):
        return True
"""


def test_an_engine_process_whose_device_is_lost_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "lost-device", "stageloom.executors", {"lost": "lost_device:Lost"}, LOST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine, model, fd = RealEngine(), artifact_of("squeezenet"), _memory()
    engine.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    _serve(engine, 1, _plan(model, executor="lost"), model)
    _submit(engine, 1)
    assert engine.wait_for(messages.Exited).returncode == 70
    engine.stop()
    told = capfd.readouterr().err
    assert f"the device is lost to the engine process, which ends: RuntimeError: {TEXT}" in told
