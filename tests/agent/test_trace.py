"""Traces: what was recorded is drawn where it ran, in the Chrome event format, beside what was planned."""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.store import ArtifactStore
from stageloom.edge_agent.trace.chrome import MEASURED, PLANNED, QUEUES, chrome_trace
from stageloom.edge_agent.trace.command import (
    bound_plans,
    costs_text,
    read_costs,
    record,
    trace_text,
    write_trace,
)
from stageloom.edge_agent.trace.timeline import Timeline, timeline
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import Command, StartRecording
from stageloom.edge_agent.worker.recorder import (
    Recorder,
    RecordingBatch,
    RecordingSummary,
    StepEntry,
    SwapEntry,
    TaskEntry,
)
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import InputError, SettingError, UnavailableError
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.launch_list import lower
from stageloom.shared.plan import ExecutorOptions, Place, PlacementPolicy, Resource
from stageloom.shared.search.assignment import Assignment
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from tests.agent.chrome_format import problems
from tests.agent.conftest import Hosted, eventually
from tests.agent.models import ROW_SHAPE, import_tiny, plan_for, write_tiny
from tests.agent.process import AgentProcess
from tests.executor.models import artifact_of, random_inputs

Trace = dict[str, Any]


def _record(executor: NullExecutor | OnnxExecutor, models: Mapping[str, Artifact], **how: Any) -> Timeline:
    """Two tasks of each model, all at once, under a plan of stages with groups side by side."""
    graphs = {model.digest: model.graph for model in models.values()}
    choices = [
        ModelChoice(name=name, artifact=model.digest, graph=model.graph, partition="paper")
        for name, model in models.items()
    ]
    plan = compose(choices, scheduler="greedy", **how)
    recorder, ended = Recorder(), threading.Semaphore(0)
    with InProcessEngine(executor) as shell:
        shell.record(recorder)
        shell.activate(shell.load(plan, {model.digest: model for model in models.values()}))
        for name, model in models.items():
            for _ in range(2):
                shell.submit(name, random_inputs(model.graph, 1), on_end=lambda end: ended.release())
        for _ in range(2 * len(models)):
            assert ended.acquire(timeout=60.0)
        shell.record(None)
    batch = recorder.take()
    assert batch is not None
    end_s = max(step.ended_s for step in batch.steps)
    recorded = RecordingSummary(batch.swaps[0].at_s, end_s, {}, 0, recorder.own_s)
    costs = CostTable(
        measured_s={(d, OpId(op)): 1e-4 for d, g in graphs.items() for op in range(len(g.operators))}
    )
    return timeline(batch, recorded, {1: bind(plan, graphs)}, costs)


@pytest.fixture(scope="module")
def models() -> dict[str, Artifact]:
    return {"a": artifact_of("squeezenet"), "b": artifact_of("inception_v3", side=75)}


@pytest.fixture(scope="module")
def found(models: dict[str, Artifact]) -> Timeline:
    return _record(OnnxExecutor(), models, combination=Combination.ALIGNED, lanes=2)


@pytest.fixture(scope="module")
def trace(found: Timeline) -> Trace:
    return chrome_trace(found, costs="measured")


def _spans(trace: Trace, pid: int, category: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["cat"] == category]


@pytest.mark.promise("trace-obeys-chrome-event")
def test_a_trace_obeys_the_chrome_event_format(trace: Trace) -> None:
    assert problems(trace) == []


@pytest.mark.promise("trace-obeys-chrome-event")
def test_every_operator_of_every_task_is_in_the_trace_once(
    found: Timeline, models: dict[str, Artifact]
) -> None:
    for runs in (found.runs, found.planned):
        for name, model in models.items():
            ran = [op for run in runs if run.model == name for op in run.operators]
            assert sorted(ran) == sorted(2 * list(range(len(model.graph.operators))))


def test_groups_lie_within_their_step_on_a_track_per_lane_and_stream(trace: Trace) -> None:
    steps = {step["args"]["step"]: step for step in _spans(trace, MEASURED, "step")}
    groups = _spans(trace, MEASURED, "group")
    assert len({group["tid"] for group in groups}) > len({step["tid"] for step in steps.values()})
    for group in groups:
        step = steps[group["args"]["step"]]
        assert step["ts"] - 0.001 <= group["ts"]
        assert group["ts"] + group["dur"] <= step["ts"] + step["dur"] + 0.002
        assert group["tid"] // 1000 == step["tid"] // 1000, "the track of another lane"


