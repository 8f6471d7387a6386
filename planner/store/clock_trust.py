"""How far the clock is believed, as the database keeps it; every function is one part of a transaction."""

from sqlalchemy.orm import Session

from stageloom.planner.store.tables import ClockTrustRow
from stageloom.planner.telemetry.trusted_time import ClockTrust

_ID = 1


def read(session: Session, wall_us: int) -> ClockTrust:
    """What is believed; a database that knows no time yet believes the clock."""
    row = session.get(ClockTrustRow, _ID)
    return ClockTrust(wall_us) if row is None else ClockTrust(row.trusted_us, row.confirmed_us)


def keep(session: Session, believed: ClockTrust) -> None:
    """Remember it."""
    session.merge(ClockTrustRow(id=_ID, trusted_us=believed.trusted_us, confirmed_us=believed.confirmed_us))
