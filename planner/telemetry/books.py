"""Telemetry's books at the planner: per device and boot, produced = stored + dropped + lost.

A device sends the rows of a boot in order, oldest first, and its ledger says how many rows below the end of
a batch were produced and how many of them it dropped. So once a batch is in, every sequence below that end
is stored, dropped, or *lost*: acknowledged by this planner once and not in this database, because the
database was restored from an older copy. What the device still spools lies above that end.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stageloom.shared.messages.telemetry import Ledger


class Balance(NamedTuple):
    """Rows over one or all devices and boots; produced = stored + dropped + lost after every commit."""

    produced: int
    stored: int
    dropped: int
    lost: int


@dataclass(frozen=True, slots=True)
class Book:
    """One boot. Every sequence below `settled` is stored, dropped or lost: what comes again is a repeat.

    Rows are recognised as repeats by this number, not by the rows themselves, which do not stay for ever.
    """

    produced: int = 0
    dropped: int = 0
    stored: int = 0
    lost: int = 0
    settled: int = 0

    def take(self, sequences: Iterable[int], said: Iterable[Ledger]) -> "tuple[Book, frozenset[int]]":
        """The book after a batch, and those of its rows that are new and must be stored.

        Of repeated ledgers the larger counts win. `lost` is counted only when the device tells its ledger:
        between two ledgers a gap may be rows that it dropped.
        """
        new = frozenset(sequence for sequence in sequences if sequence >= self.settled)
        ledgers = tuple(said)
        produced = max((self.produced, *(one.produced for one in ledgers)))
        dropped = max((self.dropped, *(one.dropped for one in ledgers)))
        stored = self.stored + len(new)
        return (
            Book(
                produced=produced,
                dropped=dropped,
                stored=stored,
                lost=max(produced - dropped - stored, 0) if ledgers else self.lost,
                settled=max((self.settled, produced, *(sequence + 1 for sequence in new))),
            ),
            new,
        )