def test_names_of_tracks_say_lane_and_stream(trace: Trace) -> None:
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"lane 0 steps", "lane 0 stream 0", "launches of a"} <= names
    # Which lane ran a second group beside the first is the machine's affair.
    assert any(re.fullmatch(r"lane \d stream [1-9]", name) for name in names)


def test_the_planned_items_take_what_their_operators_cost_and_obey_their_waits(
    found: Timeline, models: dict[str, Artifact]
) -> None:
    for run in found.planned:
        assert run.ended_s - run.began_s == pytest.approx(1e-4 * len(run.operators))
    begun: dict[tuple[int, int], float] = {}  # per lane and stream when the last planned item ended
    for run in found.planned:
        assert run.began_s >= begun.get((run.lane, run.stream), 0.0) - 1e-12
        begun[run.lane, run.stream] = run.ended_s


def test_a_planned_barrier_waits_for_all_groups_of_the_stage_before() -> None:
    model = artifact_of("squeezenet")
    choice = ModelChoice(name="net", artifact=model.digest, graph=model.graph, partition="whole")
    plan = compose([choice], scheduler="greedy")
    bound = bind(plan, {model.digest: model.graph})
    entry = StepEntry(0, 0, 1, 0, 1, (0,), (0,), False, 5.0, 6.0, ())
    runs = timeline(
        RecordingBatch([entry], [], [], []), RecordingSummary(5.0, 7.0, {}, 0, 0.0), {1: bound}, CostTable()
    ).planned
    ends: dict[int, float] = {}
    for item, run in zip(lower(plan.combined[0].schedule, bound.combined[0].graph, 1), runs, strict=True):
        assert all(run.began_s >= ends[wait] for wait in item.waits)
        ends[len(ends)] = run.ended_s
    assert runs[0].began_s == 5.0


def test_launches_queues_tasks_and_the_first_plan_are_there(trace: Trace) -> None:
    events = trace["traceEvents"]
    launches = [e for e in events if e["ph"] == "i" and e["cat"] == "launch"]
    assert sum(e["args"]["tasks"] for e in launches) == 4
    assert {e["name"] for e in events if e["ph"] == "C"} == {"queue a", "queue b"}
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 4
    assert [len(e["args"]["plan"]) for e in events if e.get("cat") == "swap"] == [64]


def test_a_task_of_which_no_step_began_was_queued_until_its_end() -> None:
    tasks = [TaskEntry(1, ("a",), 1.0, None, 1.5, "expired"), TaskEntry(2, ("a",), 1.0, 1.25, 2.0, "expired")]
    batch, recorded = RecordingBatch([], [], [], tasks), RecordingSummary(0.0, 9.0, {}, 0, 0.0)
    trace = chrome_trace(timeline(batch, recorded, {}, CostTable()), costs="estimated")
    ends = [event["args"] for event in trace["traceEvents"] if event["ph"] == "e"]
    assert [end["queued_ms"] for end in ends] == [500.0, 250.0]


def test_members_of_a_fallback_are_drawn_one_after_another() -> None:
    model = artifact_of("squeezenet")
    bound, (first, second) = _two_members(model)
    lists = [lower(bound.combined[0].plan.schedule, bound.combined[0].graph, mask) for mask in (2, 1)]
    spans = iter(range(100))
    groups = tuple((i, 0, float(n := next(spans)), n + 0.5) for part in lists for i in range(len(part)))
    entry = StepEntry(3, 0, 1, 0, 3, (1, 0), (8, 9), True, 0.0, 100.0, groups)
    found = timeline(
        RecordingBatch([entry], [], [SwapEntry(0.0, 1)], []),
        RecordingSummary(0.0, 100.0, {}, 0, 0.0),
        {1: bound},
        CostTable(),
    )
    assert [run.model for run in found.runs] == [second] * len(lists[0]) + [first] * len(lists[1])
    assert {run.stream for run in found.planned} == {0}
    assert problems(chrome_trace(found, costs="estimated")) == []


def _two_members(model: Artifact) -> tuple[BoundPlan, tuple[str, str]]:
    choices = [
        ModelChoice(name=name, artifact=model.digest, graph=model.graph, partition="whole")
        for name in ("one", "two")
    ]
    plan = compose(choices, scheduler="sequential", combination=Combination.ALIGNED)
    return bind(plan, {model.digest: model.graph}), ("one", "two")


