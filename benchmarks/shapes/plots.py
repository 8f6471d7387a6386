"""One picture per figure: what the twin says, under the paper's claim."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

Rows = Sequence[Mapping[str, Any]]


class Axes(NamedTuple):
    """What a figure shows: one line per value of `line` (none: per column of `shown`)."""

    across: str
    shown: tuple[str, ...]
    line: str = ""
    logarithmic: bool = False


_AXES: Final[Mapping[int, Axes]] = {
    18: Axes("members_max", ("tasks_per_s",), line="device", logarithmic=True),
    20: Axes("device", ("stages", "groups_per_stage")),
    24: Axes("replicas", ("instances_per_s", "together_per_s"), line="model"),
    25: Axes("batch", ("stages", "groups_per_stage")),
    26: Axes("batch", ("images_per_s", "utilisation")),
    27: Axes(
        "batch",
        ("planned_images_per_s", "ios_images_per_s", "sequential_images_per_s", "synchronised_images_per_s"),
        line="subject",
    ),
}
_STYLES: Final = ("o-", "s--", "^:", "v-.")


def draw(figure: int, claim: str, rows: Rows, folder: Path) -> Path:
    """Write `figure-N.svg`; equal rows give equal bytes.

    Columns of different size have a panel each; lines of one model or device have a panel together.
    """
    import matplotlib
    from matplotlib.figure import Figure

    axes = _AXES[figure]
    panels = _panels(axes, rows)
    picture = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for place, (title, lines) in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for style, (label, points) in zip(_STYLES * 4, lines, strict=False):
            place.plot([str(x) for x, _ in points], [y for _, y in points], style, label=label)
        place.set_title(title, fontsize=10)
        place.set_xlabel(axes.across.replace("_", " "))
        place.grid(color="0.9")
        if axes.logarithmic:
            place.set_yscale("log")
        else:
            place.set_ylim(bottom=0.0)
        if len(lines) > 1:
            place.legend(fontsize=8, frameon=False)
    picture.suptitle(f"twin; the paper's figure {figure}: {claim}", fontsize=9, wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"figure-{figure}.svg"
    with matplotlib.rc_context({"svg.hashsalt": "stageloom", "svg.fonttype": "none"}):
        picture.savefig(file, metadata={"Date": None})
    return file


def _panels(axes: Axes, rows: Rows) -> list[tuple[str, list[tuple[str, list[tuple[Any, float]]]]]]:
    """Title and lines of each panel."""

    def points(chosen: Rows, column: str) -> list[tuple[Any, float]]:
        return [(row[axes.across], row[column]) for row in chosen if row.get(column) is not None]

    if not axes.line:
        return [(_words(column), [(column, points(rows, column))]) for column in axes.shown]
    names = list(dict.fromkeys(row[axes.line] for row in rows))
    of = {name: [row for row in rows if row[axes.line] == name] for name in names}
    if len(axes.shown) == 1:
        return [(_words(axes.shown[0]), [(name, points(of[name], axes.shown[0])) for name in names])]
    return [
        (name, [(_words(column), found) for column in axes.shown if (found := points(of[name], column))])
        for name in names
    ]


def _words(column: str) -> str:
    return column.replace("_per_s", " per s").replace("_", " ")
