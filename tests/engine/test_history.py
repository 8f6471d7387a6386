"""Measured durations: both rules by their definitions, bounded memory, saved and restored."""

from fractions import Fraction
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.history import (
    ENOUGH,
    RECENT,
    STARPU_ENOUGH,
    DurationHistory,
    Footprint,
    HistoryRow,
    HistoryRule,
)
from stageloom.shared.errors import StateError

HEAD = Footprint("googlenet 0:60 b1")
RULES = pytest.mark.parametrize("rule", HistoryRule)
DURATIONS = st.lists(st.floats(0.0, 10.0), max_size=60)


def after(samples: list[float], rule: HistoryRule = HistoryRule.MEDIAN) -> float | None:
    history = DurationHistory(rule)
    for seconds in samples:
        history.add(HEAD, "cpu", seconds)
    return history.expected_s(HEAD, "cpu")


@given(DURATIONS)
def test_the_default_is_the_median_of_the_recent_samples(samples: list[float]) -> None:
    wanted = median(samples[-RECENT:]) if len(samples) >= ENOUGH else None
    assert after(samples) == wanted


def by_the_definition(samples: list[float]) -> Fraction | None:
    """StarPU's rule told with exact numbers and all samples kept."""
    kept: list[Fraction] = []
    errors = 0
    for sample in map(Fraction, samples[1:]):
        mean = sum(kept) / len(kept) if kept else Fraction(0)
        if kept and (2 * sample > 3 * mean or 2 * mean > 3 * sample):
            errors += 1
            if errors >= len(kept):
                kept, errors = [], 0
        else:
            kept.append(sample)
    return sum(kept, Fraction(0)) / len(kept) if len(kept) >= 10 else None


@given(st.lists(st.sampled_from([0.5, 1.0, 1.25, 1.75, 4.0]), max_size=80))
def test_starpus_rule_is_its_definition(samples: list[float]) -> None:
    wanted = by_the_definition(samples)
    found = after(samples, HistoryRule.STARPU)
    assert (found is None) == (wanted is None)
    assert wanted is None or found == pytest.approx(float(wanted))


def test_starpu_drops_the_first_sample_and_needs_ten_more() -> None:
    assert after([100.0] + [1.0] * (STARPU_ENOUGH - 1), HistoryRule.STARPU) is None
    assert after([100.0] + [1.0] * STARPU_ENOUGH, HistoryRule.STARPU) == 1.0


@pytest.mark.parametrize(
    ("sample", "mean"), [(1.5, 1 + 0.5 / 11), (1.51, 1.0), (0.67, 1 - 0.33 / 11), (0.66, 1.0), (0.0, 1.0)]
)
def test_starpu_takes_a_ratio_above_one_and_a_half_either_way_for_an_error(
    sample: float, mean: float
) -> None:
    assert after([1.0] * 11 + [sample], HistoryRule.STARPU) == pytest.approx(mean)


def test_starpu_forgets_everything_once_errors_are_as_many_as_samples() -> None:
    calibrated = [1.0] * 11
    assert after(calibrated + [3.0] * 9, HistoryRule.STARPU) == 1.0
    assert after(calibrated + [3.0] * 10, HistoryRule.STARPU) is None
    # The first one after that is not dropped.
    assert after(calibrated + [3.0] * 10 + [3.0] * 10, HistoryRule.STARPU) == 3.0


def test_a_resource_that_slows_down_is_believed_after_half_a_window_by_the_median() -> None:
    fast = [1.0] * 1000
    assert after(fast + [3.0] * (RECENT // 2)) == 1.0
    assert after(fast + [3.0] * (RECENT // 2 + 1)) == 3.0
    assert after(fast + [3.0] * 900, HistoryRule.STARPU) == 1.0, (
        "StarPU's waits for as many errors as samples"
    )


@RULES
def test_kinds_and_footprints_are_apart(rule: HistoryRule) -> None:
    history = DurationHistory(rule)
    for _ in range(20):
        history.add(HEAD, "cpu", 3.0)
        history.add(HEAD, "gpu", 1.0)
    assert history.expected_s(HEAD, "cpu") == 3.0
    assert history.expected_s(HEAD, "gpu") == 1.0
    assert history.expected_s(Footprint("googlenet 60:81 b1"), "gpu") is None


@RULES
@given(samples=DURATIONS, later=DURATIONS)
def test_what_was_saved_goes_on_as_if_nothing_had_happened(
    rule: HistoryRule, samples: list[float], later: list[float]
) -> None:
    history, restored = DurationHistory(rule), DurationHistory(rule)
    for seconds in samples:
        history.add(HEAD, "cpu", seconds)
    saved = msgspec.msgpack.encode(history.rows())
    restored.restore(msgspec.msgpack.decode(saved, type=tuple[HistoryRow, ...]))
    for seconds in later:
        for one in (history, restored):
            one.add(HEAD, "cpu", seconds)
    assert restored.rows() == history.rows()
    assert restored.expected_s(HEAD, "cpu") == history.expected_s(HEAD, "cpu")


@RULES
def test_of_too_many_pairs_the_one_used_least_recently_is_forgotten(rule: HistoryRule) -> None:
    history = DurationHistory(rule, max_entries=3)
    for name in "abc":
        for _ in range(11):
            history.add(Footprint(name), "cpu", 1.0)
    assert history.expected_s(Footprint("a"), "cpu") == 1.0
    history.add(Footprint("d"), "cpu", 1.0)
    assert {row.footprint for row in history.rows()} == {"a", "c", "d"}
    restored = DurationHistory(rule, max_entries=2)
    restored.restore(history.rows())
    assert [row.footprint for row in restored.rows()] == ["a", "d"]


@RULES
@pytest.mark.parametrize("seconds", [-1e-9, float("inf"), float("nan")])
def test_what_is_no_duration_is_refused(rule: HistoryRule, seconds: float) -> None:
    history = DurationHistory(rule)
    with pytest.raises(ValueError, match="no run of"):
        history.add(HEAD, "cpu", seconds)
    assert len(history) == 0


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        (HistoryRule.MEDIAN, (-1.0,)),
        (HistoryRule.MEDIAN, (float("nan"),)),
        (HistoryRule.MEDIAN, (1.0,) * (RECENT + 1)),
        (HistoryRule.STARPU, (1.0, 1.0)),
        (HistoryRule.STARPU, (1.5, 1.0, 0)),
        (HistoryRule.STARPU, (float("nan"), 1.0, 0)),
        (HistoryRule.STARPU, (3, 1.0, 3)),
        (HistoryRule.STARPU, (3, -1.0, 0)),
    ],
)
def test_rows_that_the_rule_could_not_have_saved_are_refused_whole(
    rule: HistoryRule, numbers: tuple[float, ...]
) -> None:
    history = DurationHistory(rule)
    good = DurationHistory(rule)
    good.add(HEAD, "gpu", 1.0)
    with pytest.raises(StateError, match="no history of"):
        history.restore([*good.rows(), HistoryRow(HEAD, "cpu", numbers)])
    assert len(history) == 0
