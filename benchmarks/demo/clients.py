"""The load: a client process per model all the time, and one more for each burst; their live table."""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from benchmarks.demo.live import watch_load
from benchmarks.demo.processes import DemoFailed, Lines, Processes

BEFORE = ("planner", "agent")
"""What must live as long as there is load."""


class Clients:
    """Started once; then `burst` as often as wanted, `watch` meanwhile, and `end`."""

    def __init__(
        self,
        processes: Processes,
        console: Console,
        folder: Path,
        socket: Path,
        *,
        deadline_s: float,
        seed: int,
    ) -> None:
        self.files: dict[str, list[Path]] = {}
        self.began_s = 0.0
        self._processes = processes
        self._console = console
        self._folder = folder
        self._common = ("--endpoint", str(socket), "--deadline", str(deadline_s))
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
        process = self._processes.start(
            f"client-{name}",
            "benchmarks.demo.load",
            *self._common,
            *("--model", model, "--rate", f"{rate_per_s:.4f}", "--seconds", str(seconds)),
            *("--seed", str(self._seed + len(self._lines)), "--out", str(file)),
        )
        assert process.stdout is not None
        self._lines[title] = Lines(process.stdout)
        self.files.setdefault(model, []).append(file)

    def watch(self, what: str, done: Callable[[], bool], patience_s: float) -> None:
        """The live table until `done`.

        Raises:
            DemoFailed: it takes longer than `patience_s`, or planner or agent died.
        """
        until_s = time.monotonic() + patience_s

        def check() -> None:
            self._processes.require_alive(BEFORE)
            if time.monotonic() > until_s:
                raise DemoFailed(f"waited {patience_s:.0f} s for {what}; see {self._processes.folder}")

        watch_load(self._console, self._lines, began_s=self.began_s, done=done, check=check)

    def pause(self, seconds: float) -> None:
        """The live table for a while."""
        until_s = time.monotonic() + seconds
        self.watch("nothing", lambda: time.monotonic() >= until_s, seconds + 60.0)

    def end(self, patience_s: float) -> None:
        """Ask every client to submit no more; wait until its open tasks have ended.

        Raises:
            DemoFailed: one of them ended with an error.
        """
        names = [f"client-{file.stem}" for files in self.files.values() for file in files]
        for name in names:
            process = self._processes.running[name]
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for name in names:
            process = self._processes.running[name]
            process.wait(patience_s)
            if process.returncode:
                raise DemoFailed(f"{name}: {self._processes.tail(name)}")
