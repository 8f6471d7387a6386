"""The spool's books: per boot, how many rows were produced and which of them were dropped."""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.messages.base import BootId, Count
from stageloom.shared.messages.telemetry import Ledger


def add_range(ranges: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """The union of half-open ranges with [first, end), sorted and merged."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted([*ranges, (first, end)]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


@dataclass
class Account:
    """One boot. `produced` is the next sequence; `told` is what the planner has committed of these books."""

    produced: int = 0
    dropped_ranges: list[tuple[int, int]] = field(default_factory=list)
    told: tuple[int, int] = (0, 0)

    def dropped(self, end: int | None = None) -> int:
        """Dropped rows, or those with a sequence below `end`."""
        stop = self.produced if end is None else end
        return sum(max(min(high, stop) - low, 0) for low, high in self.dropped_ranges)

    def dropped_mask(self) -> int:
        """Dropped rows as a mask over sequences."""
        return sum((1 << high) - (1 << low) for low, high in self.dropped_ranges)

    def drop(self, first: int, end: int) -> None:
        """Count the rows [first, end) as dropped; once, however often it is said."""
        self.dropped_ranges = add_range(self.dropped_ranges, first, end)

    def dropped_until(self, first: int) -> int:
        """The first sequence from `first` on that is not dropped."""
        for low, high in self.dropped_ranges:
            if low <= first < high:
                return high
        return first

    def ledger(self, boot: int, end: int | None = None) -> Ledger:
        """What to tell the planner once all rows below `end` have left; `end` None: they all have.

        Told like this, produced = stored + dropped holds in the planner's books after every commit, whatever
        is lost here afterwards.
        """
        produced = self.produced if end is None else end
        return Ledger(boot, produced, self.dropped(produced))


class _Entry(Struct, frozen=True, array_like=True):
    boot: BootId
    produced: Count
    told: tuple[Count, Count]
    dropped: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=4096)]


class _Books(Struct, frozen=True, tag="spool_ledger", tag_field="type"):
    entries: Annotated[tuple[_Entry, ...], Meta(max_length=4096)]
    removing: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=4096)]


_BOOKS: Codec[_Books] = Codec(_Books, CodecLimits(frame_bytes=1 << 20, body_bytes=1 << 20))


def encode_books(accounts: dict[int, Account], removing: tuple[str, ...]) -> bytes:
    """The ledger file: all accounts, and the segments that are about to be removed."""
    entries = tuple(
        _Entry(boot, one.produced, one.told, tuple(one.dropped_ranges[-4096:]))
        for boot, one in accounts.items()
    )
    return _BOOKS.encode(_Books(entries, removing))


def decode_books(frame: bytes) -> tuple[dict[int, Account], tuple[str, ...]]:
    """What `encode_books` wrote.

    Raises:
        DecodeError: damaged.
    """
    books = _BOOKS.decode(frame)
    accounts = {one.boot: Account(one.produced, list(one.dropped), one.told) for one in books.entries}
    return accounts, books.removing
