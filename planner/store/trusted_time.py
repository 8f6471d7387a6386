"""How far the planner believes its clock where it deletes by age, and files what comes by time.

A machine without a battery, or with a wrong one, may start years ahead; by its clock all that is stored is
too old. So the planner keeps the newest time that it believed, the *trusted time*, which follows the clock:

- within `LEAP_S` of it (a planner that was off for a weekend) the clock is believed;
- further ahead it is not: trusted time then passes at most twice as fast as real time does, so a clock that
  stays ahead is believed after as much real time as it was ahead, or at once when an operator confirms it;
- even then trusted time moves by `STEP_S` a run: no run deletes more than what that much time makes too old.
"""

from typing import Final, NamedTuple

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from stageloom.planner.store.database import now_us
from stageloom.planner.store.events import recent_refusals
from stageloom.planner.store.replans import end_overdue
from stageloom.planner.store.rows import add_event
from stageloom.planner.store.tables import (
    AlarmRow,
    CalibrationRow,
    ClockTrustRow,
    DeviceRow,
    ExecutorTimeRow,
    ExpectedRegimeRow,
    GenerationRow,
    HandoverCostRow,
    OperatorCostRow,
    PartCostRow,
    RegimeRow,
    ReplanRow,
    StageCostRow,
    TelemetryRow,
)
from stageloom.shared.errors import InputError
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.text import counted

_ID: Final = 1
LEAP_S: Final = 3 * 86_400.0

STEP_S: Final = 6 * 3_600.0

NEWEST_US: Final = 86_400_000_000
"""That a device's clock may be ahead of the planner's."""


class ClockTrust(NamedTuple):
    """What is remembered: the trusted time and what an operator confirmed last, microseconds since 1970."""

    trusted_us: int
    confirmed_us: int = 0

    def ahead_s(self, wall_us: int) -> float:
        """How far the clock is past what is believed of it; 0 where it is believed."""
        gap_s = (wall_us - max(self.trusted_us, self.confirmed_us)) / 1e6
        return gap_s if gap_s > LEAP_S else 0.0

    def behind_s(self, wall_us: int) -> float:
        """How far the clock is before the trusted time; 0 where that may be."""
        gap_s = (self.trusted_us - wall_us) / 1e6
        return gap_s if gap_s > LEAP_S else 0.0

    def advance(self, wall_us: int, elapsed_s: float) -> "ClockTrust":
        """After `elapsed_s` of real time (monotonic) since the last run of housekeeping; 0: not known."""
        if wall_us <= self.trusted_us:
            return self  # it was set back: nothing becomes too old by that
        step_s = min(2.0 * elapsed_s, STEP_S) if self.ahead_s(wall_us) else STEP_S
        return self._replace(trusted_us=min(wall_us, self.trusted_us + round(step_s * 1e6)))

    def now_us(self, wall_us: int) -> int:
        """The time that ages are counted from."""
        return min(wall_us, self.trusted_us)

    def present_us(self, wall_us: int) -> int:
        """The time that it is, as far as is known: the clock's, unless it leapt ahead or was set back."""
        return self.trusted_us if self.behind_s(wall_us) or self.ahead_s(wall_us) else wall_us


def _believed(session: Session) -> ClockTrust:
    """A database that knows no time yet believes the clock."""
    row = session.get(ClockTrustRow, _ID)
    return ClockTrust(now_us(session)) if row is None else ClockTrust(row.trusted_us, row.confirmed_us)


def _keep(session: Session, trust: ClockTrust) -> None:
    session.merge(ClockTrustRow(id=_ID, trusted_us=trust.trusted_us, confirmed_us=trust.confirmed_us))


def trusted_now_us(session: Session) -> int:
    """The time that ages are counted from, in microseconds since 1970."""
    return _believed(session).now_us(now_us(session))


def present_us(session: Session) -> int:
    """The time that it is, as far as is known, in microseconds since 1970."""
    return _believed(session).present_us(now_us(session))


def advance_clock(session: Session, elapsed_s: float) -> float:
    """Let the trusted time follow the clock; returns by how many seconds the clock is ahead of it.

    `elapsed_s`: real time since the last call in this process, 0 for the first one.
    """
    wall_us, before = now_us(session), _believed(session)
    _keep(session, before.advance(wall_us, elapsed_s))
    return before.ahead_s(wall_us)


_PAST: Final = (
    DeviceRow.last_seen_us,
    GenerationRow.decided_at_us,
    AlarmRow.received_at_us,
    ReplanRow.begun_at_us,
    RegimeRow.at_us,
    ExpectedRegimeRow.found_at_us,
    CalibrationRow.at_us,
    OperatorCostRow.measured_at_us,
    StageCostRow.measured_at_us,
    PartCostRow.measured_at_us,
    HandoverCostRow.measured_at_us,
    ExecutorTimeRow.measured_at_us,
)
"""Of what was, by the planner's clock: re-plans, among others, ask how long ago that is."""


def trust_clock(session: Session, *, confirmed: bool = False) -> None:
    """An operator says that the clock is right: what one that was ahead has put into the future is of now.

    `confirmed`: telemetry may lose the times that it is filed under for that.

    Raises:
        InputError: it would, and that is not confirmed.
    """
    wall_us = now_us(session)
    future = (
        TelemetryRow.device.in_(select(DeviceRow.name)),  # so that an index serves
        TelemetryRow.kind.in_([kind.value for kind in RowKind]),
        TelemetryRow.at_us > wall_us + NEWEST_US,
    )
    rows, newest_us = session.execute(select(func.count(), func.max(TelemetryRow.at_us)).where(*future)).one()
    if rows and not confirmed:
        raise InputError(
            f"{counted(rows, 'row')} of telemetry would be filed under the time of now, up to "
            f"{(newest_us - wall_us) / 86_400e6:.1f} days earlier",
            remedy="correct the clock; if it is right, add --yes",
        )
    _keep(session, ClockTrust(min(_believed(session).trusted_us, wall_us), confirmed_us=wall_us))
    end_overdue(session)  # before what tells them from those of now is gone
    misfiled = [update(TelemetryRow).where(*future).values(at_us=wall_us)]
    misfiled += [update(of.class_).where(of > wall_us).values({of: wall_us}) for of in _PAST]
    for statement in misfiled:
        session.execute(statement, execution_options={"synchronize_session": False})
    add_event(session, None, "clock_trusted", "by operator")


def clock_notice(ahead_s: float) -> str:
    """One line for people about a clock that is not believed."""
    return (
        f"old telemetry and events are held back: the clock is {ahead_s / 86_400.0:.1f} days ahead of all "
        "that this planner knows; correct it, or run `stageloom planner trust-clock` if it is right"
    )


def notices(session: Session) -> list[str]:
    """What an operator should know of, a line each: a clock that is not believed, what was refused."""
    trust, wall_us = _believed(session), now_us(session)
    clock = []
    if ahead_s := trust.ahead_s(wall_us):
        clock.append(clock_notice(ahead_s))
    if behind_s := trust.behind_s(wall_us):
        clock.append(
            f"telemetry is filed under a later time than the clock's: it is {behind_s / 86_400.0:.1f} days "
            "behind what this planner has known; correct it, or run `stageloom planner trust-clock --yes` if "
            "it is right"
        )
    return clock + recent_refusals(session)
