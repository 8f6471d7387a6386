"""Where the twin doubts what it was fitted to, and what it predicted."""

from pathlib import Path

import pytest

from stageloom.planner.twin.calibrate import StepSample
from stageloom.planner.twin.doubts import DISTURBED, doubt_of, over_alone
from stageloom.planner.twin.stored import stored_times
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import (
    PLAN_CHARS,
    CoreRange,
    ExecutorFact,
    ExecutorTime,
    MachineFacts,
    RowKind,
    StepTimings,
)
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.arrangements import BORDERS_S
from tests.planner.world import KINDS, World
from tests.store.helpers import NANO
from tests.twin.test_calibrate import cut_plan

CLASS = "cpu-2-core"
ONNX = ExecutorOptions()


def samples(bound: BoundPlan, seconds: float) -> list[StepSample]:
    return [StepSample(bound, index, 1, (1,), seconds) for index in range(len(bound.combined))]


def whole(bound: BoundPlan, seconds: float) -> dict[Digest, dict[tuple[ExecutorOptions, int], float]]:
    return {model.artifact: {(ONNX, 1): seconds} for model in bound.plan.models}


def test_steps_of_whole_models_are_compared_with_what_those_take_alone() -> None:
    bound = cut_plan((), False)
    assert over_alone(samples(bound, 0.030), whole(bound, 0.020)) == pytest.approx(1.5)


def test_blocks_of_a_cut_model_are_added_up_and_their_borders_allowed_for() -> None:
    bound = cut_plan((3, 6), False)
    alone_s = 0.020 + 2 * BORDERS_S["onnx"]
    assert over_alone(samples(bound, 0.010), whole(bound, 0.020)) == pytest.approx(0.030 / alone_s)
    assert over_alone(samples(bound, 0.010)[:2], whole(bound, 0.020)) is None, "a block was never sampled"


def test_nothing_is_compared_with_a_time_that_is_not_known() -> None:
    bound = cut_plan((), False)
    assert over_alone(samples(bound, 0.030), {}) is None
    assert over_alone([], whole(bound, 0.020)) is None


@pytest.mark.parametrize(("times", "said"), [(1.1, "fitted to 1 programs"), (1.6, "is left out")])
def test_a_twin_is_not_fitted_to_steps_that_others_disturbed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, said: str
) -> None:
    for data, kind in (
        (StepTimings, RowKind.STEP_TIMINGS),
        (ExecutorTime, RowKind.EXECUTOR_TIME),
        (MachineFacts, RowKind.MACHINE_FACTS),
    ):
        monkeypatch.setitem(KINDS, data, kind)
    world = World(tmp_path / "home")
    plan = world.kept("sequential")
    world.profiled()
    alone_us = 400.0
    world.tells(
        MachineFacts((CoreRange(0, 0),), (ExecutorFact("onnx"),), 1),
        ExecutorTime(world.digest, "onnx", 1, 1, CLASS, alone_us, 9),
        StepTimings(plan.digest[:PLAN_CHARS], 0, 1, 100, round(100 * times * alone_us), 900),
    )
    found, where = stored_times(world.store, NANO, bind(plan, {world.digest: world.graph}))
    assert said in where
    step = found.of_plan(bind(plan, {world.digest: world.graph})).step(0, 1, (1,))
    seconds = step.seconds - found.device.step_s
    if times < DISTURBED:
        assert seconds == pytest.approx(1e-6 * times * alone_us, rel=0.05)
    else:
        assert seconds < 1e-6 * times * alone_us


def figures(running: float, waiting: float) -> dict[str, float]:
    return {"steps_running": running, "a.queued_mean": waiting / 2, "b.queued_mean": waiting / 2}


def test_a_prediction_that_is_busy_all_the_time_beside_a_device_that_was_not_is_not_to_be_believed() -> None:
    said = doubt_of(figures(0.99, 900.0), figures(0.5, 0.1), 1)
    assert "99 % of the time and were 50 %" in said
    assert doubt_of(figures(1.98, 900.0), figures(1.9, 700.0), 2) == ""


def test_tasks_that_wait_beside_idle_lanes_contradict_the_utilisation() -> None:
    """By Pollaczek and Khinchine 0.09 tasks wait at 0.34; ten times as many may be bursts of models."""
    assert "5.0 tasks waited while lanes were busy 34 %" in doubt_of(figures(0.3, 0.1), figures(0.34, 5.0), 1)
    assert doubt_of(figures(0.3, 0.1), figures(0.34, 0.5), 1) == ""
    assert doubt_of(figures(0.9, 5.0), figures(0.9, 5.0), 1) == "", "busy lanes explain a queue"


def test_a_load_beyond_the_plan_is_said_before_anything_was_measured() -> None:
    assert "more tasks arrive than the plan is predicted to carry" in doubt_of(figures(1.0, 80.0), None, 1)
    assert doubt_of(figures(1.0, 80.0), None, 2) == ""
