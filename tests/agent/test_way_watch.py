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


def test_what_was_measured_is_kept_though_the_last_measurement_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_watch, "installed", lambda: ("onnx",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    now_s, asked = 0.0, list[StageProfileRequest]()
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(executor=AUTO, home_path=tmp_path),
        lifecycle=SimpleNamespace(link=None),
        loop=SimpleNamespace(now=lambda: now_s),
        checker=SimpleNamespace(graph={DIGEST: GRAPH}.get),
        background=SimpleNamespace(run=lambda work, then: then(work())),
        profiles=SimpleNamespace(wanted=asked.append),
        journal=SimpleNamespace(record=lambda rows: None),
        machine=SimpleNamespace(power_mode="slow", environment=lambda: "in fast mode"),
    )
    watch = WayWatch(parts)
    plan = compose([ModelChoice(name="a", artifact=DIGEST, graph=GRAPH)], executor=ONE_THREAD)
    need = ArtifactNeed("a", DIGEST, 8)
    watch.plan_active(RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, 0), plan.wire, (need,)))
    assert watch.left
    while watch.left:
        now_s += BUSY_PAUSE_S
        watch.tick(free=True)
        executor = decode_plan(asked.pop().plan).executor
        watch.answered(1e3 if executor == ONE_THREAD else None, "too busy", cannot=False, quiet=True)
    kept = ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class())
    assert kept.of(DIGEST) == {ONE_THREAD: 1e-3}


def test_in_another_power_mode_the_models_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Measured in one mode. 2. The mode changes while a measurement runs, which counts for neither. 3. All
    of the plan's models are measured in the new mode, and kept under it."""
    monkeypatch.setattr(way_watch, "installed", lambda: ("onnx",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    now_s, asked = 0.0, list[StageProfileRequest]()
    machine = SimpleNamespace(power_mode="slow", environment=lambda: "in fast mode")
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(executor=AUTO, home_path=tmp_path),
        lifecycle=SimpleNamespace(link=None),
        loop=SimpleNamespace(now=lambda: now_s),
        checker=SimpleNamespace(graph={DIGEST: GRAPH}.get),
        background=SimpleNamespace(run=lambda work, then: then(work())),
        profiles=SimpleNamespace(wanted=asked.append),
        journal=SimpleNamespace(record=lambda rows: None),
        machine=machine,
    )
    watch = WayWatch(parts)
    plan = compose([ModelChoice(name="a", artifact=DIGEST, graph=GRAPH)], executor=ONE_THREAD)
    need = ArtifactNeed("a", DIGEST, 8)
    watch.plan_active(RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, 0), plan.wire, (need,)))
    taken_us = {"slow": 2e3, "fast": 1e3}
    for number in range(99):
        now_s += BUSY_PAUSE_S
        watch.tick(free=True)
        if not watch.left:
            break
        if number == 1:
            machine.power_mode = "fast"
        if not asked:
            continue  # it begins anew, and waits until the plan has settled
        asked.pop()
        watch.answered(taken_us[machine.power_mode], "", cannot=False, quiet=True)
    assert not watch.left and not asked
    assert not ExecutorTimes(StateFile(tmp_path / TIMES_NAME), device_class()).of(DIGEST)
    kept = ExecutorTimes(StateFile(tmp_path / TIMES_NAME), "in fast mode")
    assert set(kept.of(DIGEST).values()) == {1e-3}
