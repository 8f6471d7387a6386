"""The demo's report: what it promises is checked, and what a person sees stands alone."""

import json
import math
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from matplotlib.figure import Figure
from msgspec import structs

from benchmarks.pays.intervals import Tasks
from benchmarks.pays.load import Application
from examples.demo import load
from examples.demo.checks import SCHEMA, check
from examples.demo.load import StayingLoad
from examples.demo.page import Chart, render
from examples.demo.report import (
    AFTER,
    BEFORE,
    BUSILY,
    FITTING,
    NAIVELY,
    STAYING,
    WINDOW_US,
    Served,
    timeline,
    verdict,
)
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.shared.ids import DeviceId, Digest

DIGEST = Digest("ab" * 32)
BEGAN_US = 1_000_000_000


def served(who: str, load: str, latency_s: float, late: int = 0) -> Served:
    """Four windows of twenty tasks, of which some are late in each."""
    latency = np.full(20, latency_s)
    every = np.full(20, True)
    windows = [Tasks(latency * (1.0 + 0.01 * n), np.arange(20) >= late, every) for n in range(4)]
    return Served(who=who, load=load, rate_per_s=10.0, window_s=2.0, windows=windows)


SERVED = [
    served(NAIVELY, BUSILY, 0.4, late=12),
    served(FITTING, BUSILY, 0.1),
    served(BEFORE, BUSILY, 0.3, late=10),
    served(AFTER, STAYING, 0.1, late=1),
]


def answer(**changes: Any) -> ReplanInfo:
    """A re-plan whose plan won its trial."""
    info = ReplanInfo(
        replan=1,
        device=DeviceId("bench"),
        cause="oldest_age",
        value=0.4,
        threshold=0.25,
        at_us=BEGAN_US + 5_000_000,
        boot=1,
        alarm=1,
        control=DIGEST,
        plan=DIGEST[:12],
        digest=DIGEST,
        epoch=1,
        generation=2,
        how="trial",
        predicted=0.9,
        outcome="committed",
        ratio=1.4,
        ratio_low=1.2,
        ratio_high=1.6,
        pairs=9,
        trigger_to_decision_ms=24_900.0,
        trigger_to_active_ms=25_000.0,
        later_alarms=0,
        reason="better by more than 2%",
    )
    return structs.replace(info, **changes)


def sound_report() -> dict[str, Any]:
    """A report that holds everything it promises; whoever asks may change it."""
    found: dict[str, Any] = json.loads(_sound_report())
    return found


@cache
def _sound_report() -> str:
    plan = {
        "digest": DIGEST,
        "scheduler": "sequential",
        "how": "1 lane, 1 blocks, onnx x2",
        "wire_bytes": 500,
        "text": "plan <text>",
        "stages": [{"members": "one#0.0", "stage_string": "0..6"}],
    }
    report = {
        "version": 4,
        "started_at": "2026-01-01T00:00:00+00:00",
        "machine": {"processor": "<cpu> x2", "cores": 2, "memory_mib": 1024, "system": "Linux"},
        "versions": {"python": "3.11"},
        "verdict": verdict(SERVED, answer(), [answer()], 10.0, BEGAN_US),
        "capacity_per_s": 10.0,
        "models": [
            {"name": name, "artifact": DIGEST, "operators": 120, "weight": 1, "deadline_ms": 100.0}
            for name in ("one", "<two>")
        ],
        "tasks": {"submitted": 60, "completed": 57, "expired": 2, "refused": 1, "lost": 0},
        "served": [one.entry() for one in SERVED],
        "load": {
            "rate_per_s": 10.0,
            "at_s": [0.0, 2.0],
            "in_time_per_s": [5.0, 9.5],
            "p99_ms": [None, 100.0],
            "moments": [{"at_s": 1.0, "text": "alarm: oldest age"}, {"at_s": 1.1, "text": "new plan"}],
            "variance": {"at_s": [0.0, 1.0], "s2": [0.4, 0.1]},
        },
        "replans": [
            {
                "at_s": 5.0,
                "trigger": "oldest_age",
                "value": 0.4,
                "threshold": 0.25,
                "plan": DIGEST[:12],
                "how": "trial",
                "predicted": 0.9,
                "outcome": "committed",
                "ratio": 1.4,
                "interval": [1.2, 1.6],
                "pairs": 9,
                "trigger_to_decision_ms": 24_900.0,
                "trigger_to_active_ms": 25_000.0,
                "reason": "better by more than 2%",
            }
        ],
        "paper": {
            "plan": "paper",
            "one_by_one_ms": 100.0,
            "side_by_side_ms": 60.0,
            "predicted": 0.8,
            "verdict": "rejected",
            "ratio": 0.7,
            "interval": [0.6, 0.8],
            "pairs": 8,
            "seconds": 12.0,
            "reason": "worse by more than 2%",
        },
        "plans": [{"plan": name, **plan} for name in ("first", "paper")],
        "telemetry": {"produced": 10, "stored": 9, "dropped": 1},
        "difference": 1e-6,
        "sensitivity": 0.5,
        "samples": 12,
        "timeline": [
            {
                "track": "lane 0 stream 1",
                "planned": planned,
                "model": "<two>",
                "block": 0,
                "operators": "0-3",
                "started_ms": 0.5,
                "ended_ms": 1.5,
            }
            for planned in (False, True)
        ],
    }
    return json.dumps(report)


