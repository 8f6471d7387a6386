"""The last plan's schedule as it ran: sampled step traces, joined with the operators behind them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.artifact import open_artifact
from shared.bound import BoundPlan, bind
from shared.launch_list import lower
from shared.plan import Plan

WINDOW_US = 120_000


def timeline(
    rows: Sequence[Mapping[str, Any]],
    digest: str,
    plan: Plan,
    models: Mapping[str, Mapping[str, Any]],
    out: Path,
) -> list[dict[str, Any]]:
    """The runs of operators of the busiest window of `WINDOW_US`, times in milliseconds from its start."""
    paths = {model["digest"]: path for model in models.values() for path in [_artifact(out, model["digest"])]}
    bound = bind(plan, {key: open_artifact(path, key).graph for key, path in paths.items()})
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
