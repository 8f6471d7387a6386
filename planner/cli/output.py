"""Data on stdout, progress on stderr.

Tables are drawn on a terminal and tab-separated in a pipe. A terminal too narrow for a table's words gets its
rows one below the other, a line per cell.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import msgspec

from stageloom.planner.cli.settings import settings
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.schema.plan import Pushed
from stageloom.planner.schema.service import TelemetryBooks
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.text import counted


def emit(text: str) -> None:
    """One piece of data, on stdout, at once."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """One line for whoever waits, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def emit_json(value: Any) -> None:
    """One JSON document on one line; bytes as base64, times as they are stored (microseconds since 1970)."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a path that is not UTF-8 has no other form in JSON than as escapes
        text = json.dumps(msgspec.to_builtins(value))
    emit(text)


def show(value: Any, told: Callable[[], None]) -> None:
    """The one result of a command: `value` as JSON where --json was given, else what `told` prints."""
    if settings.json:
        emit_json(value)
    else:
        told()


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table; with no rows, `empty` goes to stderr, so that a pipe reads nothing."""
    if not rows:
        progress(empty)
        return
    if not sys.stdout.isatty():
        emit("\n".join("\t".join(_cell(cell) for cell in row) for row in [columns, *rows]))
        return
    from rich.console import Console

    console = Console()
    if _least_width(columns, rows) > console.width:
        emit("\n\n".join(_record(columns, row) for row in rows))
    else:
        console.print(rich_table(columns, rows))


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> Any:
    """A table as rich draws it: numbers to the right, long texts folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, _GAP - 1, 0, 0),
        pad_edge=False,
    )
    for name, column in zip(columns, zip(*rows, strict=True) if rows else [()] * len(columns), strict=True):
        numeric = bool(column) and all(
            isinstance(cell, int | float) and not isinstance(cell, bool) for cell in column
        )
        table.add_column(
            name, justify="right" if numeric else "left", overflow="fold", no_wrap=_is_words((name, *column))
        )
    for row in rows:
        # Text, not str: what a device reports must not be read as markup.
        table.add_row(*(Text(_cell(cell)) for cell in row))
    return table


_WORD_MAX = 20  # a longer one may be folded: a device class, a path
_GAP = 2  # blanks between two columns


def _is_words(column: Sequence[object]) -> bool:
    """Whether nothing in a column can be folded without breaking a word."""
    return all(" " not in _cell(cell) and len(_cell(cell)) <= _WORD_MAX for cell in column)


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    """Columns of a terminal in which the drawn table breaks no word."""
    cells = zip(columns, *rows, strict=True)
    words = (max(len(word) for cell in column for word in _cell(cell).split() or [""]) for column in cells)
    return sum(min(word, _WORD_MAX) + _GAP for word in words) - _GAP


def _record(columns: Sequence[str], row: Sequence[object]) -> str:
    """One row, a line per cell that holds something."""
    width = max(len(name) for name in columns)
    shown = ((name, _cell(cell)) for name, cell in zip(columns, row, strict=True))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in shown if text != "-")


def when(at_us: int) -> str:
    """A moment as people read it, in UTC; `-` for never."""
    if not at_us:
        return "-"
    return datetime.fromtimestamp(at_us / 1e6, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def pair(epoch: int, generation: int) -> str:
    """A generation as people read it, `epoch.generation`; empty before the first."""
    return f"{epoch}.{generation}" if generation else ""


def interval(ratio: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its 95 % interval."""
    if ratio is None:
        return ""
    if low is None or high is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def compared(figure: str, ratio: float | None, low: float | None, high: float | None) -> str:
    """What a trial compared and found: above 1 where the candidate is better."""
    return f"{figure} {interval(ratio, low, high)}".strip() if ratio is not None else ""


def pushed_text(pushed: Pushed) -> str:
    """The generation and autonomy that a push gave a device."""
    autonomy = pushed.autonomy.value if pushed.autonomy is not None else "as before"
    return f"generation {pair(pushed.epoch, pushed.generation)}, autonomy {autonomy}"


def presence(info: DeviceInfo, *, live: bool = True) -> bool | str | None:
    """Whether a device is there, or why it cannot be; None where no planner runs that knows."""
    if info.revoked or info.quarantine:
        return "revoked" if info.revoked else "quarantined"
    return info.online if live else None


def desired_state(info: DeviceInfo) -> str | None:
    """How far the generation that is desired has come; None where none is, or it has no state."""
    report = info.report
    if (report.epoch, report.generation) == (info.desired_epoch, info.desired_generation):
        return report.state.value if report.state else None
    return "not told yet" if info.desired_generation else None


_WAITS: Final = {
    DeviceState.RECEIVED: "the agent to look at the plan",
    DeviceState.WAITING: "artifacts that it fetches",
    DeviceState.VERIFIED: "the engine to load the plan",
    DeviceState.STAGED: "its trial to begin",
    DeviceState.TRIAL: "the trial's verdict",
    DeviceState.PROBATION: "the end of the plan's probation",
}


def waits_for(info: DeviceInfo, *, live: bool = True) -> str:
    """What stands between a device and the plan that it should run; empty where nothing does."""
    report = info.report
    if info.revoked or info.quarantine or not info.desired_generation:
        return ""
    if (report.epoch, report.generation) != (info.desired_epoch, info.desired_generation):
        return "the device to be told" if info.online or not live else "the device to come online"
    waits = _WAITS.get(report.state, "") if report.state is not None else ""
    return f"{waits}, {report.reason}" if report.state is DeviceState.TRIAL and report.reason else waits


def tell_troubles(infos: Iterable[DeviceInfo]) -> None:
    """On stderr, what is wrong with devices, a line each."""
    for info in infos:
        if info.unshown:
            progress(_cell(f"{info.device}: {info.unshown}"))
        if info.quarantine and not info.revoked:
            remedy = f"`stageloom device release {info.device}` lets it in"
            progress(_cell(f"{info.device} is quarantined: {info.quarantine}; {remedy}"))
        if info.unreadable:
            what = counted(info.unreadable, "record")
            progress(_cell(f"{info.device}: {what} could not be stored as sent; {info.unreadable_reason}"))


def books_line(books: TelemetryBooks) -> str:
    """Rows produced, stored, dropped and lost, in one line."""
    return (
        f"telemetry: {books.produced} rows produced, {books.stored} stored, {books.dropped} dropped, "
        f"{books.lost} lost"
    )


def _cell(cell: object) -> str:
    if cell is None or cell == "":
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    # Control characters in a device's text could redraw the operator's terminal.
    return "".join(char if char.isprintable() else " " for char in str(cell))
