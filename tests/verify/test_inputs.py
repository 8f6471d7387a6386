"""Drawn inputs: shapes, types, ranges, and contents that change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.edge_agent.verify.inputs import MAX_PAIRS, ValueRange, check_ranges, draw_pair
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Tensor

DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
          "uint64", "bool"]  # fmt: skip


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4),
    attempt=st.integers(0, MAX_PAIRS - 1),
    seed=st.integers(0, 9),
)
def test_inputs_have_the_tensors_shape_and_type_and_are_finite(
    dtype: str, shape: list[int], attempt: int, seed: int
) -> None:
    tensor = Tensor("x", dtype, tuple(shape))
    for feeds in draw_pair([tensor], {}, attempt, np.random.default_rng(seed)):
        assert feeds["x"].shape == tensor.shape
        assert feeds["x"].dtype.name == dtype
        assert np.isfinite(feeds["x"].astype(np.float64)).all()


@given(
    dtype=st.sampled_from(["int32", "int64", "float16", "float32", "float64"]),
    low=st.integers(-50, 50),
    width=st.integers(0, 30),
    attempt=st.integers(0, MAX_PAIRS - 1),
)
def test_inputs_stay_inside_the_given_range(dtype: str, low: int, width: int, attempt: int) -> None:
    tensor = Tensor("x", dtype, (4, 7))
    ranges = {"x": ValueRange(low, low + width)}
    for feeds in draw_pair([tensor], ranges, attempt, np.random.default_rng(attempt)):
        assert low <= feeds["x"].min()
        assert feeds["x"].max() <= low + width


def test_range_of_a_flag_is_honoured() -> None:
    for attempt in range(4):
        for feeds in draw_pair(
            [Tensor("x", "bool", (50,))], {"x": ValueRange(1, 1)}, attempt, np.random.default_rng(attempt)
        ):
            assert feeds["x"].all()


def test_first_integers_use_the_whole_range_and_later_pairs_its_halves() -> None:
    tensor = Tensor("ids", "int64", (1, 500))
    ranges = {"ids": ValueRange(0, 9)}
    rng = np.random.default_rng(0)
    whole = draw_pair([tensor], ranges, 0, rng)[0]["ids"]
    assert set(whole.flat) == set(range(10))
    for attempt in (1, 2, 3):
        one, other = (feeds["ids"] for feeds in draw_pair([tensor], ranges, attempt, rng))
        assert {set(one.flat) == set(range(5)), set(other.flat) == set(range(5))} == {True, False}
        assert not set(one.flat) & set(other.flat)


def test_integers_without_a_range_are_valid_for_every_table_and_flag() -> None:
    tensor = Tensor("ids", "int64", (64,))
    for attempt in range(MAX_PAIRS):
        for feeds in draw_pair([tensor], {}, attempt, np.random.default_rng(attempt)):
            assert set(feeds["ids"].flat) <= {0, 1}


def test_some_images_survive_global_pooling() -> None:
    # White noise over 64x64 pixels has pooled means of about 1/64.
    tensor = Tensor("x", "float32", (1, 3, 64, 64))
    pooled = [
        np.abs(feeds["x"].mean(axis=(2, 3))).max()
        for attempt in range(4)
        for feeds in draw_pair([tensor], {}, attempt, np.random.default_rng(attempt))
    ]
    assert max(pooled) > 0.2


def test_scales_differ_between_the_pairs() -> None:
    tensor = Tensor("x", "float32", (1, 3, 32, 32))
    spreads = [
        float(draw_pair([tensor], {}, attempt, np.random.default_rng(1))[0]["x"].std())
        for attempt in range(MAX_PAIRS)
    ]
    assert max(spreads) > 8 * min(spreads)


def test_same_seed_draws_the_same_inputs() -> None:
    tensor = Tensor("x", "float32", (2, 5))
    one, other = (draw_pair([tensor], {}, 3, np.random.default_rng(7))[0]["x"] for _ in range(2))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("nan")), (0.0, float("inf"))]
)
def test_range_that_holds_no_value_is_refused(low: float, high: float) -> None:
    with pytest.raises(InputError, match="LO <= HI"):
        ValueRange(low, high)


@pytest.mark.parametrize(
    ("tensor", "ranges", "message"),
    [
        (Tensor("x", "uint8", (1,)), {"x": ValueRange(0, 256)}, "leaves its type uint8"),
        (Tensor("x", "int32", (1,)), {"y": ValueRange(0, 1)}, "no input 'y'; its inputs are x"),
        (Tensor("x", "int32", (1,)), {"x": ValueRange(0.2, 0.8)}, "holds no whole number"),
        (Tensor("x", "float16", (1,)), {"x": ValueRange(0, 1e6)}, "leaves its type float16"),
        (Tensor("x", "bool", (1,)), {"x": ValueRange(0, 2)}, "leaves its type bool"),
        (Tensor("x", "bfloat16", (1,)), {}, "bfloat16"),
    ],
)
def test_input_that_cannot_be_drawn_is_refused(
    tensor: Tensor, ranges: dict[str, ValueRange], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_ranges([tensor], ranges)
