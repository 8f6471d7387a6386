"""The engine on a CPU: what a step costs, how much of onnxruntime's speed is left, swaps, memory.

    python -m benchmarks.engine_cpu [--quick] [--json] [--only PART]...

| part | figures | see |
| --- | --- | --- |
| steps | `step_overhead_p50_us`, `_p99_us`, `trace_overhead_p50_us` | `benchmarks.steps` |
| memory | `rss_growth_mib` | `benchmarks.steps` |
| groups | `two_groups_p50_us`, `_p99_us` | `benchmarks.two_groups` |
| swaps | `swap_lost_tasks`, `swap_stall_p50_ms`, `_p99_ms` | `benchmarks.swaps` |
| ratios | `ratio.WORKLOAD`, `ratio_blocks.WORKLOAD`, `ratio_staged.WORKLOAD` | `benchmarks.ratios` |

`ratio` is the saturated engine with whole models over the best onnxruntime setting; `ratio_blocks` cuts at
the papers' borders, `ratio_staged` runs the best of the schedules with groups side by side.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from benchmarks import swaps, two_groups
from benchmarks.ratios import BLOCKS, FULL, QUICK, STAGED, WHOLE, Workload, compare, workloads
from benchmarks.report import Report, arguments, emit
from benchmarks.steps import growth, overhead
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.shared.artifact import open_artifact
from stageloom.shared.importer.api import artifact_path, import_model

MODELS = ("squeezenet", "resnet50", "googlenet", "inception_v3")
SMALL_WIDTH = 0.25
KINDS = {"ratio": WHOLE, "ratio_blocks": BLOCKS, "ratio_staged": STAGED}
PARTS = ("steps", "memory", "groups", "swaps", "ratios")
PACKAGES = ("onnxruntime", "numpy", "msgspec", "msgpack", "pyzmq")


def main() -> None:
    """Measure and print."""
    parser = arguments("The engine's own cost, and its speed over onnxruntime's")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part; repeat for more")
    options = parser.parse_args()
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    report = Report("engine_cpu")
    chosen = options.only or PARTS
    with tempfile.TemporaryDirectory() as folder:
        small = {**workloads(MODELS, Path(folder), width=SMALL_WIDTH), "tiny": _tiny(Path(folder))}
        _engine(report, chosen, small, options.quick)
    if "ratios" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            for name, workload in workloads(MODELS, Path(folder)).items():
                compare(report, name, workload, KINDS, QUICK if options.quick else FULL)
    emit(report, as_json=options.json, packages=PACKAGES)


def _tiny(folder: Path) -> Workload:
    """A model whose steps take little beside what the engine does."""
    onnx.save(two_groups.model(), folder / "tiny.onnx")
    found = import_model(folder / "tiny.onnx", shapes={}, out_dir=folder)
    return {"tiny": open_artifact(artifact_path(folder, found.digest))}


def _engine(report: Report, chosen: Sequence[str], small: Mapping[str, Workload], quick: bool) -> None:
    """What needs no weights of full size."""
    if "steps" in chosen:
        overhead(report, small["mix"], quick)
    if "memory" in chosen:
        growth(report, small["mix"], small["tiny"], quick)
    if "groups" in chosen:
        two_groups.part(report, quick)
    if "swaps" in chosen:
        swaps.part(report, small["squeezenet"], quick)


if __name__ == "__main__":
    main()
