"""Opara's claim that its streams are allocated quickly, beside Nimble's, on the same graphs in one run.

    python -m benchmarks.allocation [--quick] [--json]

GoogLeNet, Inception V3 and NASNet-A Large as the importer counts operators. Per network the median time of
stream allocation (`*_opara_ms`: Opara's algorithm 1; `*_nimble_ms`: transitive reduction and matchings), of
Opara's launch order (`*_opara_order_ms`, algorithm 2), and `*_speedup`, Nimble's time over Opara's. The rows
repeat Opara's table I, which was measured on graphs of PyTorch's own operators. Both take the same graph
anew each time, so that neither finds anything computed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from benchmarks import zoo
from benchmarks.runner import Report, progress, run, timed_s
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.search.streams import OperatorProfile, allocate_streams, assign_streams, launch_order

# Model of the zoo, its name in figures, and Opara's table I: ms of Opara and of Nimble.
NETWORKS = (
    ("googlenet", "googlenet", 0.27, 5.80),
    ("inception_v3", "inception", 0.50, 14.40),
    ("nasnet_large", "nasnet", 1.75, 257.83),
)
_WIDTH, _SIDE = 0.25, 75  # what is allocated depends on neither


def whole_graph(name: str) -> CombinedGraph:
    """All operators of a zoo model, as the importer counts them."""
    graph = zoo.graph_of(name, width=_WIDTH, size=_SIDE)
    return combine([(graph, split(graph, ())[0])])


def measure(report: Report, options: argparse.Namespace) -> None:
    for model, name, opara_paper_ms, nimble_paper_ms in NETWORKS:
        progress(name)
        graph = whole_graph(model)
        # No profiler runs here: kinds alternate and demands differ, so that the order has something to do.
        profiles = [
            OperatorProfile(threads=op % 7 / 7, memory_intensive=bool(op & 1)) for op in range(graph.size)
        ]
        works = (allocate_streams, assign_streams, partial(launch_order, profiles=profiles))
        opara_ms, nimble_ms, order_ms = median_ms(graph, works, 11 if options.quick else 101)
        figures = {
            f"{name}_opara_ms": opara_ms,
            f"{name}_nimble_ms": nimble_ms,
            f"{name}_speedup": nimble_ms / opara_ms,
            f"{name}_opara_order_ms": order_ms,
        }
        row = {
            "network": name,
            "operators": graph.size,
            "opara_streams": max(allocate_streams(graph)) + 1,
            "nimble_streams": max(assign_streams(graph)) + 1,
            "paper_opara_ms": opara_paper_ms,
            "paper_nimble_ms": nimble_paper_ms,
            "paper_speedup": nimble_paper_ms / opara_paper_ms,
        }
        report.add(figures, [row])


def median_ms(
    graph: CombinedGraph, works: Sequence[Callable[[CombinedGraph], object]], repeats: int
) -> list[float]:
    """Median milliseconds of each, taken in turns."""

    def fresh(number: int) -> CombinedGraph:
        return CombinedGraph(graph.offsets, graph.starts, graph.predecessors)

    return [median(times) * 1e3 for times in timed_s(works, fresh, repeats)]


if __name__ == "__main__":
    sys.exit(run(measure, ["onnx", "onnxruntime"]))
