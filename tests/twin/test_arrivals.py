"""Arrival processes: rates, closed forms, and independence of how they are asked."""

import pickle

import numpy as np
import pytest

from stageloom.planner.twin.arrivals import (
    ArrivalStream,
    Bursty,
    Counted,
    Periodic,
    Poisson,
    Process,
    Recorded,
    Tape,
    arrivals,
    entered_anywhere,
)
from stageloom.shared.errors import InputError

PROCESSES: list[Process] = [
    Periodic(rate_per_s=30.0),
    Periodic(rate_per_s=30.0, offset_s=0.4, jitter_s=0.02),
    Poisson(rate_per_s=80.0),
    Bursty(on_rate_per_s=200.0, off_rate_per_s=5.0, mean_on_s=0.3, mean_off_s=0.7),
    Bursty(on_rate_per_s=50.0, mean_on_s=0.1, mean_off_s=2.0),
    Recorded(times_s=(0.0, 0.5, 0.5, 2.0)),
    Recorded(times_s=(0.1, 0.4), repeat_s=0.5),
    Counted(spans=((0.0, 1.0, 3), (1.0, 2.5, 40)), length_s=3.0, begin_s=1.2),
]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_periodic_arrivals_lie_on_the_grid() -> None:
    found = arrivals(Periodic(rate_per_s=4.0, offset_s=0.1), 1.2, rng())
    assert found.tolist() == pytest.approx([0.1, 0.35, 0.6, 0.85, 1.1])


def test_an_arrival_at_the_end_belongs_to_the_next_span() -> None:
    stream = ArrivalStream(Periodic(rate_per_s=2.0), rng())
    assert stream.until(1.0).tolist() == [0.0, 0.5]
    assert stream.until(1.0).tolist() == []
    assert stream.until(1.5).tolist() == [1.0]


def test_jitter_delays_each_by_less_than_it() -> None:
    found = arrivals(Periodic(rate_per_s=10.0, jitter_s=0.05), 100.0, rng())
    late = found - np.arange(len(found)) / 10.0
    assert late.min() >= 0.0
    assert late.max() < 0.05
    assert late.mean() == pytest.approx(0.025, abs=0.002)


