"""Patterns of a part's time: planted ones come back, and the choice among them is by what was left out."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.errors import InputError
from stageloom.shared.search.patterns import (
    POINTS,
    Pattern,
    PatternKind,
    extents_to_measure,
    fit,
    fitted_pattern,
    held_out_error,
    left_out_errors,
)

EXTENTS = (28, 64, 128, 256, 512, 768)


def planted(random: Random, kind: PatternKind) -> tuple[Pattern, int]:
    """A pattern of that kind, and the whole extent."""
    extent = random.choice(EXTENTS)
    if kind is PatternKind.CONSTANT:
        return Pattern(random.uniform(1, 10)), extent
    if kind is PatternKind.LINEAR:
        return Pattern(random.uniform(0, 5), random.uniform(0.05, 1)), extent
    quantum = random.choice([one for one in (4, 8, 16, 32, 64) if one * 3 <= extent])
    return Pattern(random.uniform(0, 5), random.uniform(1, 5), quantum), extent


def measured(random: Random, pattern: Pattern, extent: int, noise: float) -> dict[int, float]:
    """As `extents_to_measure` says, each off by up to `noise`."""
    return {x: pattern(x) * random.uniform(1 - noise, 1 + noise) for x in extents_to_measure(extent)}


@given(st.integers(0, 10_000), st.sampled_from(PatternKind))
def test_a_pattern_without_noise_is_predicted_exactly_where_the_samples_tell_it(
    seed: int, kind: PatternKind
) -> None:
    pattern, extent = planted(Random(seed), kind)
    samples = measured(Random(seed), pattern, extent, 0.0)
    found = fit(sorted(samples.items()), kind)
    assert held_out_error(found, samples) < 1e-5
    assert found.quantum <= pattern.quantum
    if kind is not PatternKind.STAIRCASE:
        assert (found.base_s, found.step_s) == pytest.approx((pattern.base_s, pattern.step_s), abs=1e-6)


@pytest.mark.promise("part-times-left-out")
@pytest.mark.parametrize("kind", PatternKind)
@pytest.mark.parametrize("noise", [0.005, 0.01, 0.03])
def test_leave_one_out_finds_the_planted_kind_and_predicts_what_was_not_measured(
    kind: PatternKind, noise: float
) -> None:
    random, found, far = Random(1), 0, 0
    for _ in range(60):
        pattern, extent = planted(random, kind)
        samples = measured(random, pattern, extent, noise)
        chosen = fitted_pattern(samples)
        found += chosen.kind is kind
        truth = {x: pattern(x) for x in range(1, extent + 1) if x not in samples}
        far += held_out_error(chosen, truth) > 0.1
    assert found >= 0.8 * 60
    assert far == 0


@pytest.mark.promise("part-times-left-out")
def test_the_error_at_its_own_samples_prefers_the_staircase_whatever_is_planted() -> None:
    """Which is why that error does not decide."""
    random, by_training, by_left_out = Random(2), 0, 0
    for _ in range(60):
        pattern, extent = planted(random, random.choice([PatternKind.CONSTANT, PatternKind.LINEAR]))
        samples = measured(random, pattern, extent, 0.05)
        own = {kind: squares(fit(sorted(samples.items()), kind), samples) for kind in PatternKind}
        by_training += min(own, key=own.__getitem__) is PatternKind.STAIRCASE
        by_left_out += fitted_pattern(samples).kind is PatternKind.STAIRCASE
    assert by_training > 20
    assert by_left_out < 8


def squares(pattern: Pattern, samples: dict[int, float]) -> float:
    return sum((pattern(x) / seconds - 1) ** 2 for x, seconds in samples.items())


def test_the_tiles_of_a_convolution_on_a_processor_are_found() -> None:
    """3x3, 64 channels to x at 28x28, one thread of onnxruntime, microseconds: steps of 16."""
    samples = {8: 129.0, 16: 128.0, 20: 227.0, 32: 231.0, 40: 299.0, 48: 299.0, 56: 382.0, 64: 384.0}
    found = fitted_pattern(samples)
    assert (found.kind, found.quantum) == (PatternKind.STAIRCASE, 16)
    assert found(24) == pytest.approx(230, rel=0.1)


@given(st.integers(0, 10_000), st.sampled_from(PatternKind))
def test_a_longer_part_never_takes_less(seed: int, kind: PatternKind) -> None:
    random = Random(seed)
    samples = {x: random.uniform(1.0, 10.0) for x in extents_to_measure(random.choice(EXTENTS))}
    found = fit(sorted(samples.items()), kind)
    times = [found(x) for x in range(1, 800)]
    assert times == sorted(times)
    assert found(0) == 0.0 and times[0] >= 0.0


def test_leave_one_out_asks_for_more_samples_than_a_pattern_has_parameters() -> None:
    line = [(x, 1.0 + x) for x in (1, 2, 3)]
    assert left_out_errors(line, PatternKind.LINEAR) is None
    assert left_out_errors(line[:1], PatternKind.CONSTANT) is None
    assert left_out_errors([*line, (4, 5.0)], PatternKind.LINEAR) == pytest.approx([0.0] * 4, abs=1e-9)
    assert fitted_pattern({7: 2.0}) == Pattern(2.0)


@pytest.mark.parametrize("samples", [{1: 1.0, 2: 1.9}, {1: 1.0, 2: 1.9, 3: 2.8}], ids=["two", "three"])
def test_two_or_three_extents_make_a_line(samples: dict[int, float]) -> None:
    """As an axis of two or three rows has no more."""
    found = fitted_pattern(samples)
    assert [found(extent) for extent in samples] == pytest.approx(list(samples.values()))
    assert fitted_pattern(dict.fromkeys(samples, 2.0))(1) == pytest.approx(2.0)


@given(st.integers(1, 5000), st.sampled_from([1, 2, 8, 32]))
def test_extents_to_measure_reach_the_whole_and_are_few(extent: int, granule: int) -> None:
    found = extents_to_measure(extent, granule)
    assert list(found) == sorted(set(found)) and len(found) <= POINTS + 1
    assert all(x % granule == 0 and 0 < x <= extent for x in found)
    if extent >= granule:
        assert found[-1] == extent - extent % granule and found[0] == granule


@pytest.mark.parametrize("samples", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}, {1: float("inf")}])
def test_what_is_no_time_of_a_part_is_refused(samples: dict[int, float]) -> None:
    with pytest.raises(InputError, match="no times of parts"):
        fitted_pattern(samples)
