"""Graphs to try schedulers on: shapes of known networks, borders, and random ones by a seed."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.conformance import Case
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits

Rows = list[list[int]]
"""Per operator the operators of the same member that it reads."""

_LIMITS: Final = (
    Limits(),
    Limits(r=3, s=8),
    Limits(r=1),
    Limits(s=1),
    Limits(r=2, s=2),
)
_EXPANSIONS: Final = 1000
_MOST_OPERATORS: Final = 10  # of a random graph


def chain(length: int) -> Rows:
    """Operators one after another."""
    return [[op - 1] if op else [] for op in range(length)]


def cells(branches: Sequence[int], number: int) -> Rows:
    """`number` cells in a row: chains of these lengths side by side from one operator, joined by another.

    A branch of length 0 is the residual edge.
    """
    rows: Rows = [[]]
    for _ in range(number):
        start, ends = len(rows) - 1, []
        for length in branches:
            last = start
            for _ in range(length):
                rows.append([last])
                last = len(rows) - 1
            ends.append(last)
        rows.append(sorted(set(ends)))
    return rows


_KNOWN: Final[dict[str, tuple[Rows, ...]]] = {
    "one operator": ([[]],),
    "chain of 30": (chain(30),),
    "30 side by side": ([[] for _ in range(30)],),
    "SqueezeNet's fire modules": (cells((1, 1), 8),),
    "ResNet-50's bottlenecks": (cells((3, 0), 16),),
    "GoogLeNet's inception modules": (cells((1, 2, 2, 2), 3),),
    "an inception module beside bottlenecks": (cells((1, 2, 2, 2), 1), cells((3, 0), 2)),
    "three replicas of a fire module": (cells((1, 1), 1),) * 3,
}


def cases(random_graphs: int, seed: int) -> Iterator[Case]:
    """Known shapes under every limits and with a budget of one expansion, then so many random graphs."""
    rng = Random(seed)
    for name, members in _KNOWN.items():
        graph = combined(members)
        for limits in _LIMITS:
            yield _case(f"{name}, {_text(limits)}", graph, limits, Budget(expansions=_EXPANSIONS), rng)
        yield _case(f"{name}, no budget", graph, Limits(), Budget(expansions=1), rng)
    for number in range(random_graphs):
        graph = combined([_random_rows(rng) for _ in range(rng.randint(1, 3))])
        limits = Limits(r=rng.choice((None, 1, 2, 3)), s=rng.choice((None, 1, 2, 3)))
        name = f"random graph {number} of seed {seed}, {_text(limits)}"
        yield _case(name, graph, limits, Budget(expansions=_EXPANSIONS), rng)


def combined(members: Sequence[Rows]) -> CombinedGraph:
    """Members side by side; operators that read the same may merge."""
    offsets, masks, classes = [0], [], []
    kinds: dict[tuple[int, ...], int] = {}
    for rows in members:
        first = offsets[-1]
        for before in rows:
            masks.append(sum(1 << (first + op) for op in before))
            classes.append(kinds.setdefault((first, *before), len(kinds)) if before else -1)
        offsets.append(first + len(rows))
    return CombinedGraph(tuple(offsets), (0,) * len(members), tuple(masks), tuple(classes))


def _case(name: str, graph: CombinedGraph, limits: Limits, budget: Budget, rng: Random) -> Case:
    seconds = tuple(rng.uniform(0.01, 1.0) for _ in range(graph.size))
    siblings: dict[int, list[int]] = {}
    for op, kind in enumerate(graph.merge_class):
        siblings.setdefault(kind, []).append(op)
    merges = tuple(
        (tuple(ops), rng.uniform(0.5, 1.1) * sum(seconds[op] for op in ops))
        for kind, ops in siblings.items()
        if kind >= 0 and len(ops) > 1
    )
    costs = StageCosts(
        seconds,
        contention=rng.choice((0.0, rng.random(), 1.0)),
        barrier_s=rng.choice((0.0, 0.05, 0.2)),
        merges=merges,
    )
    return Case(name=name, graph=graph, costs=costs, limits=limits, budget=budget)


def _random_rows(rng: Random) -> Rows:
    density = rng.choice((0.1, 0.2, 0.35, 0.6))
    size = rng.randint(1, _MOST_OPERATORS)
    return [[before for before in range(op) if rng.random() < density] for op in range(size)]


def _text(limits: Limits) -> str:
    parts = [f"{name} = {value}" for name, value in (("r", limits.r), ("s", limits.s)) if value is not None]
    return ", ".join(parts) or "no limits"