@pytest.mark.promise("arrivals-rates-closed-forms")
def test_poisson_gaps_are_exponential() -> None:
    """Mean and variation of gaps; the share of gaps above the mean is 1/e; counts have variance = mean."""
    found = arrivals(Poisson(rate_per_s=50.0), 400.0, rng())
    gaps = np.diff(found)
    assert len(found) == pytest.approx(20_000, abs=4 * 20_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.02)
    counts = np.histogram(found, bins=400, range=(0.0, 400.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.3)


@pytest.mark.promise("arrivals-rates-closed-forms")
def test_bursty_arrivals_have_the_mean_rate_and_are_overdispersed() -> None:
    """Variance of counts over their mean in windows t, of an interrupted Poisson process (Fischer and
    Meier-Hellstern 1993): 1 + 2 r^2 p q / (m s) (1 - (1 - exp(-s t)) / (s t)), s = 1/on + 1/off, m = r p."""
    process = Bursty(on_rate_per_s=100.0, mean_on_s=0.5, mean_off_s=1.5)
    assert process.mean_per_s == pytest.approx(25.0)
    found = arrivals(process, 8000.0, rng(1))
    assert len(found) / 8000.0 == pytest.approx(25.0, rel=0.05)
    counts = np.histogram(found, bins=4000, range=(0.0, 8000.0))[0]
    on, speed, window = 0.25, 1 / 0.5 + 1 / 1.5, 2.0
    spread = 100.0**2 * on * (1 - on)
    expected = 1 + 2 * spread / (25.0 * speed) * (1 - (1 - np.exp(-speed * window)) / (speed * window))
    assert counts.var() / counts.mean() == pytest.approx(expected, rel=0.1)


def test_a_recording_comes_back_and_may_repeat() -> None:
    assert arrivals(Recorded(times_s=(0.0, 0.5, 0.5, 2.0)), 9.0, rng()).tolist() == [0.0, 0.5, 0.5, 2.0]
    repeated = arrivals(Recorded(times_s=(0.1, 0.4), repeat_s=0.5), 1.2, rng())
    assert repeated.tolist() == pytest.approx([0.1, 0.4, 0.6, 0.9, 1.1])
    assert Recorded(times_s=(0.1, 0.4), repeat_s=0.5).mean_per_s == pytest.approx(4.0)
    assert arrivals(Recorded(times_s=(), repeat_s=1.0), 5.0, rng()).tolist() == []


@pytest.mark.promise("counted-arrivals-keep-bursts")
def test_counted_arrivals_are_as_many_in_every_span_wherever_the_recording_is_entered() -> None:
    """Three, then none, then forty; entered amid the forty, of which no more come than were counted."""
    spans = ((0.0, 1.0, 3), (2.0, 2.5, 40))
    whole = Counted(spans=spans, length_s=4.0)
    edges = [0.0, 1.0, 2.0, 2.5, 4.0, 5.0, 6.0, 6.5, 8.0]
    assert np.histogram(arrivals(whole, 8.0, rng()), edges)[0].tolist() == [3, 0, 40, 0] * 2
    found = arrivals(Counted(spans=spans, length_s=4.0, begin_s=2.25), 4.0, rng())
    assert np.histogram(found, [0.25, 1.75, 2.75, 3.75])[0].tolist() == [0, 3, 0]
    assert (found < 0.25).sum() + (found >= 3.75).sum() == 40 and (found < 0.25).any()
    assert whole.mean_per_s == pytest.approx(43 / 4)
    assert arrivals(Counted(spans=((0.0, 1.0, 0),), length_s=1.0), 5.0, rng()).tolist() == []


@pytest.mark.promise("counted-arrivals-keep-bursts")
def test_a_seed_enters_the_recordings_of_all_models_at_one_place() -> None:
    """Both models burst together, whatever the seed; the seed decides when."""
    burst = Counted(spans=((5.0, 6.0, 100),), length_s=10.0)
    middles = set()
    for seed in range(5):
        entered = entered_anywhere({"a": burst, "b": burst, "c": Poisson(rate_per_s=1.0)}, seed)
        one, other = (arrivals(entered[name], 10.0, rng(seed)) for name in "ab")
        assert one.tolist() == other.tolist()
        middles.add(round(float(np.median(one)), 1))
        assert entered["c"] == Poisson(rate_per_s=1.0)
    assert len(middles) == 5


@pytest.mark.promise("arrivals-rates-closed-forms")
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_arrivals_do_not_depend_on_the_spans_they_are_asked_in(process: Process) -> None:
    whole = arrivals(process, 40.0, rng(3))
    stream = ArrivalStream(process, rng(3))
    cuts = [*np.sort(rng(4).uniform(0.0, 40.0, 25)), 40.0]
    parts = np.concatenate([stream.until(float(cut)) for cut in cuts])
    assert parts.tolist() == whole.tolist()
    assert (np.diff(whole) >= 0.0).all()
    assert whole.tolist() != arrivals(process, 40.0, rng(5)).tolist() or isinstance(
        process, Recorded | Periodic
    )


def test_a_tape_that_forgets_and_is_pickled_goes_on_the_same_and_stays_small() -> None:
    sources: list[Process] = [Poisson(rate_per_s=4_000.0), Periodic(rate_per_s=500.0)]
    times, numbers = Tape(sources, 7).between(0, 20.0)
    tape, taken, sizes = Tape(sources, 7), 0, []
    for until_s in range(1, 21):
        parts = tape.between(taken, float(until_s))
        count = len(parts[0])
        assert parts[0].tolist() == times[taken : taken + count].tolist()
        assert parts[1].tolist() == numbers[taken : taken + count].tolist()
        taken += count
        tape.forget(taken)
        copy = pickle.dumps(tape)
        sizes.append(len(copy))
        tape = pickle.loads(copy)
    assert taken == len(times) and max(sizes) < 20_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: Periodic(rate_per_s=0.0),
        lambda: Periodic(rate_per_s=10.0, jitter_s=0.1),
        lambda: Poisson(rate_per_s=float("nan")),
        lambda: Bursty(on_rate_per_s=1.0, mean_on_s=0.0, mean_off_s=1.0),
        lambda: Recorded(times_s=(1.0, 0.5)),
        lambda: Recorded(times_s=(0.5,), repeat_s=0.5),
        lambda: Counted(spans=((0.0, 2.0, 1),), length_s=1.0),
        lambda: Counted(spans=((0.0, 1.0, -1),), length_s=1.0),
        lambda: Counted(spans=(), length_s=0.0),
    ],
)
def test_a_process_that_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()  # type: ignore[operator]
