"""The last active plan's schedule as it ran: sampled step traces, joined with the operators behind them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.artifact import open_artifact
from shared.bound import BoundPlan
from shared.graph import Graph
from shared.ids import Digest
from shared.launch_list import lower

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


def timeline(rows: Sequence[Mapping[str, Any]], digest: str, bound: BoundPlan) -> list[dict[str, Any]]:
    """The runs of operators of the busiest window of `WINDOW_US`, times in milliseconds from its start."""
    traces = sorted(
        (
            row
            for row in rows
            if row["kind"] == "step_trace" and row["groups"] and digest.startswith(row["plan"])
        ),
        key=lambda row: row["began_us"],
    )
    items = []
    start_us = _busiest(traces)
    for trace in traces:
        began_us = trace["began_us"] - start_us
        if 0 <= began_us <= WINDOW_US:
            items += _items(trace, bound, began_us)
    return items


def _artifact(out: Path, digest: str) -> Path:
    return next(out.glob(f"planner/**/{digest}*"))


def _busiest(traces: Sequence[Mapping[str, Any]]) -> int:
    """Start of the window that holds most steps."""
    starts = [trace["began_us"] for trace in traces]
    best, most = 0, 0
    for index, start in enumerate(starts):
        inside = sum(1 for other in starts[index:] if other - start <= WINDOW_US)
        if inside > most:
            best, most = start, inside
    return best


def _items(trace: Mapping[str, Any], bound: BoundPlan, began_us: int) -> list[dict[str, Any]]:
    combined = bound.combined[trace["combined_block"]]
    launches = lower(combined.plan.schedule, combined.graph, trace["mask"], barrier=bound.plan.barrier)
    entries = []
    for group in trace["groups"]:
        item = launches[group["item"]]
        member = combined.members[item.member]
        operators = [combined.graph.model_op(op) for op in item.ops]
        entries.append(
            {
                "lane": trace["lane"],
                "stream": group["stream"],
                "model": bound.models[member.model].plan.name,
                "block": member.block,
                "operators": f"{operators[0]}-{operators[-1]}" if len(operators) > 1 else str(operators[0]),
                "started_ms": (began_us + group["begin_us"]) / 1000,
                "ended_ms": (began_us + group["end_us"]) / 1000,
            }
        )
    return entries
