"""Outputs of two versions compared: closed forms, the edge of the tolerance, NaN, types and shapes."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from stageloom.shared.messages.outputs import OutputsVerdict
from stageloom.shared.output_comparison import OutputComparison


def compared(*pairs: tuple[Any, Any], tolerance: float = 0.5) -> OutputsVerdict:
    """The verdict on one output of one model, over these pairs of old and new arrays."""
    comparison = OutputComparison(tolerance)
    for old, new in pairs:
        comparison.take("m", {"o": np.asarray(old)}, {"o": np.asarray(new)})
    return comparison.verdict()


def test_the_largest_difference_is_where_the_closed_form_says() -> None:
    """|0.9 - 0.1| / 1.1 at [0, 1], and |5 - 4| / 5 at [1, 0] of the second input, which is smaller."""
    verdict = compared(([[1.0, 0.1]], [[1.0, 0.9]]), ([[4.0, 0.0]], [[5.0, 0.0]]))
    assert verdict.difference == pytest.approx(0.8 / 1.1)
    assert (verdict.index, verdict.old, verdict.new) == ((0, 1), "0.1", "0.9")
    assert verdict.max_abs == pytest.approx(1.0)
    assert verdict.max_rel == pytest.approx(0.8 / 0.9)
    assert (verdict.agreement, verdict.inputs, verdict.agrees) == (0.75, 2, False)
    assert verdict.text() == (
        "outputs_differ: 'o' of 'm' at [0, 1] is 0.9, was 0.1; 25.00% of its elements differ over 2 inputs, "
        "tolerance 0.5"
    )


@pytest.mark.parametrize(("new", "agrees"), [(1.0, True), (np.nextafter(1.0, 2.0), False)])
def test_a_difference_of_just_the_tolerance_agrees(new: float, agrees: bool) -> None:
    assert compared(([0.0], [new]), tolerance=1.0).agrees is agrees


def test_without_tolerance_equal_outputs_alone_agree() -> None:
    assert compared(([1.5, -0.0], [1.5, 0.0]), tolerance=0.0).agrees
    assert not compared(([1.5], [np.nextafter(1.5, 2)]), tolerance=0.0).agrees


@pytest.mark.parametrize(
    ("old", "new", "agrees"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, -math.inf, False),
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
        (math.nan, math.inf, False),
    ],
)
def test_what_is_no_number_equals_itself_and_differs_infinitely_from_all_else(
    old: float, new: float, agrees: bool
) -> None:
    verdict = compared(([0.0, old], [0.0, new]), tolerance=1e9)
    assert verdict.agrees is agrees
    if not agrees:
        assert (verdict.difference, verdict.max_abs, verdict.max_rel) == (None, None, None)
        assert (verdict.index, verdict.old, verdict.new) == ((1,), f"{old:g}", f"{new:g}")
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=OutputsVerdict) == verdict


def test_an_infinite_difference_stays_the_largest() -> None:
    verdict = compared(([1.0], [math.nan]), ([1.0], [9.0]))
    assert (verdict.difference, verdict.new) == (None, "nan")


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.int32])
def test_labels_are_judged_by_the_share_that_differs(dtype: Any) -> None:
    """One of four: 0.25 is within 0.25 and beyond 0.2."""
    old, new = np.array([0, 1, 1, 0], dtype), np.array([0, 1, 0, 0], dtype)
    assert compared((old, new), tolerance=0.25).agrees
    verdict = compared((old, new), tolerance=0.2)
    assert (verdict.agrees, verdict.agreement, verdict.difference) == (False, 0.75, 0.25)
    assert verdict.index == (2,)


def test_integers_that_doubles_cannot_tell_apart_differ() -> None:
    old, new = np.array([2**60]), np.array([2**60 + 1])
    verdict = compared((old, new), tolerance=0.5)
    assert (verdict.agreement, verdict.old, verdict.new) == (0.0, str(2**60), str(2**60 + 1))


def test_half_precision_and_mixed_types_are_compared_as_numbers() -> None:
    old, new = np.array([1.0, 2.0], np.float16), np.array([1.0, 2.5], np.float32)
    assert compared((old, new), tolerance=0.5 / 3).agrees
    assert not compared((old, new), tolerance=0.16).agrees
    assert compared((np.array([1, 2]), np.array([1.0, 2.0])), tolerance=0.0).agrees


def test_other_shapes_and_missing_outputs_never_agree() -> None:
    verdict = compared((np.zeros((1, 3)), np.zeros((1, 4))), tolerance=1e9)
    assert (verdict.agrees, verdict.old, verdict.new, verdict.index) == (False, "1x3", "1x4", ())
    comparison = OutputComparison(1e9)
    comparison.take("m", {"o": np.zeros(1)}, {})
    assert not comparison.verdict().agrees


def test_scalars_and_empty_outputs_are_outputs() -> None:
    assert compared((np.float32(1.0), np.float32(1.0)), tolerance=0.0).agrees
    assert compared((np.zeros((0, 4)), np.zeros((0, 4))), tolerance=0.0).agrees
    assert not compared((np.int64(1), np.int64(2)), tolerance=0.5).agrees


def test_the_output_that_differs_most_is_named_and_inputs_are_those_of_the_model_with_fewest() -> None:
    comparison = OutputComparison(0.01)
    for model, gap in (("a", 0.0), ("a", 0.1), ("b", 0.5)):
        comparison.take(model, {"x": np.zeros(3), "y": np.ones(2)}, {"x": np.zeros(3), "y": np.ones(2) + gap})
    verdict = comparison.verdict()
    assert (verdict.model, verdict.output, verdict.inputs) == ("b", "y", 1)
    assert (comparison.inputs_of("a"), comparison.inputs_of("c")) == (2, 0)


def test_the_verdict_is_that_of_brute_force_over_random_arrays() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        shape = tuple(rng.integers(1, 4, size=rng.integers(1, 4)))
        old = rng.normal(size=shape)
        new = old + rng.normal(size=shape) * rng.choice([0.0, 0.1, 1.0])
        tolerance = float(rng.choice([0.0, 0.05, 0.5]))
        worst, at = -1.0, ()
        for index in np.ndindex(*shape):
            gap = abs(new[index] - old[index]) / (1 + abs(old[index]))
            if gap > worst:
                worst, at = gap, index
        verdict = compared((old, new), tolerance=tolerance)
        assert verdict.difference == pytest.approx(worst)
        assert (verdict.agrees, verdict.index) == (worst <= tolerance, at)
