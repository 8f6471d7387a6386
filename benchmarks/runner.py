"""What every benchmark does: read its options, measure into a report, print it.

A benchmark is a function that fills a `Report`; `run` gives it `--json` and `--quick`. It prints tables
for people or, with `--json`, one object on stdout with `benchmark`, `machine`, `versions`, `figures`
(flat, units in the names) and `rows`. Progress goes to stderr.
"""

import argparse
import gc
import json
import math
import os
import platform
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from mmap import PAGESIZE
from pathlib import Path
from statistics import correlation, median, quantiles
from typing import Any

from stageloom.edge_agent.bench.termination import ended_politely


@dataclass
class Report:
    """One benchmark's results; `about` joins what is said of the machine."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, figures: Mapping[str, float], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Take in one part's results.

        Raises:
            ValueError: a figure is there already.
        """
        if repeated := self.figures.keys() & figures.keys():
            raise ValueError(f"figures measured twice: {sorted(repeated)}")
        self.figures.update(figures)
        self.rows += [dict(row) for row in rows]


def run(
    measure: Callable[[Report, argparse.Namespace], int | None],
    packages: Sequence[str] = (),
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run one benchmark from its command line; the exit code is what `measure` returns.

    What is in the report is printed also where `measure` raises, as it does on Ctrl-C and SIGTERM; then
    `ended_by` says what.
    The docstring of the module of `measure` is the help text. `options` are the benchmark's own: keyword
    arguments of `add_argument` by flag. `packages` are those whose versions matter.
    """
    module = sys.modules[measure.__module__]
    name = (module.__spec__.name if module.__spec__ else module.__name__).removesuffix(".__main__")
    parser = arguments(module.__doc__ or "", name)
    for flag, settings in (options or {}).items():
        parser.add_argument(flag, **settings)
    given = parser.parse_args(argv)
    report = Report(name.removeprefix("benchmarks."))
    try:
        with ended_politely():
            code = measure(report, given)
    except BaseException as error:
        report.about["ended_by"] = type(error).__name__
        raise
    finally:
        if report.figures or report.rows:  # else it printed what was asked for itself
            emit(report, as_json=given.json, packages=packages)
    return code or 0


def arguments(description: str, name: str = "") -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    if not name and (spec := sys.modules["__main__"].__spec__) is not None:  # None: not started with -m
        name = spec.name.removesuffix(".__main__")
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}" if name else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, or less of it")
    return parser


def progress(line: str) -> None:
    """Say on stderr what is being measured."""
    print(line, file=sys.stderr, flush=True)


def emit(
    report: Report, *, as_json: bool, packages: Sequence[str], device: Mapping[str, Any] | None = None
) -> None:
    """Print the report on stdout; `device` joins what is said of the machine.

    A figure that is no finite number is left out; JSON has null for one in a row.
    """
    there = {name: value for name, value in report.figures.items() if math.isfinite(value)}
    if as_json:
        about = {**machine(), **report.about, **(device or {})}
        figures = {name: float(f"{value:.6g}") for name, value in there.items()}
        found = {"benchmark": report.name, "machine": about, "versions": versions(packages)}
        told = json.dumps({**found, "figures": figures, "rows": report.rows})
        print(json.dumps(json.loads(told, parse_constant=lambda name: None), allow_nan=False))
        return
    width = max((len(name) for name in there), default=0)
    for name, value in there.items():
        print(f"{name:{width}}  {value:12.4g}")
    print(readable(report.rows))


def readable(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any] | None = None) -> str:
    """Tables, by `part` in order of appearance; rows of a part with the same columns share a heading."""
    lines = [f"{key}: {value}" for key, value in (about or {}).items()]
    parts: dict[str, dict[tuple[str, ...], list[Mapping[str, Any]]]] = {}
    for row in rows:
        columns = tuple(key for key in row if key != "part")
        parts.setdefault(str(row.get("part", "")), {}).setdefault(columns, []).append(row)
    for part, tables in parts.items():
        lines += ["", f"== {part} =="] if part else [""]
        for columns, own in tables.items():
            cells = [list(columns), *[[_text(row[column]) for column in columns] for row in own]]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for line in cells:
                padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The machine


def machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": PAGESIZE * os.sysconf("SC_PHYS_PAGES") >> 20,
        "load_average_1min": os.getloadavg()[0],
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python and of packages; `absent` where one is not installed."""
    return {"python": platform.python_version(), **{package: _version(package) for package in packages}}


def pss_mib(pids: Sequence[int]) -> float:
    """Proportional set size of some processes together: what they share counts once."""
    return sum(_kib(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids) / 1024


def resident_mib(pids: Sequence[int]) -> float:
    """Resident memory of some processes together: pages of files that they share count once, whoever else has
    them, and what is anonymous is each one's own. See proc_pid_pagemap(5)."""
    anonymous_kib, of_files = 0, set[tuple[str, str, int]]()
    for pid in pids:
        anonymous_kib += _kib(f"/proc/{pid}/smaps_rollup", "Anonymous:")
        with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pages:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                span, _, offset, device, inode, *_ = line.split()
                begin, end = (int(address, 16) // PAGESIZE for address in span.split("-"))
                entries = array("Q", os.pread(pages.fileno(), 8 * (end - begin), 8 * begin))
                for place, entry in enumerate(entries, int(offset, 16) // PAGESIZE):
                    if entry >> 61 & 0b101 == 0b101:  # present, and of a file
                        of_files.add((device, inode, place))
    return (anonymous_kib + len(of_files) * PAGESIZE / 1024) / 1024


def rss_mib() -> float:
    """Resident memory of this process."""
    return _kib("/proc/self/status", "VmRSS:") / 1024


def anonymous_mib() -> float:
    """Memory of this process that no file holds."""
    return _kib("/proc/self/status", "RssAnon:") / 1024


def _kib(file: str, key: str) -> int:
    lines = Path(file).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


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


# Times and statistics


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected: it would fall on anything that is timed, at random."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed_s(
    works: Sequence[Callable[[Any], object]], inputs: Callable[[int], Any], repeats: int, warm_up: int = 0
) -> list[list[float]]:
    """Seconds of each of `repeats` calls of each work, taken in turns; `inputs(n)` is made off the clock."""
    taken: list[list[float]] = [[] for _ in works]
    with uncollected():
        for number in range(warm_up + repeats):
            for work, times in zip(works, taken, strict=True):
                given = inputs(number)
                began_s = time.perf_counter()
                work(given)
                times.append(time.perf_counter() - began_s)
    return [times[warm_up:] for times in taken]


def spread(values: Sequence[float]) -> dict[str, float]:
    low, high = (percentile(values, percent) for percent in (25, 75))
    return {"median": median(values), "q1": low, "q3": high}


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's; equal values share their mean rank. 0 where all values of one side are equal."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return 0.0
    return correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]
