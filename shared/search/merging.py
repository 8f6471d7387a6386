"""Which operators of a block a search may merge (IOS, section 3.2), and what that should cost.

Any two or more operators of a class (`stageloom.shared.merge`) may run as one launch. Classes of up to six
give all their subsets, 57 at most. Larger ones, which no model of the papers has, give the runs of neighbours
when sorted by the size of their kernels: what merges well is of about one size, as smaller kernels are
padded.

The estimate is that of one convolution of the padded, stacked size that reads its input once, whose output is
written, read and written again by the split, and that is a launch of its own: it joins no neighbour, and pays
the barrier. Where the operators were measured it is scaled by what they took over what was estimated.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import Final

from stageloom.shared.blocks import Block
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId
from stageloom.shared.merge import merge_key, merged, padding

_ALL_SUBSETS_OF: Final = 6


def mergeable(graph: Graph, block: Block) -> Iterator[tuple[OpId, ...]]:
    """Sets of operators of a block that may run as one launch, each ascending."""
    classes: dict[object, list[OpId]] = {}
    for op in block.operators:
        key = merge_key(graph, OpId(op))
        if key is not None:
            classes.setdefault(key, []).append(OpId(op))
    for ops in classes.values():
        if len(ops) <= _ALL_SUBSETS_OF:
            for size in range(2, len(ops) + 1):
                yield from combinations(ops, size)
            continue
        by_size = sorted(ops, key=lambda op: (_taps(graph, op), op))
        for first in range(len(ops)):
            for last in range(first + 2, len(ops) + 1):
                yield tuple(sorted(by_size[first:last]))


def merged_work(graph: Graph, ops: Sequence[OpId], batch: int = 1) -> tuple[int, int]:
    """(flop, bytes moved) of operators that run as one launch, over `batch` rows."""
    one = merged(graph, ops)
    flop, weights = padding(graph, one)
    weights += sum(graph.operators[op].weight_bytes for op in ops)
    flop += sum(graph.operators[op].flop for op in ops)
    made = sum(graph.tensors[tensor].nbytes for tensor in one.outputs)
    return flop * batch, weights + (graph.tensors[one.input].nbytes + 3 * made) * batch


def _taps(graph: Graph, op: OpId) -> int:
    found = graph.operators[op].convolution
    return prod(found.kernel) if found is not None else 0
