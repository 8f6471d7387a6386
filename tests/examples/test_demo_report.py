"""The demo's report: what it promises is checked, and what a person sees stands alone."""

import json
import math
import subprocess
import sys
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from examples.demo.checks import SCHEMA, check
from examples.demo.compare import Ratio, compare
from examples.demo.load import arrivals
from examples.demo.page import render
from examples.demo.report import WINDOW_US, merged, percentile, timeline, total_tasks

DIGEST = "ab" * 32


def replan(proposer: str, **changes: Any) -> dict[str, Any]:
    """A re-plan whose plan won its trial."""
    return {
        "at_s": 4.0,
        "trigger": "variance",
        "value": 0.4,
        "threshold": 0.25,
        "proposer": proposer,
        "plan": DIGEST,
        "scheduler": {"learned": "maddpg", "plain": "ios"}[proposer],
        "blocks": 24,
        "same_structure": False,
        "looked_at": 7,
        "predicted": 0.93,
        "outcome": "committed",
        "ratio": 1.08,
        "interval": [1.03, 1.13],
        "pairs": 9,
        "trigger_to_plan_ms": 180.0,
        "trigger_to_decision_ms": 21_000.0,
        "trigger_to_active_ms": 21_010.0,
        "reason": "better by more than 2%",
        **changes,
    }


NO_GAIN: dict[str, Any] = {
    "outcome": "no_gain",
    "ratio": 1.0,
    "interval": [0.97, 1.03],
    "trigger_to_active_ms": None,
    "reason": "no difference of 2% is sure after 20 pairs",
}
NOTHING: dict[str, Any] = {
    **NO_GAIN,
    "plan": None,
    "scheduler": "",
    "blocks": None,
    "ratio": None,
    "interval": None,
    "pairs": 0,
    "reason": "no plan to try: 1 equal to the plan that runs",
}


def sound_report() -> dict[str, Any]:
    """A report that holds everything it promises."""
    tasks = {"submitted": 60, "completed": 57, "refused": 1, "cancelled": 0, "expired": 2, "failed": 0}
    models = [
        {
            "name": name,
            "artifact": DIGEST,
            "operators": 120,
            "blocks": 13,
            "rate_per_s": 5.0,
            "throughput_per_s": 4.9,
            "latency_p50_ms": 20.0,
            "latency_p99_ms": 90.0,
            "latencies_ms": [10.0, 20.0, 90.0],
            "tasks": tasks,
        }
        for name in ("one", "two", "<three>")
    ]
    return {
        "version": 2,
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 12.0,
        "machine": {"processor": "x", "cores": 2, "memory_mib": 1024, "system": "Linux"},
        "versions": {"python": "3.11"},
        "models": models,
        "tasks": total_tasks(models),
        "first_valid_plan_s": 0.01,
        "plan_bytes": {"text": 1900, "wire": 800},
        "generations": [
            {
                "generation": 1,
                "plan": DIGEST,
                "scheduler": "greedy",
                "decided_by": "operator",
                "state": "committed",
                "active_at_s": -1.5,
            }
        ],
        "telemetry": {"produced": 10, "stored": 9, "dropped": 1},
        "difference": 1e-6,
        "sensitivity": 0.5,
        "samples": 12,
        "replans": [replan("learned"), replan("plain", **NO_GAIN)],
        "policy": {
            "digest": DIGEST,
            "trained_for": "twin cpu",
            "device_class": "<cpu> x2",
            "had_say": True,
            "reason": "",
        },
        "comparison": compare(replan("learned"), replan("plain", **NO_GAIN)),
        "queues": {
            "at_s": [0.0, 1.0],
            "tasks": {"one": [0, 1], "two": [2, 0], "<three>": [0, 0]},
            "work_s": {"one": [0.0, 0.1], "two": [0.2, 0.0], "<three>": [0.0, 0.0]},
            "variance_s2": [0.0089, 0.0022],
            "threshold_s2": 0.25,
        },
        "predicted": [
            {
                "plan": DIGEST,
                "block": "<three>#0.2",
                "steps": 40,
                "predicted_ms": 1.5,
                "measured_ms": 2.5,
            }
        ],
        "timeline": [
            {
                "track": "lane 0 stream 1",
                "planned": planned,
                "model": "<three>",
                "block": 2,
                "operators": "0-3",
                "started_ms": 0.5,
                "ended_ms": 1.5,
            }
            for planned in (False, True)
        ],
        "schedules": [{"members": "one#0.0", "stage_string": "0..6"}],
    }


