"""How long the searches take on NASNet-A Large, 753 operators; part times are patterns, as profiles give."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks import zoo
from benchmarks.eop.problems import joined_by, problem_of, roofline
from benchmarks.runner import Report, progress, spread, timed_s
from stageloom.planner.twin.device_pair import load_pair, pair_names
from stageloom.shared.graph import Graph
from stageloom.shared.search.eop import splitters
from stageloom.shared.search.patterns import Pattern, extents_to_measure, fitted_pattern
from stageloom.shared.search.split_problem import AxisTimes, PartSeconds, SplitProblem

BATCHES = (1, 16)
MODEL = "nasnet_large"


@cache
def _pattern(samples: tuple[tuple[int, float], ...]) -> Pattern:
    return fitted_pattern(dict(samples))


def with_patterns(problem: SplitProblem) -> SplitProblem:
    """The same problem with part times fitted to those of a dozen extents; equal ones are fitted once."""

    def fitted(axis: AxisTimes, part_s: PartSeconds) -> Pattern:
        extents = extents_to_measure(axis.extent, axis.granule)
        return _pattern(tuple((extent, part_s(extent)) for extent in extents))

    operators = []
    for operator in problem.operators:
        axes = [
            replace(one, part_s=(fitted(one, one.part_s[0]), fitted(one, one.part_s[1])))
            for one in operator.axes
        ]
        operators.append(replace(operator, axes=tuple(axes)))
    return replace(problem, operators=operators)


def measure_search(report: Report, repeats: int, load: Callable[[], Graph] | None = None) -> None:
    """Figures of every splitter, both homes included, over batches and pairs of devices."""
    progress(f"import of {MODEL}")
    graph = zoo.graph_of(MODEL) if load is None else load()
    rows: list[dict[str, Any]] = []
    for pair in map(load_pair, pair_names()):
        for batch in BATCHES:
            progress(f"search on {pair.name}, batch {batch}")
            problem = with_patterns(problem_of(graph, batch, roofline(pair), joined_by(pair, graph, batch)))
            for name, one in splitters().items():
                taken_s = timed_s([one.choose], ([problem] * repeats).__getitem__, repeats)[0]
                found = one.choose(problem)
                row = {"part": "search", "pair": pair.name, "batch": batch, "splitter": name}
                row |= {"operators": len(problem.operators), "boundaries": _boundaries(problem)}
                row |= {"search_ms": 1e3 * spread(taken_s)["median"], "splits": len(found.splits)}
                rows.append(row | {"predicted_ms": 1e3 * found.seconds})
    slowest = max(row["search_ms"] for row in rows if row["splitter"] == "eop")
    report.add({"search_operators": len(graph.operators), "search_eop_slowest_s": slowest / 1e3}, rows)


def _boundaries(problem: SplitProblem) -> int:
    return sum(len(axis.boundaries) for one in problem.operators for axis in one.axes)
