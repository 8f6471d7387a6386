"""When arrivals are another regime: closed forms, and how soon, how often and how rarely by simulation."""

import math
from collections.abc import Sequence
from random import Random
from statistics import median

import pytest

from stageloom.shared.policy.arrivals import Arrivals, Arrived
from stageloom.shared.policy.regime import BURST_S, RegimeWatch, moved, weights

PACE_S = 0.5
NAMES = ("a", "b", "c")
SERVICE_S = dict.fromkeys(NAMES, 0.01)
MIX = (4.0, 2.0, 1.0)
Rates = Sequence[float]


def poisson(rng: Random, mean: float) -> int:
    """Knuth's way: how many exponential gaps fit."""
    count, product, least = 0, rng.random(), math.exp(-mean)
    while product > least:
        count += 1
        product *= rng.random()
    return count


class Device:
    """Poisson arrivals, looked at every half second; what moved is answered at once."""

    def __init__(self, seed: int) -> None:
        self.watch = RegimeWatch(arrivals := Arrivals())
        self._arrivals, self._rng = arrivals, Random(seed)
        self._now_s, self._counts = 0.0, [0, 0, 0]

    def halt(self, seconds: float, rates: Rates) -> None:
        """Tasks come, and nobody looks: the process stands still, or a plan is exchanged."""
        self._now_s += seconds
        for at, rate in enumerate(rates):
            self._counts[at] += poisson(self._rng, rate * seconds)

    def run(self, seconds: float, rates: Rates) -> list[float]:
        """When it fired, in seconds since these rates began."""
        began_s, fired = self._now_s, []
        for _ in range(round(seconds / PACE_S)):
            self._now_s += PACE_S
            for at, rate in enumerate(rates):
                self._counts[at] += poisson(self._rng, rate * PACE_S)
            self._arrivals.add(self._now_s, dict(zip(NAMES, self._counts, strict=True)))
            if self.watch.look(SERVICE_S, 2.0) > 2.0:
                self.watch.answered()
                fired.append(self._now_s - began_s)
        return fired


def times(rates: Rates, factor: float) -> list[float]:
    return [rate * factor for rate in rates]


def delays(before: Rates, after: Rates, runs: int = 12) -> list[float]:
    """From a change to the alarm, of simulations that had none before; sorted."""
    found = []
    for seed in range(runs):
        device = Device(seed)
        assert device.run(100.0, before) == []
        found.append(device.run(60.0, after)[0])
    return sorted(found)


def test_models_count_by_their_share_in_the_work_of_before_and_of_now() -> None:
    assert weights(MIX, MIX[::-1], [1.0] * 3) == pytest.approx([2.5 / 7, 2 / 7, 2.5 / 7])
    assert weights([1.0, 1.0], [1.0, 1.0], [3.0, 1.0]) == pytest.approx([0.75, 0.25])
    assert weights([1.0, 3.0], [1.0, 3.0], [0.0, 0.0]) == pytest.approx([0.25, 0.75]), "nothing is measured"
    assert weights([0.0], [0.0], [1.0]) == [0.0]


def many(*rates: float) -> dict[str, Arrived]:
    """So many tasks that chance has no say."""
    return {name: Arrived(1e6 * rate, 1e6) for name, rate in zip(NAMES, rates, strict=False)}


def test_the_distance_is_the_mean_log_ratio_by_work() -> None:
    assert moved(many(4, 2, 1), many(8, 4, 2), SERVICE_S) == pytest.approx(2.0, rel=1e-3)
    assert moved(many(8, 4, 2), many(4, 2, 1), SERVICE_S) == pytest.approx(2.0, rel=1e-3)
    assert moved(many(4, 2, 1), many(1, 2, 4), SERVICE_S) == pytest.approx(4 ** (5 / 7), rel=1e-3)
    share = (1 / 10 + 2 / 11) / 2
    assert moved(many(9, 1), many(9, 2), SERVICE_S) == pytest.approx(2**share, rel=1e-3)


def test_a_few_tasks_more_or_less_are_chance() -> None:
    few = {"a": Arrived(5, 30.0)}
    assert moved(few, {"a": Arrived(6, 12.0)}, {}) == 1.0
    assert moved(few, {"a": Arrived(60, 12.0)}, {}) == pytest.approx(60.5 / 12 / (5.5 / 30))


