"""What a swap's stall is worked out from: when tasks of the steady stream ended."""

import argparse
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import replan
from benchmarks.replan import BACKLOG, Backlog, Stream, figures_of, gap_ms, rounds
from benchmarks.runner import Report
from stageloom.shared.errors import UnavailableError

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
        if len(self.open) == BACKLOG + 2:
            raise UnavailableError("the agent went away")
        self.open.append(Future())
        return self.open[-1]


def test_a_backlog_keeps_its_own_count_of_lost_tasks() -> None:
    client = HeldClient()
    backlog = Backlog(client, {})  # type: ignore[arg-type]
    client.open[0].set_exception(RuntimeError("lost"))
    client.open[1].set_result({})
    assert backlog.lost == 1
    assert len(client.open) == BACKLOG + 2


def test_a_task_of_the_stream_that_fails_or_is_never_answered_is_lost_once() -> None:
    client = HeldClient()
    stream = Stream(client, {})  # type: ignore[arg-type]
    for _ in range(BACKLOG + 3):  # of the last one the submission fails
        stream.submit()
    client.open[0].set_exception(RuntimeError("lost"))
    for future in client.open[3:]:
        future.set_result({})
    assert stream.take_lost(0.0) == 4
    client.open[1].set_exception(RuntimeError("after all"))
    assert stream.take_lost(0.0) == 0
    assert len(stream.ended_us) == BACKLOG - 1


def test_a_stall_around_the_swap_back_to_a_counts_as_one_around_the_swap_to_b(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A is committed at 2.5 s, 0.2 s after a stall of 0.5 s; B is active at 5 s."""
    ended_us = every_20_ms(0, 1_800_000)
    stream = SimpleNamespace(ended_us=ended_us, start=list, close=list, take_lost=lambda within_s: 3)
    found = SimpleNamespace(plan="B", how="proven", generation=1, trigger_to_active_ms=40.0, at_us=4_960_000)

    def push(name: str) -> None:
        ended_us.extend(every_20_ms(2_300_000, 2_500_000))

    def until(*_: object) -> SimpleNamespace:
        ended_us.extend(every_20_ms(2_520_000, 7 * SECOND_US))
        return found

    now_us = iter([2_500_000, 7 * SECOND_US])
    replaced = {
        "Client": lambda socket: nullcontext(),
        "Stream": lambda *_: stream,
        "Backlog": lambda *_: SimpleNamespace(end=list, lost=1),
        "_inputs": lambda *_: {},
        "time": SimpleNamespace(time_ns=lambda: 1000 * next(now_us)),
    }
    for name, one in replaced.items():
        monkeypatch.setattr(replan, name, one)
    store = SimpleNamespace(read=lambda *_, **__: [])
    bench: Any = SimpleNamespace(socket=None, device="bench", store=store, active=list)
    bench.planner = bench.committed = lambda *_: None
    bench.run_plan, bench.until = push, until
    (row,) = rounds(bench, 1)
    assert [row["stall_ms"], row["stall_back_ms"], row["lost"]] == pytest.approx([0.0, 480.0, 4])
    assert figures_of([row])["stall_longest_ms"] == pytest.approx(480.0)


def round_of(how: str, active_ms: float) -> dict[str, Any]:
    return {"how": how, "trigger_to_active_ms": active_ms, "stall_ms": 4.0, "stall_back_ms": 1.0, "lost": 1}


def test_rounds_before_one_that_gets_nowhere_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_rounds(*_: object) -> Iterator[dict[str, Any]]:
        yield from (round_of("proven", 40.0), round_of("trial", 900.0))
        raise TimeoutError("no better plan is active")

    monkeypatch.setattr(replan, "rounds", two_rounds)
    monkeypatch.setattr(replan, "Bench", lambda *_, **__: nullcontext(SimpleNamespace(prepare=list)))
    report = Report("replan")
    with pytest.raises(TimeoutError):
        replan.measure(report, argparse.Namespace(quick=True))
    assert len(report.rows) == 2
    assert report.figures == figures_of([round_of("proven", 40.0), round_of("trial", 900.0)])
    assert report.figures["proven_active_p50_ms"] == 40.0 and report.figures["lost_tasks"] == 2.0


def test_where_no_plan_was_proven_there_is_no_time_to_one() -> None:
    assert not any("proven_active" in name for name in figures_of([round_of("trial", 900.0)]))
