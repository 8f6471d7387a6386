"""What a swap's stall is worked out from: when tasks of the steady stream ended."""

import argparse
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import replan
from benchmarks.replan import BACKLOG, Backlog, figures_of, gap_ms
from benchmarks.runner import Report

SECOND_US = 1_000_000


def every_20_ms(first_us: int, last_us: int) -> list[int]:
    return list(range(first_us, last_us + 1, 20_000))


def test_the_longest_gap_near_a_swap_counts_beyond_the_median_gap() -> None:
    ended_us = [*every_20_ms(0, 5 * SECOND_US), *every_20_ms(5_150_000, 8 * SECOND_US)]
    assert gap_ms(ended_us, 5 * SECOND_US, 8 * SECOND_US) == pytest.approx(130.0)
    assert gap_ms(ended_us, 2 * SECOND_US, 8 * SECOND_US) == 0.0


@pytest.mark.parametrize("stall_us", [1_500_000, 3_000_000])
def test_a_stall_that_ends_long_after_the_swap_is_seen(stall_us: int) -> None:
    """Of 1.5 s only the beginning lies near the swap; of 3 s neither end does."""
    swap_us = 10 * SECOND_US
    begun_us = swap_us - (0 if stall_us < 2 * SECOND_US else stall_us // 2)
    ended_us = [*every_20_ms(0, begun_us), *every_20_ms(begun_us + stall_us, begun_us + 10 * SECOND_US)]
    assert gap_ms(ended_us, swap_us, ended_us[-1]) == pytest.approx(stall_us / 1e3 - 20.0)


def test_a_stall_that_lasts_still_is_seen() -> None:
    ended_us = every_20_ms(0, 10 * SECOND_US)
    assert gap_ms(ended_us, 10 * SECOND_US, 14 * SECOND_US) == pytest.approx(3980.0)


class HeldClient:
    """Tasks end when they are told to."""

    def __init__(self) -> None:
        self.open: list[Future[Any]] = []

    def submit(self, model: str, inputs: object) -> "Future[Any]":
        self.open.append(Future())
        return self.open[-1]


def test_a_backlog_keeps_its_own_count_of_lost_tasks() -> None:
    client = HeldClient()
    backlog = Backlog(client, {})  # type: ignore[arg-type]
    client.open[0].set_exception(RuntimeError("lost"))
    client.open[1].set_result({})
    assert backlog.lost == 1
    assert len(client.open) == BACKLOG + 2


def round_of(how: str, active_ms: float) -> dict[str, Any]:
    return {"how": how, "trigger_to_active_ms": active_ms, "stall_ms": active_ms / 10, "lost": 1}


def test_rounds_before_one_that_gets_nowhere_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(*_: object) -> Iterator[dict[str, Any]]:
        yield from (round_of("proven", 40.0), round_of("trial", 900.0))
        raise TimeoutError("no better plan is active")

    monkeypatch.setattr(replan, "rounds", rounds)
    monkeypatch.setattr(replan, "Bench", lambda *_, **__: nullcontext(SimpleNamespace(prepare=list)))
    report = Report("replan")
    with pytest.raises(TimeoutError):
        replan.measure(report, argparse.Namespace(quick=True))
    assert len(report.rows) == 2
    assert report.figures == figures_of([round_of("proven", 40.0), round_of("trial", 900.0)])
    assert report.figures["proven_active_p50_ms"] == 40.0 and report.figures["lost_tasks"] == 2.0


def test_where_no_plan_was_proven_there_is_no_time_to_one() -> None:
    assert not any("proven_active" in name for name in figures_of([round_of("trial", 900.0)]))
