"""How much is measured; and what was measured so far, written row by row: a time limit loses nothing."""

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner import Report, progress

PARTS = ("correctness", "probes", "table", "serving", "switching", "concurrency", "processes")
"""In the order in which they run, those of most worth first; what they build on is always made."""

MODES = ("default", "reduce-overhead", "max-autotune")
"""Of torch.compile."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. Times in seconds."""

    device: str = "cuda"
    executor: str = "torch_cuda"
    precision: str = "fp16"
    models: tuple[str, ...] = ("inception_v3", "resnet50", "squeezenet")
    width: float = 1.0  # of the models' channels
    size: int | None = None  # side of the image; None: the network's own
    quick: bool = False
    limit_s: float = 460.0
    compile_s: float = 110.0
    modes: tuple[str, ...] = MODES
    parts: tuple[str, ...] = ()  # all of them
    cache: Path | None = None  # of torch.compile, kept between runs
    children: bool = True
    batches: tuple[int, ...] = (8, 16, 64)
    instances: tuple[int, ...] = (2, 4, 8, 16)
    mix_instances: tuple[int, ...] = (1, 2, 4, 8)

    def wants(self, *parts: str) -> bool:
        """Whether one of the parts is to run."""
        return not self.parts or any(part in self.parts for part in parts)


def quick_settings(device: str, executor: str) -> Settings:
    """Tiny models and a handful of repeats: that the code is whole, and nothing about speed."""
    return Settings(
        device=device,
        executor=executor,
        precision="fp32" if device == "cpu" else "fp16",
        models=("squeezenet", "inception_v3"),
        width=0.125,
        size=75,
        quick=True,
        limit_s=600.0,
        compile_s=60.0,
        modes=("default",),
        batches=(2,),
        instances=(2,),
        mix_instances=(1, 2),
    )


class Skip(Exception):
    """Why a row is not run."""


class Results:
    """The report, and a file of JSON lines that grows with it."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.report = Report("gpu")
        self._file = path.open("w", encoding="utf-8") if path else None
        self._clock = clock
        self._began_s = clock()

    def add(self, figures: Mapping[str, float | None], **row: Any) -> None:
        """Figures that are known (None is left out), and a row of the table if `row` holds anything."""
        known = {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
        self.report.add(known, [row] if row else [])
        if self._file is not None:
            entry = {"at_s": round(self._clock() - self._began_s, 2), "figures": known, "row": row}
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def attempt(self, part: str, name: str) -> "Attempt":
        """A context for work on one row: what a driver, compiler or library raises is told there."""
        progress(f"[{self._clock() - self._began_s:6.1f} s] {part}: {name}")
        return Attempt(self, part, name)

    def fail(self, part: str, name: str, error: Exception) -> None:
        """A row that says what was raised."""
        self.add({}, part=part, name=name, failed=why(error))
        progress("".join(traceback.format_exception(error)))

    def skip(self, part: str, name: str, reason: str) -> None:
        """A row that was not run."""
        self.add({}, part=part, name=name, skipped=reason)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class Attempt:
    """See `Results.attempt`."""

    results: Results
    part: str
    name: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """The rest goes on, unless a signal ends the run."""
        if isinstance(error, Skip):
            self.results.skip(self.part, self.name, str(error))
        elif isinstance(error, Exception):
            self.results.fail(self.part, self.name, error)
        return isinstance(error, Exception)


def why(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Deadline:
    """The time that all parts share."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_s = clock() + seconds

    @property
    def left_s(self) -> float:
        return max(self._ends_s - self._clock(), 0.0)

    @property
    def over(self) -> bool:
        return not self.left_s

    def within(self, seconds: float) -> "Deadline":
        """The same clock; it ends in so many seconds at the latest."""
        return Deadline(min(seconds, self.left_s), clock=self._clock)