def broken(*path: str | int, value: Any) -> dict[str, Any]:
    report = deepcopy(sound_report())
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
        (("tasks",), {**sound_report()["tasks"], "failed": 1, "submitted": 181}, "1 tasks failed"),
        (
            ("tasks",),
            {"submitted": 100, "completed": 100, "refused": 0, "cancelled": 0, "expired": 0, "failed": 0},
            "only 100 tasks",
        ),
        (("telemetry", "stored"), 8, "telemetry does not add up"),
        (("first_valid_plan_s",), 1.0, "first valid plan took"),
        (("difference",), 2e-4, "differ from onnxruntime"),
        (("sensitivity",), 1e-2, "hardly depend"),
        (("plan_bytes", "wire"), 1025, "plan_bytes/wire"),
        (("models",), sound_report()["models"][:2], "models"),
        (("replans",), [], "replans"),
        (("replans", 0, "value"), 0.2, "not above 0.25"),
        (("replans", 0, "outcome"), "no_gain", "yet its plan became active"),
        (("replans", 0, "trigger_to_active_ms"), None, "never became active"),
        (("replans", 0, "ratio"), 1.2, "outside its interval"),
        (("replans", 0, "outcome"), "pending", "pending"),
        (("replans", 0, "scheduler"), "ios", "learned policy's plan is by ios"),
        (("comparison", "winner"), "plain", "not what the re-plans say"),
        (("comparison",), None, "had say, and the comparison is None"),
        (("policy", "had_say"), False, "had no say"),
        (("replans", 1, "proposer"), "", "plain was compared and never asked"),
        (("timeline",), [], "timeline"),
        (("surprise",), 1, "surprise"),
    ],
)
def test_a_broken_promise_is_named(path: tuple[str, ...], value: Any, words: str) -> None:
    (problem, *_) = check(broken(*path, value=value))
    assert words in problem


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert [percentile(values, f) for f in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_tasks_arrive_as_often_as_asked_and_not_after_the_end() -> None:
    at_s = list(arrivals(Random(1), 20.0, 300.0))
    assert at_s == sorted(at_s) and at_s[-1] < 300.0
    assert abs(len(at_s) - 6000) < 4 * math.sqrt(6000)  # four standard deviations of a Poisson count
    assert list(arrivals(Random(1), 20.0, 100.0)) == [at for at in at_s if at < 100.0]


def test_a_bursts_client_counts_with_its_model() -> None:
    usual = {"model": "one", "rate_per_s": 2.0, "began_s": 1.0, "seconds": 60.0}
    loads = [
        {**usual, "submitted": 5, "outcomes": {"completed": 5}, "latencies_ms": [1.0]},
        {
            **usual,
            "seconds": 4.0,
            "submitted": 9,
            "outcomes": {"completed": 6, "expired": 3},
            "latencies_ms": [8.0],
        },
    ]
    assert merged(loads) == {
        **usual,
        "submitted": 14,
        "outcomes": {"completed": 11, "expired": 3},
        "latencies_ms": [1.0, 8.0],
    }


def test_two_independent_ratios_over_the_same_plan_are_compared_through_it() -> None:
    """ln 1.21 - ln 1.1 = ln 1.1; half widths of ln 1.03 and ln 1.04 make one of their root sum of squares."""
    mine, its = Ratio(1.21, 1.21 / 1.03, 1.21 * 1.03), Ratio(1.1, 1.1 / 1.04, 1.1 * 1.04)
    over, half = mine.over(its), math.exp(math.hypot(math.log(1.03), math.log(1.04)))
    assert (over.value, over.low, over.high) == pytest.approx((1.1, 1.1 / half, 1.1 * half))
    same = mine.over(Ratio(1.0, 1.0, 1.0))
    assert (same.value, same.low, same.high) == pytest.approx((mine.value, mine.low, mine.high))


@pytest.mark.promise("learned-policy-s-plan")
@pytest.mark.parametrize(
    ("learned", "plain", "winner", "ratio", "words"),
    [
        ({}, NO_GAIN, "learned", 1.08, "the learned policy won"),
        (NO_GAIN, {}, "plain", 1 / 1.08, "the plain replanner won"),
        ({}, NOTHING, "learned", 1.08, "found nothing better"),
        (NOTHING, {}, "plain", 1 / 1.08, "the plain replanner won"),
        (NO_GAIN, NOTHING, "neither", 1.0, "neither gained"),
        ({}, {}, "neither", 1.0, "not sure"),
        ({"ratio": 1.5, "interval": [1.4, 1.6]}, {}, "learned", 1.5 / 1.08, "the learned policy won"),
        ({}, {"ratio": 1.5, "interval": [1.4, 1.6]}, "plain", 1.08 / 1.5, "the plain replanner won"),
        (
            {**NO_GAIN, "outcome": "rejected", "ratio": 1.4, "interval": [1.3, 1.5]},
            {},
            "plain",
            1.4 / 1.08,
            "rejected",
        ),
        (
            NO_GAIN,
            {"same_structure": True, "ratio": None, "interval": None, "pairs": 0},
            "neither",
            1.0,
            "launch intervals alone",
        ),
        ({**NO_GAIN, "ratio": None, "interval": None}, {}, "plain", None, "nothing was measured"),
    ],
)
def test_the_one_whose_plan_the_device_took_won_and_of_two_the_one_that_is_surely_better(
    learned: dict[str, Any], plain: dict[str, Any], winner: str, ratio: float | None, words: str
) -> None:
    found = compare(replan("learned", **learned), replan("plain", **plain))
    assert found["winner"] == winner and words in found["text"]
    assert found["ratio"] == (None if ratio is None else pytest.approx(ratio))
    assert (found["interval"] is None) == (ratio is None)


class _Page(HTMLParser):
    """Collects what would be fetched, and checks that tags close."""

    VOID = {"meta"}  # noqa: RUF012

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
def test_the_page_stands_alone_and_escapes_names() -> None:
    page = _Page()
    page.feed(render(sound_report()))
    assert page.open == [] and page.fetched == []
    assert "<three>" in page.text and "171 of 180" in page.text and "0..6" in page.text
    assert "On this machine the learned policy won." in page.text and "<cpu> x2" in page.text


def test_without_a_policy_the_report_says_why_and_compares_nothing() -> None:
    report = sound_report()
    report["replans"] = [replan("plain")]
    report["comparison"] = None
    report["policy"] = {
        "digest": None,
        "trained_for": None,
        "device_class": None,
        "had_say": False,
        "reason": "no policy was trained for networks of width 0.5",
    }
    assert check(report) == []
    assert "networks of width 0.5" in render(report)
    report["policy"]["reason"] = ""
    assert check(report) == ["the policy had no say, and nothing says why"]


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
