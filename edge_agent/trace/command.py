"""`stageloom-agent trace`: ask the agent for a recording, join it with the plan, write a Chrome trace."""

import json
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from stageloom.edge_agent.ingest.channel import ask
from stageloom.edge_agent.ingest.messages import MAX_TRACE_S, TraceRequest, TraceWritten
from stageloom.edge_agent.store import ArtifactStore
from stageloom.edge_agent.trace.chrome import chrome_trace
from stageloom.edge_agent.trace.spans import task_spans
from stageloom.edge_agent.trace.timeline import timeline
from stageloom.edge_agent.worker.recorder import RecordingBatch, RecordingSummary, read_recording
from stageloom.shared.artifact import open_artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError, SettingError, StorageError, UnavailableError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import decode_plan
from stageloom.shared.search.costs import CostTable
from stageloom.shared.spans import require_packages, send_spans

SERVICE: Final = "stageloom-agent"
_PATIENCE_S = 30.0  # beyond the recording
_ROWS: Final = "`stageloom device telemetry DEVICE --kind profile_result --json`"
"""Without the kind the newest rows seldom have a profile among them."""


def require_length(seconds: float) -> None:
    """A recording may be so long.

    Raises:
        SettingError: it may not.
    """
    if not 0.0 < seconds <= MAX_TRACE_S:  # true for NaN, too
        raise SettingError(
            f"there is no trace of {seconds:g} seconds",
            remedy=f"ask for more than 0 and at most {MAX_TRACE_S:g}",
        )


def record(socket: Path, seconds: float) -> tuple[RecordingBatch, RecordingSummary]:
    """What the engine behind this agent does in the next `seconds`.

    Raises:
        SettingError: that is no length for a recording.
        UnavailableError: no agent answers, or its engine cannot record now.
    """
    require_length(seconds)
    file = os.memfd_create("stageloom-trace", os.MFD_CLOEXEC)
    try:
        written = ask(socket, TraceRequest(0, seconds), TraceWritten, seconds + _PATIENCE_S, file)
        if written.reason:
            raise UnavailableError(f"nothing was recorded: {written.reason}")
        return _read(file)
    finally:
        os.close(file)


def _read(file: int) -> tuple[RecordingBatch, RecordingSummary]:
    try:
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as data:
            return read_recording(data[:])
    except ValueError as error:
        raise UnavailableError(f"the recording cannot be read: {error}", remedy="try again") from error


def bound_plans(recorded: RecordingSummary, artifacts: Path) -> dict[int, BoundPlan]:
    """The plans that ran, with the graphs of their artifacts, but for those whose artifacts are gone.

    The agent deletes artifacts when a plan is released, as at a change of a model's version.
    """
    store = ArtifactStore(artifacts)
    graphs: dict[Digest, Graph] = {}
    found = {}
    for key, wire in recorded.plans.items():
        plan = decode_plan(wire)
        with suppress(FileNotFoundError):
            for model in plan.models:
                if model.artifact not in graphs:
                    path = store.path(model.artifact)
                    graphs[model.artifact] = open_artifact(path, model.artifact).graph
            found[key] = bind(plan, graphs)
    return found


def read_costs(path: Path | None) -> CostTable:
    """Operator costs from telemetry rows, as `_ROWS` prints them; an empty table without a file.

    Raises:
        InputError: the file holds no profile.
    """
    if path is None:
        return CostTable()
    try:
        table = measured(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} does not hold telemetry rows: {type(error).__name__}: {error}",
            remedy=f"write it with {_ROWS}",
        ) from error
    if not table.measured_s:
        raise InputError(
            f"{path} holds no operator profile",
            remedy=f"run `stageloom device profile DEVICE`, then write it with {_ROWS}",
        )
    return table


