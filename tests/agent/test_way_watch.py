"""What becomes of the measurements that an agent under a planner makes by itself."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.edge_agent import way_watch
from stageloom.edge_agent.config import AUTO
from stageloom.edge_agent.executor_choice import TIMES_NAME, ExecutorTimes
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.machine import control_groups
from stageloom.edge_agent.machine.device import device_class
from stageloom.edge_agent.reporting.profiles import ENDED_TWICE
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.way_measuring import ATTEMPTS, BUSY_PAUSE_S, ROUNDS
from stageloom.edge_agent.way_watch import WayWatch
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed, Origin, StageProfileRequest
from stageloom.shared.plan import ExecutorOptions, decode_plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.search.graphs import CHAIN, DIAMOND, model

DIGEST, GRAPH = model("a", DIAMOND)
OTHER, OTHER_GRAPH = model("b", CHAIN)
ONE_THREAD, TWO_THREADS = (ExecutorOptions(name="onnx", intra_op_threads=threads) for threads in (1, 2))


class Rig:
    """A watch of two ways to run one model, on a device in a power mode; what it asks for is in `asked`."""

    def __init__(self, home: Path) -> None:
        self.now_s = 0.0
        self.asked: list[StageProfileRequest] = []
        self.machine = SimpleNamespace(power_mode="slow", environment=lambda: "in fast mode")
        parts: Any = SimpleNamespace(
            config=SimpleNamespace(executor=AUTO, home_path=home),
            lifecycle=SimpleNamespace(link=None),
            loop=SimpleNamespace(now=lambda: self.now_s),
            checker=SimpleNamespace(graph={DIGEST: GRAPH, OTHER: OTHER_GRAPH}.get),
            background=SimpleNamespace(run=lambda work, then: then(work())),
            profiles=SimpleNamespace(wanted=self.asked.append),
            journal=SimpleNamespace(record=lambda rows: None),
            machine=self.machine,
        )
        self.watch = WayWatch(parts)
        self.activate("a", DIGEST, GRAPH)

    def activate(self, name: str, digest: Digest, graph: Graph) -> None:
        """A plan of one model runs from now on."""
        plan = compose([ModelChoice(name=name, artifact=digest, graph=graph)], executor=ONE_THREAD)
        need = ArtifactNeed(name, digest, 8)
        self.watch.plan_active(RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, 0), plan.wire, (need,)))

    def tick(self) -> None:
        """A while later."""
        self.now_s += BUSY_PAUSE_S
        self.watch.tick(free=True)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(way_watch, "installed", lambda: ("onnx",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    return Rig(tmp_path)


@pytest.mark.parametrize(
    ("cannot", "asked", "kept"),
    [
        (False, ROUNDS * (1 + ATTEMPTS), {ONE_THREAD: 1e-3}),
        (True, ROUNDS + 1, {ONE_THREAD: 1e-3, TWO_THREADS: math.inf}),
    ],
)
def test_a_way_that_cannot_run_is_remembered_and_one_that_found_no_moment_is_tried_again(
    rig: Rig, tmp_path: Path, asked: int, kept: dict[ExecutorOptions, float], *, cannot: bool
) -> None:
    """What was measured is kept either way."""
    for _ in range(asked):
        rig.tick()
        executor = decode_plan(rig.asked.pop().plan).executor
        measured = executor == ONE_THREAD
        rig.watch.answered(1e3 if measured else None, cannot=cannot and not measured, quiet=True, reason="")
    assert not rig.watch.left
    assert ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST) == kept


def test_a_way_that_ended_the_engine_process_leaves_nothing_to_measure_on_that_executor(
    rig: Rig, tmp_path: Path
) -> None:
    """It alone is remembered: ways with other threads wait for the next start."""
    rig.tick()
    way = decode_plan(rig.asked.pop().plan).executor
    rig.watch.answered(None, cannot=True, quiet=True, reason=ENDED_TWICE)
    assert not rig.watch.left
    assert ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST) == {way: math.inf}


def test_a_way_that_ends_the_engine_process_in_a_later_round_keeps_no_time_of_an_earlier_one(
    rig: Rig, tmp_path: Path
) -> None:
    for ended in (False, False, True):
        rig.tick()
        way = decode_plan(rig.asked.pop().plan).executor
        reason = ENDED_TWICE if ended else ""
        rig.watch.answered(None if ended else 1e3, cannot=ended, quiet=True, reason=reason)
    kept = ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST)
    assert kept == {ONE_THREAD: 1e-3, TWO_THREADS: 1e-3} | {way: math.inf}


def test_a_time_is_kept_once_all_its_rounds_are_over_whatever_else_is_left(rig: Rig, tmp_path: Path) -> None:
    for _ in range(2 * ROUNDS - 1):
        assert not ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST)
        rig.tick()
        executor = decode_plan(rig.asked.pop().plan).executor
        rig.watch.answered(1e3 if executor == ONE_THREAD else None, cannot=False, quiet=True, reason="")
    assert rig.watch.left
    assert ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST) == {ONE_THREAD: 1e-3}


def test_a_model_whose_rounds_another_plan_cut_short_is_measured_in_all_of_them_once_it_is_back(
    rig: Rig, tmp_path: Path
) -> None:
    """1. One round of two ways. 2. Another plan runs until one of its ways is saved. 3. The first is back."""

    def measure(times: int) -> None:
        for _ in range(times):
            rig.tick()
            rig.asked.pop()
            rig.watch.answered(1e3, cannot=False, quiet=True, reason="")

    measure(2)
    rig.activate("b", OTHER, OTHER_GRAPH)
    measure(2 * ROUNDS - 1)
    kept = ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class())
    assert kept.of(OTHER) and not kept.of(DIGEST)
    rig.activate("a", DIGEST, GRAPH)
    measure(2 * ROUNDS)
    assert not rig.watch.left
    assert len(ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST)) == 2


def test_in_another_power_mode_the_models_are_measured_anew(rig: Rig, tmp_path: Path) -> None:
    """1. Measured in one mode. 2. The mode changes while a measurement runs, which counts for neither. 3. All
    of the plan's models are measured in the new mode, and kept under it."""
    taken_us = {"slow": 2e3, "fast": 1e3}
    for number in range(99):
        rig.tick()
        if not rig.watch.left:
            break
        if number == 1:
            rig.machine.power_mode = "fast"
        if not rig.asked:
            continue  # it begins anew, and waits until the plan has settled
        rig.asked.pop()
        rig.watch.answered(taken_us[rig.machine.power_mode], cannot=False, quiet=True, reason="")
    assert not rig.watch.left and not rig.asked
    assert not ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST)
    kept = ExecutorTimes(StateFile(tmp_path / TIMES_NAME), "in fast mode")
    assert set(kept.of(DIGEST).values()) == {1e-3}


def test_with_a_quota_no_more_threads_are_measured_than_it_pays_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_watch, "installed", lambda: ("onnx",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(control_groups, "cpu_quota", lambda root: 1.0)
    rig = Rig(tmp_path)
    while rig.watch.left:
        rig.tick()
        assert decode_plan(rig.asked.pop().plan).executor == ONE_THREAD
        rig.watch.answered(1e3, cannot=False, quiet=True, reason="")
