"""Panels as SVG, by matplotlib. Equal panels give equal bytes under one version of it."""

from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Final

from benchmarks.paper.finding import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: Final = ("o-", "s--", "^:", "v-.", "D-", "x--", "P:", "*-.")
_MARKERS: Final = 10  # of a line at most
_PANEL_INCHES: Final = (4.2, 3.4)
_PER_ROW: Final = 4


def drawn(panels: Sequence[Panel]) -> str:
    """One picture of all panels, up to four beside each other."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(len(panels), _PER_ROW)
    rows = -(-len(panels) // columns)
    width, height = _PANEL_INCHES
    picture = Figure(figsize=(width * columns, height * rows), layout="constrained")
    places = picture.subplots(rows, columns, squeeze=False).flatten()
    for place in places[len(panels) :]:
        place.set_axis_off()
    for panel, place in zip(panels, places, strict=False):
        _draw(panel, place)
    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "stageloom", "svg.fonttype": "none"}):
        picture.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _draw(panel: Panel, place: "Axes") -> None:
    if any(isinstance(x, str) for line in panel.lines for x, _ in line.points):
        _bars(panel, place)
    else:
        for style, line in zip(_STYLES * 4, panel.lines, strict=False):
            across, up = [x for x, _ in line.points], [y for _, y in line.points]
            every = -(-len(across) // _MARKERS)
            place.plot(across, up, style, label=line.label, ms=4, markevery=every)
    place.set_title(panel.title, fontsize=10)
    place.set_xlabel(panel.across)
    place.set_ylabel(panel.up)
    place.grid(color="0.9", axis="y")
    place.set_axisbelow(True)
    if panel.logarithmic:
        place.set_yscale("log")
    else:
        place.set_ylim(bottom=0.0)
    if len(panel.lines) > 1:
        place.legend(fontsize=8, frameon=False, ncols=1 + len(panel.lines) // 5)


def _bars(panel: Panel, place: "Axes") -> None:
    """A group per x, in it a bar per line; what a line lacks has no bar."""
    names = list(dict.fromkeys(str(x) for line in panel.lines for x, _ in line.points))
    width = 0.8 / len(panel.lines)
    for number, line in enumerate(panel.lines):
        shift = (number - (len(panel.lines) - 1) / 2) * width
        places = [names.index(str(x)) + shift for x, _ in line.points]
        place.bar(places, [y for _, y in line.points], width, label=line.label)
    place.margins(y=0.1 + 0.1 * len(panel.lines))  # room for the legend above the bars
    turned = 20 if max(map(len, names)) > 8 else 0
    place.set_xticks(
        range(len(names)), names, fontsize=8, rotation=turned, ha="right" if turned else "center"
    )