def costs_text(costs: CostTable, plans: Iterable[BoundPlan]) -> str:
    """Where the planned times of these plans come from: of how many operators, unless of all."""
    if not costs.measured_s:
        return "costs estimated"
    operators = {
        (model.plan.artifact, OpId(op))
        for bound in plans
        for model in bound.models
        for op in range(len(model.source.operators))
    }
    known = len(operators & costs.measured_s.keys())
    share = f" of {known} of {len(operators)} operators" if known < len(operators) else ""
    return f"costs measured{share}"


def measured(rows: Iterable[Mapping[str, Any]]) -> CostTable:
    """Seconds per operator, from the profile results among telemetry rows, oldest first.

    Of each artifact the newest request with times counts: others may be of another executor or number of
    threads, which rows do not say, or batch size.

    Rows that 0.1.0 wrote have beside `kind` what later ones have in `values`.
    """
    found = [row.get("values", row) for row in rows if row["kind"] == "profile_result"]
    request_of = {profile["artifact"]: profile["request"] for profile in found if profile["timings"]}
    newest = [profile for profile in found if profile["request"] == request_of.get(profile["artifact"])]
    batch_of = {Digest(profile["artifact"]): int(profile["batch"]) for profile in newest}
    measured_s = {
        (Digest(profile["artifact"]), OpId(timing["operator"])): timing["median_us"] * 1e-6
        for profile in newest
        for timing in profile["timings"]
    }
    return CostTable(measured_s=measured_s, measured_at=batch_of)


def write_trace(
    home: Path,
    socket: Path,
    seconds: float,
    out: Path,
    costs: Path | None,
    progress: Callable[[str], None],
    otlp: str | None = None,
) -> dict[str, Any]:
    """Record, join and write; what the recording came to. `recorder_us_per_step` is None without a step.

    Tasks are sent as spans to the collector at `otlp`, too, if one is named; `spans` says how many,
    `unsent` why it did not take them.

    Raises:
        SettingError, InputError, UnavailableError: see `record`, `read_costs` and `require_packages`.
        StorageError, OSError: the file cannot be written.
    """
    require_length(seconds)
    table = read_costs(costs)
    if otlp is not None:
        require_packages()
    if not os.access(out.parent, os.W_OK):  # before anything is recorded in vain
        raise StorageError(f"nothing can be written to {out.parent}", remedy="check the path")
    progress(f"recording {seconds:g} s")
    batch, recorded = record(socket, seconds)
    joined_s = time.monotonic()
    plans = bound_plans(recorded, home / "artifacts")
    origin = costs_text(table, plans.values())
    trace = chrome_trace(timeline(batch, recorded, plans, table), costs=origin)
    out.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    found = trace["otherData"]
    if otlp is not None:
        spans = task_spans(batch.tasks, time.time_ns() // 1000, time.monotonic())
        try:
            found["spans"] = send_spans(spans, otlp, SERVICE)
        except UnavailableError as error:
            found |= {"spans": 0, "unsent": str(error)}
    steps = found["steps"] + found["unnamed"]
    return {
        **found,
        "file": str(out),
        "bytes": out.stat().st_size,
        "recorder_share": round(recorded.own_s / (recorded.ended_s - recorded.began_s), 6),
        "recorder_us_per_step": round(1e6 * recorded.own_s / steps, 3) if steps else None,
        "joined_s": round(time.monotonic() - joined_s, 3),
    }


def trace_text(found: Mapping[str, Any]) -> str:
    dropped = f", {found['dropped']} entries dropped" if found["dropped"] else ""
    gone = f", {found['unnamed']} more of plans that are gone" if found["unnamed"] else ""
    head = (
        f"{found['file']}: {found['steps']} steps{gone}, {found['groups']} groups, {found['tasks']} tasks in "
        f"{found['seconds']:g} s{dropped}\n"
    )
    if found["recorder_us_per_step"] is None:
        return f"{head}no step ran meanwhile: see that tasks arrive, and trace again"
    return (
        f"{head}the recorder took {found['recorder_us_per_step']:g} us per step, "
        f"{100 * found['recorder_share']:.2f} % of a core; planned beside measured: {found['costs']}\n"
        "open it in https://ui.perfetto.dev or chrome://tracing"
    )
