"""The executors' contract over all models, schedules, masks and batches.

    python -m benchmarks.contract [--quick] [--json] [--executor NAME] [--repeats N]

One row per model and schedule, and per plan of several models: the largest difference to the whole model in
onnxruntime over every tensor that crosses a block border, and whether all repeats had equal bits. `--quick`
takes models of a quarter of their width, leaves out the three light ones of more than 200 MB, and repeats ten
times instead of a hundred. Ends with 1 if any plan disagrees.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import zoo
from benchmarks.contract import cases
from benchmarks.contract.cases import SCHEDULES, Case
from benchmarks.contract.compare import Outcome, compare
from benchmarks.contract.subjects import LARGE, LIGHT, Subject, onnx_subject, zoo_subject
from benchmarks.report import Report, arguments, emit, progress
from edge_agent.executor.base import Executor
from edge_agent.executor.registry import make_executor
from shared.errors import ExecutorError
from shared.launch_list import Barrier

PACKAGES = ("onnx", "onnxruntime", "numpy", "torch")
_TOGETHER = ("squeezenet_bypass", "googlenet", "resnet50")
_QUICK_SIDE = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and say whether all agreed."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--executor", default="onnx", help="one that computes")
    parser.add_argument("--repeats", type=int, help="of every plan")
    options = parser.parse_args(argv)
    repeats = options.repeats or (10 if options.quick else 100)
    report = Report("contract")
    executor = make_executor(options.executor)
    with tempfile.TemporaryDirectory(prefix="stageloom-contract-") as folder:
        for case in _cases(Path(folder), options.quick, options.executor):
            progress(case.name)
            report.add({}, [_row(executor, case, repeats)])
            executor.drop_idle()
    executor.close()
    report.add(
        {
            "plans": float(len(report.rows)),
            "agreed": float(sum(row["agrees"] for row in report.rows)),
            "models": float(len({row["model"] for row in report.rows})),
            "repeats": float(repeats),
            "tensors": float(sum(row["tensors"] for row in report.rows)),
            "difference_max": max(row["difference"] for row in report.rows),
            "sensitivity_min": min(row["sensitivity"] for row in report.rows),
            "merge_stages": float(sum(row["merges"] for row in report.rows)),
        }
    )
    emit(report, as_json=options.json, packages=PACKAGES)
    return 0 if report.figures["agreed"] == report.figures["plans"] else 1


def _row(executor: Executor, case: Case, repeats: int) -> dict[str, object]:
    began_s = time.monotonic()
    failed = ""
    try:
        found = compare(
            executor,
            case.bound,
            case.subjects,
            repeats=repeats,
            tasks=case.tasks,
            fallback=case.fallback,
            models=case.models or None,
        )
    except ExecutorError as error:
        found, failed = Outcome(difference=float("inf")), str(error)
    return {
        "model": "+".join(one.name for one in case.subjects),
        "plan": case.name,
        "difference": found.difference,
        "sensitivity": min(one.pair.sensitivity for one in case.subjects),
        "stable": found.stable,
        "tensors": found.tensors,
        "merges": case.merges,
        "agrees": found.agrees,
        "failed": failed,
        "seconds": time.monotonic() - began_s,
    }


def _cases(folder: Path, quick: bool, executor: str) -> Iterator[Case]:
    for subject in _subjects(folder, quick):
        for schedule in SCHEDULES:
            yield cases.alone(subject, schedule, executor)
        if subject.artifact.graph.batchable:
            yield from cases.batches(subject, "merged", executor)
    several = [_zoo(name, folder / "together", quick) for name in _TOGETHER]
    for schedule in SCHEDULES:
        for barrier in Barrier:
            yield cases.together(several, schedule, executor, barrier)
        yield from cases.masks(several, schedule, executor)
        yield cases.replicas(several[0], schedule, executor)


def _subjects(folder: Path, quick: bool) -> Iterator[Subject]:
    """One after another; the files of the one before may be gone by then."""
    for name in zoo.ZOO:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            yield _zoo(name, Path(own), quick)
    for path in sorted(LIGHT.glob("light_*.onnx")):
        if not quick or path.stem not in LARGE:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                yield onnx_subject(path.stem, path, Path(own))


def _zoo(name: str, folder: Path, quick: bool) -> Subject:
    if quick:
        return zoo_subject(name, folder / name, width=0.25, side=_QUICK_SIDE)
    return zoo_subject(name, folder / name)


if __name__ == "__main__":
    sys.exit(main())
