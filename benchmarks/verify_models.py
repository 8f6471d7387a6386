"""`stageloom-agent verify` over real models: the zoo at full size and the onnx package's `light_*` models.

    python -m benchmarks.verify_models [--quick] [--json] [--schedule NAME]...

One row per model and scheduler: the largest difference to onnxruntime over all block borders and outputs,
the sensitivity of the comparison, and the exit code that the command would end with. `--quick` takes
quarter-width zoo models and leaves out the three light models of more than 200 MB.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import onnx.backend.test

from benchmarks import zoo
from benchmarks.runner import Report, progress, run
from stageloom.edge_agent.verify.check import verify
from stageloom.shared.errors import ExitCode
from stageloom.shared.search.registry import schedulers

SCHEDULES = ("sequential", "greedy", "ios", "ios_rooted", "opara")
"""Stages from none in parallel to the best found, and streams."""

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
LARGE = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")


def measure(report: Report, options: argparse.Namespace) -> int:
    """The exit code of the worst comparison."""
    worst = ExitCode.OK
    with tempfile.TemporaryDirectory() as folder:
        for path in _models(Path(folder), options.quick):
            for schedule in options.schedule or SCHEDULES:
                progress(f"{path.stem} under {schedule}")
                began_s = time.monotonic()
                result = verify(path, schedule)
                row = {
                    "model": path.stem,
                    "schedule": schedule,
                    "difference": result.difference,
                    "sensitivity": result.sensitivity,
                    "tensors": result.tensors,
                    "exit_code": int(result.exit_code),
                    "seconds": time.monotonic() - began_s,
                }
                report.add({}, [row])
                worst = max(worst, result.exit_code)
    report.add(
        {
            "models": float(len({row["model"] for row in report.rows})),
            "agreed": float(sum(row["exit_code"] == 0 for row in report.rows)),
            "compared": float(len(report.rows)),
            "difference_max": max(row["difference"] for row in report.rows),
            "sensitivity_min": min(row["sensitivity"] for row in report.rows),
        }
    )
    return worst


def _models(folder: Path, quick: bool) -> Iterator[Path]:
    for name in zoo.ZOO:
        path = folder / f"{name}.onnx"
        zoo.write(name, path, width=0.25 if quick else 1.0)
        yield path
        path.unlink()
    for path in sorted(LIGHT.glob("light_*.onnx")):
        if not quick or path.stem not in LARGE:
            yield path


if __name__ == "__main__":
    only = {"action": "append", "choices": schedulers(), "help": "only this one; repeat for more"}
    sys.exit(run(measure, ["onnx", "onnxruntime", "numpy"], options={"--schedule": only}))
