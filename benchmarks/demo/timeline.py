"""The plan as it ran and as it was planned, from the trace that `stageloom-agent trace` wrote in the demo."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stageloom.edge_agent.trace.chrome import MEASURED, PLANNED
from stageloom.shared.artifact import open_artifact
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest

WINDOW_US = 120_000


def last_active(rows: Sequence[Mapping[str, Any]]) -> str:
    """Digest of the plan that was activated last."""
    return str(
        max((row for row in rows if row["kind"] == "plan_activated"), key=lambda r: r["at_us"])["plan"]
    )


def artifact_graphs(models: Mapping[str, Mapping[str, Any]], out: Path) -> dict[Digest, Graph]:
    """Graphs of the planner's artifacts, by digest."""
    return {
        Digest(model["digest"]): open_artifact(_artifact(out, model["digest"]), model["digest"]).graph
        for model in models.values()
    }


def timeline(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of the busiest window of `WINDOW_US`, measured and planned; milliseconds from its start."""
    groups = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "group"]
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    measured = sorted((event for event in groups if event["pid"] == MEASURED), key=lambda event: event["ts"])
    start_us = _busiest([event["ts"] for event in measured])
    steps = {e["args"]["step"] for e in measured if 0 <= e["ts"] - start_us <= WINDOW_US}
    shown = [event for event in groups if event["args"]["step"] in steps]  # whole steps, also at the borders
    zero_us = min((event["ts"] for event in shown), default=0.0)
    return [_item(event, tracks[event["pid"], event["tid"]], zero_us) for event in shown]


def _item(event: Mapping[str, Any], track: str, start_us: float) -> dict[str, Any]:
    arguments = event["args"]
    return {
        "track": track,
        "planned": event["pid"] == PLANNED,
        "model": arguments["model"],
        "block": arguments["block"],
        "operators": arguments["operators"],
        "started_ms": round((event["ts"] - start_us) / 1000, 6),
        "ended_ms": round((event["ts"] + event["dur"] - start_us) / 1000, 6),
    }


def _artifact(out: Path, digest: str) -> Path:
    return next(out.glob(f"planner/**/{digest}*"))


def _busiest(starts: Sequence[float]) -> float:
    """Start of the window in which most groups begin; `starts` ascend."""
    best, most, end = 0.0, 0, 0
    for index, start in enumerate(starts):
        while end < len(starts) and starts[end] - start <= WINDOW_US:
            end += 1
        if end - index > most:
            best, most = start, end - index
    return best
