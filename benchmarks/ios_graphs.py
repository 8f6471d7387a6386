"""RandWire and NASNet-A Large as IOS schedules them (Ding et al. 2021, table 2): 120 and 374 operators.

A unit is Relu with the separable convolution after it, a convolution, a pool, or the sum or concat of its
inputs. A network is its blocks in order; a block lists per operator its predecessors inside the block.

RandWire: WS(16, 4, 0.75) and three of WS(32, 4, 0.75), the graphs that IOS's authors drew and published; one
operator more sums a graph's last nodes. NASNet: two stem cells, and three runs of a first cell, five normal
ones and, between two runs, a reduction cell. Table 1 of the paper holds for both: tests compare.
"""

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
