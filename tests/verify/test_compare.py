"""The two numbers, against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.edge_agent.verify.standards import relative_difference, sensitivity, smallest_share

VALUES = st.lists(st.floats(0.5, 8.0, width=32), min_size=1, max_size=20)


@given(VALUES, st.floats(1e-6, 10.0))
def test_difference_of_a_stretched_tensor_is_the_stretch(values: list[float], stretch: float) -> None:
    array = np.array(values)
    assert relative_difference(array * (1.0 + stretch), array) == pytest.approx(stretch, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint8", "bool"])
def test_equal_tensors_of_any_type_do_not_differ(dtype: str) -> None:
    array = np.array([0, 1, 1, 0]).astype(dtype)
    assert relative_difference(array.copy(), array) == 0.0


@pytest.mark.parametrize("wrong", [4, 6000])
def test_wrong_ids_count_by_their_number_whatever_their_size(wrong: int) -> None:
    ids = np.full(100, 3, np.int64)
    found = ids.copy()
    found[:2] = wrong
    assert relative_difference(found, ids) == pytest.approx(2 / 100)
    assert relative_difference(found == 3, ids == 3) == pytest.approx(2 / 100)


@pytest.mark.parametrize("zero_point", [0, 100])
def test_quantised_bytes_differ_by_quanta_over_their_spread_wherever_the_zero_point_lies(
    zero_point: int,
) -> None:
    values = np.array([-20, 20] * 50)
    expected = (values + zero_point).astype(np.uint8 if zero_point else np.int8)
    found = expected.copy()
    found[:4] += 1
    assert relative_difference(found, expected) == pytest.approx(math.sqrt(4) / (20 * math.sqrt(100)))


def test_floor_is_the_least_scale_of_a_difference_of_floats() -> None:
    small = np.full(4, 1e-8)
    assert relative_difference(small * 2, small) == pytest.approx(1.0)
    assert relative_difference(small * 2, small, floor=2e-3) == pytest.approx(1e-5)
    assert relative_difference(np.full(4, 1e-3), np.zeros(4), floor=2e-3) == pytest.approx(1.0)
    assert relative_difference(small * math.nan, small, floor=1.0) == math.inf


def test_smallest_share_needs_two_inputs_and_is_the_largest_of_one_or_two() -> None:
    gaps = [0.0, 0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert smallest_share(gaps, 0.25) == 0.0
    assert smallest_share([0.3, *gaps[2:], 0.0], 0.25) == 0.3  # one input that agrees is not enough
    assert smallest_share(gaps, 0.75) == 0.8
    assert smallest_share([0.0, 1.0], 0.25) == 1.0
    assert smallest_share([0.2], 0.25) == 0.2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([math.nan, 1.0], [math.nan, 1.0]),
        ([math.inf, 1.0], [math.inf, 1.0]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.inf]),
        ([1.0, 1e-9], [0.0, 0.0]),
        ([1.0], [1.0, 1.0]),
    ],
)
def test_what_is_not_finite_or_has_no_scale_or_another_shape_never_agrees(
    found: list[float], expected: list[float]
) -> None:
    assert relative_difference(np.array(found), np.array(expected)) == math.inf


def test_another_type_never_agrees() -> None:
    assert relative_difference(np.ones(3, np.float32), np.ones(3)) == math.inf


def test_two_empty_or_zero_tensors_agree() -> None:
    assert relative_difference(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
    assert relative_difference(np.zeros(3), np.zeros(3)) == 0.0


def test_largest_floats_do_not_overflow_into_agreement() -> None:
    large = np.full(1000, 3e38, np.float32)
    assert relative_difference(-large, large) == pytest.approx(2.0)


def test_sensitivity_is_the_smallest_over_the_outputs() -> None:
    one = {"a": np.array([3.0, 4.0]), "b": np.array([1.0, 0.0])}
    other = {"a": np.array([3.0, 3.0]), "b": np.array([0.0, 1.0])}
    assert sensitivity(one, other, ["a", "b"]) == pytest.approx(1 / 5)
    assert sensitivity(one, other, ["b"]) == pytest.approx(math.sqrt(2.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sensitivity_of_what_is_not_finite_is_zero(value: float) -> None:
    assert sensitivity({"a": np.array([value])}, {"a": np.array([1.0])}, ["a"]) == 0.0


def test_sensitivity_without_outputs_or_of_zeros_is_zero() -> None:
    assert sensitivity({}, {}, []) == 0.0
    assert sensitivity({"a": np.zeros(2)}, {"a": np.zeros(2)}, ["a"]) == 0.0
