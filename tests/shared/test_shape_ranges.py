"""Ranges of shapes as arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.shape_ranges import middle_shape, range_text, shape_text, within

pytestmark = pytest.mark.promise("open-dimensions")

BOUNDS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(sorted).map(tuple), max_size=4)


@given(BOUNDS, st.data())
def test_a_shape_is_within_where_every_size_is(bounds: list[tuple[int, int]], data: st.DataObject) -> None:
    low, high = tuple(a for a, _ in bounds), tuple(b for _, b in bounds)
    shape = tuple(data.draw(st.integers(a, b)) for a, b in bounds)
    assert within(shape, low, high)
    assert not within((*shape, 1), low, high)
    for axis in range(len(shape)):
        for out in (low[axis] - 1, high[axis] + 1):
            assert not within((*shape[:axis], out, *shape[axis + 1 :]), low, high)


@given(BOUNDS)
def test_the_middle_is_within(bounds: list[tuple[int, int]]) -> None:
    low, high = tuple(a for a, _ in bounds), tuple(b for _, b in bounds)
    assert within(middle_shape(low, high), low, high)


def test_the_middle_is_a_multiple_of_32_where_it_can_be() -> None:
    assert middle_shape((1, 3, 48, 16), (6, 3, 48, 2400)) == (3, 3, 48, 1184)
    assert middle_shape((100,), (110,)) == (100,)


def test_ranges_are_written_as_on_the_command_line() -> None:
    assert range_text((1, 3, 48, 16), (6, 3, 48, 2400)) == "1..6x3x48x16..2400"
    assert shape_text((1, 3)) == "1x3"
    assert shape_text(()) == "scalar"
