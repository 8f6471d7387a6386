"""The scheduling algorithms themselves: how fast endings are counted, drawn and searched, streams allocated.

    python -m benchmarks.algorithms [--quick] [--json] [--only PART]...

- `endings`: four 12-operator blocks of Inception V3 side by side, their concats done, r = 3, s = 8: counting
  (`count_ms`), drawing one by its number (`unrank_us`) and, in the same run, listing all of them
  (`enumerate_ms`, some 500 MB); then the whole dynamic programming of one such block, exact, every transition
  visited, with a seeded pseudo-random cost per stage.
- `networks`: the same dynamic programming of IOS's RandWire and NASNet (`randwire_dp_s`, `nasnet_dp_s`: two
  processes, isomorphic blocks searched once; beside them one process, no sharing, and rooted groups). IOS's
  released Python takes 39 s and 41 s for them under rooted groups, on 2 cores.
- `streams`: Opara's claim that its streams are allocated quickly, beside Nimble's, on the same graphs:
  GoogLeNet, Inception V3 and NASNet-A Large as the importer counts operators. Per network the median time of
  stream allocation (`*_opara_ms`: Opara's algorithm 1; `*_nimble_ms`: transitive reduction and matchings), of
  Opara's launch order (`*_opara_order_ms`, algorithm 2), and `*_speedup`, Nimble's time over Opara's. Rows
  repeat Opara's table I, which was measured on graphs of PyTorch's own operators. Each takes the graph anew
  each time, so that none finds anything computed.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import zoo
from benchmarks.runner import Report, progress, run, timed_s
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.schedule import Group
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.ios import exact
from stageloom.shared.search.isomorphism import form
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.stages import Stages, Strategy
from stageloom.shared.search.states import states_by_size
from stageloom.shared.search.streams import OperatorProfile, allocate_streams, assign_streams, launch_order

Block = tuple[tuple[int, ...], ...]
Network = tuple[Block, ...]

PARTS = ("endings", "networks", "streams")
# Model of the zoo, its name in figures, and Opara's table I: ms of Opara and of Nimble.
STREAMED = (
    ("googlenet", "googlenet", 0.27, 5.80),
    ("inception_v3", "inception", 0.50, 14.40),
    ("nasnet_large", "nasnet", 1.75, 257.83),
)
_WIDTH, _SIDE = 0.25, 75  # what is allocated depends on neither
R, S = 3, 8

# Inception V3's blocks with 17x17 grids: branches of 1, 3, 5 and 2 operators, and the concat of all.
INCEPTION_BLOCK = ((), (), (1,), (2,), (), (4,), (5,), (6,), (7,), (), (9,), (0, 3, 8, 10))


@cache
def networks() -> dict[str, Network]:
    """RandWire and NASNet-A Large as IOS schedules them (Ding et al. 2021, table 2), 120 and 374 operators.

    A unit is Relu with the separable convolution after it, a convolution, a pool, or the sum or concat of its
    inputs. A network is its blocks in order; a block lists per operator its predecessors inside the block.

    RandWire: WS(16, 4, 0.75) and three of WS(32, 4, 0.75), the graphs that IOS's authors drew and published;
    one operator more sums a graph's last nodes. NASNet: two stem cells, and three runs of a first cell, five
    normal ones and, between two runs, a reduction cell. Table 1 of the paper holds for both: tests compare.
    """
    file = Path(__file__).with_name("ios_networks.json")
    return {
        name: tuple(tuple(map(tuple, block)) for block in blocks)
        for name, blocks in json.loads(file.read_text(encoding="utf-8")).items()
    }


@dataclass(frozen=True, slots=True)
class SpaceSize:
    """The exact size of a search (IOS, table 1)."""

    states: int
    transitions: int  # pairs of a state and one of its endings
    schedules: int  # paths from all operators to none


def measure_space(endings: Endings) -> SpaceSize:
    """Count by visiting every transition once."""
    paths = {0: 1}
    transitions = 0
    for level in states_by_size(endings.graph):
        for state in level:
            found = endings.endings(state)
            transitions += len(found)
            paths[state] = sum(map(paths.__getitem__, map(state.__xor__, found)))
    return SpaceSize(len(paths) - 1, transitions, paths[(1 << endings.graph.size) - 1])


def graph_of(*members: Sequence[Sequence[int]]) -> CombinedGraph:
    """A combined graph; each member lists per operator its predecessors inside the member."""
    offsets, masks = [0], []
    for member in members:
        masks += [sum(1 << (offsets[-1] + before) for before in row) for row in member]
        offsets.append(offsets[-1] + len(member))
    return CombinedGraph(tuple(offsets), (0,) * len(members), tuple(masks))


class RandomCosts(StageCosts):
    """A seeded pseudo-random cost per stage: nothing to measure, nothing to prune by."""

    def stage_s(self, groups: Sequence[Group]) -> float:
        """Between 0 and 1, the same for the same operators."""
        return (hash(groups) * 0x9E3779B97F4A7C15 >> 11 & 0xFFFFFFFF) / 2**32


def measure(report: Report, options: argparse.Namespace) -> None:
    parts = options.only or PARTS
    if "endings" in parts:
        measure_endings(report, 3 if options.quick else 21)
    if "networks" in parts:
        for name, network in networks().items():
            progress(f"dynamic programming of {name}")
            report.add(*_measure_network(name, network, 1 if options.quick else 5))
    if "streams" in parts:
        measure_streams(report, 11 if options.quick else 101)


def measure_endings(report: Report, repeats: int) -> None:
    """Counting, drawing and listing, and the dynamic programming of one block."""
    graph = graph_of(*[INCEPTION_BLOCK] * 4)
    size = len(INCEPTION_BLOCK)
    state = sum(((1 << size - 1) - 1) << size * member for member in range(4))
    for rule in GroupRule:
        progress(f"{rule.value} groups")
        report.add(*_measure_rule(Endings(graph, rule=rule, r=R, s=S), state, repeats))
    progress("listing")
    endings = Endings(graph, r=R, s=S)
    report.add({"enumerate_ms": _median_s(lambda: endings.endings(state), 1) * 1e3})


def _measure_network(
    name: str, network: Network, repeats: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures of one network under both rules, and the sizes of its search spaces as rows."""
    blocks = distinct(network)
    ways = {"": (blocks, 2), "one_process_": (blocks, 1), "unshared_": (network, 2)}
    figures, rows = {}, []
    for prefix, rule in (("", GroupRule.CONNECTED), ("rooted_", GroupRule.ROOTED)):
        for way, (searched, processes) in ways.items():
            searching = partial(search, searched, rule, processes=processes)
            figures[f"{name}_{prefix}{way}dp_s"] = _median_s(searching, repeats)
        sizes = [measure_space(Endings(graph_of(block), rule=rule, r=R, s=S)) for block in blocks]
        rows.append(
            {
                "network": name,
                "groups": rule.value,
                "operators": sum(map(len, network)),
                "blocks": len(network),
                "blocks_searched": len(blocks),
                "states": sum(size.states for size in sizes),
                "transitions": sum(size.transitions for size in sizes),
            }
        )
    return figures, rows


