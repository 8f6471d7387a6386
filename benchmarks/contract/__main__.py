"""The executors' contract over all models, schedules, masks and batches.

    python -m benchmarks.contract [--quick] [--json] [--executor NAME] [--repeats N]
                                  [--part NAME]... [--rows FILE]

One row per model and schedule, and per plan of several models: the largest difference to the whole model
in onnxruntime over every tensor that crosses a block border, and whether all repeats had equal bits.
`--quick` takes models of a quarter of their width, leaves out the three light ones of more than 200 MB,
and repeats ten times instead of a hundred. What runs before a program is ready (`fallback`) has one
member and one stream at a time, hence nothing that delays could put in another order: it is repeated a
tenth as often. Ends with 1 if any plan disagrees.

All of it takes hours. With `--rows` each row is appended to a file as it comes, and what agreed by that file
is not compared again: a run that was cut off goes on, and parts (`--part`: a model, or `together`) may be
compared by several processes into files of their own. Concatenated, they give the report at once.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import zoo
from benchmarks.contract import cases
from benchmarks.contract.cases import (
    LARGE,
    LIGHT,
    SCHEDULES,
    Case,
    Outcome,
    Subject,
    onnx_subject,
    zoo_subject,
)
from benchmarks.runner import Report, progress, run
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.shared.errors import ExecutorError
from stageloom.shared.launch_list import Barrier


class Record:
    """What is known for one run's settings; without a file it knows nothing and keeps nothing."""

    def __init__(self, path: Path | None, settings: Mapping[str, object]) -> None:
        """Read what is there.

        Raises:
            OSError: the file can be neither read nor written.
        """
        self._path = path
        self._settings = dict(settings)
        self._complete: set[str] = set()
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        whole, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
        for line in whole.splitlines():
            found = json.loads(line)
            if found["settings"] != self._settings:
                continue
            if "complete" in found:
                self._complete.add(found["complete"])
            else:
                self._rows[found["row"]["plan"]] = found["row"]
        if torn:  # the writer was killed in the middle of a line
            path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def has(self, plan: str) -> bool:
        """Whether this plan was compared and agreed; one that did not is compared again."""
        return plan in self._rows and bool(self._rows[plan]["agrees"])

    def is_complete(self, part: str) -> bool:
        """Whether all plans of this part were compared and agreed."""
        return part in self._complete

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep one plan's row."""
        self._rows[row["plan"]] = dict(row)
        self._write({"row": row})

    def complete(self, part: str) -> None:
        """All plans of this part have been compared and agreed."""
        self._complete.add(part)
        self._write({"complete": part})

    def _write(self, said: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"settings": self._settings, **said}) + "\n")


_TOGETHER = ("squeezenet_bypass", "googlenet", "resnet50")
_SEVERAL = "together"
_QUICK_SIDE = 75
_LEAST = 3  # repeats: both inputs, and one of them again after the other
_LIGHT = tuple(path.stem for path in sorted(LIGHT.glob("light_*.onnx")))
_PARTS = (*zoo.ZOO, *_LIGHT, _SEVERAL)


def measure(report: Report, options: argparse.Namespace) -> int:
    """1 unless all plans agree."""
    repeats = options.repeats or (10 if options.quick else 100)
    settings = {"executor": options.executor, "repeats": repeats, "quick": options.quick}
    record = Record(options.rows, settings)
    executor = make_executor(options.executor)
    for part in options.part or [part for part in _PARTS if not (options.quick and part in LARGE)]:
        if not record.is_complete(part):
            _compare(part, executor, record, options.quick, repeats)
    executor.close()
    report.about = settings
    report.add(_figures(record.rows, repeats), record.rows)
    return int(report.figures["agreed"] < report.figures["plans"])


def main(argv: Sequence[str] | None = None) -> int:
    own: dict[str, dict[str, Any]] = {
        "--executor": {"default": "onnx", "help": "one that computes"},
        "--repeats": {"type": int, "help": "of every plan"},
        "--part": {"action": "append", "choices": _PARTS, "help": "only this one; repeat for more"},
        "--rows": {"type": Path, "metavar": "FILE", "help": "keep rows there; compare what it has not"},
    }
    return run(measure, ("onnx", "onnxruntime", "numpy", "torch"), options=own, argv=argv)


def _compare(part: str, executor: Executor, record: Record, quick: bool, repeats: int) -> None:
    """Compare what the record has not yet."""
    agreed = True
    with tempfile.TemporaryDirectory(prefix="stageloom-contract-") as folder:
        for case in _cases(part, Path(folder), quick, executor.name):
            if not record.has(case.name):
                progress(case.name)
                record.add(_row(executor, case, repeats))
                executor.drop_idle()
                agreed = agreed and record.has(case.name)
    if agreed:
        record.complete(part)


def _row(executor: Executor, case: Case, repeats: int) -> dict[str, object]:
    began_s = time.monotonic()
    failed = ""
    repeats = max(_LEAST, repeats // 10) if case.fallback else repeats
    try:
        found = case.run(executor, repeats=repeats)
    except ExecutorError as error:
        found, failed = Outcome(), str(error)
    return {
        "model": "+".join(one.name for one in case.subjects),
        "plan": case.name,
        "repeats": repeats,
        "difference": float("inf") if failed else found.difference,
        "sensitivity": min(one.pair.sensitivity for one in case.subjects),
        "stable": found.stable,
        "tensors": found.tensors,
        "merges": case.merges,
        "agrees": found.agrees,
        "failed": failed,
        "seconds": time.monotonic() - began_s,
    }


def _figures(rows: Sequence[Mapping[str, Any]], repeats: int) -> dict[str, float]:
    return {
        "plans": float(len(rows)),
        "agreed": float(sum(row["agrees"] for row in rows)),
        "models": float(len({row["model"] for row in rows})),
        "repeats": float(repeats),
        "tensors": float(sum(row["tensors"] for row in rows)),
        "difference_max": max(row["difference"] for row in rows),
        "sensitivity_min": min(row["sensitivity"] for row in rows),
        "merge_stages": float(sum(row["merges"] for row in rows)),
    }


def _cases(part: str, folder: Path, quick: bool, executor: str) -> Iterator[Case]:
    if part != _SEVERAL:
        return _alone(_subject(part, folder, quick), executor)
    return _together([_subject(name, folder / name, quick) for name in _TOGETHER], executor)


def _alone(subject: Subject, executor: str) -> Iterator[Case]:
    for schedule in SCHEDULES:
        yield cases.alone(subject, schedule, executor)
    if subject.artifact.graph.batchable:
        yield from cases.batches(subject, "merged", executor)


def _together(several: Sequence[Subject], executor: str) -> Iterator[Case]:
    for schedule in SCHEDULES:
        for barrier in Barrier:
            yield cases.together(several, schedule, executor, barrier)
        yield from cases.masks(several, schedule, executor)
        yield cases.replicas(several[0], schedule, executor)


def _subject(name: str, folder: Path, quick: bool) -> Subject:
    if name not in zoo.ZOO:
        return onnx_subject(name, LIGHT / f"{name}.onnx", folder)
    if quick:
        return zoo_subject(name, folder, width=0.25, side=_QUICK_SIDE)
    return zoo_subject(name, folder)


if __name__ == "__main__":
    sys.exit(main())