def test_a_change_that_stays_is_told_within_ten_seconds_up_and_twenty_down() -> None:
    """Of seven tasks a second; the least that stays, whatever the rates, is longer than a burst."""
    up, down = delays(MIX, times(MIX, 3.6)), delays(times(MIX, 3.6), MIX)
    assert median(up) <= 10.0 and up[-1] <= 12.0
    assert median(down) <= 12.0 and down[-1] <= 20.0
    assert min(up[0], down[0]) > BURST_S


def test_another_mix_of_the_same_total_is_another_regime() -> None:
    found = delays(MIX, MIX[::-1])
    assert median(found) <= 20.0 and found[-1] <= 40.0


def test_few_tasks_take_longer_to_tell() -> None:
    """One task a second in all."""
    found = delays(times(MIX, 1 / 7), times(MIX, 3.6 / 7))
    assert median(found) <= 25.0


@pytest.mark.parametrize(
    ("burst", "pause_s"),
    [(times(MIX, 3.6), 16.0), (times(MIX, 100.0), 70.0), (MIX[::-1], 16.0), ((0.0,) * 3, 16.0)],
)
@pytest.mark.more
def test_bursts_of_four_seconds_are_no_regime(burst: Rates, pause_s: float) -> None:
    for seed in range(6):
        device = Device(seed)
        device.run(60.0, MIX)
        fired = [at for _ in range(3) for at in (*device.run(4.0, burst), *device.run(pause_s, MIX))]
        assert fired == []


def test_where_nothing_comes_there_is_no_regime_to_plan_for() -> None:
    device = Device(1)
    assert device.run(60.0, (0.0,) * 3) + device.run(60.0, MIX) == [], (
        "the first load is what the plan is for"
    )
    assert device.run(120.0, (0.0,) * 3) + device.run(60.0, MIX) == []


@pytest.mark.parametrize("pause_s", [5.0, 7.0, 8.0, 9.0, 10.0, 12.0, 20.0, 50.0])
def test_a_pause_is_no_regime_however_long(pause_s: float) -> None:
    for seed in range(3):
        device = Device(seed)
        device.run(70.0, MIX)
        assert device.run(pause_s, (0.0,) * 3) + device.run(70.0, MIX) == []


@pytest.mark.parametrize("halt_s", [4.0, 7.0, 8.0, 15.0, 40.0])
@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_what_came_while_nobody_looked_tells_no_burst_from_a_change(halt_s: float, factor: float) -> None:
    device = Device(5)
    assert device.run(100.0, MIX) == []
    device.halt(halt_s, times(MIX, factor))
    assert device.run(0.5, times(MIX, factor)) == [], "one look says nothing of when they came"
    assert bool(device.run(60.0, times(MIX, factor))) == (factor > 1.0)


def test_after_an_answer_the_new_rates_are_what_is_compared_with() -> None:
    device = Device(3)
    device.run(60.0, MIX)
    for rates in (times(MIX, 4.0), MIX, MIX[::-1], times(MIX, 3.0)):
        assert len(device.run(100.0, rates)) == 1


def test_a_slow_drift_is_a_change_too() -> None:
    """What settles is no longer added to after two minutes: arrivals cannot creep away."""
    device = Device(5)
    fired = [at for step in range(60) for at in device.run(20.0, times(MIX, 4.0 ** (step / 60)))]
    assert len(fired) in (1, 2)


def test_other_models_begin_a_regime_of_their_own() -> None:
    watch = RegimeWatch(arrivals := Arrivals())
    for tick in range(400):
        names = ("a",) if tick < 150 else ("a", "b") if tick < 250 else ("b",)
        arrivals.add(tick * PACE_S, {name: (3 if name == "a" else 30) * tick for name in names})
        assert watch.look({}, 2.0) == 1.0
    assert watch.chosen_for is not None and watch.chosen_for["b"].per_s == pytest.approx(60.0)


@pytest.mark.full
@pytest.mark.parametrize(
    "rates", [(0.3, 0.0, 0.0), (1.0, 0.0, 0.0), (2.5, 0.0, 0.0), (0.4, 0.2, 0.1), MIX, (20.0, 0.1, 0.0)]
)
def test_at_constant_rates_there_is_less_than_an_alarm_in_an_hour(rates: Rates) -> None:
    hours = 4
    assert sum(len(Device(seed).run(3600.0, rates)) for seed in range(hours)) < hours


def test_half_an_hour_at_constant_rates_is_quiet() -> None:
    assert [Device(11).run(1800.0, rates) for rates in (MIX, (0.5, 0.5, 0.2))] == [[], []]