def test_steps_of_one_lane_that_overlap_are_drawn_beside_each_other() -> None:
    model = artifact_of("squeezenet")
    bound, _ = _two_members(model)
    entries = [
        StepEntry(number, 0, 1, 0, 1, (0,), (number,), False, float(number), number + 1.5, ())
        for number in range(3)
    ]
    found = timeline(
        RecordingBatch(entries, [], [], []), RecordingSummary(0.0, 9.0, {}, 0, 0.0), {1: bound}, CostTable()
    )
    trace = chrome_trace(found, costs="estimated")
    assert problems(trace) == []
    assert len({span["tid"] for span in _spans(trace, MEASURED, "step")}) == 2


def test_steps_say_their_executor_lane_resource_and_cores_and_tracks_the_lanes_place() -> None:
    """The second model's block runs on the second executor; lane 0 has the second resource."""
    model = artifact_of("squeezenet")
    used = Assignment(
        further_executors=(ExecutorOptions(name="openvino"),),
        resources=(Resource(cores=(4,)), Resource(cores=(1, 2))),
        lane_resources=(1, 0),
        executors_of=((0,), (1,)),
    )
    choices = [ModelChoice(name=name, artifact=model.digest, graph=model.graph) for name in ("one", "two")]
    bound = bind(compose(choices, lanes=2, assignment=used), {model.digest: model.graph})
    entries = [
        StepEntry(number, number, 1, number, 1, (0,), (number,), False, float(number), number + 0.5, ())
        for number in range(2)
    ]
    found = timeline(
        RecordingBatch(entries, [], [], []), RecordingSummary(0.0, 9.0, {}, 0, 0.0), {1: bound}, CostTable()
    )
    trace = chrome_trace(found, costs="estimated")
    assert problems(trace) == []
    told = [step["args"] for step in _spans(trace, MEASURED, "step")]
    assert [(one["executor"], one["lane"], one["resource"], one["cores"]) for one in told] == [
        ("onnx", 0, 1, [1, 2]),
        ("openvino", 1, 0, [4]),
    ]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"lane 0 steps (resource 1, cores 1, 2)", "lane 1 steps (resource 0, cores 4)"} <= names


def test_a_step_that_another_executor_ran_in_another_place_says_so() -> None:
    """The block may run on either resource, on the second one by the second executor."""
    model = artifact_of("squeezenet")
    used = Assignment(
        further_executors=(ExecutorOptions(name="openvino"),),
        resources=(Resource(cores=(4,)), Resource(cores=(1,))),
        lane_resources=(0, 1),
        resources_of=(((0,),),),
        placement=PlacementPolicy.EAGER,
    )
    choice = ModelChoice(name="one", artifact=model.digest, graph=model.graph)
    plan = compose([choice], lanes=2, assignment=used)
    plan = replace(plan, combined=(replace(plan.combined[0], further_places=(Place(1, 1),)),))
    bound = bind(plan, {model.digest: model.graph})
    entries = [
        StepEntry(number, number, 1, 0, 1, (0,), (number,), False, 1.0, 1.5, (), number)
        for number in range(2)
    ]
    found = timeline(
        RecordingBatch(entries, [], [], []), RecordingSummary(0.0, 9.0, {}, 0, 0.0), {1: bound}, CostTable()
    )
    assert [(step.resource, step.executor) for step in found.steps] == [(0, "onnx"), (1, "openvino")]


def test_steps_of_a_plan_whose_artifact_was_deleted_meanwhile_are_counted_and_the_others_drawn(
    tmp_path: Path,
) -> None:
    kept, gone = import_tiny(tmp_path, 0), import_tiny(tmp_path, 1)
    wires = {key: plan_for({"net": one}).wire for key, one in enumerate((kept, gone))}
    ArtifactStore(tmp_path).remove(gone.digest)
    recorded = RecordingSummary(0.0, 9.0, wires, 0, 0.0)
    entries = [
        StepEntry(number, 0, key, 0, 1, (0,), (number,), False, float(number), number + 0.5, ())
        for number, key in enumerate((1, 1, 0))
    ]
    batch, plans = RecordingBatch(entries, [], [], []), bound_plans(recorded, tmp_path)
    trace = chrome_trace(timeline(batch, recorded, plans, CostTable()), costs="estimated")
    assert problems(trace) == []
    assert (trace["otherData"]["steps"], trace["otherData"]["unnamed"]) == (1, 2)


