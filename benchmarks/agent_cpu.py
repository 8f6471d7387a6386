"""The agent on a CPU: the saturated engine against onnxruntime itself, and what the agent weighs.

    python -m benchmarks.agent_cpu [--quick] [--json]

`ratio.MODEL` is the engine's tasks per second over those of the best onnxruntime setting (threads inside an
operator, callers, sessions), both from memory; see `benchmarks.ratios`. `ratio_blocks` is one session per
block of the papers' partition, `ratio_greedy` the greedy schedule's parallel groups, on the same terms.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks import ingest
from benchmarks.ratios import BLOCKS, FULL, GREEDY, QUICK, WHOLE, compare, workloads
from benchmarks.report import Report, arguments, emit
from stageloom.edge_agent.worker.messages import WorkerConfig

MODELS = ("squeezenet", "resnet50", "inception_v3")
KINDS = {"ratio": WHOLE, "ratio_blocks": BLOCKS, "ratio_greedy": GREEDY}
PACKAGES = ("onnxruntime", "numpy", "msgspec", "msgpack")


def main() -> None:
    """Measure and print."""
    options = arguments("The saturated engine over onnxruntime, ingest, memory").parse_args()
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    report = Report("agent_cpu")
    ingest.part(report, options.quick)
    with tempfile.TemporaryDirectory() as folder:
        for name, workload in workloads(MODELS, Path(folder)).items():
            compare(report, name, workload, KINDS, QUICK if options.quick else FULL)
    emit(report, as_json=options.json, packages=PACKAGES)


if __name__ == "__main__":
    main()
