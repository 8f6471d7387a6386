"""The table that a person watches while the load runs."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.demo.processes import Lines

REFRESH_S = 0.5


def watch_load(
    console: Console,
    clients: Mapping[str, Lines],
    *,
    began_s: float,
    done: Callable[[], bool],
    check: Callable[[], None],
) -> None:
    """Show every client's newest counts until `done`; `check` raises when it makes no sense to wait on."""
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while not done():
            check()
            if console.is_terminal:
                live.update(_table(clients, time.monotonic() - began_s))
            time.sleep(REFRESH_S)


def _table(clients: Mapping[str, Lines], elapsed_s: float) -> Table:
    table = Table(title=f"{elapsed_s:.0f} s of load", title_justify="left")
    table.add_column("client")
    for head in ("submitted", "open", "completed", "refused", "expired", "failed", "p50 ms", "p99 ms"):
        table.add_column(head, justify="right")
    for name, lines in clients.items():
        latest: dict[str, Any] = lines.latest or {}
        counts = [
            str(latest.get(w, 0)) for w in ("submitted", "open", "completed", "refused", "expired", "failed")
        ]
        times = [
            f"{value:.1f}" if (value := latest.get(key)) is not None else "-" for key in ("p50_ms", "p99_ms")
        ]
        table.add_row(name, *counts, *times)
    return table