def broken(*path: str | int, value: Any) -> dict[str, Any]:
    report = sound_report()
    place: Any = report
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return report


def test_the_schema_is_a_schema_and_a_sound_report_has_no_problem() -> None:
    Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))
    assert check(sound_report()) == []


@pytest.mark.promise("promise-report-checked-page")
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("tasks", "submitted"), 181, "do not add up"),
        (("tasks",), {**sound_report()["tasks"], "lost": 1, "submitted": 61}, "1 tasks were lost"),
        (("telemetry", "stored"), 8, "telemetry does not add up"),
        (("served", 0, "p99_ms"), [50.0, 51.0, 52.0], "p99_ms 50.0 lies outside"),
        (("served", 3, "in_time"), 81, "more tasks in time than there were"),
        (("difference",), 2e-3, "differ from onnxruntime"),
        (("sensitivity",), 1e-2, "hardly depend"),
        (("served",), sound_report()["served"][:2], "served"),
        (("replans", 0, "outcome"), "no_gain", "yet its plan became active"),
        (("replans", 0, "trigger_to_active_ms"), None, "never became active"),
        (("replans", 0, "ratio"), 1.7, "outside its interval"),
        (("replans", 0, "outcome"), "pending", "pending"),
        (("paper", "ratio"), 0.9, "act three states the ratio 0.9 outside"),
        (("timeline",), [], "timeline"),
        (("verdict",), "", "verdict"),
        (("surprise",), 1, "surprise"),
    ],
)
def test_a_broken_promise_is_named(path: tuple[str, ...], value: Any, words: str) -> None:
    (problem, *_) = check(broken(*path, value=value))
    assert words in problem


def test_a_p99_that_falls_on_tasks_without_a_result_is_none_and_the_page_says_how_many_had_none() -> None:
    """What such a task counts as, twice its deadline, is no latency that anybody saw."""
    answered = np.arange(20) >= 2
    windows = [Tasks(np.full(20, 0.1), answered, answered) for _ in range(3)]
    entry = Served(who=NAIVELY, load=BUSILY, rate_per_s=10.0, window_s=2.0, windows=windows).entry()
    assert (entry["p99_ms"], entry["given_up"]) == (None, 0.1)
    report = broken("served", 0, value=json.loads(json.dumps(entry)))
    assert check(report) == []
    assert "none: 10 % had no result" in render(report)
    assert all(one.entry()["p99_ms"] is not None for one in SERVED)


def test_of_fewer_than_four_windows_a_report_has_no_interval_and_its_page_shows_none() -> None:
    few = [replace(one, windows=one.windows[:2]).entry() for one in SERVED]
    assert few[0]["in_time_per_s"] == (4.0, None, None)
    report = broken("served", value=json.loads(json.dumps(few, allow_nan=False)))
    assert check(report) == []
    assert "<br>" in render(sound_report()) and "<br>" not in render(report)


def test_a_task_that_never_ends_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def submit(*asked: Any, **options: Any) -> "Future[Any]":
        begun.set()
        return Future()

    client: Any = SimpleNamespace(submit=submit)
    models: Any = [SimpleNamespace(name="one", feeds=lambda number: [{}] * number)]
    application = Application(client, models, [math.inf])
    monkeypatch.setattr(load, "_DRAIN_S", 0.0)
    staying = StayingLoad(application, [1.0], 1e3, seed=1)
    assert begun.wait(60.0)
    staying.end()
    assert application.submitted == application.outcomes["lost"] == application.outcomes.total() > 0