def test_a_step_that_began_before_the_recording_is_left_out(found: Timeline) -> None:
    model = artifact_of("squeezenet")
    bound, _ = _two_members(model)
    entry = StepEntry(0, 0, 1, 0, 1, (0,), (0,), False, 1.0, 3.0, ())
    late = RecordingSummary(2.0, 4.0, {}, 0, 0.0)
    assert not timeline(RecordingBatch([entry], [], [], []), late, {1: bound}, CostTable()).steps


def _broken(spoil: Callable[[list[dict[str, Any]]], object]) -> Callable[[Trace], Trace]:
    def apply(trace: Trace) -> Trace:
        copy = deepcopy(trace)
        spoil(copy["traceEvents"])
        return copy

    return apply


def _into_the_next(events: list[dict[str, Any]]) -> float:
    """A length with which the first span would end in the middle of the second of its track."""
    first = _first(events, "X")
    second = [event for event in events if event["ph"] == "X" and event["tid"] == first["tid"]][1]
    return float(second["ts"] + second["dur"] / 2 - first["ts"])


def _first(events: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    return next(event for event in events if event["ph"] == phase)


@pytest.mark.promise("trace-obeys-chrome-event")
@pytest.mark.parametrize(
    "spoil",
    [
        _broken(lambda events: _first(events, "X").pop("dur")),
        _broken(lambda events: _first(events, "X").update(ts=-1.0)),
        _broken(lambda events: _first(events, "X").update(ts=float("nan"))),
        _broken(lambda events: _first(events, "X").update(tid="one")),
        _broken(lambda events: _first(events, "X").update(ph="Z")),
        _broken(lambda events: _first(events, "X").update(dur=_into_the_next(events))),
        _broken(lambda events: _first(events, "M").update(args={})),
        _broken(lambda events: events.remove(_first(events, "e"))),
        _broken(lambda events: _first(events, "i").update(s="x")),
        _broken(lambda events: _first(events, "C").update(args={"tasks": "many"})),
        _broken(lambda events: events.remove(next(e for e in events if e["name"] == "thread_name"))),
    ],
)
def test_the_check_of_the_format_notices_a_defect(trace: Trace, spoil: Callable[[Trace], Trace]) -> None:
    assert problems(spoil(trace))


def test_processes_are_apart(trace: Trace) -> None:
    assert _spans(trace, PLANNED, "group")
    assert not _spans(trace, PLANNED, "step")
    assert not _spans(trace, QUEUES, "group")


def test_a_recording_that_the_agent_cannot_make_is_refused_with_its_reason(hosted: Hosted) -> None:
    hosted.backend.why_not_ready = "no plan is loaded"
    with pytest.raises(UnavailableError, match="no plan is loaded"):
        record(hosted.path, 1.0)
    hosted.backend.why_not_ready = ""
    with pytest.raises(UnavailableError, match="cannot be read"):
        record(hosted.path, 1.0)  # the played agent writes no recording
    with pytest.raises(SettingError, match="at most"):
        record(hosted.path, 1e6)


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0, 601.0])
def test_a_length_that_no_recording_may_have_is_refused_before_anything_is_said(
    tmp_path: Path, seconds: float
) -> None:
    said: list[str] = []
    with pytest.raises(SettingError, match="ask for more than 0 and at most 600"):
        write_trace(tmp_path, tmp_path / "agent.sock", seconds, tmp_path / "trace.json", None, said.append)
    assert said == []


@pytest.mark.promise("trace-obeys-chrome-event")
def test_the_command_traces_an_agent_that_serves(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "net.onnx")
    out, said = tmp_path / "trace.json", list[str]()
    models = (ModelFile(path=str(file), name="net"),)
    with AgentProcess(tmp_path / "home", models=models, executor="null") as agent:
        agent.until_ready()
        empty = write_trace(agent.home, agent.socket, 0.05, out, None, said.append)
        stop = threading.Event()

        def serve() -> None:
            with Client(agent.socket) as client:
                while not stop.is_set():
                    client.run("net", {"input": np.zeros(ROW_SHAPE, np.float32)}, timeout_s=60)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            found = write_trace(agent.home, agent.socket, 0.3, out, None, said.append)
        finally:
            stop.set()
            thread.join()
    assert said == ["recording 0.05 s", "recording 0.3 s"]
    assert (empty["steps"], empty["recorder_us_per_step"]) == (0, None)
    assert "no step ran meanwhile" in trace_text(empty) and "recorder" not in trace_text(empty)
    assert "the recorder took" in trace_text(found)
    trace = json.loads(out.read_text())
    assert problems(trace) == []
    assert found["steps"] == len(_spans(trace, MEASURED, "step")) > 0
    assert 0 < found["recorder_share"] < 1


