"""IOS, tables 1 and 2, and TOP's table II: what networks and the search spaces of their blocks are like."""

from collections.abc import Sequence
from math import comb
from typing import Any, Final

from benchmarks.algorithms import distinct, graph_of, measure_space, networks
from benchmarks.paper.finding import Finding, Inputs, PaperClaim, Row
from benchmarks.paper.graphs import zoo_graph
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.states import width

TABLE_1: Final = {
    "inception_v3": (11, 6, 2.6e4, 4.9e3, 3.8e6),
    "randwire": (33, 8, 3.7e9, 1.2e6, 9.2e22),
    "nasnet": (18, 8, 5.2e6, 3.1e5, 7.2e12),
    "squeezenet_bypass": (6, 3, 2.2e2, 51, 1.3e2),
}
"""n, d, bound, pairs and schedules of the largest block."""

TABLE_2: Final = {
    "inception_v3": (11, 119),
    "randwire": (3, 120),
    "nasnet": (13, 374),
    "squeezenet_bypass": (10, 50),
}
"""Blocks and operators."""

TOP_TABLE_II: Final = {"inception_v3": (13, 119), "resnet50": (5, 87), "squeezenet_bypass": (12, 50)}
TOP_TABLE_I: Final = {
    "nano": (128, 0.5, 128),
    "tx2": (256, 1.3, 128),
    "xavier_nx": (384, 6.8, 64),
    "a100": (6912, 19.5, 64),
}
"""CUDA cores, TFLOP/s as printed, and cores of a multiprocessor of that generation."""

_DRAWN: Final = ("randwire", "nasnet")
"""Networks of which IOS's authors published the graphs (`benchmarks/ios_networks.json`)."""


def table_1(inputs: Inputs) -> Finding:
    """Count the search space of each network's largest block exactly, without pruning."""
    rows: list[Row] = []
    claims = []
    for name in ("squeezenet_bypass", "nasnet") if inputs.small else TABLE_1:
        wanted = TABLE_1[name]
        row = _nearest(_blocks(inputs, name), wanted)
        rows.append({"network": name, **row})
        ours = (row["n"], row["d"], row["bound"], row["pairs"], row["schedules"])
        same = [_shown(one) == _shown(other) for one, other in zip(ours, wanted, strict=True)]
        claims.append(
            PaperClaim(
                f"{name}: n, d, bound, pairs (S, S'), schedules: {', '.join(map(_shown, wanted))}",
                ", ".join(map(_shown, ours)) + f"; {sum(same)} of 5 are the same",
                all(same),
            )
        )
    note = (
        "Every transition is visited once, without pruning, under the groups that IOS's released code "
        "enumerates. Of each network that block is taken whose n and d are nearest to the table's; RandWire "
        "and NASNet are the graphs that IOS's authors published, the others the zoo's as the importer counts "
        "operators."
    )
    return Finding(tuple(claims), tuple(rows), (), note)


def _blocks(inputs: Inputs, name: str) -> list[CombinedGraph]:
    if name in _DRAWN:
        return [graph_of(block) for block in distinct(networks()[name])]
    graph = zoo_graph(inputs, name)
    return [combine([(graph, block)]) for block in split(graph, _cuts(graph))]


def _cuts(graph: Graph) -> tuple[int, ...]:
    offered = dict(graph.partitions)
    return offered.get("paper", offered["base"])


def _nearest(blocks: Sequence[CombinedGraph], wanted: Sequence[float]) -> Row:
    """The space of the block whose size and width are nearest to what is wanted."""

    def distance(graph: CombinedGraph) -> float:
        return abs(graph.size - wanted[0]) + abs(width(graph) - wanted[1])

    least = min(map(distance, blocks))
    rows = [space_of(graph) for graph in blocks if distance(graph) == least]
    return min(rows, key=lambda row: abs(row["pairs"] / wanted[3] - 1.0))


def space_of(graph: CombinedGraph) -> Row:
    """Operators, width, IOS's bound, and the exact counts."""
    size, across = graph.size, width(graph)
    counts = measure_space(Endings(graph, rule=GroupRule.ROOTED))
    per_chain, more = divmod(size, across)
    tight = comb(per_chain + 2, 2) ** (across - more) * comb(per_chain + 3, 2) ** more
    return {
        "n": size,
        "d": across,
        "bound": ((size / across + 2) * (size / across + 1) / 2) ** across,
        "bound over whole chains": tight,
        "pairs": counts.transitions,
        "schedules": counts.schedules,
    }


def _shown(value: Any) -> str:
    """Two digits, as the table prints them."""
    return f"{value:.1e}" if value >= 100 else str(value)


def table_2(inputs: Inputs) -> Finding:
    """Blocks and operators of IOS's networks."""
    return _counted(inputs, TABLE_2)


def top_table_2(inputs: Inputs) -> Finding:
    """Blocks and operators of TOP's models."""
    return _counted(inputs, TOP_TABLE_II)


def _counted(inputs: Inputs, wanted: dict[str, tuple[int, int]]) -> Finding:
    rows: list[Row] = []
    claims = []
    for name, (blocks, operators) in wanted.items():
        if name in _DRAWN:
            found = (len(networks()[name]), sum(map(len, networks()[name])))
        else:
            graph = zoo_graph(inputs, name)
            found = (len(_cuts(graph)) + 1, len(graph.operators))
        rows.append({"network": name, "blocks": found[0], "operators": found[1]})
        near = abs(found[0] - blocks) <= 2 and abs(found[1] - operators) <= 1
        ours = f"{found[0]} blocks, {found[1]} operators"
        claims.append(PaperClaim(f"{name}: {blocks} blocks, {operators} operators", ours, near))
    note = (
        "Operators as the importer counts them: a convolution with its activation, a pool, a concat, an "
        "addition. A claim holds within one operator (our networks end in a classifier of their own) and two "
        "blocks (stem and head may count as blocks or not). The graphs of RandWire and NASNet are those that "
        "IOS's authors published; they list more blocks than the table counts."
    )
    return Finding(tuple(claims), tuple(rows), (), note)


def top_table_1(inputs: Inputs) -> Finding:
    """The twin's device files beside what TOP says of its devices."""
    rows: list[Row] = []
    claims = []
    for name, (cores, tflops, of_each) in TOP_TABLE_I.items():
        device = load_device(name)
        ours = {bits: getattr(device, f"fp{bits}_flop_per_s") / 1e12 for bits in (32, 16)}
        fits = [bits for bits, value in ours.items() if 0.9 <= value / tflops <= 1.1]
        own_cores = device.multiprocessors * of_each
        rows.append(
            {
                "device": name,
                "cores": own_cores,
                "TFLOP/s, 32 bits": ours[32],
                "TFLOP/s, 16 bits": ours[16],
                "printed": tflops,
            }
        )
        text = f"{own_cores} cores; " + (
            f"{tflops} is its peak at {fits[0]} bits"
            if fits
            else f"{ours[32]:.3g} at 32 bits, {ours[16]:.3g} at 16"
        )
        claims.append(
            PaperClaim(f"{name}: {cores} cores, {tflops} TFLOPS", text, own_cores == cores and bool(fits))
        )
    note = (
        "Printed peaks mix precisions: a ratio of two rows of the table is no ratio of speeds at one "
        "precision."
    )
    return Finding(tuple(claims), tuple(rows), (), note)
