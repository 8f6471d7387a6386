"""Figures as the pages show them: never with an exponent where digits would do."""

import pytest
from msgspec import structs

from stageloom.planner.api.page.fleet import presence
from stageloom.planner.api.page.rendering import render
from stageloom.planner.api.page.words import cause_text, figure, size
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.schema.service import ModelRate
from stageloom.planner.store.rows import blank_of
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


def live(*rates: ModelRate) -> str:
    """The figures of a device that is there."""
    device = blank_of(DeviceInfo, device="nano", online=True)
    values = {"device": device, "presence": presence(device), "state": None, "rates": rates}
    keys = dict.fromkeys(("buttons", "runs", "buttons_key", "runs_key"), "")
    return " ".join(render("device_live.html", {**values, **keys}).decode().split())


def test_a_model_of_which_no_task_completed_has_no_latency_and_where_none_has_one_that_is_said() -> None:
    idle = blank_of(ModelRate, device="nano", model="idle", queued=3)
    busy = structs.replace(idle, throughput_per_s=9.0, latency_p50_ms=2.0, latency_p99_ms=8.0)
    text = live(idle, busy)
    assert text.count(">\N{EN DASH}<") == 2 and ">2 ms<" in text and ">8 ms<" in text and ">0 ms<" not in text
    assert "No task completed in the last seconds" not in text
    assert all("No task completed in the last seconds" in live(*rates) for rates in ((), (idle,)))
