"""Alarms, the re-plans they begin, and how those end; every function is one part of a transaction.

A re-plan is `PENDING` from its alarm to its outcome. The device ends it: by the state of the generation that
it pushed (`stageloom.planner.store.generations.set_states`) and by the rows about its trial, which arrive in
any order and more than once. An alarm waits for what is decided from it, so that is read in few statements of
few columns: each statement takes the interpreter's lock twice, and other threads hold it.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import and_, bindparam, func, insert, literal, or_, select, update
from sqlalchemy.orm import Session

from stageloom.planner.costs.records import Calibration
from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.schema.webhook import WebhookEvent
from stageloom.planner.store.costs import calibration_from, environment_changed
from stageloom.planner.store.database import now_us
from stageloom.planner.store.replan_settings import settings_of
from stageloom.planner.store.rows import known_device, message_of
from stageloom.planner.store.tables import (
    AlarmRow,
    CalibrationRow,
    DesiredRow,
    DeviceRow,
    PlanRow,
    ReplanRow,
    ReplanSettingRow,
    ReportedRow,
)
from stageloom.planner.store.tried_replans import PENDING
from stageloom.planner.store.webhooks import tell_webhooks, told_of
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm
from stageloom.shared.policy.trigger import Cause

LINE: Final = 512  # characters of a text that a message holds

IS_PENDING: Final = ReplanRow.outcome == literal(PENDING, literal_execute=True)
"""A part of statements' text: of a parameter a database sees only at a run whether a partial index serves."""

_KNOWN: Final = (
    select(
        DeviceRow.device_class,
        ReplanSettingRow.enabled,
        AlarmRow.at_us,
        ReplanRow.replan,
    )
    .outerjoin(ReplanSettingRow, ReplanSettingRow.device == DeviceRow.name)
    .outerjoin(
        AlarmRow,
        and_(
            AlarmRow.device == DeviceRow.name,
            AlarmRow.boot == bindparam("in_boot"),
            AlarmRow.number == bindparam("is_number"),
        ),
    )
    .outerjoin(ReplanRow, and_(ReplanRow.device == DeviceRow.name, IS_PENDING))
    .where(DeviceRow.name == bindparam("of"))
    .order_by(ReplanRow.replan.desc())
    .limit(1)
)

_ALARM: Final = insert(AlarmRow)

_BEGIN: Final = insert(ReplanRow)

_ANOTHER: Final = (
    update(DeviceRow)
    .where(DeviceRow.name == bindparam("who"))
    .values(device_class=bindparam("now_is"), version=DeviceRow.version + 1)
)

_BEGUN_BY: Final = select(ReplanRow.replan).where(
    ReplanRow.device == bindparam("of"),
    ReplanRow.boot == bindparam("in_boot"),
    ReplanRow.number == bindparam("is_number"),
    IS_PENDING,
    ReplanRow.generation == 0,
    ReplanRow.begun_at_us >= bindparam("since_us"),
)

OVERTAKEN: Final = "other arrivals came to stay before a plan was found for those that it began with"
TOLD_ONCE: Final = {
    Cause.REGIME.value: OVERTAKEN,
    Cause.DRIFT.value: "the device drifted before a plan was found; its costs are renewed first",
    Cause.POWER_MODE.value: "the power mode changed before a plan was found; other costs hold in it",
}
"""Causes that a device tells once, and why they end a re-plan that has pushed nothing: arrivals, or the
device, are others than it began with."""

BEING_TRIED: Final = "the plan for these arrivals is being tried already"
NEWER_DESIRED: Final = "something newer was desired meanwhile"
"""Why a re-plan ends that leaves the decision to another one, or to an operator."""

OVERDUE_US: Final = 900_000_000
_OVERDUE: Final = f"no outcome within {OVERDUE_US // 1_000_000} s"
"""A pending re-plan this old no longer holds up the next: the device was away, or its rows were lost."""


