"""EOP: operators split over two resources.

    python -m benchmarks.eop [--json] [--quick] [--minutes N] [--only PART]...

- `search`: how long each way to split takes to be found for NASNet-A Large, 753 operators.
- `paper`: the tables and figures of Xu et al. 2022, each a row with what is claimed, what is found here, and
  whether it holds. All of it is modelled on a pair of device files; nothing of it is measured.
- `parts`: what parts of single operators take here, on one thread of onnxruntime and of OpenVINO, and how far
  patterns of a dozen extents miss ten others.
- `models`: models that really run split, on two cores: onnxruntime beside onnxruntime made three times
  slower, and beside OpenVINO as it is. N minutes, 30 by default, scale the rounds. With --quick two models,
  three minutes.

Rows of `lines` are what is asked, figures how many are met.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.eop.measured import measure_models
from benchmarks.eop.paper import measure_paper
from benchmarks.eop.part_times import judged, measure_part_times
from benchmarks.eop.search_time import measure_search
from benchmarks.real_models.fetching import CACHE
from benchmarks.runner import Report, run

PARTS = ("search", "paper", "parts", "models")
_OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"action": "append", "choices": PARTS, "help": "this part; repeat for more"},
    "--minutes": {"type": float, "default": 30.0, "metavar": "N", "help": "for models; default %(default)g"},
    "--cache": {"type": Path, "default": CACHE, "metavar": "DIR", "help": "downloads; default %(default)s"},
}


def measure(report: Report, options: argparse.Namespace) -> None:
    parts = options.only or PARTS
    if "search" in parts:
        measure_search(report, 1 if options.quick else 5)
    if "paper" in parts:
        measure_paper(report)
    try:
        if "parts" in parts:
            executors = ["onnx", *(["openvino"] if find_spec("openvino") is not None else [])]
            for row in measure_part_times(executors, 5 if options.quick else 25):
                report.add({}, [row])
            report.add({}, judged([row for row in report.rows if row["part"] == "part times"]))
        if "models" in parts:
            options.cache.mkdir(parents=True, exist_ok=True)
            minutes = min(options.minutes, 2.0) if options.quick else options.minutes
            measure_models(report, minutes, options.quick, options.cache)
    finally:
        if lines := [row for row in report.rows if row["part"] == "lines"]:
            report.add({"lines": len(lines), "lines_met": sum(row["met"] for row in lines)})


if __name__ == "__main__":
    sys.exit(run(measure, ("onnx", "onnxruntime", "openvino", "numpy"), options=_OPTIONS))
