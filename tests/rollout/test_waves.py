"""Waves as operators write them, for fleets of every size."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.planner.rollout.waves import parse_waves, wave_ends
from stageloom.shared.errors import InputError


@pytest.mark.parametrize(
    ("text", "devices", "ends"),
    [
        ("1,10%,100%", 200, [1, 20, 200]),
        ("1,10%,100%", 50, [1, 5, 50]),
        ("1,10%,100%", 3, [1, 3]),
        ("5,10%,100%", 3, [3]),
        ("5,10%,100%", 20, [5, 20]),
        ("100%", 7, [7]),
        ("3,1,100%", 9, [3, 9]),
        (" 1 , 100% ", 2, [1, 2]),
    ],
)
def test_waves_end_where_they_say_and_never_beyond_the_fleet(
    text: str, devices: int, ends: list[int]
) -> None:
    assert wave_ends(parse_waves(text), devices) == ends


@pytest.mark.parametrize("text", ["", "0,100%", "x,100%", "1,,100%", "101%", "-1,100%", "1,10%", "5"])
def test_what_is_no_list_of_waves_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="100%"):
        parse_waves(text)


@given(
    st.lists(st.one_of(st.integers(1, 2000).map(str), st.integers(1, 100).map("{}%".format)), max_size=6),
    st.integers(1, 1000),
)
def test_each_wave_adds_devices_and_the_last_ends_with_all(words: list[str], devices: int) -> None:
    ends = wave_ends(parse_waves(",".join([*words, "100%"])), devices)
    assert ends[-1] == devices
    assert ends[0] > 0 and all(first < second for first, second in pairwise(ends))