def record_alarm(session: Session, device: DeviceId, alarm: Alarm) -> int | None:
    """Keep an alarm; returns the re-plan it begins, None where it begins none (see `DispatchStore`).

    A repeat returns the re-plan that the alarm began while that has pushed nothing: the answer to the commit
    may have been lost, and nobody else knows of it then.

    Arrivals that came to stay overtake a re-plan for those before them, which ends if it has pushed nothing.
    So do a drift and another power mode: the device tells either once, only a drift's own re-plan renews
    costs, and a search under way plans by those of the mode before. What is on trial goes on, and for these
    two its end is awaited (`awaits_trial`): the device tells them after it, but its report may be on the way.
    """
    at_us = now_us(session)
    connection = session.connection()
    known = connection.execute(
        _KNOWN, {"of": device, "in_boot": alarm.boot, "is_number": alarm.number}
    ).first()
    device_class, enabled, stored_us, pending = known or ("", None, None, None)
    if stored_us is not None:
        if pending is None:
            return None
        begun_by = {"of": device, "in_boot": alarm.boot, "is_number": alarm.number}
        return connection.scalar(_BEGUN_BY, {**begun_by, "since_us": at_us - OVERDUE_US})
    another = alarm.environment not in ("", device_class)
    if another:
        device_class = alarm.environment
        connection.execute(_ANOTHER, {"who": device, "now_is": device_class})
    if another or alarm.cause == Cause.POWER_MODE.value:  # of a mode its hello has told before the alarm
        environment_changed(session, device, device_class, alarm.at_us)
    connection.execute(
        _ALARM,
        {
            "device": device,
            "boot": alarm.boot,
            "number": alarm.number,
            "at_us": alarm.at_us,
            "received_at_us": at_us,
            "body": msgspec.msgpack.encode(alarm),
        },
    )
    tell_webhooks(session, WebhookEvent.ALARM, device, told_of(WebhookEvent.ALARM, alarm))
    running = None if pending is None else _running(session, device, at_us)
    overtakes = TOLD_ONCE.get(alarm.cause)
    if running is not None and overtakes is None:
        running.later_alarms += 1
        return None
    if not (ReplanSettings().enabled if enabled is None else enabled):
        return None
    if running is not None and overtakes is not None and not running.generation:
        running.trigger_to_decision_ms = max(at_us - running.begun_at_us, 0) / 1e3
        _end(running, "no_gain", overtakes)
    begun = connection.execute(
        _BEGIN,
        {
            "device": device,
            "boot": alarm.boot,
            "number": alarm.number,
            "cause": alarm.cause,
            "value": alarm.value,
            "threshold": alarm.threshold,
            "at_us": alarm.at_us,
            "control": alarm.plan,
            "begun_at_us": at_us,
            "environment": device_class,
            "how": "",
            "epoch": 0,
            "generation": 0,
            "outcome": PENDING,
            "pairs": 0,
            "later_alarms": 0,
            "reason": "",
            "remark": "",
            "figure": "",
        },
    )
    assert begun.inserted_primary_key is not None
    return int(begun.inserted_primary_key[0])


def _running(session: Session, device: DeviceId, at_us: int) -> ReplanRow | None:
    """The device's re-plan under way. One that a newer desired value overtook, or that is overdue, ends."""
    row = session.scalar(
        select(ReplanRow)
        .where(ReplanRow.device == device, IS_PENDING)
        .order_by(ReplanRow.replan.desc())
        .limit(1)
    )
    if row is None:
        return None
    desired = session.get(DesiredRow, device)
    newest = (desired.epoch, desired.generation) if desired is not None else (0, 0)
    if row.generation and newest > (row.epoch, row.generation):
        _end(row, "no_gain", f"overtaken by generation {newest[0]}.{newest[1]}")
        return None
    if abs(at_us - row.begun_at_us) > OVERDUE_US:  # the clock was ahead when it began, and was set since
        _end(row, "no_gain", _OVERDUE)
        return None
    return row


def end_overdue(session: Session) -> None:
    """End re-plans that have pushed nothing for so long that their load is gone: a planner was away, or its
    clock was ahead when they began."""
    rows = session.scalars(
        select(ReplanRow).where(
            IS_PENDING,
            ReplanRow.generation == 0,
            func.abs(ReplanRow.begun_at_us - now_us(session)) > OVERDUE_US,
        )
    )
    for row in rows:
        _end(row, "no_gain", _OVERDUE)


def unfinished_replans(session: Session) -> list[tuple[DeviceId, int]]:
    """Re-plans that have pushed nothing yet, oldest first: those that a stopped planner left behind."""
    wanted = select(ReplanRow.replan, ReplanRow.device).where(IS_PENDING, ReplanRow.generation == 0)
    # Sorted here: SQLite would read the whole table to have them in order.
    found = sorted((replan, device) for replan, device in session.execute(wanted))
    return [(DeviceId(device), replan) for replan, device in found]


def _end(row: ReplanRow, outcome: str, reason: str) -> None:
    """Give a re-plan its outcome; the first one stands."""
    if row.outcome == PENDING:
        row.outcome, row.reason = outcome, reason[:LINE]


