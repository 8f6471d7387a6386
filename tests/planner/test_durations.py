"""Durations as people write them."""

import pytest

from stageloom.planner.cli.options import parse_duration
from stageloom.shared.errors import InputError


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "m", "-3s", "0", "nan", "inf", "10 minutes"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--budget .* is no duration"):
        parse_duration(text, "--budget")
