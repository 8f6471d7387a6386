"""The load of the demo, and its live table."""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.processes import DemoFailed, Lines, System

DEADLINE_S: Final = 2.0
REFRESH_S: Final = 0.5


class Clients:
    """The load: a client process per model all the time, and one more for each burst; their live table."""

    def __init__(self, system: System, console: Console, seed: int) -> None:
        self.files: dict[str, list[Path]] = {}
        self.began_s = 0.0
        self._system, self._console = system, console
        self._folder = system.folder / "clients"
        self._seed = seed * 100
        self._lines: dict[str, Lines] = {}

    def start(self, rates_per_s: Mapping[str, float], seconds: float) -> None:
        """One client per model, for so long at most."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for model, rate_per_s in rates_per_s.items():
            self._start(model, model, rate_per_s, seconds)
        self.began_s = time.monotonic()

    def burst(self, model: str, rate_per_s: float, seconds: float) -> None:
        """More tasks of one model on top, for a while."""
        self._start(f"{model}, burst {len(self.files[model])}", model, rate_per_s, seconds)

    def _start(self, title: str, model: str, rate_per_s: float, seconds: float) -> None:
        name = title.replace(", ", "-").replace(" ", "-")
        file = self._folder / f"{name}.json"
        process = self._system.processes.start(
            f"client-{name}",
            "examples.demo.load",
            *("--endpoint", str(self._system.socket), "--deadline", str(DEADLINE_S)),
            *("--model", model, "--rate", f"{rate_per_s:.4f}", "--seconds", str(seconds)),
            *("--seed", str(self._seed + len(self._lines)), "--out", str(file)),
        )
        assert process.stdout is not None
        self._lines[title] = Lines(process.stdout)
        self.files.setdefault(model, []).append(file)

    def watch(self, what: str, done: Callable[[], object], patience_s: float) -> None:
        """The live table until `done`.

        Raises:
            DemoFailed: it takes longer than `patience_s`, or planner or agent died.
        """
        until_s = time.monotonic() + patience_s
        processes = self._system.processes
        with Live(console=self._console, refresh_per_second=2, transient=True) as live:
            while not done():
                processes.require_alive(("planner", "agent"))
                if time.monotonic() > until_s:
                    raise DemoFailed(f"waited {patience_s:.0f} s for {what}; see {processes.folder}")
                if self._console.is_terminal:
                    live.update(self._table())
                time.sleep(REFRESH_S)

    def _table(self) -> Table:
        counts = ("submitted", "open", "completed", "refused", "expired", "failed")
        title = f"{time.monotonic() - self.began_s:.0f} s of load"
        table = Table("client", title=title, title_justify="left")
        for head in (*counts, "p50 ms", "p99 ms"):
            table.add_column(head, justify="right")
        for name, lines in self._lines.items():
            latest: dict[str, Any] = lines.latest or {}
            times = [latest.get(key) for key in ("p50_ms", "p99_ms")]
            shown = ["-" if value is None else f"{value:.1f}" for value in times]
            table.add_row(name, *(str(latest.get(word, 0)) for word in counts), *shown)
        return table

    def pause(self, seconds: float) -> None:
        """The live table for a while."""
        until_s = time.monotonic() + seconds
        self.watch("nothing", lambda: time.monotonic() >= until_s, seconds + 60.0)

    def end(self, patience_s: float) -> None:
        """Ask every client to submit no more; wait until its open tasks have ended.

        Raises:
            DemoFailed: one of them ended with an error.
        """
        processes = self._system.processes
        names = [f"client-{file.stem}" for files in self.files.values() for file in files]
        for name in names:
            if processes.running[name].poll() is None:
                processes.running[name].send_signal(signal.SIGTERM)
        for name in names:
            if processes.running[name].wait(patience_s):
                raise DemoFailed(f"{name}: {processes.tail(name)}")
