"""Base cuts: where the fewest live bytes cross, with bounded count and balanced cost; a file's borders. Pure.

Rule. Consider the sets of cuts that hold the borders which the file carries and leave no base block costlier
than `share` of the whole (or than the costliest single operator, which no cut can divide). Take the set over
which the fewest bytes cross in sum; among equals one with the fewest cuts.

Two neighbouring blocks of such a set cost more than `share` together unless a border of the file lies between
them, else dropping the cut were better. So with share 1/16 there are at most 31 blocks, and each border of
the file adds at most one.

The dynamic program keeps the best set of cuts that ends at each position; the borders that may come before it
form a sliding window, whose minimum a monotone queue gives: O(n) for n operators.

An ONNX file may carry block borders, as metadata under the key `stageloom.blocks`. The value is JSON:
`{"version": 1, "borders": [["t1"], ["t2", "t3"], ...], "body": ["pool"]}`. Each border names tensors: all
that they are computed from lies before it, the rest after. Each border must contain the one before. `body`
(optional) names the tensors where the network's body ends: operators that no such tensor needs are the
classifier, which the papers' counts leave out.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph, Operator

METADATA_KEY = "stageloom.blocks"
_VERSION = 1
_MAX_CHARS = 1 << 20

BLOCK_SHARE = 16
"""A base block costs at most one sixteenth of the model."""

MAX_PAPER_CUTS = 31
"""Most borders that a file may carry; with the cuts of the rule there are at most 62 base blocks."""

FLOP_PER_BYTE = 16
"""A byte moved costs as much as this many multiply-adds. Only the balance between blocks depends on it."""

OPERATOR_FLOP = 1_000_000
"""Cost of an operator beyond its work (a launch), in flop."""


Borders: TypeAlias = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]
"""Tensor names per border, in order, and those where the body ends; without these there is no classifier."""


def parse_borders(text: str) -> Borders:
    """Read the value of the metadata key.

    Raises:
        ModelError: it is not the documented JSON.
    """
    try:
        if len(text) > _MAX_CHARS:
            raise ValueError(f"longer than {_MAX_CHARS} characters")
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("version") != _VERSION:
            raise ValueError(f"not an object of version {_VERSION}")
        borders = tuple(_names(names) for names in value.get("borders", []))
        return borders, _names(value.get("body", []))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(
            f"metadata {METADATA_KEY!r} is unreadable: {error}", remedy="correct or remove that entry"
        ) from error


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("a border is a list of tensor names")
    return tuple(value)


def choose_cuts(
    crossing_bytes: Sequence[int],
    cost: Sequence[int],
    *,
    required: Iterable[int] = (),
    share: int = BLOCK_SHARE,
) -> tuple[int, ...]:
    """Return the cuts of the module's rule, ascending positions p with 0 < p < n.

    `crossing_bytes[p]` is what crosses position p [n + 1], `cost[i]` what operator i costs [n], all >= 0. A
    block may cost up to `sum(cost) / share`. The cuts of `required` are part of every answer.
    """
    count = len(cost)
    if count < 2:
        return ()
    prefix = [0, *accumulate(cost)]
    bound = max(prefix[-1] // share, *cost)
    fixed = set(required)
    best: list[tuple[int, int]] = [(0, 0)]  # bytes and number of cuts up to a block border at p
    previous = [0]
    first = 0
    window: deque[int] = deque()  # candidates for the last border, their `best` rising
    for position in range(1, count + 1):
        while prefix[position] - prefix[first] > bound:
            first += 1
        if position - 1 in fixed:
            first = position - 1  # the last border cannot lie before a required one
        while window and best[window[-1]] > best[position - 1]:
            window.pop()
        window.append(position - 1)
        while window[0] < first:
            window.popleft()
        start = window[0]
        crossing = crossing_bytes[position] if position < count else 0
        best.append((best[start][0] + crossing, best[start][1] + 1))
        previous.append(start)
    cuts = []
    position = previous[count]
    while position > 0:
        cuts.append(position)
        position = previous[position]
    return tuple(reversed(cuts))


def crossing_bytes(graph: Graph) -> list[int]:
    """Return the bytes that are live across each position 0..n, those of `Graph.live_at`. [n + 1]"""
    count = len(graph.operators)
    step = [0] * (count + 2)
    wanted = set(graph.outputs)
    for tensor, made in enumerate(graph.producer):
        readers = graph.consumers[tensor]
        last = count if tensor in wanted else (readers[-1] if readers else -1)
        if last > made:
            step[made + 1] += graph.tensors[tensor].nbytes
            step[last + 1] -= graph.tensors[tensor].nbytes
    return list(accumulate(step[: count + 1]))


def operator_cost(graph: Graph, operator: Operator) -> int:
    """Estimate an operator's cost on any device, in flop: work, bytes moved and launch."""
    moved = sum(graph.tensors[t].nbytes for t in (*operator.inputs, *operator.outputs))
    return operator.flop + FLOP_PER_BYTE * (moved + operator.weight_bytes) + OPERATOR_FLOP


def base_cuts(graph: Graph, paper: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the rule's cuts for `graph`, among them the file's borders `paper`."""
    costs = [operator_cost(graph, operator) for operator in graph.operators]
    return choose_cuts(crossing_bytes(graph), costs, required=paper)
