"""The page's part on who plans better on this machine."""

from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks.demo.charts import interval_chart
from benchmarks.demo.comparison import LEARNED, NAMES, PLAIN
from benchmarks.demo.parts import figure, ratio_text, table


def answers(report: Mapping[str, Any]) -> str:
    """Both answers to the same burst side by side, their trials, and the verdict in words."""
    asked = {entry["proposer"]: entry for entry in report["replans"] if entry["proposer"]}
    rows = [_row(asked[name], name) for name in (LEARNED, PLAIN) if name in asked]
    head = ["asked", "plan", "after", "predicted cost", "measured in its trial", "outcome"]
    return (
        f'<p class="verdict">{escape(_verdict(report))}</p>'
        + _chart(report, asked)
        + f'<div class="below">{table(head, rows, "text")}</div>'
        + f'<p class="soft">{escape(_note(report["policy"]))}</p>'
    )


def _verdict(report: Mapping[str, Any]) -> str:
    if report["comparison"] is not None:
        return str(report["comparison"]["text"])
    return f"The learned policy had no say: {report['policy']['reason']}."


def _chart(report: Mapping[str, Any], asked: Mapping[str, Mapping[str, Any]]) -> str:
    points = {
        f"{NAMES[name]} over the plan that ran": (entry["ratio"], *entry["interval"])
        for name, entry in sorted(asked.items())
        if entry["ratio"] is not None and entry["interval"] is not None
    }
    found = report["comparison"]
    if found is not None and found["ratio"] is not None:
        points["learned over plain"] = (found["ratio"], *found["interval"])
    if not points:
        return ""
    label = "tasks per busy device second over the other plan's, with its 95 % interval"
    return figure(interval_chart(points, title="Ratios of the plans", x_label=label))


def _row(entry: Mapping[str, Any], name: str) -> list[str]:
    proposed = entry["trigger_to_plan_ms"]
    return [
        escape(NAMES[name]),
        _plan(entry),
        "-" if proposed is None else f"{proposed / 1000:.2f} s",
        "-" if entry["predicted"] is None else f"{entry['predicted']:.3f}",
        ratio_text(entry),
        escape(entry["outcome"].replace("_", " ")),
    ]


def _plan(entry: Mapping[str, Any]) -> str:
    if entry["plan"] is None:
        return "as it was"
    what = "other intervals" if entry["same_structure"] else f"combined blocks: {entry['blocks']}"
    return f"<code>{escape(entry['plan'][:12])}</code>{escape(entry['scheduler'])}, {what}"


def _note(policy: Mapping[str, Any]) -> str:
    if policy["digest"] is None:
        return "No trained policy was adopted."
    return (
        f"Policy {policy['digest'][:12]}, trained for {policy['trained_for']}, adopted for "
        f"{policy['device_class']}. Both were asked while the same first plan ran, under the same load and "
        "burst. A plan of another structure is tried against that one: above 1 it needs less of the device "
        "for a task. Other launch intervals alone need no trial."
    )
