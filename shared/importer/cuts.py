"""Base cuts: where the fewest live bytes cross, with bounded count and balanced cost. Pure.

Rule. Consider the sets of cuts that hold the borders which the file carries and leave no base block costlier
than `share` of the whole (or than the costliest single operator, which no cut can divide). Take the set over
which the fewest bytes cross in sum; among equals one with the fewest cuts.

Two neighbouring blocks of such a set cost more than `share` together unless a border of the file lies between
them, else dropping the cut were better. So with share 1/16 there are at most 31 blocks, and each border of
the file adds at most one.

The dynamic program keeps the best set of cuts that ends at each position; the borders that may come before it
form a sliding window, whose minimum a monotone queue gives: O(n) for n operators.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from stageloom.shared.graph import Graph, Operator

BLOCK_SHARE = 16
"""A base block costs at most one sixteenth of the model."""

MAX_PAPER_CUTS = 31
"""Borders that a file may carry; with the rule's own that makes at most 62 base blocks."""

FLOP_PER_BYTE = 16
"""Machine balance behind the balance rule: a byte moved counts like this many multiply-adds. Only the balance
between blocks depends on it, no plan does."""

OPERATOR_FLOP = 1_000_000
"""What an operator costs beyond its work (a launch), in the same unit."""


def choose_cuts(
    crossing_bytes: Sequence[int],
    cost: Sequence[int],
    *,
    required: Iterable[int] = (),
    share: int = BLOCK_SHARE,
) -> tuple[int, ...]:
    """The cuts of the module's rule, ascending positions p with 0 < p < n.

    `crossing_bytes[p]` is what crosses position p [n + 1], `cost[i]` what operator i costs [n], all >= 0. A
    block may cost up to `sum(cost) / share`. The cuts of `required` are part of every answer.
    """
    count = len(cost)
    if count < 2:
        return ()
    prefix = [0]
    for value in cost:
        prefix.append(prefix[-1] + value)
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
    """Bytes live across each position 0..n, as `Graph.live_at` names the tensors. [n + 1]"""
    count = len(graph.operators)
    step = [0] * (count + 2)
    wanted = set(graph.outputs)
    for tensor, made in enumerate(graph.producer):
        readers = graph.consumers[tensor]
        last = count if tensor in wanted else (readers[-1] if readers else -1)
        if last > made:
            step[made + 1] += graph.tensors[tensor].nbytes
            step[last + 1] -= graph.tensors[tensor].nbytes
    live = []
    total = 0
    for change in step[: count + 1]:
        total += change
        live.append(total)
    return live


def operator_cost(graph: Graph, operator: Operator) -> int:
    """A device-free estimate in flop: the work, the bytes moved and the launch."""
    moved = sum(graph.tensors[t].nbytes for t in (*operator.inputs, *operator.outputs))
    return operator.flop + FLOP_PER_BYTE * (moved + operator.weight_bytes) + OPERATOR_FLOP


def base_cuts(graph: Graph, paper: Iterable[int] = ()) -> tuple[int, ...]:
    """The rule's cuts for `graph`, among them the borders that its file carries."""
    costs = [operator_cost(graph, operator) for operator in graph.operators]
    return choose_cuts(crossing_bytes(graph), costs, required=paper)
