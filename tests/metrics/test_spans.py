"""Spans as a collector gets them."""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.cli.app import execute
from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.trace import command
from stageloom.edge_agent.trace.command import write_trace
from stageloom.edge_agent.trace.spans import task_spans
from stageloom.edge_agent.worker.recorder import RecordingBatch, RecordingSummary, TaskEntry
from stageloom.planner.cli.plan_trace import plan_spans
from stageloom.planner.schema.plan import HistoryEntry
from stageloom.planner.schema.replan import ReplanInfo, TrialInfo
from stageloom.shared.errors import ExitCode, UnavailableError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.spans import RecordedSpan, send_spans
from tests.agent.models import ROW_SHAPE, write_tiny
from tests.agent.process import AgentProcess
from tests.metrics.collector import collector

WALL_US, MONOTONIC_S = 1_700_000_000_000_000, 500.0


def sent(spans: list[RecordedSpan]) -> list[Any]:
    """What a collector makes of them."""
    with collector() as (url, found):
        assert send_spans(spans, url, "tried") == len(found)
    return found


def test_each_task_is_a_trace_of_what_it_waited_and_ran() -> None:
    tasks = [
        TaskEntry(1, ("a",), 499.0, 499.25, 499.5, "completed"),
        TaskEntry(2, ("a", "b"), 499.5, None, 499.75, "expired"),
    ]
    found = sent(task_spans(tasks, WALL_US, MONOTONIC_S))
    roots = {one.trace_id: one for one in found if not one.parent_span_id}
    assert len(roots) == 2
    parts = [
        (
            roots[one.trace_id].attributes[0].value.string_value,
            one.name,
            one.start_time_unix_nano // 1000 - WALL_US,
            one.end_time_unix_nano // 1000 - WALL_US,
        )
        for one in found
    ]
    assert sorted(parts) == [
        ("a", "queue", -1_000_000, -750_000),
        ("a", "run", -750_000, -500_000),
        ("a", "task", -1_000_000, -500_000),
        ("a,b", "queue", -500_000, -250_000),
        ("a,b", "task", -500_000, -250_000),
    ]
    for one in found:
        if one.parent_span_id:
            assert one.parent_span_id == roots[one.trace_id].span_id
    assert [(one.status.code, one.status.message) for one in roots.values()] == [(0, ""), (2, "expired")]


def test_plan_goes_from_the_alarm_over_its_search_and_trial_to_the_verdict() -> None:
    def entry(generation: int, state: str, at_us: int) -> HistoryEntry:
        return HistoryEntry(
            device=DeviceId("edge"),
            epoch=1,
            generation=generation,
            plan=f"plan{generation}",
            digest=None,
            decided_by="replan",
            state=state,
            reason="slower" if state == "rejected" else "",
            at_us=at_us,
        )

    trial = TrialInfo(
        device=DeviceId("edge"),
        epoch=1,
        generation=2,
        origin="planner",
        how="trial",
        verdict="reject",
        candidate=Digest("a" * 64),
        control=None,
        environment="",
        ratio=0.9,
        ratio_low=None,
        ratio_high=None,
        pairs=3,
        began_us=5_000_000,
        decided_us=9_000_000,
        reason="",
    )
    replan = ReplanInfo(
        replan=1,
        device=DeviceId("edge"),
        cause="deadline",
        value=1.0,
        threshold=1.0,
        at_us=1_000_000,
        boot=1,
        alarm=1,
        control=None,
        plan="plan2",
        digest=None,
        epoch=1,
        generation=2,
        how="search",
        predicted=None,
        outcome="rejected",
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        pairs=0,
        trigger_to_decision_ms=None,
        trigger_to_active_ms=None,
        later_alarms=0,
        reason="",
    )
    entries = [entry(2, "rejected", 4_000_000), entry(1, "committed", 500_000)]
    found = sent(plan_spans(entries, {(1, 2): replan}, {(1, 2): trial}))
    times = [(one.name, one.start_time_unix_nano // 10**9, one.end_time_unix_nano // 10**9) for one in found]
    assert times == [("search", 1, 4), ("trial", 5, 9), ("plan", 1, 9), ("plan", 0, 0)]
    assert [(one.status.code, one.status.message) for one in found if not one.parent_span_id] == [
        (2, "slower"),
        (0, ""),
    ]
    verdict = {one.key: one.value.string_value for one in found[1].attributes}
    assert verdict == {"stageloom.verdict": "reject", "stageloom.how": "trial"}


def test_many_spans_come_in_several_requests() -> None:
    many = [RecordedSpan(name=str(number), began_us=number, ended_us=number) for number in range(4_500)]
    assert [one.name for one in sent(many)] == [one.name for one in many]


def test_collector_that_takes_nothing_is_an_error() -> None:
    span = RecordedSpan(name="one", began_us=1, ended_us=2)
    with collector(400) as (url, _), pytest.raises(UnavailableError, match="did not take the spans"):
        send_spans([span], url, "tried")


def test_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UnavailableError, match=r"stageloom\[otel\]"):
        send_spans([], "http://127.0.0.1:9", "tried")


def test_tasks_of_an_agent_that_serves_reach_the_collector_on_the_wall_clock(tmp_path: Path) -> None:
    file, home = write_tiny(tmp_path / "net.onnx"), tmp_path / "home"
    models = (ModelFile(path=str(file), name="net"),)
    with AgentProcess(home, models=models, executor="null") as agent:
        agent.until_ready()
        stop = threading.Event()

        def serve() -> None:
            with Client(agent.socket) as client:
                while not stop.is_set():
                    client.run("net", {"input": np.zeros(ROW_SHAPE, np.float32)}, timeout_s=60)

        thread = threading.Thread(target=serve)
        thread.start()
        said: list[str] = []
        try:
            with collector() as (url, sent):
                out = tmp_path / "trace.json"
                found = write_trace(agent.home, agent.socket, 0.3, out, None, said.append, url)
        finally:
            stop.set()
            thread.join()
    names = Counter(span.name for span in sent)
    assert names == dict.fromkeys(("task", "queue", "run"), found["spans"] / 3)
    assert found["spans"] > 0
    assert all(abs(span.end_time_unix_nano / 1e9 - time.time()) < 3600 for span in sent)


def test_packages_that_spans_need_are_missed_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    said: list[str] = []
    with pytest.raises(UnavailableError, match=r"stageloom\[otel\]"):
        write_trace(tmp_path, tmp_path, 0.1, tmp_path / "trace.json", None, said.append, "http://127.0.0.1:9")
    assert said == []


def test_trace_whose_spans_are_not_taken_is_there_and_said_beside_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = RecordingBatch([], [], [], [TaskEntry(1, ("a",), 1.0, 1.25, 1.5, "completed")])
    recorded = batch, RecordingSummary(0.0, 9.0, {}, 0, 0.0)
    monkeypatch.setattr(command, "record", lambda socket, seconds: recorded)
    out = tmp_path / "trace.json"
    with collector(400) as (url, _):
        code = execute(["trace", "-o", str(out), "--otlp", url, "--home", str(tmp_path), "--json"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (code, found["file"], found["spans"]) == (ExitCode.UNAVAILABLE, str(out), 0)
    assert "did not take the spans" in said.err and found["unsent"] in said.err
    assert len(json.loads(out.read_text())["traceEvents"]) > 0
