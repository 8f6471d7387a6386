"""A fast and a slow resource for one model: what StarONNX's plans carry, and what the engine costs them.

    python -m benchmarks.staronnx [--json] [--quick] [--model NAME]... [--slow K]... [--only PART]...

Core 0 runs onnxruntime, core 1 the same *paced* to be K times slower (it waits K - 1 times as long as it
computed); what crosses between them waits for a bus. Batches of one item come evenly spaced. The highest
rate of a plan is the largest at which latency has no slope above 0 at 95 % over 300 batches and at most four
batches wait, of eight shares of what its closed loop carries: 0.80, 0.85, 0.89, 0.92, and by 0.02 up to 1.00.
Of plans that are compared closed loops take turns. Every row of `lines` is something that is asked: with
`measured`, and whether it is `met`. Under Poisson arrivals, and with OpenVINO unpaced on core 1, figures are
rows only.

`--quick` takes GoogLeNet at K = 3 and 150 batches; without it all models, K = 3 and 6, for about an hour.
"""

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.real_models.fetching import CACHE, NoRegistryError
from benchmarks.runner import Report, progress, run
from benchmarks.staronnx import batches
from benchmarks.staronnx.lines import Line, Pair
from benchmarks.staronnx.models import SOURCES, Machine, Parts, load
from stageloom.shared.engine.residency import Bus

NO_REGISTRY = 3
PARTS = ("pairs", "batches")
BUS = Bus(latency_s=1e-4, bytes_per_s=1e9)
_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"action": "append", "choices": list(SOURCES), "help": "only this one; repeat for more"},
    "--slow": {"action": "append", "type": float, "metavar": "K", "help": "default 3 and 6"},
    "--only": {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"},
    "--cache": {"type": Path, "default": CACHE, "metavar": "DIR", "help": "downloads; default %(default)s"},
}


def measure(report: Report, options: argparse.Namespace) -> int:
    """Every line of every model; the exit code is 3 where no registry answers for one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        progress("two cores are needed")
        return 1
    machine = Machine((cores[0], cores[1]), BUS)
    names = options.model or list(SOURCES)[: 1 if options.quick else None]
    slows = options.slow or ([3.0] if options.quick else [3.0, 6.0])
    count = 150 if options.quick else 300
    options.cache.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    code = 0
    try:
        with tempfile.TemporaryDirectory(prefix="stageloom-staronnx-") as folder:
            for name in names if "pairs" in (options.only or PARTS) else ():
                try:
                    model = load(name, Path(folder), options.cache)
                except NoRegistryError as error:
                    progress(f"no registry: {error}")
                    report.add({}, [{"part": "absent", "model": name, "reason": str(error)}])
                    code = NO_REGISTRY
                    continue
                parts = Parts(model, machine)
                for slow in slows:
                    beside = slow == slows[0] and find_spec("openvino") is not None
                    _measure_pair(report, Pair(model, machine, parts, slow, count), lines, beside=beside)
            if "batches" in (options.only or PARTS):
                _batches(report, Path(folder), cores[0], 5 if options.quick else 25, lines)
    finally:  # what was measured before anything failed stays
        if lines:
            report.add({"lines": len(lines), "lines_met": sum(line.met for line in lines)})
    return code


def _measure_pair(report: Report, pair: Pair, lines: list[Line], *, beside: bool) -> None:
    try:
        for line in pair.lines():
            lines.append(line)
            report.add({}, [line.row])
        if beside:
            pair.beside("openvino")
    finally:
        report.add({}, pair.rows)


def _batches(report: Report, folder: Path, core: int, repeats: int, lines: list[Line]) -> None:
    """The batch for a rate, on one core."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    for network, width, side in batches.NETWORKS:
        progress(f"batches of {network}")
        times_s = batches.measured_s(network, width, side, folder, repeats)
        found = batches.judged(times_s)
        met = found["close"] >= 0.9 and found["larger"] >= 1 / 3
        name = f"{network} at {width:g} of its channels, {side} pixels"
        beside = {"larger_than_1": found["larger"]}
        lines.append(
            Line(name, 1.0, "rates at which b* is within 5 %", ">= 0.9", found["close"], met, beside)
        )
        row: dict[str, Any] = {f"b{batch}_us": 1e6 * times_s[batch] for batch in batches.FITTED}
        row |= {"part": "batches", "model": name, "highest_per_s": found["per_s"]}
        report.add({}, [lines[-1].row, row])
    os.sched_setaffinity(0, everywhere)


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "openvino", "numpy", "onnx"), options=_OPTIONS))
