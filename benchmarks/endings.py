"""Endings: how many a search faces, and how fast they are counted, drawn and searched.

    python -m benchmarks.endings [--quick] [--json]
    python -m benchmarks.endings --graph FILE [--json]

Without a file: four 12-operator blocks of Inception V3 side by side, their concats done, r = 3, s = 8:
counting (`count_ms`), drawing one by its number (`unrank_us`) and, in the same run, listing all of them
(`enumerate_ms`, some 500 MB). Then the whole dynamic programming, exact, every transition visited, with a
seeded pseudo-random cost per stage: of one such block, and of IOS's RandWire and NASNet (`randwire_dp_s`,
`nasnet_dp_s`: two processes, isomorphic blocks searched once; beside them one process, no sharing, and
rooted groups). IOS's released Python takes 39 s and 41 s for them under rooted groups, on 2 cores.

With a file: the size of the search over any graph given as {"ops": [...], "edges": [[u, v], ...]}, exactly:
`width`, then under `rooted` and `connected` groups, each `r3_s8` and `unpruned`, its `states`, `transitions`
and `schedules` (IOS, Ding et al. 2021, table 1).

`RANDWIRE` and `NASNET` are RandWire and NASNet-A Large as IOS schedules them (Ding et al. 2021, table 2):
120 and 374 operators.

A unit is Relu with the separable convolution after it, a convolution, a pool, or the sum or concat of its
inputs. A network is its blocks in order; a block lists per operator its predecessors inside the block.

RandWire: WS(16, 4, 0.75) and three of WS(32, 4, 0.75), the graphs that IOS's authors drew and published; one
operator more sums a graph's last nodes. NASNet: two stem cells, and three runs of a first cell, five normal
ones and, between two runs, a reduction cell. Table 1 of the paper holds for both: tests compare.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import Report, progress, run, timed_s
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.errors import InputError, StageloomError
from stageloom.shared.schedule import Group
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.ios import exact
from stageloom.shared.search.isomorphism import form
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.stages import Stages, Strategy
from stageloom.shared.search.states import states_by_size, width

Block = tuple[tuple[int, ...], ...]
Network = tuple[Block, ...]

# Per node its successors, all of a higher number; nodes are separated by slashes.
_WS = (
    "6 7 9/6 7 15/6 10 11/9 13/6 9 13 14 15/8 10 15/8 9 12/11 15/11/11/14/14/14/14 15/15/",
    "2 13 25 30/8 20 22/3 16 24 30/6 7 26/12 22/15 21 27/11 21 31/8 9 15/23 27/10 11 19/12 30/13 15 17 28/"
    "14 26 31/14 16 21 31/16 28 29/19 22/18/18 19/24 31//21 22/23 26/31//31/26/31/29//30 31//",
    "9 11 14 17 31/2 3 31/4 11 12 14 30/4 25/9 20 29/6 27/7 21 27/30 31/10 25/10 14/11 16 22 28/16 24/"
    "13 14 15 16/14 22 26/23/29/21/26/19 20/22 27/22//25 30/27/25 26/28/28/28 29/29/30 31/31/",
    "17 20 24/10 22 26 29/19 22 28/6 7 8 9/5 7 26/6 23 24/8/8 11 18 23/11 25/11 19 27 29/12 17 30/14 23 30/"
    "13 25 31/16 27 28/24/16 18 21/17 22/21/24/22/23 28 29//25/30/26/28//28 29 30//31/31/",
)


class _Cell:
    """A block under construction; None stands for a tensor from outside."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def op(self, *before: int | None) -> int:
        self.rows.append(tuple(sorted({one for one in before if one is not None})))
        return len(self.rows) - 1

    def branch(self, source: int | None) -> int:
        """Two separable convolutions in a row."""
        return self.op(self.op(source))

    def halved(self) -> int:
        """Half as large in pixels: two convolutions of what comes from outside, side by side."""
        return self.op(self.op(None), self.op(None))


def _chain(size: int) -> Block:
    return tuple((op - 1,) if op else () for op in range(size))


def _random(text: str) -> Block:
    after = [[int(one) for one in node.split()] for node in text.split("/")]
    rows = [tuple(u for u, row in enumerate(after) if v in row) for v in range(len(after))]
    return (*rows, tuple(u for u, row in enumerate(after) if not row))


def _normal(first: bool) -> Block:
    cell = _Cell()
    left = cell.halved() if first else cell.op(None)
    right = cell.op(None)
    ends = [cell.branch(right), cell.branch(right if first else left)]
    ends += [cell.branch(left), cell.branch(left)]
    ends += [cell.op(right), left, cell.op(left), cell.op(left), cell.branch(right), right]
    cell.op(*ends)
    return tuple(cell.rows)


def _reduction(stem: int | None) -> Block:
    cell = _Cell()
    right = cell.op(None)  # the larger half's source
    left = None if stem == 0 else cell.halved() if stem == 1 else cell.op(None)
    first = cell.op(cell.branch(right), cell.branch(left))
    pool, wide = cell.op(right), cell.branch(left)
    second = cell.op(pool, wide)
    third = [cell.op(right), cell.branch(left)]
    fourth = cell.op(first)
    fifth = [cell.branch(first), cell.op(right)]
    also = {0: [first], 1: [], None: [pool, wide]}[stem]
    cell.op(second, *third, fourth, *fifth, *also)
    return tuple(cell.rows)


def _nasnet() -> Network:
    run = (_normal(first=True), *[_normal(first=False)] * 5)
    stems = (_chain(1), _reduction(0), _reduction(1))
    return (*stems, *run, _reduction(None), *run, _reduction(None), *run, _chain(2))


