"""What was measured so far, written row by row, so that a time limit loses nothing."""

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.report import Report, progress


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
        self._write({"at_s": round(self._clock() - self._began_s, 2), "figures": known, "row": row})

    def attempt(self, part: str, name: str) -> "Attempt":
        """A context for one row: if it fails, the row says why, and the rest goes on."""
        progress(f"[{self._clock() - self._began_s:6.1f} s] {part}: {name}")
        return Attempt(self, part, name)

    def skip(self, part: str, name: str, reason: str) -> None:
        """A row that was not run."""
        self.add({}, part=part, name=name, skipped=reason)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def close(self) -> None:
        """No more rows."""
        if self._file is not None:
            self._file.close()


class Attempt:
    """See `Results.attempt`."""

    def __init__(self, results: Results, part: str, name: str) -> None:
        self._results = results
        self._part = part
        self._name = name

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Whatever a driver, a compiler or a library raises is a row; a signal that ends the run is not."""
        if not isinstance(error, Exception):
            return False
        self._results.add({}, part=self._part, name=self._name, failed=why(error))
        progress("".join(traceback.format_exception(error)))
        return True


def why(error: BaseException) -> str:
    """One line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Deadline:
    """The time that all parts share."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds, never below 0."""
        return max(self._ends_s - self._clock(), 0.0)

    def within(self, seconds: float) -> "Deadline":
        """The same clock; it ends in so many seconds at the latest."""
        return Deadline(min(seconds, self.left_s), clock=self._clock)

    def share_s(self, fraction: float, *, most: float = math.inf) -> float:
        """A part of what is left."""
        return min(self.left_s * fraction, most)
