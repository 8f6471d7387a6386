"""Actions of the task launcher."""

import pytest

from stageloom.shared.policy.maddpg.actions import HEADROOM, interval_bounds, interval_s, intervals_us
from stageloom.shared.policy.maddpg.space import IntervalMap
from stageloom.shared.policy.plain import Load


def load(arrivals_per_s: float, service_s: float) -> Load:
    return Load(model="m", arrivals_per_s=arrivals_per_s, service_s=service_s, queued=0)


def test_the_action_moves_the_interval_by_equal_factors_from_service_to_arrivals() -> None:
    """10 tasks/s of 1 ms: from 1 ms to 1 / 10.5 s; half way is the geometric mean."""
    bounds = interval_bounds(load(10.0, 0.001))
    most_s = 0.1 / (1 + HEADROOM)
    assert interval_s(0.0, bounds) == pytest.approx(0.001)
    assert interval_s(1.0, bounds) == pytest.approx(most_s)
    assert interval_s(0.5, bounds) == pytest.approx((0.001 * most_s) ** 0.5)


@pytest.mark.promise("untrained-actors-still-give")
@pytest.mark.parametrize("action", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("arrivals_per_s", "service_s"), [(30.0, 0.004), (30.0, 0.5), (2000.0, 0.0)])
def test_capacity_is_never_below_what_arrives(action: float, arrivals_per_s: float, service_s: float) -> None:
    """Also on a device that cannot keep up: throttling a queue is not the launcher's answer to overload."""
    (interval_us,) = intervals_us([action], [load(arrivals_per_s, service_s)])
    assert 0 < interval_us * arrivals_per_s <= 1e6


def test_more_lanes_may_launch_faster() -> None:
    assert interval_bounds(load(10.0, 0.02), lanes=2)[0] == pytest.approx(0.01)


def test_a_model_without_arrivals_waits_a_second_at_most() -> None:
    assert interval_bounds(load(0.0, 0.0))[1] == 1.0


def test_the_papers_form_is_seconds_per_task() -> None:
    assert intervals_us([0.25], [load(10.0, 0.001)], how=IntervalMap.PAPER) == (250_000,)
