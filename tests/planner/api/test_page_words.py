"""Figures as the pages show them: never with an exponent where digits would do."""

import pytest

from stageloom.planner.api.page.words import cause_text, figure, size
from stageloom.shared.policy.trigger import Cause


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.1234, "0.123"),
        (999.4, "999"),
        (999.7, "1,000"),
        (-999.7, "-1,000"),
        (12345.6, "12,346"),
    ],
)
def test_a_figure_has_three_digits_that_count_and_more_before_its_point(value: float, shown: str) -> None:
    assert figure(value) == shown


@pytest.mark.parametrize(
    ("octets", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1020 << 10, "1,020 KiB"), (1020 << 40, "1,020 TiB")],
)
def test_a_size_is_written_without_an_exponent(octets: int, shown: str) -> None:
    assert size(octets) == shown


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        (Cause.OLDEST_AGE.value, "a task had waited for 1,235 s, longer than 0.5 s"),
        ("of_tomorrow", "of tomorrow: 1,235, limit 0.5"),
    ],
)
def test_what_fired_an_alarm_is_told_without_an_exponent(cause: str, shown: str) -> None:
    assert cause_text(cause, 1234.5678, 0.5) == shown
