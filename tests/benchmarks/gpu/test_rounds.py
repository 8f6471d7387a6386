"""Interleaved rounds: what they run, what they drop, what they make of it."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from benchmarks.gpu.device import Device, Work
from benchmarks.gpu.rounds import (
    Rounds,
    Sample,
    Variant,
    faster,
    kept,
    shape_of_rounds,
    summarise,
)
from benchmarks.runner import percentile


def sample(variant: str, number: int, device_us: float, sm_mhz: float | None = None) -> Sample:
    return Sample("m", variant, number, device_us, device_us, (device_us, 2 * device_us), sm_mhz)


class Fake(Device):
    """A host whose clock moves only when something runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def timed_s(self, work: Work) -> float:
        began_s = self.now_s
        work()
        return self.now_s - began_s


def working(device: Fake, ran: list[str], name: str, seconds: float) -> Callable[[], None]:
    def run() -> None:
        ran.append(name)
        device.now_s += seconds

    return run


def test_every_round_runs_every_variant_once_and_the_order_changes() -> None:
    device, ran = Fake(), list[str]()
    variants = [Variant("m", name, working(device, ran, name, 1e-3)) for name in "abcd"]
    rounds = Rounds(device, Random(1), clock=lambda: device.now_s)
    assert rounds.measure(variants, rounds=6, window_s=0.01, until=lambda: False) == 6
    orders = [[one.variant for one in rounds.samples if one.round == number] for number in range(6)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert Counter(one.variant for one in rounds.samples) == Counter(dict.fromkeys("abcd", 6))


def test_a_window_gives_the_time_of_a_unit_back_to_back_and_of_a_run_alone() -> None:
    device = Fake()
    variants = [Variant("m", "eight at once", working(device, [], "", 4e-3), units=8)]
    rounds = Rounds(device, Random(1), clock=lambda: device.now_s)
    rounds.measure(variants, rounds=3, window_s=0.1, until=lambda: False)
    columns = summarise(rounds.samples, "m", "eight at once")
    assert columns["device_us"] == pytest.approx(500.0) and columns["alone_us"] == pytest.approx(4000.0)
    assert len(rounds.samples[0].alone_us) == 10  # 0.4 of the window


@pytest.mark.promise("benchmark-s-rate-depends")
def test_a_variant_that_raises_is_told_once_and_the_others_go_on() -> None:
    device, ran, told = Fake(), list[str](), list[str]()

    def dies() -> None:
        ran.append("b")
        if len(ran) > 60:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        device.now_s += 1e-3

    variants = [Variant("m", name, working(device, ran, name, 1e-3)) for name in "ac"]
    variants.insert(1, Variant("m", "b", dies))
    rounds = Rounds(device, Random(1), clock=lambda: device.now_s)

    def tell(variant: Variant, error: Exception) -> None:
        told.append(f"{variant.name}: {error}")

    whole = rounds.measure(variants, rounds=6, window_s=0.01, until=lambda: False, on_failure=tell)
    assert whole == 6 and told == ["b: CUDA error: an illegal memory access was encountered"]
    counted = Counter(one.variant for one in rounds.samples)
    assert counted["a"] == counted["c"] == 6 and 0 < counted["b"] < 6
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rounds.measure(variants, rounds=6, window_s=0.01, until=lambda: False)


def test_rounds_end_when_the_time_is_up_and_say_how_many_were_whole() -> None:
    device = Fake()
    variants = [Variant("m", name, working(device, [], name, 1e-3)) for name in "ab"]
    rounds = Rounds(device, Random(1), clock=lambda: device.now_s)
    left = iter([False, False, False, True])
    assert rounds.measure(variants, rounds=9, window_s=0.001, until=lambda: next(left)) == 1
    assert len(rounds.samples) == 3


def test_a_window_at_another_clock_than_its_variants_usual_one_is_dropped() -> None:
    samples = [sample("a", 0, 10.0, 1980.0), sample("a", 1, 11.0, 1935.0), sample("a", 2, 14.0, 1500.0)]
    samples += [sample("hot", 0, 20.0, 1500.0), sample("hot", 1, 21.0, 1510.0)]
    assert [one.device_us for one in kept(samples)] == [10.0, 11.0, 20.0, 21.0]
    columns = summarise(samples, "m", "a")
    assert (columns["rounds"], columns["dropped"]) == (2, 1)


def test_windows_without_a_clock_are_kept() -> None:
    assert len(kept([sample("a", 0, 1.0), sample("a", 1, 9.0)])) == 2


def test_variants_are_compared_round_by_round() -> None:
    """The device slows down by half from round to round: the ratio does not see it, the medians do."""
    samples = [sample("a", number, 10.0 * 1.5**number) for number in range(5)]
    samples += [sample("b", number, 5.0 * 1.5**number) for number in range(5)]
    ratio = faster(samples, "m", "a", "b")
    assert ratio is not None and (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert faster(samples, "m", "a", "none") is None and faster([], "m", "a", "b") is None


def test_a_round_that_one_of_two_lost_is_compared_with_nothing() -> None:
    samples = [sample("a", 0, 10.0), sample("b", 0, 5.0), sample("a", 1, 10.0)]
    ratio = faster(samples, "m", "a", "b")
    assert ratio is not None and ratio.rounds == 1


@pytest.mark.parametrize(
    ("variants", "seconds", "rounds", "window_s"),
    [
        (10, 10 * 1.25 * 30 * 0.2, 30, 0.2),  # exactly the protocol
        (10, 10 * 1.25 * 60 * 0.2, 60, 0.2),  # more time: more rounds
        (80, 80 * 1.25 * 30 * 0.05, 30, 0.05),  # less: shorter windows
        (80, 80 * 1.25 * 10 * 0.02, 10, 0.02),  # less still: fewer rounds
        (80, 0.0, 3, 0.02),
    ],
)
def test_windows_shrink_before_rounds_do(variants: int, seconds: float, rounds: int, window_s: float) -> None:
    found = shape_of_rounds(variants, seconds + 1e-6)
    assert found[0] == rounds and found[1] == pytest.approx(window_s, rel=1e-3)


def test_percentiles_interpolate() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([float(n) for n in range(101)], 95) == 95.0
