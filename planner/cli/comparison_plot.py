"""The comparison of schedulers as a picture: gap to the bound, search time and, where measured, the device's.

Drawn by matplotlib, which the extra `plot` installs; nothing but a `--plot` imports it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stageloom.planner.schema.scheduler import ComparedScheduler
from stageloom.shared.errors import InputError
from stageloom.shared.search.comparison import Measured, Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Compared = tuple[Standing, Measured | None]

Point = tuple[float, float, float]
"""A middle with its lower and upper end."""

_FORMATS: Final = (".svg", ".png", ".pdf")
_MARKERS: Final = "osD^v<>phX*P8"
_ROW_INCHES: Final = 0.55
"""Height of a subject's row."""


def check_file(file: Path) -> None:
    """Refuse, before anything is searched, what could not be written afterwards.

    Raises:
        InputError: the file's ending names no format, or its folder does not exist.
        ImportError: matplotlib is not installed.
    """
    if file.suffix.lower() not in _FORMATS:
        raise InputError(f"{file.name} names no format to draw in", remedy=f"end it in {', '.join(_FORMATS)}")
    if not file.resolve().parent.is_dir():
        raise InputError(f"there is no folder {file.resolve().parent}", remedy="make it first")
    import matplotlib  # noqa: F401


def drawn(row: ComparedScheduler) -> Compared:
    """A row of the planner's answer as it is drawn."""
    standing = Standing(
        subject=row.models,
        scheduler=row.scheduler,
        schedules=(),
        predicted_s=1e-3 * row.predicted_ms,
        bound_s=1e-3 * row.bound_ms,
        optimum_s=None if row.optimum_ms is None else 1e-3 * row.optimum_ms,
        search_s=1e-3 * row.search_ms,
    )
    return standing, None if row.measured_ms is None else Measured(median_s=1e-3 * row.measured_ms)


def save(compared: Sequence[Compared], file: Path) -> None:
    """Draw to a file; the same values give the same bytes.

    Raises:
        InputError, ImportError: as `check_file`.
    """
    check_file(file)
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    subjects = list(dict.fromkeys(one.subject for one, _ in compared))
    panels = _panels(compared)
    figure = Figure(
        figsize=(4.6 * len(panels) + 2.0, 1.6 + _ROW_INCHES * len(subjects)), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for at, (title, scale, value) in enumerate(panels):
        _draw(axes[at], compared, subjects, value)
        axes[at].set_title(title, fontsize=10)
        axes[at].set_xscale(scale)
        axes[at].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes[at].xaxis.set_minor_formatter(NullFormatter())
        axes[at].grid(axis="x", color="0.9")
        axes[at].set_axisbelow(True)
    axes[0].set_yticks(range(len(subjects)), [name.replace("+", "\n+ ") for name in subjects], fontsize=8)
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "stageloom", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None, dpi=150)


def _panels(compared: Sequence[Compared]) -> list[tuple[str, str, Callable[[Compared], Point | None]]]:
    """Title, scale and value of each panel."""
    found: list[tuple[str, str, Callable[[Compared], Point | None]]] = [
        ("predicted, % over the lower bound", "linear", lambda one: _point(100.0 * one[0].over_bound)),
        ("search, ms", "log", lambda one: _point(1e3 * one[0].search_s)),
    ]
    bases_s = {
        one.subject: measured.median_s
        for one, measured in compared
        if measured is not None and one.scheduler == "sequential"
    }
    if bases_s:
        found.append(
            ("measured, % over sequential", "linear", lambda one: _measured(one, bases_s.get(one[0].subject)))
        )
    return found


def _point(value: float) -> Point:
    return value, value, value


def _measured(one: Compared, base_s: float | None) -> Point | None:
    """Over `sequential`: in the same rounds where that is known, else of medians. Quartiles scale alike."""
    measured = one[1]
    if measured is None or base_s is None:
        return None
    ratio = measured.median_s / base_s if measured.over_sequential is None else measured.over_sequential
    low_s, high_s = measured.quartiles_s or (measured.median_s, measured.median_s)
    middle, low, high = (
        100.0 * (ratio * seconds / measured.median_s - 1.0) for seconds in (measured.median_s, low_s, high_s)
    )
    return middle, low, high


def _draw(
    axes: "Axes",
    compared: Sequence[Compared],
    subjects: Sequence[str],
    value: Callable[[Compared], Point | None],
) -> None:
    """One mark per subject and scheduler; schedulers are spread over a row, in their order."""
    schedulers = list(dict.fromkeys(one.scheduler for one, _ in compared))
    for index, scheduler in enumerate(schedulers):
        offset = 0.7 * ((index + 0.5) / len(schedulers) - 0.5)
        found = [
            (subjects.index(one[0].subject) + offset, value(one))
            for one in compared
            if one[0].scheduler == scheduler
        ]
        shown = [(y, at) for y, at in found if at is not None]
        axes.errorbar(
            [middle for _, (middle, _, _) in shown],
            [y for y, _ in shown],
            xerr=[
                [middle - low for _, (middle, low, _) in shown],
                [high - middle for _, (middle, _, high) in shown],
            ],
            fmt=_MARKERS[index % len(_MARKERS)],
            color=f"C{index % 10}",
            markersize=4.5,
            markerfacecolor="none" if index >= 10 else None,
            elinewidth=0.8,
            label=scheduler,
        )