def test_the_sentence_says_what_was_gained_or_why_nothing_was() -> None:
    gained = verdict(SERVED, answer(), [answer()], 10.0, BEGAN_US)
    assert gained.startswith(
        "The load rose to 10.0 tasks a second and stayed; 30 s later the device ran another plan"
    )
    assert "1.40 times as good in its trial: 9.5 instead of 5.0 tasks a second in time" in gained
    assert "Default sessions serve 4.0/s" in gained
    without = SERVED[:-1]
    assert "raised no alarm" in verdict(without, None, [], 10.0, BEGAN_US)
    lost = answer(outcome="no_gain", reason="no difference of 2% is sure", trigger_to_active_ms=None)
    assert "of 1 re-plans ended with no gain, no difference" in verdict(without, None, [lost], 10.0, BEGAN_US)


class _Page(HTMLParser):
    """Collects what would be fetched, and checks that tags close."""

    VOID = {"meta", "br"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.promise("promise-report-checked-page")
def test_the_page_stands_alone_begins_with_the_sentence_and_escapes_names() -> None:
    page = _Page()
    page.feed(render(sound_report()))
    assert page.open == [] and page.fetched == []
    assert (
        "<two>" in page.text
        and "<cpu> x2" in page.text
        and "plan <text>" in page.text
        and "0..6" in page.text
    )
    first = page.text.split("Stageloom demo")[2].strip()
    assert first.startswith("The load rose to 10.0 tasks a second and stayed")
    for who in (NAIVELY, BEFORE, AFTER):
        assert who in page.text
    assert "rejected" in page.text and "0.700 (0.600 to 0.800)" in page.text


@pytest.mark.promise("promise-report-checked-page")
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_quick_demo_keeps_its_promises(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--quick", "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-500:]
    assert check(json.loads(run.stdout)) == []
    assert (tmp_path / "report.html").stat().st_size > 10_000


def _trace() -> dict[str, Any]:
    """Steps that each run one group of a millisecond: sparse at first, then one every two milliseconds."""
    begins_us = [*range(0, 1_000_000, 100_000), *range(1_000_000, 1_400_000, 2_000)]
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": 1001, "args": {"name": "lane 0 stream 0"}}
        for pid in (1, 2)
    ]
    for step, at_us in enumerate(begins_us):
        arguments = {"step": step, "model": "one", "block": 0, "operators": "0-3"}
        for pid, late_us in ((1, 0.0), (2, 500.0)):
            span = {"name": "one", "ph": "X", "ts": at_us + late_us, "dur": 1000.0, "pid": pid, "tid": 1001}
            events.append({**span, "cat": "group", "args": arguments})
    return {"traceEvents": events}


@pytest.mark.promise("trace-obeys-chrome-event")
def test_the_page_draws_the_busiest_window_of_the_trace_measured_and_planned() -> None:
    found = timeline(_trace())
    measured = [item for item in found if not item["planned"]]
    assert len(measured) == len(found) - len(measured) == WINDOW_US // 2_000 + 1
    assert [item["started_ms"] for item in measured[:2]] == [0.0, 2.0]
    assert found[-1]["started_ms"] == measured[-1]["started_ms"] + 0.5
    assert {item["ended_ms"] - item["started_ms"] for item in found} == {1.0}
    page = render(sound_report() | {"timeline": found})
    assert page.count("one block 0, operators 0-3") == len(found)
    assert "lane 0 stream 0, planned" in page


@pytest.mark.parametrize("second_s", [31.0, 45.0, 60.0, 75.0, 95.0])
def test_texts_of_neighbouring_moments_stand_in_rows_of_their_own_where_they_would_touch(
    second_s: float,
) -> None:
    """Late texts end at their moment: they reach back to the one before."""
    axes = Figure(figsize=(6.0, 3.0)).subplots()
    axes.set_xlim(0.0, 100.0)
    Chart([axes]).marks([(70.0, "new plan"), (second_s, "act three")])
    one, other = (text.get_window_extent() for text in axes.texts)
    assert not one.overlaps(other)


@pytest.mark.parametrize("at_s", [66.0, 70.0, 75.0, 79.0, 90.0])
def test_the_text_of_a_moment_stays_within_the_chart(at_s: float) -> None:
    axes = Figure(figsize=(6.0, 3.0)).subplots()
    axes.set_xlim(0.0, 100.0)
    Chart([axes]).marks([(at_s, "alarm: oldest age")])
    (text,) = axes.texts
    extent = text.get_window_extent()
    assert axes.bbox.x0 <= extent.x0 and extent.x1 <= axes.bbox.x1