def distinct(network: Network) -> Network:
    """The blocks of which no earlier one is the same up to numbering."""
    found: dict[Any, Block] = {}
    for block in network:
        found.setdefault(form(graph_of(block), StageCosts((1.0,) * len(block))).key, block)
    return tuple(found.values())


def search(network: Network, rule: GroupRule, *, processes: int) -> list[list[int]]:
    """Every block's cheapest endings, largest blocks first; with one process no other is started."""
    work = sorted(network, key=len, reverse=True)
    rules = [rule] * len(work)
    if processes == 1:
        return list(map(_search_block, work, rules))
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return list(pool.map(_search_block, work, rules))


def _search_block(block: Block, rule: GroupRule) -> list[int]:
    return exact(Stages(graph_of(block), RandomCosts(()), Limits(r=R, s=S), rule, Strategy.PARALLEL))


def _measure_rule(
    endings: Endings, state: int, repeats: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures of one rule, and the exact count as a row."""
    ranked = RankedEndings(endings, state)
    drawn = random.Random(0).choices(range(ranked.count), k=10_000)
    limits = Limits(r=R, s=S)
    stages = Stages(graph_of(INCEPTION_BLOCK), RandomCosts(()), limits, endings.rule, Strategy.PARALLEL)
    figures = {
        "count_ms": _median_s(lambda: RankedEndings(endings, state), repeats) * 1e3,
        "unrank_us": _median_s(lambda: [ranked.unrank(k) for k in drawn], repeats) * 1e6 / len(drawn),
        "neighbour_distance": _distance(ranked, drawn),
        "inception_block_dp_ms": _median_s(lambda: exact(stages), repeats) * 1e3,
    }
    prefix = "" if endings.rule is GroupRule.CONNECTED else "rooted_"
    named = {prefix + name: value for name, value in figures.items()}
    return named, [{"groups": endings.rule.value, "endings": ranked.count}]


def _median_s(work: Callable[[], object], repeats: int) -> float:
    return median(timed_s([lambda _: work()], lambda number: None, repeats)[0])


def _distance(ranked: RankedEndings, drawn: Sequence[int]) -> float:
    """Operators by which an ending differs from the next one, on average over drawn places of the order."""
    places = [place for place in drawn if place + 1 < ranked.count]
    total = sum((ranked.unrank(place) ^ ranked.unrank(place + 1)).bit_count() for place in places)
    return total / len(places)


# Streams


def whole_graph(name: str) -> CombinedGraph:
    """All operators of a zoo model, as the importer counts them."""
    graph = zoo.graph_of(name, width=_WIDTH, size=_SIDE)
    return combine([(graph, split(graph, ())[0])])


def measure_streams(report: Report, repeats: int) -> None:
    for model, name, opara_paper_ms, nimble_paper_ms in STREAMED:
        progress(f"streams of {name}")
        graph = whole_graph(model)
        # No profiler runs here: kinds alternate and demands differ, so that the order has something to do.
        profiles = [
            OperatorProfile(threads=op % 7 / 7, memory_intensive=bool(op & 1)) for op in range(graph.size)
        ]
        works = (allocate_streams, assign_streams, partial(launch_order, profiles=profiles))
        opara_ms, nimble_ms, order_ms = median_ms(graph, works, repeats)
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
    only = {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"}
    sys.exit(run(measure, ["onnx", "onnxruntime"], options={"--only": only}))
