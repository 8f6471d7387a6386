"""EOP: operators split over two resources.

    python -m benchmarks.eop [--json] [--quick] [--only PART]...

- `search`: how long each way to split takes to be found for NASNet-A Large, 753 operators.
- `paper`: the tables and figures of Xu et al. 2022, each a row with what is claimed, what is found here, and
  whether it holds. All of it is modelled on a pair of device files; nothing of it is measured.
- `parts`: what parts of single operators take here, on one thread of onnxruntime and of OpenVINO, and how far
  patterns of a dozen extents miss ten others. Rows of `lines` are what is asked, figures how many are met.
"""

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from benchmarks.eop.paper import measure_paper
from benchmarks.eop.part_times import judged, measure_part_times
from benchmarks.eop.search_time import measure_search
from benchmarks.runner import Report, run

PARTS = ("search", "paper", "parts")
_OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"action": "append", "choices": PARTS, "help": "this part; repeat for more"},
}


def measure(report: Report, options: argparse.Namespace) -> None:
    parts = options.only or PARTS
    if "search" in parts:
        measure_search(report, 1 if options.quick else 5)
    if "paper" in parts:
        measure_paper(report)
    if "parts" in parts:
        executors = ["onnx", *(["openvino"] if find_spec("openvino") is not None else [])]
        rows = measure_part_times(executors, 5 if options.quick else 25)
        lines = judged(rows)
        report.add({"lines": len(lines), "lines_met": sum(row["met"] for row in lines)}, [*rows, *lines])


if __name__ == "__main__":
    sys.exit(run(measure, ("onnx", "onnxruntime", "openvino", "numpy"), options=_OPTIONS))
