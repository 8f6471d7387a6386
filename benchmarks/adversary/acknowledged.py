"""What a planner has acknowledged, compared with what its database holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import text

from benchmarks.adversary.witness import Witness
from stageloom.planner.store.database import Database

_AGAIN: Final = 2_000
"""Rows that were found before and are looked at again each time; the last look takes all."""

_ROWS: Final = text(
    "SELECT sequence, body FROM telemetry WHERE device = :device AND boot = :boot AND sequence >= :first"
)
_REPORT: Final = text(
    "SELECT revision, epoch, generation, seen, active, state, reason FROM reported WHERE device = :device"
)
_GENERATIONS: Final = text("SELECT device, epoch, generation, plan FROM generations")
_DEVICES: Final = text("SELECT name, public_key FROM devices WHERE NOT revoked")
_LOST: Final = text("SELECT device, boot, lost FROM telemetry_ledgers WHERE lost > 0")


@dataclass
class Acknowledged:
    """Filled while others are killed; `check` compares."""

    pushes: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Plan's name by (device, epoch, generation)."""

    keys: dict[str, str] = field(default_factory=dict)
    """Public key of each enrolled device."""

    lost: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    _rows_found: int = 0

    def check(self, database: Database, witness: Witness, *, everything: bool = False) -> None:
        """Note what is missing (`lost`) and what differs from what was sent (`wrong`)."""
        first = 0 if everything else max(0, self._rows_found - _AGAIN)
        # Before the database is read: it must hold at least this.
        rows, revision = witness.rows_acknowledged, witness.revision_acknowledged
        with database.engine.connect() as connection:
            where = {"device": witness.device, "boot": witness.boot, "first": first}
            stored = {int(sequence): bytes(body) for sequence, body in connection.execute(_ROWS, where)}
            report = connection.execute(_REPORT, {"device": witness.device}).one_or_none()
            generations = connection.execute(_GENERATIONS).all()
            keys = {name: key for name, key in connection.execute(_DEVICES)}
            self.lost |= {
                f"{lost} rows of {device}, boot {boot}" for device, boot, lost in connection.execute(_LOST)
            }
        self._compare_rows(stored, witness.rows, range(first, rows))
        self._compare_report(report, witness, revision)
        plans = {(device, epoch, generation): plan for device, epoch, generation, plan in generations}
        self._compare(self.pushes, plans, "generation")
        self._compare(self.keys, keys, "the key of device")
        self._rows_found = rows

    def _compare_rows(self, stored: Mapping[int, bytes], sent: Sequence[bytes], wanted: range) -> None:
        self.lost |= {f"row {sequence}" for sequence in wanted if sequence not in stored}
        self.wrong |= {
            f"row {sequence} is not what was sent"
            for sequence, body in stored.items()
            if sequence >= len(sent) or sent[sequence] != body
        }

    def _compare_report(self, stored: Any, witness: Witness, revision: int) -> None:
        if revision and (stored is None or stored.revision < revision):
            self.lost.add(f"report {revision} of {witness.device}")
        elif stored is not None and stored.revision:
            sent = witness.reports[stored.revision]
            fields = ("epoch", "generation", "seen", "active", "state", "reason")
            if [getattr(stored, name) for name in fields] != [getattr(sent, name) for name in fields]:
                self.wrong.add(f"report {stored.revision} is not what was sent")

    def _compare(self, acknowledged: Mapping[Any, str], stored: Mapping[Any, str], what: str) -> None:
        for of, value in acknowledged.items():
            if of not in stored:
                self.lost.add(f"{what} {of}")
            elif stored[of] != value:
                self.wrong.add(f"{what} {of}: {stored[of]}, not {value}")
