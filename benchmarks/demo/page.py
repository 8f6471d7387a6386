"""The report as one HTML page that needs nothing beside itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.demo import charts
from benchmarks.demo.report import LEARNED, NAMES, PLAIN


def render(report: Mapping[str, Any]) -> str:
    """The page for a report that follows docs/report.schema.json."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["ratio"] = _ratio
    environment.filters["moment"] = _moment
    names = [model["name"] for model in report["models"]]
    asked = {entry["proposer"]: entry for entry in report["replans"] if entry["proposer"]}
    predicted, plans = _predicted(report)
    return environment.get_template("report.html.jinja").render(
        report=report,
        names=names,
        plans=plans,
        colors=[f"var(--c{number})" for number in range(len(charts.COLORS))],
        answers=[(NAMES[name], asked[name]) for name in (LEARNED, PLAIN) if name in asked],
        intervals=_intervals(report, asked),
        queues=_queues(report),
        variance=_variance(report),
        latencies=charts.distribution_chart(
            {model["name"]: model["latencies_ms"] for model in report["models"]},
            title="Latency distributions",
            x_label="ms",
        ),
        predicted=predicted,
        timeline=_timeline(report, names),
    )


def _ratio(replan: Mapping[str, Any]) -> str:
    """A trial's ratio with its interval."""
    if replan["ratio"] is None or replan["interval"] is None:
        return "-"
    low, high = replan["interval"]
    return f"{replan['ratio']:.3f} ({low:.3f} to {high:.3f})"


def _moment(at_s: float | None) -> str:
    if at_s is None:
        return "never"
    return f"{at_s:.1f} s into the load" if at_s >= 0 else f"{-at_s:.1f} s before the load"


def _intervals(report: Mapping[str, Any], asked: Mapping[str, Mapping[str, Any]]) -> Markup | None:
    """Both answers over the plan that ran, and over each other; None where nothing was measured."""
    points = {
        f"{NAMES[name]} over the plan that ran": (entry["ratio"], *entry["interval"])
        for name, entry in sorted(asked.items())
        if entry["ratio"] is not None and entry["interval"] is not None
    }
    comparison = report["comparison"]
    if comparison is not None and comparison["ratio"] is not None:
        points["learned over plain"] = (comparison["ratio"], *comparison["interval"])
    if not points:
        return None
    label = "tasks per busy device second over the other plan's, with its 95 % interval"
    return charts.interval_chart(points, title="Ratios of the plans", x_label=label)


def _queues(report: Mapping[str, Any]) -> Markup:
    queues = report["queues"]
    return charts.line_chart(
        {name: list(zip(queues["at_s"], tasks, strict=True)) for name, tasks in queues["tasks"].items()},
        title="Queue lengths",
        x_label="seconds of the run",
        y_label="queued tasks",
        marks=[
            (generation["active_at_s"], f"plan {generation['generation']}")
            for generation in report["generations"]
            if generation["active_at_s"] and generation["active_at_s"] >= 0
        ],
    )


def _variance(report: Mapping[str, Any]) -> Markup:
    queues = report["queues"]
    marks = []
    for replan in report["replans"]:
        decided_s = replan["at_s"] + replan["trigger_to_decision_ms"] / 1000
        marks += [(replan["at_s"], "trigger"), (decided_s, replan["outcome"].replace("_", " "))]
    return charts.line_chart(
        {"queue variance": list(zip(queues["at_s"], queues["variance_s2"], strict=True))},
        title="Variance of queued work over the queues",
        x_label="seconds of the run",
        y_label="s²",
        marks=marks,
        limit=(queues["threshold_s2"], "threshold"),
    )


def _predicted(report: Mapping[str, Any]) -> tuple[Markup, list[str]]:
    """The chart, and the names of the plans in it."""
    generation = {entry["plan"]: entry["generation"] for entry in report["generations"]}
    series: dict[str, list[tuple[float, float, str]]] = {}
    for entry in report["predicted"]:
        name = f"plan {generation.get(entry['plan'], entry['plan'][:12])}"
        text = f"{name}, {entry['block']}: {entry['steps']} steps"
        series.setdefault(name, []).append((entry["predicted_ms"], entry["measured_ms"], text))
    chart = charts.scatter_chart(
        series,
        title="Predicted and measured step times",
        x_label="predicted from operators timed alone, ms",
        y_label="measured under load, ms",
    )
    return chart, list(series)


def _timeline(report: Mapping[str, Any], names: Sequence[str]) -> Markup:
    bars: dict[tuple[str, bool], list[tuple[float, float, int, str]]] = {}
    for item in report["timeline"]:
        text = f"{item['model']} block {item['block']}, operators {item['operators']}"
        bar = (item["started_ms"], item["ended_ms"], names.index(item["model"]), text)
        bars.setdefault((item["track"], item["planned"]), []).append(bar)
    rows = [
        (f"{track}, planned" if planned else track, planned, own)
        for (track, planned), own in sorted(bars.items())
    ]
    return charts.timeline_chart(rows, title="Timeline of streams")
