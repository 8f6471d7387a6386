"""Static memory: an offset in one arena for every tensor that a program makes and uses up itself.

Two tensors share bytes only if every launch that touches one has ended before any that touches the other
begins. The launch list orders two launches if a chain of waits and of places on one stream leads from one to
the other; that the first is likely to end earlier is no order, since streams run at their own pace. A
caching allocator proves less: it hands a freed block to the next caller on the block's stream, whatever
another stream still reads from it.

Tensors are placed by size, the largest first, into the lowest gap that fits, O(tensors^2). Greedy by size, as
in Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", section 5.2, with
their interval overlap replaced by the proof above.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stageloom.shared.bitmask import bits
from stageloom.shared.launch_list import Item

ALIGNMENT_BYTES = 256
"""What cudaMalloc guarantees, and more than any kernel's vector loads need."""

_MEMBERS_WITH_ALL_MASKS = 4


def items_before(items: Sequence[Item]) -> tuple[int, ...]:
    """Per item the mask of items that have ended when it begins. [num_items]"""
    last: dict[int, int] = {}  # per stream its latest item
    masks: list[int] = []
    for index, item in enumerate(items):
        mask = 0
        direct = item.waits if item.stream not in last else (*item.waits, last[item.stream])
        for before in direct:
            mask |= masks[before] | 1 << before
        masks.append(mask)
        last[item.stream] = index
    return tuple(masks)


def launches_before(items: Sequence[Item], counts: Sequence[int]) -> tuple[int, ...]:
    """Per launch the mask of launches that have ended when it begins. [num_launches]

    Item i makes `counts[i]` launches, one after another; they are numbered item by item.
    """
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    whole = [(1 << starts[i + 1]) - (1 << starts[i]) for i in range(len(items))]
    masks: list[int] = []
    for index, mask in enumerate(items_before(items)):
        ended = 0
        for before in bits(mask):
            ended |= whole[before]
        for _ in range(counts[index]):
            masks.append(ended)
            ended |= 1 << len(masks) - 1
    return tuple(masks)


def masks_to_hold(members: int) -> tuple[int, ...]:
    """The masks that an arena must have room for: all of several members, up to four members' (TOP's H).

    Fewer active members can need more than all: what separated two tensors in time may be gone, and greedy
    placing knows no order between its results. Of more members only the full mask counts; one of the others
    that does not fit runs its members one after another.
    """
    full = (1 << members) - 1
    if members > _MEMBERS_WITH_ALL_MASKS:
        return (full,)
    return tuple(mask for mask in range(full, 0, -1) if mask & (mask - 1) or mask == full)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A piece of memory: how much, and which launches write or read it."""

    nbytes: int
    uses: int  # mask of launches


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where each piece begins, and how many bytes all need."""

    offsets: tuple[int, ...]  # [num_pieces]
    nbytes: int


def plan_memory(pieces: Sequence[Lifetime], before: Sequence[int]) -> MemoryPlan:
    """Place every piece; `before` is `launches_before`. [num_pieces]"""
    spans = [_Span(piece, before) for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda index: (-pieces[index].nbytes, index))
    offsets = [0] * len(pieces)
    placed: list[int] = []
    total = 0
    for index in order:
        size = aligned(pieces[index].nbytes)
        taken = sorted(
            (offsets[other], offsets[other] + aligned(pieces[other].nbytes))
            for other in placed
            if not spans[index].apart(spans[other])
        )
        offsets[index] = _lowest_gap(taken, size)
        total = max(total, offsets[index] + size)
        placed.append(index)
    return MemoryPlan(tuple(offsets), total)


def shared_wrongly(
    plan: MemoryPlan, pieces: Sequence[Lifetime], before: Sequence[int]
) -> tuple[int, int] | None:
    """The first two pieces that share bytes though launches that use them may run at once, or None.

    Written from the definition and not from the planner, so that neither hides the other's mistake.
    """
    by_offset = sorted(range(len(pieces)), key=lambda index: plan.offsets[index])
    for at, piece in enumerate(by_offset):
        end = plan.offsets[piece] + pieces[piece].nbytes
        for other in by_offset[at + 1 :]:
            if plan.offsets[other] >= end:
                break
            if pieces[other].nbytes and not (
                _all_before(pieces[piece].uses, pieces[other].uses, before)
                or _all_before(pieces[other].uses, pieces[piece].uses, before)
            ):
                return (min(piece, other), max(piece, other))
    return None


def _all_before(first: int, second: int, before: Sequence[int]) -> bool:
    return all(first & ~before[launch] == 0 for launch in bits(second))


class _Span:
    """The uses of a piece, and what has ended before the earliest of them."""

    __slots__ = ("ended", "uses")

    def __init__(self, piece: Lifetime, before: Sequence[int]) -> None:
        self.uses = piece.uses
        self.ended = -1  # every launch: a piece that nobody uses conflicts with none
        for launch in bits(piece.uses):
            self.ended &= before[launch]

    def apart(self, other: "_Span") -> bool:
        """Whether one is used up before the other begins."""
        return self.uses & ~other.ended == 0 or other.uses & ~self.ended == 0


def _lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The lowest offset at which `size` bytes fit between intervals that are sorted by their start."""
    offset = 0
    for start, end in taken:
        if start - offset >= size:
            break
        offset = max(offset, end)
    return offset


def aligned(nbytes: int) -> int:
    """Rounded up to what an address must be a multiple of."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
