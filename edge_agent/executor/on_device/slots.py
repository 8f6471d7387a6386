"""When a step may not write its result where it belongs."""

from collections.abc import Sequence

from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundCombined, BoundModel


def staged(combined: BoundCombined, models: Sequence[BoundModel], mask: int, position: int) -> bool:
    """Whether another active member reads the slot that this one's result goes to."""
    own = combined.members[position]
    return any(
        own.block + 1 in models[other.model].slot_reads[other.block]
        for other in (combined.members[at] for at in bits(mask))
        if (other.model, other.replica) == (own.model, own.replica) and other.block > own.block
    )