def end_replan(
    session: Session, replan: int, reason: str, remark: str = "", *, weighed: Digest | None = None
) -> None:
    """End a re-plan that found no plan: no gain. Its decision is timed by the planner, which made it.

    `weighed` is the plan that others were weighed against; None: it did not come to that. One that has pushed
    a plan goes on, whatever failed since: its device says how it ends.
    """
    row = session.get(ReplanRow, replan)
    if row is not None and row.outcome == PENDING and not row.generation:
        row.control = weighed or row.control
        row.trigger_to_decision_ms = max(now_us(session) - row.begun_at_us, 0) / 1e3
        row.remark = remark[:LINE]
        _end(row, "no_gain", reason)


def replan_infos(
    session: Session, device: DeviceId | None = None, *, before: int = 0, limit: int = 1000
) -> list[ReplanInfo]:
    """Re-plans of one device or of all, newest first; with `before` those of a lower number.

    Raises:
        InputError: there is no such device.
    """
    if device is not None:
        known_device(session, device)
    wanted = select(ReplanRow).order_by(ReplanRow.replan.desc()).limit(limit)
    if device is not None:
        wanted = wanted.where(ReplanRow.device == device)
    if before:
        wanted = wanted.where(ReplanRow.replan < before)
    return [
        message_of(ReplanInfo, row, alarm=row.number, plan=row.plan or "") for row in session.scalars(wanted)
    ]


_DECODER: Final = msgspec.msgpack.Decoder(Alarm)

_RUNS: Final = func.coalesce(
    select(ReportedRow.active)
    .join(PlanRow, PlanRow.digest == ReportedRow.active)
    .where(
        ReportedRow.device == ReplanRow.device,
        or_(ReportedRow.at_us > ReplanRow.at_us, ReportedRow.at_us > ReplanRow.begun_at_us),
    )
    .limit(1)
    .correlate(ReplanRow)
    .scalar_subquery(),
    ReplanRow.control,
)
"""Of a `ReplanRow`, what its device runs: the plan that it reported after it raised the alarm, however long
that was on its way, where the plan is known here; else the one that the alarm names."""

RUNS_NOW: Final = select(_RUNS).where(ReplanRow.replan == bindparam("number"))

_BEGUN: Final = (
    select(
        AlarmRow.body,
        DeviceRow.device_class,
        DesiredRow.epoch,
        DesiredRow.generation,
        PlanRow.digest,
        _RUNS.label("runs"),
        ReplanSettingRow.enabled,
        ReplanSettingRow.scheduler,
        ReplanSettingRow.members_max,
        ReplanSettingRow.budget_s,
        ReplanSettingRow.proposer,
        ReplanSettingRow.attach,
        CalibrationRow.costs_key,
        CalibrationRow.steps_since_us,
        CalibrationRow.ratio,
        CalibrationRow.at_us,
    )
    .select_from(ReplanRow)
    .join(
        AlarmRow,
        and_(
            AlarmRow.device == ReplanRow.device,
            AlarmRow.boot == ReplanRow.boot,
            AlarmRow.number == ReplanRow.number,
        ),
    )
    .join(DeviceRow, DeviceRow.name == ReplanRow.device)
    .outerjoin(DesiredRow, DesiredRow.device == ReplanRow.device)
    .outerjoin(PlanRow, PlanRow.name == DesiredRow.plan)
    .outerjoin(ReplanSettingRow, ReplanSettingRow.device == ReplanRow.device)
    .outerjoin(
        CalibrationRow,
        and_(CalibrationRow.device == DeviceRow.name, CalibrationRow.environment == DeviceRow.device_class),
    )
    .where(ReplanRow.replan == bindparam("number"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an alarm found. `desired` is the newest (epoch, generation) at the moment of the snapshot, `runs`
    what the device runs by then, as far as it is known."""

    alarm: Alarm
    device_class: str
    calibration: Calibration
    desired: tuple[int, int]
    desired_plan: Digest | None
    runs: Digest | None
    settings: ReplanSettings


def begun_replan(session: Session, replan: int) -> Begun | None:
    """A re-plan's alarm and device; None: there is no such re-plan."""
    row = session.connection().execute(_BEGUN, {"number": replan}).first()
    if row is None:
        return None
    return Begun(
        alarm=_DECODER.decode(row.body),
        device_class=row.device_class,
        calibration=calibration_from(row.device_class, row),
        desired=(row.epoch or 0, row.generation or 0),
        desired_plan=Digest(row.digest) if row.digest else None,
        runs=Digest(row.runs) if row.runs else None,
        settings=settings_of(row),
    )
