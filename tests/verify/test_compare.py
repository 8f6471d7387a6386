"""The two numbers, against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.verify.compare import relative_difference, sensitivity

VALUES = st.lists(st.floats(0.5, 8.0, width=32), min_size=1, max_size=20)


@given(VALUES, st.floats(1e-6, 10.0))
def test_difference_of_a_stretched_tensor_is_the_stretch(values: list[float], stretch: float) -> None:
    array = np.array(values)
    assert relative_difference(array * (1.0 + stretch), array) == pytest.approx(stretch, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint8", "bool"])
def test_equal_tensors_of_any_type_do_not_differ(dtype: str) -> None:
    array = np.array([0, 1, 1, 0]).astype(dtype)
    assert relative_difference(array.copy(), array) == 0.0


def test_one_wrong_id_among_many_counts_by_its_size() -> None:
    ids = np.full(100, 3, np.int64)
    wrong = ids.copy()
    wrong[0] = 6
    assert relative_difference(wrong, ids) == pytest.approx(3 / 30)


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
