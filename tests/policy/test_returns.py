"""Whether a known regime is back: the score in closed form, and how soon and how rarely by simulation."""

import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from stageloom.shared.ids import Digest
from stageloom.shared.policy.arrivals import Arrived, Moment
from stageloom.shared.policy.regime import Regime
from stageloom.shared.policy.returns import SURE, ReturnWatch
from tests.policy.test_regime import poisson

PACE_S = 0.5
NAMES = ("a", "b", "c", "d")
SERVICE_S: Mapping[str, float] = dict.fromkeys(NAMES, 0.01)
NIGHT, DAY = (2.0, 4.0, 3.0, 1.0), (8.0, 16.0, 12.0, 4.0)
BY_NIGHT, BY_DAY = Digest("1" * 64), Digest("2" * 64)


def regime(rates: Sequence[float], seconds: float = 1e5) -> Regime:
    return {name: Arrived(rate * seconds, seconds) for name, rate in zip(NAMES, rates, strict=False)}


class Device:
    """Knows the night, has the day's regime and plan, and is looked at every half second."""

    def __init__(self, seed: int = 0) -> None:
        self.watch = ReturnWatch()
        self.watch.left(regime(NIGHT), BY_NIGHT, SERVICE_S, 0.0)
        self.now_s, self._rng, self._counts = 0.0, Random(seed), [0] * len(NAMES)
        self.look([0] * len(NAMES))

    def look(self, tasks: Sequence[int], structure: Digest = BY_DAY) -> Regime | None:
        """So many tasks of each model came in half a second."""
        self.now_s += PACE_S
        self._counts = [before + more for before, more in zip(self._counts, tasks, strict=True)]
        moment = Moment(self.now_s, dict(zip(NAMES, self._counts, strict=True)))
        return self.watch.look(moment, regime(DAY), structure, SERVICE_S, 2.0)

    def told_after_s(
        self, seconds: float, rates: Sequence[float], structure: Digest = BY_DAY
    ) -> float | None:
        """When it told of the night under these arrivals, if it did."""
        for at in range(round(seconds / PACE_S)):
            if self.look([poisson(self._rng, rate * PACE_S) for rate in rates], structure) is not None:
                return (at + 1) * PACE_S
        return None


def test_the_score_is_the_log_likelihood_ratio_of_poisson_arrivals() -> None:
    """n tasks in half a second add n log(1/4) + 15: 8.07 for 5, of which 7 count; 5.3 for 7; -5.8 for 15."""
    added = {tasks: tasks * math.log(1 / 4) + 15.0 for tasks in (5, 7, 15)}
    assert min(added[5], SURE / 2) * 2 <= SURE < 3 * added[7]
    assert SURE - added[15] < 3 * SURE / 2 < SURE + 7 - added[15]
    night, more, day = [1, 2, 1, 1], [1, 3, 2, 1], [4, 5, 4, 2]
    for looks in ([night, night], [more, more], [night, night, day]):
        device = Device()
        assert [device.look(tasks) for tasks in looks] == [None] * len(looks)
        assert device.look(night) == regime(NIGHT)


def test_a_regime_that_is_back_is_told_within_two_seconds() -> None:
    found = []
    for seed in range(40):
        device = Device(seed)
        assert device.told_after_s(30.0, DAY) is None
        after_s = device.told_after_s(20.0, NIGHT)
        assert after_s is not None
        found.append(after_s)
    assert sorted(found)[-4] <= 2.0, "nine in ten"
    assert min(found) >= 1.0, "a single look tells nothing"


@pytest.mark.parametrize("seed", range(3))
def test_two_hours_of_todays_regime_tell_nothing(seed: int) -> None:
    assert Device(seed).told_after_s(7200.0, DAY) is None


def test_no_pause_is_a_regime_however_long() -> None:
    device = Device()
    assert device.told_after_s(60.0, [0.0] * 4) is None


def test_arrivals_that_are_unlike_both_are_left_to_those_who_look_longer() -> None:
    for seed in range(20):
        assert Device(seed).told_after_s(60.0, [rate / 10 for rate in NIGHT]) is None
    turned = [30.0, 0.5, 0.5, 0.5]
    assert Device().told_after_s(60.0, turned) is None


def test_as_many_tasks_as_by_night_of_other_models_are_no_night() -> None:
    """Their plan would be the wrong one, and run at once."""
    for mix in ([0.5, 0.5, 0.5, 8.5], [8.5, 0.5, 0.5, 0.5], [0.1, 0.1, 9.7, 0.1]):
        for seed in range(20):
            assert Device(seed).told_after_s(60.0, mix) is None


def test_a_regime_under_whose_plan_the_device_runs_is_no_news() -> None:
    assert Device().told_after_s(60.0, NIGHT, structure=BY_NIGHT) is None


def test_who_leaves_again_at_once_came_for_a_burst_and_is_not_followed_for_a_while() -> None:
    device = Device()
    pauses = []
    for _ in range(3):
        assert device.told_after_s(5.0, NIGHT) is not None
        device.watch.left(regime(DAY), BY_DAY, SERVICE_S, device.now_s)
        device.watch.told(device.now_s)
        device.now_s += 5.0
        device.watch.left(regime(NIGHT), BY_NIGHT, SERVICE_S, device.now_s)
        began_s = device.now_s
        while device.told_after_s(PACE_S, NIGHT) is None:
            pass
        pauses.append(device.now_s - began_s)
        device.now_s += 1e4
        device.watch.rest()
    assert pauses == [pytest.approx(pause, abs=4.0) for pause in (60.0, 120.0, 240.0)]


def test_a_regime_that_stayed_is_followed_the_next_time_too() -> None:
    device = Device()
    assert device.told_after_s(5.0, NIGHT) is not None
    device.watch.left(regime(DAY), BY_DAY, SERVICE_S, device.now_s)
    device.watch.told(device.now_s)
    device.now_s += 600.0
    device.watch.left(regime(NIGHT), BY_NIGHT, SERVICE_S, device.now_s)
    assert device.told_after_s(5.0, NIGHT) is not None


def test_a_regime_is_kept_once_with_the_plan_that_ran_there_last() -> None:
    device = Device()
    device.watch.left(regime([rate * 1.0001 for rate in NIGHT], 100.0), BY_DAY, SERVICE_S, 1.0)
    assert device.told_after_s(30.0, NIGHT) is None, "the plan that runs now ran there, too"


def test_other_models_and_an_engine_that_began_anew_say_nothing() -> None:
    watch = ReturnWatch()
    watch.left(regime(NIGHT), BY_NIGHT, SERVICE_S, 0.0)
    of_two = {name: regime(DAY)[name] for name in NAMES[:2]}
    for at in range(10):
        moment = Moment(at * PACE_S, dict.fromkeys(NAMES[:2], at))
        assert watch.look(moment, of_two, BY_DAY, SERVICE_S, 2.0) is None
    device = Device()
    assert device.look([1, 2, 1, 1]) is None
    assert device.look([-1, -2, -1, -1]) is None
    assert [device.look([1, 2, 1, 1]) for _ in range(2)] == [None, None]
    assert watch.look(Moment(9.0, dict.fromkeys(NAMES, 9)), None, BY_DAY, SERVICE_S, 2.0) is None
