"""Whether a known regime is back: the score in closed form, and how soon and how rarely by simulation."""

import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from stageloom.shared.ids import Digest
from stageloom.shared.policy.arrivals import Arrived, Moment
from stageloom.shared.policy.regime import Regime
from stageloom.shared.policy.returns import LEAST_S, SURE, ReturnWatch
from tests.policy.test_regime import poisson

PACE_S = 0.1
NAMES = ("a", "b", "c", "d")
SERVICE_S: Mapping[str, float] = dict.fromkeys(NAMES, 0.01)
NIGHT, DAY = (2.0, 4.0, 3.0, 1.0), (8.0, 16.0, 12.0, 4.0)
BY_NIGHT, BY_DAY = Digest("1" * 64), Digest("2" * 64)


def regime(rates: Sequence[float], seconds: float = 1e5) -> Regime:
    return {name: Arrived(rate * seconds, seconds) for name, rate in zip(NAMES, rates, strict=False)}


class Device:
    """Knows the night, has the day's regime and plan, and is looked at ten times a second."""

    def __init__(self, seed: int = 0) -> None:
        self.watch = ReturnWatch()
        self.watch.left(regime(NIGHT), BY_NIGHT, SERVICE_S, 0.0)
        self.now_s, self._rng, self._counts = 0.0, Random(seed), [0] * len(NAMES)
        self.look([0] * len(NAMES))

    def look(self, tasks: Sequence[int], structure: Digest = BY_DAY) -> Regime | None:
        """So many tasks of each model came since the look before."""
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
    """Between regimes of 40 and 10 a second n tasks in a tenth of a second add n log(1/4) + 3: 1.61 for one.

    Of 3 for none 2 count, and 4 take 2.55 away. Sure is more than 16, once 15 tasks may have come.
    """
    looks = {"none": [0, 0, 0, 0], "one": [0, 1, 0, 0], "four": [1, 1, 1, 1]}
    added = {name: sum(tasks) * math.log(1 / 4) + 3.0 for name, tasks in looks.items()}
    assert added["none"] > SURE * PACE_S / LEAST_S > added["one"]
    device = Device()
    mixed = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0]] * 2
    for tasks in (*mixed[:9], looks["four"]):
        assert device.look(tasks) is None
    (known,) = device.watch.scores
    assert known == pytest.approx(9 * added["one"] + added["four"], rel=1e-4)
    for tasks in (looks["none"], *mixed[:2]):
        assert device.look(tasks) is None, "sure, and too few could have come"
    (known,) = device.watch.scores
    assert known == pytest.approx(11 * added["one"] + added["four"] + SURE * PACE_S / LEAST_S, rel=1e-4)
    assert known > SURE
    assert device.look(mixed[3]) is None
    assert device.look([0, 0, 0, 1]) == regime(NIGHT)


def test_what_lasts_less_than_the_least_time_tells_nothing() -> None:
    """However many tasks it is: a hundred times as many are seen in one look."""
    device = Device()
    device.watch.left(regime([100 * rate for rate in DAY]), BY_NIGHT, SERVICE_S, 1.0)
    device.look([0] * len(NAMES))
    looks = round(LEAST_S / PACE_S)
    tasks = [round(100 * rate * PACE_S) for rate in DAY]
    assert [device.look(tasks) for _ in range(looks - 1)] == [None] * (looks - 1)
    assert any(device.look(tasks) is not None for _ in range(2))


def test_a_regime_that_is_back_is_told_within_two_seconds() -> None:
    found = []
    for seed in range(40):
        device = Device(seed)
        assert device.told_after_s(30.0, DAY) is None
        after_s = device.told_after_s(20.0, NIGHT)
        assert after_s is not None
        found.append(after_s)
    assert sorted(found)[-4] <= 2.0, "nine in ten"
    assert min(found) >= LEAST_S - 1e-9


def test_where_much_comes_a_regime_that_is_back_is_told_within_a_second() -> None:
    """Whatever part of a look the change falls into: tasks of before it count as after."""
    found = []
    for seed in range(40):
        device = Device(seed)
        device.watch.left(regime([8 * rate for rate in DAY]), BY_NIGHT, SERVICE_S, 1.0)
        for share in (0.0, (seed % 10) / 10):
            device.look([round(rate * PACE_S * (1 + 7 * share)) for rate in DAY])
        after_s = device.told_after_s(20.0, [8 * rate for rate in DAY])
        assert after_s is not None
        found.append(after_s)
    assert sorted(found)[-4] <= 1.0, "nine in ten"


@pytest.mark.parametrize("seed", range(3))
def test_an_hour_of_todays_regime_tells_nothing(seed: int) -> None:
    assert Device(seed).told_after_s(3600.0, DAY) is None


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
    device, night = Device(), [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]] * 3
    assert [device.look(tasks) for tasks in night] == [None] * len(night)
    assert device.look([-3, -3, -3, 0]) is None
    assert [device.look(tasks) for tasks in night] == [None] * len(night)
    assert watch.look(Moment(9.0, dict.fromkeys(NAMES, 9)), None, BY_DAY, SERVICE_S, 2.0) is None
