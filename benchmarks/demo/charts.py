"""Charts of the report as inline SVG: they take the page's colours, and need no network and no script."""

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from itertools import cycle
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ("#2563a8", "#c2571a", "#2f8f5b", "#8a4fa3", "#b3862b", "#4b7f8c")
_SOFT, _RULE = "#6b7280", "#e3e0d8"
_VARIABLES = {**{color: f"var(--c{number})" for number, color in enumerate(COLORS)}}
_VARIABLES |= {_SOFT: "var(--soft)", _RULE: "var(--rule)"}
"""Drawn in these, and replaced: the page chooses by whether its reader likes it dark."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stageloom",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _SOFT),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _RULE),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), _SOFT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.axisbelow": True,
}
_WIDTH_IN = 9.2
_CHARACTER = 0.0085  # of a mark's text, in widths of the axes

Tips = dict[str, str]
"""What is shown where the pointer rests, by the identifier of what was drawn."""


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[tuple[float, str]] = (),
    limit: tuple[float, str] | None = None,
) -> Markup:
    """One line per series over shared axes, with vertical marks for moments of decision.

    `limit` is a value of the y axis that a dashed line shows, and its name.
    """

    def draw(axes: Axes) -> Tips:
        for number, (color, line) in enumerate(zip(cycle(COLORS), series.values(), strict=False)):
            axes.plot(
                [x for x, _ in line], [y for _, y in line], color=color, linewidth=1.5, gid=f"tip{number}"
            )
        axes.margins(x=0)
        if limit:
            axes.axhline(limit[0], color=_SOFT, linewidth=1, linestyle="--")
            axes.text(
                0.995, limit[0], limit[1], transform=axes.get_yaxis_transform(), ha="right", va="bottom"
            )
        for at, _ in marks:
            axes.axvline(at, color=_SOFT, linewidth=1, linestyle="--")
        axes.set_ylim(bottom=0.0)
        low, high = axes.get_xlim()
        ends: list[float] = []  # of the text in each row, so that neighbours do not write over each other
        for at, text in sorted(marks):
            begin = (at - low) / (high - low)
            row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
            ends[row : row + 1] = [begin + _CHARACTER * (len(text) + 1)]
            place = (begin + 0.004, 0.98 - 0.075 * row)
            axes.text(*place, text, transform=axes.transAxes, va="top", in_layout=False)
        axes.grid(axis="y")
        _label(axes, x_label, y_label)
        return {f"tip{number}": name for number, name in enumerate(series)}

    return _drawn(draw, title, 2.6)


def distribution_chart(samples: Mapping[str, Sequence[float]], *, title: str, x_label: str) -> Markup:
    """The cumulative distribution of each series of samples; p50 and p99 can be read off the grid."""
    series = {
        name: [(value, 100.0 * (rank + 1) / len(values)) for rank, value in enumerate(sorted(values))]
        for name, values in samples.items()
    }
    return line_chart(series, title=title, x_label=x_label, y_label="tasks at or below, %")


def scatter_chart(
    points: Mapping[str, Sequence[tuple[float, float, str]]], *, title: str, x_label: str, y_label: str
) -> Markup:
    """Points (x, y, what it is) of each series in equal units, and the diagonal on which x equals y."""

    def draw(axes: Axes) -> Tips:
        tips: Tips = {}
        for color, series in zip(cycle(COLORS), points.values(), strict=False):
            for x, y, text in series:
                axes.plot([x], [y], "o", color=color, markersize=5.5, gid=f"tip{len(tips)}")
                tips[f"tip{len(tips)}"] = text
        highest = max((max(x, y) for series in points.values() for x, y, _ in series), default=1.0)
        axes.plot([0, highest], [0, highest], color=_SOFT, linewidth=1, linestyle="--", zorder=1)
        axes.set_xlim(0, 1.05 * highest)
        axes.set_ylim(0, 1.05 * highest)
        axes.grid()
        _label(axes, x_label, y_label)
        return tips

    return _drawn(draw, title, 3.3)


def interval_chart(points: Mapping[str, tuple[float, float, float]], *, title: str, x_label: str) -> Markup:
    """One row per name: a value between the ends of its interval, beside the line at 1."""

    def draw(axes: Axes) -> Tips:
        tips: Tips = {}
        for row, (color, (name, (value, low, high))) in enumerate(
            zip(cycle(COLORS), points.items(), strict=False)
        ):
            axes.plot([low, high], [row, row], color=color, linewidth=1.8)
            axes.plot([value], [row], "o", color=color, markersize=7, gid=f"tip{row}")
            tips[f"tip{row}"] = f"{name}: {value:.3f} ({low:.3f} to {high:.3f})"
        ends = [end for _, low, high in points.values() for end in (low, high)]
        axes.set_xlim(min([0.9, *ends]) - 0.02, max([1.1, *ends]) + 0.02)
        axes.axvline(1.0, color=_SOFT, linewidth=1, linestyle="--")
        _rows(axes, list(points))
        _label(axes, x_label)
        return tips

    return _drawn(draw, title, 1.1 + 0.32 * len(points))


def timeline_chart(
    rows: Sequence[tuple[str, bool, Sequence[tuple[float, float, int, str]]]], *, title: str
) -> Markup:
    """One row per stream and whether it is drawn pale; bars are (start ms, end ms, color, what ran)."""

    def draw(axes: Axes) -> Tips:
        tips: Tips = {}
        for row, (_, pale, bars) in enumerate(rows):
            for start, end, color, text in bars:
                kept = f"tip{len(tips)}"
                axes.barh(
                    row,
                    end - start,
                    0.74,
                    left=start,
                    color=COLORS[color % len(COLORS)],
                    alpha=0.45 if pale else 1.0,
                    gid=kept,
                )
                tips[kept] = f"{text} ({end - start:.3f} ms)"
        axes.margins(x=0)
        _rows(axes, [name for name, _, _ in rows])
        _label(axes, "ms")
        return tips

    return _drawn(draw, title, 1.0 + 0.3 * len(rows))


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """A named row for each, from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)


def _label(axes: Axes, x_label: str, y_label: str = "") -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.tick_params(length=0)


def _drawn(draw: Callable[[Axes], Tips], title: str, height_in: float) -> Markup:
    out = StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        tips = draw(figure.add_subplot())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    text = re.sub(
        r'<g id="(\w+)">',
        lambda found: f"<g><title>{escape(tips[found[1]])}</title>" if found[1] in tips else "<g>",
        text,
    )
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return Markup(text)
