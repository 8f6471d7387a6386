"""What every benchmark prints: a table for people or, with --json, one object on stdout.

The object has `machine`, `versions`, `figures` (flat, units in the names) and `rows` (what the table shows).
Progress goes to stderr.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any


@dataclass
class Report:
    """One benchmark's results."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, figures: Mapping[str, float], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take in one part's results; a figure that is there already is a mistake."""
        if repeated := self.figures.keys() & figures.keys():
            raise ValueError(f"figures measured twice: {sorted(repeated)}")
        self.figures.update(figures)
        self.rows += [dict(row) for row in rows]


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; under a minute")
    return parser


def progress(line: str) -> None:
    """Say on stderr what is being measured."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "q1": low, "q3": high}


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "load_average_1min": os.getloadavg()[0],
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python, and the packages that are installed."""
    return {"python": platform.python_version(), **{package: _version(package) for package in packages}}


def emit(
    report: Report, *, as_json: bool, packages: Sequence[str], device: Mapping[str, Any] | None = None
) -> None:
    """Print the report on stdout; `device` joins what is said of the machine."""
    if as_json:
        about = {**machine(), **(device or {})}
        found = {"benchmark": report.name, "machine": about, "versions": versions(packages)}
        print(json.dumps({**found, "figures": _rounded(report.figures), "rows": report.rows}))
        return
    width = max((len(name) for name in report.figures), default=0)
    for name, value in report.figures.items():
        print(f"{name:{width}}  {value:12.4g}")
    for row in report.rows:
        print("  " + "  ".join(f"{key}={_text(value)}" for key, value in row.items()))


def pss_mib(pids: Sequence[int]) -> float:
    """Proportional set size of some processes together: what they share counts once."""
    total_kib = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        total_kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kib / 1024


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or "unknown"
