"""The telemetry books as a pure function, against sets of sequences."""

import random
from dataclasses import dataclass, field

import pytest

from stageloom.planner.telemetry import TelemetryAccount
from stageloom.shared.messages.telemetry import Ledger


def test_a_closed_form() -> None:
    """1. rows 0..9 come, of which 4..6 were dropped; 2. they come again; 3. the database of before row 8 is
    restored and rows 10..11 come: rows 8 and 9 are lost; 4. rows 8 and 9 can no longer come."""
    rows = [0, 1, 2, 3, 7, 8, 9]
    first, new = TelemetryAccount().take(rows, [Ledger(1, 10, 3)])
    assert (first, new) == (
        TelemetryAccount(produced=10, dropped=3, stored=7, lost=0, settled=10),
        frozenset(rows),
    )
    assert first.take(rows, [Ledger(1, 10, 3)]) == (first, frozenset())
    older, _ = TelemetryAccount().take([0, 1, 2, 3, 7], [Ledger(1, 8, 3)])
    restored, new = older.take([10, 11], [Ledger(1, 12, 3)])
    assert (restored, new) == (TelemetryAccount(12, 3, 7, 2, 12), frozenset({10, 11}))
    assert restored.take([8, 9], []) == (restored, frozenset())


def test_a_gap_is_not_lost_before_the_ledger_tells() -> None:
    """A batch may leave out a boot's ledger; the gap may be rows that the device dropped."""
    silent, _ = TelemetryAccount().take([0, 1, 5], [])
    assert (silent.lost, silent.settled) == (0, 6)
    told, _ = silent.take([6], [Ledger(1, 7, 3)])
    assert told == TelemetryAccount(produced=7, dropped=3, stored=4, lost=0, settled=7)


def test_a_sequence_that_jumps_and_comes_back_is_stored_once_at_most() -> None:
    """What a broken device sends costs that device's rows, and never a row twice."""
    book, new = TelemetryAccount().take([3, 1, 3], [])
    assert (book.stored, new) == (2, frozenset({1, 3}))
    assert book.take([2], []) == (book, frozenset())


@dataclass
class _Device:
    """Sends the oldest rows first, again and again until they are acknowledged; drops some unsent ones."""

    rng: random.Random
    produced: int = 0
    sent_below: int = 0
    dropped: set[int] = field(default_factory=set)
    spooled: list[int] = field(default_factory=list)

    def measure(self) -> None:
        for _ in range(self.rng.randrange(20)):
            self.spooled.append(self.produced)
            self.produced += 1
        unsent = [at for at in self.spooled if at >= self.sent_below]
        if unsent and self.rng.random() < 0.3:
            gone = set(unsent[: self.rng.randrange(len(unsent) + 1)])
            self.dropped |= gone
            self.spooled = [at for at in self.spooled if at not in gone]

    def batch(self) -> tuple[list[int], Ledger]:
        again = sum(at < self.sent_below for at in self.spooled)
        rows = self.spooled[: again + self.rng.randrange(12)]
        end = rows[-1] + 1 if len(rows) < len(self.spooled) and rows else self.produced
        if not rows and self.spooled:
            end = self.sent_below
        self.sent_below = max(self.sent_below, end)
        return rows, Ledger(1, end, sum(at < end for at in self.dropped))

    def acknowledge(self, rows: list[int]) -> None:
        self.spooled = [at for at in self.spooled if at not in set(rows)]


def _live(seed: int) -> int:
    """A planner that is copied and restored at any moment, against sets; the most rows it ever lost."""
    rng = random.Random(seed)
    device, book, stored = _Device(rng), TelemetryAccount(), set[int]()
    backup = (book, frozenset[int]())
    late: list[tuple[list[int], Ledger]] = []
    lost_most = 0
    for _ in range(120):
        device.measure()
        choice = rng.random()
        if choice < 0.1:
            backup = (book, frozenset(stored))
        elif choice < 0.15:
            book, stored = backup[0], set(backup[1])
            late.clear()  # the connection ended with that planner
        elif choice < 0.25 and late:
            rows, ledger = rng.choice(late)  # one that the network held back, or sent twice
            assert book.take(rows, [ledger]) == (book, frozenset())
        else:
            rows, ledger = device.batch()
            late.append((rows, ledger))
            book, new = book.take(rows, [ledger])
            assert not new & stored
            stored |= new
            lost = set(range(ledger.produced)) - stored - device.dropped
            assert (book.produced, book.stored, book.lost) == (ledger.produced, len(stored), len(lost))
            assert book.produced == book.stored + book.dropped + book.lost
            lost_most = max(lost_most, book.lost)
            if rng.random() < 0.8:
                device.acknowledge(rows)
    return lost_most


@pytest.mark.promise("produced-stored-dropped-spooled")
def test_after_every_commit_every_row_is_stored_dropped_or_lost() -> None:
    lost = [_live(seed) for seed in range(200)]
    assert min(lost) == 0 < max(lost)  # both a life without a loss and lives with one were seen