@pytest.mark.promise("recording-bounded-answered-once")
def test_a_recording_ends_with_the_engine_process(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Two recordings begin. 2. One ends. 3. The engine process ends, and then there is none."""
    orders: list[StartRecording] = []
    ends: list[str] = []
    up = True

    def send(command: Command, fds: Sequence[int] = ()) -> bool:
        if up and isinstance(command, StartRecording):
            orders.append(command)
        return up

    def ask() -> None:
        try:
            record(hosted.path, 1.0)
        except UnavailableError as error:
            ends.append(str(error))

    monkeypatch.setattr(hosted.backend, "send", send)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(orders) == 2, "both are ordered")
    hosted.call(lambda: hosted.endpoint.recording_ended(orders[0].number, "full"))
    eventually(lambda: len(ends) == 1, "one has ended")
    hosted.call(lambda: hosted.endpoint.end_all(Outcome.FAILED, "agent_restarted", "it crashed"))
    hosted.call(lambda: hosted.endpoint.recording_ended(orders[1].number, ""))  # late: it has been answered
    for thread in threads:
        thread.join(20.0)
    up = False
    ask()
    assert [("full" in ends[0]), ("ended while" in ends[1]), ("not running" in ends[2])] == [True] * 3


def profile(artifact: str, batch: int, median_us: dict[int, float], request: int = 1) -> dict[str, Any]:
    timings = [{"operator": op, "median_us": one} for op, one in median_us.items()]
    values = {"request": request, "artifact": artifact, "batch": batch, "timings": timings}
    return {"kind": "profile_result", "values": values}


def test_costs_are_read_from_telemetry_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "queue_sample", "values": {}},
        profile("ab", 1, {2: 1.0, 3: 6.0}),
        profile("ab", 4, {3: 7.0}, request=2),
        profile("cd", 1, {0: 2.0}, request=3),
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    table = read_costs(file)
    assert dict(table.measured_s) == {(Digest("ab"), OpId(3)): 7e-6, (Digest("cd"), OpId(0)): 2e-6}
    assert dict(table.measured_at) == {Digest("ab"): 4, Digest("cd"): 1}, "the last batch size counts"
    file.write_text("[]")
    with pytest.raises(InputError, match=r"no operator profile.*DEVICE --kind profile_result --json"):
        read_costs(file)
    file.write_text("{")
    with pytest.raises(InputError, match="telemetry rows"):
        read_costs(file)
    for strange in (
        '[{"rows": 1}]',
        '{"kind": "profile_result"}',
        '[{"kind": "profile_result"}]',
        "[1]",
        "7",
    ):
        file.write_text(strange)
        with pytest.raises(InputError, match=r"does not hold telemetry rows.*; write it with"):
            read_costs(file)


def test_costs_are_those_of_the_newest_request_that_has_some_and_are_not_mixed_with_older_ones(
    tmp_path: Path,
) -> None:
    """1. Measured on one executor. 2. On another, in two rows; not all were timed. 3. Nothing was."""
    rows = [
        profile("ab", 1, {0: 1.0, 1: 1.0, 2: 1.0}),
        profile("ab", 1, {0: 7.0}, request=2),
        profile("ab", 1, {2: 7.0}, request=2),
        profile("ab", 4, {}, request=3),
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    table = read_costs(file)
    assert dict(table.measured_s) == {(Digest("ab"), OpId(op)): 7e-6 for op in (0, 2)}
    assert dict(table.measured_at) == {Digest("ab"): 1}


def test_of_how_many_operators_of_the_plans_that_ran_costs_were_measured_is_said() -> None:
    model = artifact_of("squeezenet")
    bound, _ = _two_members(model)
    size = len(model.graph.operators)
    all_s = {(model.digest, OpId(op)): 1e-6 for op in range(size)}
    some_s = {(model.digest, OpId(0)): 1e-6, (Digest("other"), OpId(1)): 1e-6}
    told = [costs_text(CostTable(measured_s=known), [bound]) for known in ({}, some_s, all_s)]
    assert told == ["costs estimated", f"costs measured of 1 of {size} operators", "costs measured"]


def test_costs_are_read_from_telemetry_rows_as_0_1_0_wrote_them(tmp_path: Path) -> None:
    row = profile("ab", 1, {3: 6.0})
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"at_us": 1, "kind": row["kind"], **row["values"]}]))
    table = read_costs(file)
    assert dict(table.measured_s) == {(Digest("ab"), OpId(3)): 6e-6}
