"""Two loaded plans compared by their outputs in the engine's own process, beside what it serves."""

import mmap
import os
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.messages import CompareOutputs, OutputsCompared
from stageloom.edge_agent.worker.output_comparer import InputSampler, OutputComparer
from stageloom.edge_agent.worker.resources import ArtifactTable
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import ExecutorError
from tests.worker.engine import RealEngine
from tests.worker.test_process import ARENA, SIZE, _memory, _plan, _serve, _task, model

__all__ = ["model"]  # a fixture


@pytest.fixture
def serving(model: Artifact) -> Iterator[tuple[RealEngine, mmap.mmap]]:
    """A process that serves plan 1 and has plan 2 loaded: the same model in other blocks."""
    engine = RealEngine()
    engine.wait_for(messages.Ready)
    fd = _memory()
    memory = mmap.mmap(fd, SIZE)
    engine.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    _serve(engine, 1, _plan(model), model)
    engine.load(2, _plan(model, "whole"), model)
    assert engine.wait_for(messages.PlanLoaded).key == 2
    yield engine, memory
    assert engine.stop() == 0


def order(number: int, *, inputs: int = 3, limit_s: float = 60.0, candidate: int = 2) -> CompareOutputs:
    return CompareOutputs(number, 1, candidate, ("net",), 1e-3, inputs, limit_s)


def test_the_same_model_in_other_blocks_agrees_while_tasks_are_answered_as_ever(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    """Both plans stay as they are: the candidate can be switched to afterwards."""
    engine, memory = serving
    engine.send(order(5))
    task = 0
    while not any(isinstance(report, OutputsCompared) for report in engine.reports):
        _task(engine, memory, model, task)
        task += 1
    found = engine.wait_for(OutputsCompared)
    assert (found.number, found.reason, found.failed) == (5, "", False)
    assert found.verdict is not None
    assert (found.verdict.agrees, found.verdict.inputs, found.verdict.agreement) == (True, 3, 1.0)
    engine.send(messages.SwitchPlan(2))
    assert engine.wait_for(messages.PlanActive).key == 2
    _task(engine, memory, model, task)


def test_without_a_task_nothing_is_known(serving: tuple[RealEngine, mmap.mmap]) -> None:
    engine, _ = serving
    engine.send(order(1, limit_s=0.2))
    found = engine.wait_for(OutputsCompared)
    assert found.verdict is None
    assert not found.failed
    assert found.reason.startswith("no task of net came within 0.2 s")


def test_a_plan_that_is_not_loaded_is_compared_with_nothing(serving: tuple[RealEngine, mmap.mmap]) -> None:
    engine, _ = serving
    engine.send(order(1, candidate=9))
    found = engine.wait_for(OutputsCompared)
    assert (found.verdict, found.failed) == (None, False)
    assert "not loaded any more" in found.reason


class GivenUp:
    """An engine that has two plans loaded, until inputs of tasks are asked for."""

    def __init__(self, bound: BoundPlan) -> None:
        self.sampler: object = None
        self._bound = bound

    def plan(self, key: PlanKey) -> BoundPlan | None:
        return self._bound if self.sampler is None else None


def test_a_comparison_ends_as_soon_as_one_of_its_plans_is_given_up(model: Artifact) -> None:
    """What it holds may be what another plan needs."""
    driver: Any = GivenUp(bind(_plan(model), {model.digest: model.graph}))
    artifacts, reports = ArtifactTable(), list[Any]()
    artifacts.use("plan", model.digest, {model.digest: str(model.path)})
    comparer = OutputComparer(reports.append, lambda: driver, Executors(), artifacts, lambda: True, 0)
    busy = [comparer.busy]
    comparer.handlers[CompareOutputs](order(1, limit_s=1.0), [])
    busy.append(comparer.busy)
    comparer._carry_out(comparer._orders.get())
    assert [*busy, comparer.busy] == [False, True, False]
    (found,) = reports
    assert (found.verdict, found.failed) == (None, False)
    assert "not loaded any more" in found.reason


class Tasks(InputSampler):
    """A task comes as soon as one is wanted; they are numbered."""

    def __init__(self) -> None:
        super().__init__(())
        self._numbers = count()
        self.want("net")

    def want(self, model: str) -> None:
        self._taken.put((model, {"image": np.array([next(self._numbers)])}))


@pytest.mark.parametrize(
    ("bad", "inputs", "said"),
    [
        (range(2), 3, "2 inputs left out, on which the version that runs fails: 1 is no image"),
        (range(1 << 30), 0, "left out"),
    ],
)
def test_an_input_that_the_running_version_fails_on_is_left_out_and_another_one_taken(
    model: Artifact, bad: range, inputs: int, said: str
) -> None:
    def run(model: str, inputs: dict[str, Any]) -> dict[str, Any]:
        if inputs["image"][0] in bad:
            raise ExecutorError(f"{inputs['image'][0]} is no image")
        return inputs

    bound = bind(_plan(model), {model.digest: model.graph})
    driver: Any = SimpleNamespace(plan=lambda key: bound)
    old: Any = SimpleNamespace(run=run)
    comparer = OutputComparer(print, lambda: driver, Executors(), ArtifactTable(), lambda: True, 0)
    asked = order(1, limit_s=0.2)
    comparer.handlers[CompareOutputs](asked, [])
    found = comparer._answer(asked, driver, Tasks(), [old, old])
    assert (found.verdict.inputs if found.verdict is not None else 0, found.failed) == (inputs, False)
    assert said in found.reason


def test_a_newer_order_ends_the_one_before(serving: tuple[RealEngine, mmap.mmap]) -> None:
    engine, _ = serving
    engine.send(order(1))
    engine.send(order(2, limit_s=0.2))
    assert [engine.wait_for(OutputsCompared).number for _ in range(2)] == [1, 2]
