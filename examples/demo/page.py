"""The report as one HTML page that needs nothing beside itself: no network, no script.

Charts are inline SVG in the page's colours, which it chooses by whether its reader likes it dark.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.demo.compare import LEARNED, NAMES, PLAIN

COLORS = ("#2563a8", "#c2571a", "#2f8f5b", "#8a4fa3", "#b3862b", "#4b7f8c")
_SOFT, _RULE = "#6b7280", "#e3e0d8"
_VARIABLES = {color: f"var(--c{number})" for number, color in enumerate(COLORS)}
_VARIABLES |= {_SOFT: "var(--soft)", _RULE: "var(--rule)"}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stageloom",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _SOFT),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _RULE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.axisbelow": True,
}
_WIDTH_IN = 9.2
_CHARACTER = 0.0085  # of a mark's text, in widths of the axes
_DASHED: Mapping[str, Any] = {"color": _SOFT, "linewidth": 1, "linestyle": "--"}


def render(report: Mapping[str, Any]) -> str:
    """The page for a report that follows docs/report.schema.json."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"ratio": _ratio, "moment": _moment}
    asked = {entry["proposer"]: entry for entry in report["replans"] if entry["proposer"]}
    return environment.get_template("report.html.jinja").render(
        report=report,
        names=[model["name"] for model in report["models"]],
        generation={entry["plan"]: entry["generation"] for entry in report["generations"]},
        colors=[f"var(--c{number})" for number in range(len(COLORS))],
        answers=[(NAMES[name], asked[name]) for name in (LEARNED, PLAIN) if name in asked],
        queues=_queues(report),
        variance=_variance(report),
        latencies=_latencies(report),
        timeline=_timeline(report),
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


class Chart:
    """One chart while it is drawn; `tip(text)` makes an artist say the text where the pointer rests on it."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.tips: dict[str, str] = {}
        self.svg = Markup()

    def tip(self, text: str) -> str:
        """The identifier for an artist."""
        name = f"tip{len(self.tips)}"
        self.tips[name] = f"<title>{escape(text)}</title>"
        return name

    def label(self, x_label: str, y_label: str = "") -> None:
        self.axes.set_xlabel(x_label)
        self.axes.set_ylabel(y_label)
        self.axes.tick_params(length=0)

    def rows(self, names: Sequence[str]) -> None:
        """A named row for each, from top to bottom."""
        self.axes.set_yticks(range(len(names)), names)
        self.axes.set_ylim(len(names) - 0.5, -0.5)
        self.axes.grid(axis="x")
        self.axes.spines["left"].set_visible(False)

    def lines(self, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
        """One line per series."""
        for color, (name, (across, up)) in zip(cycle(COLORS), series.items(), strict=False):
            self.axes.plot(across, up, color=color, linewidth=1.5, gid=self.tip(name))
        self.axes.margins(x=0)
        self.axes.grid(axis="y")

    def marks(self, moments: Sequence[tuple[float, str]]) -> None:
        """A vertical line and a text for each moment of decision; neighbours do not write over each other."""
        for at, _ in moments:
            self.axes.axvline(at, **_DASHED)
        low, high = self.axes.get_xlim()
        ends: list[float] = []  # of the text in each row
        for at, text in sorted(moments):
            begin = (at - low) / (high - low)
            row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
            ends[row : row + 1] = [begin + _CHARACTER * (len(text) + 1)]
            place = (begin + 0.004, 0.98 - 0.075 * row)
            self.axes.text(*place, text, transform=self.axes.transAxes, va="top", in_layout=False)


@contextmanager
def _chart(title: str, height_in: float) -> Iterator[Chart]:
    """A chart to draw; afterwards it has its `svg`."""
    out = StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        chart = Chart(figure.add_subplot())
        yield chart
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    text = re.sub(r'<g id="(\w+)">', lambda found: "<g>" + chart.tips.get(found[1], ""), text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    chart.svg = Markup(text)


def _queues(report: Mapping[str, Any]) -> Markup:
    queues = report["queues"]
    with _chart("Queue lengths", 2.6) as chart:
        chart.lines({name: (queues["at_s"], tasks) for name, tasks in queues["tasks"].items()})
        chart.axes.set_ylim(bottom=0.0)
        chart.marks(
            [
                (generation["active_at_s"], f"plan {generation['generation']}")
                for generation in report["generations"]
                if generation["active_at_s"] and generation["active_at_s"] >= 0
            ]
        )
        chart.label("seconds of the run", "queued tasks")
    return chart.svg


def _variance(report: Mapping[str, Any]) -> Markup:
    queues = report["queues"]
    moments = []
    for replan in report["replans"]:
        decided_s = replan["at_s"] + replan["trigger_to_decision_ms"] / 1000
        moments += [(replan["at_s"], "trigger"), (decided_s, replan["outcome"].replace("_", " "))]
    with _chart("Variance of queued work over the queues", 2.6) as chart:
        axes, threshold = chart.axes, queues["threshold_s2"]
        chart.lines({"queue variance": (queues["at_s"], queues["variance_s2"])})
        axes.axhline(threshold, **_DASHED)
        right: Any = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.text(0.995, threshold, "threshold", **right)
        axes.set_ylim(bottom=0.0)
        chart.marks(moments)
        chart.label("seconds of the run", "s²")
    return chart.svg


def _latencies(report: Mapping[str, Any]) -> Markup:
    """Cumulative distributions; p50 and p99 can be read off the grid."""
    with _chart("Latency distributions", 2.6) as chart:
        series = {}
        for model in report["models"]:
            latencies = sorted(model["latencies_ms"])
            shares = [100.0 * (rank + 1) / len(latencies) for rank in range(len(latencies))]
            series[model["name"]] = (latencies, shares)
        chart.lines(series)
        chart.axes.set_ylim(bottom=0.0)
        chart.label("ms", "tasks at or below, %")
    return chart.svg


def _timeline(report: Mapping[str, Any]) -> Markup:
    """A row per stream, and a pale one for what was planned there."""
    names = [model["name"] for model in report["models"]]
    tracks = sorted({(item["track"], item["planned"]) for item in report["timeline"]})
    with _chart("Timeline of streams", 1.0 + 0.3 * len(tracks)) as chart:
        for item in report["timeline"]:
            length = item["ended_ms"] - item["started_ms"]
            what = f"{item['model']} block {item['block']}, operators {item['operators']}"
            chart.axes.barh(
                tracks.index((item["track"], item["planned"])),
                length,
                0.74,
                left=item["started_ms"],
                color=COLORS[names.index(item["model"]) % len(COLORS)],
                alpha=0.45 if item["planned"] else 1.0,
                gid=chart.tip(f"{what} ({length:.3f} ms)"),
            )
        chart.axes.margins(x=0)
        chart.rows([f"{track}, planned" if planned else track for track, planned in tracks])
        chart.label("ms")
    return chart.svg
