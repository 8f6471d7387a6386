"""The report as one HTML page that needs nothing beside itself: no network, no script.

Charts are inline SVG in the page's colours, which it chooses by whether its reader likes it dark. They are
drawn narrow, so that a telephone shows their text at its size.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.demo.report import FITTING
from stageloom.planner.api.page.words import figure as three_digits

COLORS = ("#2563a8", "#c2571a", "#2f8f5b", "#8a4fa3", "#b3862b", "#4b7f8c")
_SOFT, _RULE, _INK = "#6b7280", "#e3e0d8", "#22262b"
_VARIABLES = {color: f"var(--c{number})" for number, color in enumerate(COLORS)}
_VARIABLES |= {_SOFT: "var(--soft)", _RULE: "var(--rule)", _INK: "var(--ink)"}

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
_WIDTH_IN = 4.5
_CHARACTER = 0.0185  # of a mark's text, in widths of the axes
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
    environment.filters |= {
        "ratio": _ratio,
        "estimate": _estimate,
        "words": lambda text: text.replace("_", " "),
    }
    load = report["load"]
    return environment.get_template("report.html.jinja").render(
        report=report,
        names=[model["name"] for model in report["models"]],
        colors=[f"var(--c{number})" for number in range(len(COLORS))],
        compared=_compared(_of_the_busy_load(report)),
        over_time=_over_time("tasks in time a second", load["at_s"], load["in_time_per_s"], load),
        variance=_over_time(
            "variance of queued work, s²", load["variance"]["at_s"], load["variance"]["s2"], load
        ),
        timeline=_timeline(report),
    )


def _ratio(tried: Mapping[str, Any]) -> str:
    """A trial's ratio with its interval."""
    if tried["ratio"] is None or tried["interval"] is None:
        return "-"
    low, high = tried["interval"]
    return f"{tried['ratio']:.3f} ({low:.3f} to {high:.3f})"


def _estimate(value: Sequence[Any]) -> Markup:
    """A figure and below it its interval, where one is known, in three digits."""
    middle, low, high = (three_digits(one) for one in _with_ends(value))
    if low == high:  # of few windows, or of tasks that all count alike
        return Markup("{}").format(middle)
    return Markup("{}<br><small>{} to {}</small>").format(middle, low, high)


def _with_ends(value: Sequence[Any]) -> Sequence[float]:
    """The figure itself stands for ends that are not known."""
    return [value[0] if one is None else one for one in value]


def _of_the_busy_load(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Default sessions, the plan before and the plan after, at the rate that the load rose to."""
    return [row for row in report["served"] if row["who"] != FITTING]


class Chart:
    """One chart while it is drawn; `tip(text)` makes an artist say the text where the pointer rests on it."""

    def __init__(self, axes: Sequence[Axes]) -> None:
        self.every = axes
        self.axes = axes[0]
        self.tips: dict[str, str] = {}
        self.svg = Markup()

    def tip(self, text: str) -> str:
        """The identifier for an artist."""
        name = f"tip{len(self.tips)}"
        self.tips[name] = f"<title>{escape(text)}</title>"
        return name

    def marks(self, moments: Sequence[tuple[float, str]]) -> None:
        """A vertical line and a text for each moment; neighbours do not write over each other."""
        low, high = self.axes.get_xlim()
        ends: list[float] = []  # of the text in each row
        for at, text in sorted(moments):
            self.axes.axvline(at, **_DASHED)
            begin = (at - low) / (high - low)
            width = _CHARACTER * (len(text) + 1)
            late = begin + width > 1.0  # its text would leave the chart
            left = begin - width if late else begin
            row = next((row for row, end in enumerate(ends) if end <= left), len(ends))
            ends[row : row + 1] = [left + width]
            place = (begin - 0.006 if late else begin + 0.006, 0.97 - 0.1 * row)
            side: Any = {"va": "top", "ha": "right" if late else "left"}
            self.axes.text(*place, text, transform=self.axes.transAxes, in_layout=False, **side)


@contextmanager
def _chart(title: str, height_in: float, columns: int = 1) -> Iterator[Chart]:
    """A chart to draw; afterwards it has its `svg`."""
    out = StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        found = figure.subplots(1, columns, squeeze=False, sharey=True)[0]
        chart = Chart(list(found))
        yield chart
        for axes in chart.every:
            axes.tick_params(length=0)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    text = re.sub(r'<g id="(\w+)">', lambda found: "<g>" + chart.tips.get(found[1], ""), text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    chart.svg = Markup(text)


def _compared(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Tasks in time a second, and the median, of all who served the load; a line over a bar is its interval.

    Not p99: where more than one task in a hundred is late, it is what a late task counts as.
    """
    with _chart("Tasks in time a second, and median latency", 0.9 + 0.42 * len(rows), columns=2) as chart:
        for axes, (name, title) in zip(
            chart.every,
            (("in_time_per_s", "in time, tasks a second"), ("p50_ms", "median latency, ms")),
            strict=True,
        ):
            figures = [_with_ends(row[name]) for row in rows]
            for place, (row, (value, low, high)) in enumerate(zip(rows, figures, strict=True)):
                axes.barh(
                    place,
                    value,
                    0.62,
                    color=COLORS[place],
                    gid=chart.tip(f"{row['who']}: {three_digits(value)}"),
                )
                axes.plot([low, high], [place, place], color=_INK, linewidth=1.2)
            axes.set_xlabel(title)
            axes.set_xlim(0.0, 1.3 * max(high for _, _, high in figures))
            for place, (value, _, high) in enumerate(figures):
                end = high + 0.03 * axes.get_xlim()[1]
                axes.text(end, place, three_digits(value), va="center", color=_INK)
            axes.grid(axis="x")
            axes.spines["left"].set_visible(False)
        chart.axes.set_yticks(range(len(rows)), [row["who"] for row in rows])
        chart.axes.set_ylim(len(rows) - 0.5, -0.5)
    return chart.svg


def _over_time(title: str, at_s: Sequence[float], values: Sequence[float], load: Mapping[str, Any]) -> Markup:
    """A line over the load that stayed, with the moments that mattered."""
    with _chart(title, 2.3) as chart:
        axes = chart.axes
        axes.plot(at_s, values, color=COLORS[0], linewidth=1.5)
        axes.margins(x=0)
        axes.set_ylim(0.0, 1.45 * max([*values, 1e-9]))  # above it is room for the moments
        axes.grid(axis="y")
        axes.set_xlabel("seconds since the load rose")
        axes.set_ylabel(title)
        chart.marks([(one["at_s"], one["text"]) for one in load["moments"]])
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
        chart.axes.set_yticks(
            range(len(tracks)), [f"{track}, planned" if planned else track for track, planned in tracks]
        )
        chart.axes.set_ylim(len(tracks) - 0.5, -0.5)
        chart.axes.grid(axis="x")
        chart.axes.set_xlabel("ms")
    return chart.svg