RANDWIRE: Network = (_chain(1), *map(_random, _WS), _chain(3))
NASNET: Network = _nasnet()


PRUNING = {"r3_s8": (3, 8), "unpruned": (None, None)}
R, S = 3, 8
_MAX_OPS = 100_000

# Inception V3's blocks with 17x17 grids: branches of 1, 3, 5 and 2 operators, and the concat of all.
INCEPTION_BLOCK = ((), (), (1,), (2,), (), (4,), (5,), (6,), (7,), (), (9,), (0, 3, 8, 10))


def read_graph(path: Path) -> CombinedGraph:
    """A graph from its file, renumbered so that edges lead from lower to higher operators.

    Raises:
        InputError: the file is not such a graph, or holds a cycle.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        size = len(found["ops"])
        edges = [(int(before), int(after)) for before, after in found["edges"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no graph: {error}", remedy='write {"ops": [...], "edges": [[u, v], ...]}'
        ) from error
    if size > _MAX_OPS or any(not 0 <= op < size for edge in edges for op in edge):
        raise InputError(f"{path} has an edge to no operator", remedy="number operators from 0")
    return _sorted(size, edges, path)


def _sorted(size: int, edges: Sequence[tuple[int, int]], path: Path) -> CombinedGraph:
    before: list[set[int]] = [set() for _ in range(size)]
    after: list[set[int]] = [set() for _ in range(size)]
    for u, v in edges:
        before[v].add(u)
        after[u].add(v)
    missing = [len(row) for row in before]
    order = [op for op in range(size) if not missing[op]]
    for op in order:  # grows while it is read
        for follower in sorted(after[op]):
            missing[follower] -= 1
            if not missing[follower]:
                order.append(follower)
    if len(order) < size:
        raise InputError(f"{path} holds a cycle", remedy="remove it")
    number = {op: index for index, op in enumerate(order)}
    return graph_of([[number[one] for one in before[op]] for op in order])


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


def space_sizes(graph: CombinedGraph) -> dict[str, Any]:
    """Width and exact counts under both rules, pruned and not."""
    found: dict[str, Any] = {"width": width(graph)}
    for rule in (GroupRule.ROOTED, GroupRule.CONNECTED):
        found[rule.value] = {}
        for key, (r, s) in PRUNING.items():
            size = measure_space(Endings(graph, rule=rule, r=r, s=s))
            found[rule.value][key] = {
                "states": size.states,
                "transitions": size.transitions,
                "schedules": size.schedules,
            }
    return found


class RandomCosts(StageCosts):
    """A seeded pseudo-random cost per stage: nothing to measure, nothing to prune by."""

    def stage_s(self, groups: Sequence[Group]) -> float:
        """Between 0 and 1, the same for the same operators."""
        return (hash(groups) * 0x9E3779B97F4A7C15 >> 11 & 0xFFFFFFFF) / 2**32


def measure(report: Report, options: argparse.Namespace) -> int:
    """Counting, drawing and listing in one run, and the dynamic programming of one block."""
    if options.graph is not None:
        return _count(options.graph, options.json)
    repeats = 3 if options.quick else 21
    graph = graph_of(*[INCEPTION_BLOCK] * 4)
    size = len(INCEPTION_BLOCK)
    state = sum(((1 << size - 1) - 1) << size * member for member in range(4))
    for rule in GroupRule:
        progress(f"{rule.value} groups")
        report.add(*_measure_rule(Endings(graph, rule=rule, r=R, s=S), state, repeats))
    progress("listing")
    endings = Endings(graph, r=R, s=S)
    report.add({"enumerate_ms": _median_s(lambda: endings.endings(state), 1) * 1e3})
    for name, network in (("randwire", RANDWIRE), ("nasnet", NASNET)):
        progress(f"dynamic programming of {name}")
        report.add(*_measure_network(name, network, 1 if options.quick else 5))
    return 0


def _measure_network(
    name: str, network: Network, repeats: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures of one network under both rules, and the sizes of its search spaces as rows."""
    blocks = distinct(network)
    connected, rooted = GroupRule.CONNECTED, GroupRule.ROOTED
    figures = {
        "dp_s": _median_s(lambda: search(blocks, connected, processes=2), repeats),
        "one_process_dp_s": _median_s(lambda: search(blocks, connected, processes=1), repeats),
        "unshared_dp_s": _median_s(lambda: search(network, connected, processes=2), repeats),
        "rooted_dp_s": _median_s(lambda: search(blocks, rooted, processes=2), repeats),
        "rooted_one_process_dp_s": _median_s(lambda: search(blocks, rooted, processes=1), repeats),
        "rooted_unshared_dp_s": _median_s(lambda: search(network, rooted, processes=2), repeats),
    }
    rows = []
    for rule in (connected, rooted):
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
    return {f"{name}_{key}": value for key, value in figures.items()}, rows


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


def _count(file: Path, as_json: bool) -> int:
    """Print the size of the search over the graph of a file; the exit code."""
    try:
        found = space_sizes(read_graph(file))
    except StageloomError as error:
        progress(str(error))
        return int(error.exit_code)
    if as_json:
        print(json.dumps(found))
        return 0
    print(f"width {found['width']}")
    for rule in GroupRule:
        for key, sizes in found[rule.value].items():
            counts = "  ".join(f"{name} {value}" for name, value in sizes.items())
            print(f"{rule.value:9}  {key:8}  {counts}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    graph = {"type": Path, "metavar": "FILE", "help": "count the search space of this graph"}
    return run(measure, options={"--graph": graph}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
