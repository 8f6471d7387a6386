"""Whether a device's steps take longer than they should: by profile, or by what they took at first."""

import pytest

from stageloom.edge_agent.replan.drift import DriftWatch
from stageloom.edge_agent.worker.messages import Stats, StepStats
from stageloom.shared.ids import Digest

PLAN_A, PLAN_B = Digest("a" * 64), Digest("b" * 64)
MEMBERS = (("a", "b"), ("a",))


def full(block: int, steps: int, step_s: float, key: int = 1) -> StepStats:
    mask = (1 << len(MEMBERS[block])) - 1
    return StepStats(key, block, mask, steps, steps, steps * step_s, step_s, step_s)


class Device:
    """Reports every second."""

    def __init__(self) -> None:
        self.drift = DriftWatch()
        self.now_s = 0.0

    def runs(
        self, seconds: int, *combined: StepStats, plan: Digest = PLAN_A, key: int = 1, lanes: int = 1
    ) -> float:
        for _ in range(seconds):
            self.now_s += 1.0
            self.drift.add(Stats(self.now_s, key, 0.0, (), combined), plan, MEMBERS, lanes=lanes)
        return self.drift.ratio


def test_drift_is_measured_over_profiled_time_of_steps_with_all_members() -> None:
    device = Device()
    device.drift.profiled(PLAN_A, 1, {0: 1000.0, 1: 3000.0})
    partial = StepStats(1, 0, 0b01, 50, 50, 9.0, 0.1, 0.3)
    assert device.runs(40, full(0, 60, 0.0015), full(1, 20, 0.0045), partial) == pytest.approx(1.5)


def test_few_steps_and_steps_of_another_plan_say_nothing() -> None:
    device = Device()
    device.drift.profiled(PLAN_A, 1, {0: 1000.0})
    assert device.runs(40, full(0, 1, 0.002)) == 1.0, "too few steps for all the windows"
    assert device.runs(40, full(0, 20, 0.002, key=2)) == 1.0
    assert device.runs(40, full(0, 20, 0.002)) == pytest.approx(2.0)
    assert device.runs(40, full(0, 20, 0.002), plan=PLAN_B) == 1.0, "nothing is expected of another plan"


def test_a_plan_of_several_lanes_never_drifts() -> None:
    device = Device()
    device.drift.profiled(PLAN_A, 2, {0: 1000.0})
    assert device.runs(60, full(0, 20, 0.004), lanes=2) == 1.0


def test_a_plan_that_was_never_profiled_is_expected_to_go_on_as_it_was_when_new() -> None:
    """1. Its first steps, while programs are prepared, are slow and count for nothing. 2. What follows is
    learned. 3. The clock falls."""
    device = Device()
    assert device.runs(6, full(0, 20, 0.009)) == 1.0
    assert device.runs(60, full(0, 20, 0.001)) == pytest.approx(1.0)
    assert device.runs(30, full(0, 20, 0.002)) == pytest.approx(2.0)


@pytest.mark.promise("device-whose-clock-falls")
def test_a_disturbance_of_some_seconds_is_no_drift() -> None:
    device = Device()
    device.drift.profiled(PLAN_A, 1, {0: 1000.0})
    for _ in range(20):
        assert device.runs(30, full(0, 20, 0.001)) == pytest.approx(1.0)
        assert device.runs(4, full(0, 20, 0.003)) == pytest.approx(1.0)


@pytest.mark.promise("device-whose-clock-falls")
def test_what_the_planner_was_told_is_expected_from_then_on() -> None:
    """The ratio was still rising when it was told."""
    device = Device()
    device.drift.profiled(PLAN_A, 1, {0: 1000.0})
    device.runs(30, full(0, 20, 0.001))
    while device.runs(1, full(0, 20, 0.002)) <= 1.25:
        pass
    device.drift.answered()
    assert device.runs(120, full(0, 20, 0.002)) == pytest.approx(1.0)
    assert device.runs(60, full(0, 20, 0.001)) == pytest.approx(0.5), "and back"
