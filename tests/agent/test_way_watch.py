"""What becomes of the measurements that an agent under a planner makes by itself."""

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
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.way_measuring import BUSY_PAUSE_S
from stageloom.edge_agent.way_watch import WayWatch
from stageloom.shared.messages.control import ArtifactNeed, Origin, StageProfileRequest
from stageloom.shared.plan import ExecutorOptions, decode_plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.search.graphs import DIAMOND, model

DIGEST, GRAPH = model("a", DIAMOND)
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
            checker=SimpleNamespace(graph={DIGEST: GRAPH}.get),
            background=SimpleNamespace(run=lambda work, then: then(work())),
            profiles=SimpleNamespace(wanted=self.asked.append),
            journal=SimpleNamespace(record=lambda rows: None),
            machine=self.machine,
        )
        self.watch = WayWatch(parts)
        plan = compose([ModelChoice(name="a", artifact=DIGEST, graph=GRAPH)], executor=ONE_THREAD)
        need = ArtifactNeed("a", DIGEST, 8)
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


def test_what_was_measured_is_kept_though_the_last_measurement_is_given_up(rig: Rig, tmp_path: Path) -> None:
    assert rig.watch.left
    while rig.watch.left:
        rig.tick()
        executor = decode_plan(rig.asked.pop().plan).executor
        rig.watch.answered(1e3 if executor == ONE_THREAD else None, "too busy", cannot=False, quiet=True)
    kept = ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class())
    assert kept.of(DIGEST) == {ONE_THREAD: 1e-3}


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
        rig.watch.answered(taken_us[rig.machine.power_mode], "", cannot=False, quiet=True)
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
        rig.watch.answered(1e3, "", cannot=False, quiet=True)
