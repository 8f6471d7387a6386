"""Opara's claim that its streams are allocated quickly, beside Nimble's, on the same graphs in one run.

    python -m benchmarks.allocation [--quick] [--json]

GoogLeNet, Inception V3 and NASNet-A Large as the importer counts operators. Per network the median time of
stream allocation (`*_opara_ms`: Opara's algorithm 1; `*_nimble_ms`: transitive reduction and matchings), of
Opara's launch order (`*_opara_order_ms`, algorithm 2), and `*_speedup`, Nimble's time over Opara's. The rows
repeat Opara's table I, which was measured on graphs of PyTorch's own operators. Both take the same graph
anew each time, so that neither finds anything computed.
"""

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import zoo
from benchmarks.report import Report, arguments, emit, progress
from stageloom.shared.artifact import open_artifact
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.search.streams import OperatorProfile, allocate_streams, assign_streams, launch_order

# Model of the zoo, its name in figures, and Opara's table I: ms of Opara and of Nimble.
NETWORKS = (
    ("googlenet", "googlenet", 0.27, 5.80),
    ("inception_v3", "inception", 0.50, 14.40),
    ("nasnet_large", "nasnet", 1.75, 257.83),
)
_WIDTH, _SIDE = 0.25, 75  # what is allocated depends on neither


def imported(name: str, *, width: float = 1.0, size: int | None = None) -> Graph:
    """The operators of a zoo model; see `benchmarks.zoo.write` for width and size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        zoo.write(name, path / "model.onnx", width=width, size=size)
        import_here(path / "model.onnx", {}, path, ImportLimits(), lambda line: None)
        return open_artifact(path / ARTIFACT_NAME).graph


def whole_graph(name: str) -> CombinedGraph:
    """All operators of a zoo model, as the importer counts them."""
    graph = imported(name, width=_WIDTH, size=_SIDE)
    return combine([(graph, split(graph, ())[0])])


def measure(repeats: int) -> Report:
    """All networks, one after another."""
    report = Report("allocation")
    for model, name, opara_paper_ms, nimble_paper_ms in NETWORKS:
        progress(name)
        graph = whole_graph(model)
        # No profiler runs here: kinds alternate and demands differ, so that the order has something to do.
        profiles = [
            OperatorProfile(threads=op % 7 / 7, memory_intensive=bool(op & 1)) for op in range(graph.size)
        ]
        opara_ms, nimble_ms, order_ms = median_ms(
            graph, (allocate_streams, assign_streams, partial(launch_order, profiles=profiles)), repeats
        )
        report.add(
            {
                f"{name}_opara_ms": opara_ms,
                f"{name}_nimble_ms": nimble_ms,
                f"{name}_speedup": nimble_ms / opara_ms,
                f"{name}_opara_order_ms": order_ms,
            },
            [
                {
                    "network": name,
                    "operators": graph.size,
                    "opara_streams": max(allocate_streams(graph)) + 1,
                    "nimble_streams": max(assign_streams(graph)) + 1,
                    "paper_opara_ms": opara_paper_ms,
                    "paper_nimble_ms": nimble_paper_ms,
                    "paper_speedup": nimble_paper_ms / opara_paper_ms,
                }
            ],
        )
    return report


def median_ms(
    graph: CombinedGraph, works: Sequence[Callable[[CombinedGraph], object]], repeats: int
) -> list[float]:
    """Median milliseconds of each, taken in turns."""
    taken: list[list[float]] = [[] for _ in works]
    gc.collect()
    gc.disable()  # a collection would fall on either at random
    try:
        for _ in range(repeats):
            for work, times in zip(works, taken, strict=True):
                fresh = CombinedGraph(graph.offsets, graph.starts, graph.predecessors)
                begun_s = time.perf_counter()
                work(fresh)
                times.append((time.perf_counter() - begun_s) * 1e3)
    finally:
        gc.enable()
    return [median(times) for times in taken]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = arguments(__doc__ or "").parse_args(argv)
    emit(measure(11 if args.quick else 101), as_json=args.json, packages=["onnx", "onnxruntime"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
