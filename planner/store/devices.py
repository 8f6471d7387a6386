"""Devices: enrolment, keys, quarantine and what they report."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from stageloom.planner.counters import CEILING
from stageloom.planner.dispatch.ports import EnrolAttempt, EnrolRefused, ReportRecord
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.store.database import now_us
from stageloom.planner.store.events import unreadable_by_device
from stageloom.planner.store.generations import set_states
from stageloom.planner.store.labels import has_labels, labels_of
from stageloom.planner.store.rows import (
    add_event,
    blank_of,
    insert_rows,
    known_device,
    message_of,
    planner_row,
    run_on_rows,
    shown,
)
from stageloom.planner.store.tables import (
    DesiredRow,
    DeviceRow,
    EventRow,
    JoinTokenRow,
    PlanRow,
    QuarantineRow,
    ReportedRow,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.control import DeviceState, Origin, Report
from stageloom.shared.text import bounded

_SEEN: Final = """
WITH given (device, now_us, class, agent) AS (VALUES {rows})
UPDATE devices SET
    last_seen_us = CASE WHEN last_seen_us < now_us THEN now_us ELSE last_seen_us END,
    device_class = CASE WHEN class = '' THEN device_class ELSE class END,
    agent_version = CASE WHEN agent = '' THEN agent_version ELSE agent END,
    version = version + 1
FROM given WHERE name = device
"""

_HEARD: Final = """
WITH given (device, now_us, before_us) AS (VALUES {rows})
UPDATE devices SET last_seen_us = now_us FROM given WHERE name = device AND last_seen_us < before_us
"""

_AS_REPORTED: Final = ("revision", "epoch", "generation", "seen", "active", "local_counter", "reason")
"""Columns of `ReportedRow` that are fields of a `Report` as they are."""

_REPORT: Final = ("device", "boot", "at_us", "origin", "state", *_AS_REPORTED)

_NEWER: Final = "ON CONFLICT (device) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in _REPORT[1:]
)


class DeviceNumbers(NamedTuple):
    """How many devices there are, in all and of some kinds."""

    enrolled: int
    revoked: int
    quarantined: int


def device_numbers(session: Session) -> DeviceNumbers:
    """Counted by the database."""

    def number(*conditions: Any) -> int:
        return session.scalar(select(func.count()).select_from(DeviceRow).where(*conditions)) or 0

    refused = DeviceRow.name.in_(select(QuarantineRow.device))
    return DeviceNumbers(number(), number(DeviceRow.revoked), number(refused, DeviceRow.revoked.is_(False)))


def planner_epoch(session: Session) -> int:
    """The planner's current epoch, 1 in a new database."""
    return planner_row(session).epoch


def planner_created_us(session: Session) -> int:
    """When this planner's database was made; no two planners share it."""
    return planner_row(session).created_at_us


def raise_epoch(session: Session, above: int) -> int:
    """Start an epoch above `above` unless the current one is; returns the current epoch.

    A device that reports a newer (epoch, generation) than this database ever gave out proves that the
    database was restored from an older copy; a new epoch keeps its generations from being taken for old ones.

    Raises:
        InputError: such an epoch would leave no room above it.
    """
    row = planner_row(session)
    if above > CEILING:
        raise InputError(f"epoch {above} is beyond {CEILING}")
    if row.epoch <= above:
        row.epoch = above + 1
        add_event(session, None, "epoch", f"a device reports epoch {above}; this is epoch {row.epoch}")
    return row.epoch


def add_token(session: Session, secret_digest: Digest, device: DeviceId | None, lifetime_s: float) -> int:
    """Remember a one-time secret by its digest; returns when it expires, in microseconds since 1970.

    Raises:
        InputError: the name belongs to a device that is enrolled and not revoked.
    """
    taken = session.get(DeviceRow, device) if device is not None else None
    if taken is not None and not taken.revoked:
        raise InputError(
            f"a device named {device!r} is enrolled already",
            remedy=f"choose another name, or run `stageloom device revoke {device}` first",
        )
    at_us = now_us(session)
    expires_at_us = at_us + round(lifetime_s * 1e6)
    session.add(
        JoinTokenRow(
            secret_digest=secret_digest, device=device, created_at_us=at_us, expires_at_us=expires_at_us
        )
    )
    return expires_at_us


def enrol_device(session: Session, attempt: EnrolAttempt) -> DeviceId:
    """Use a token up. The same key and secret again get the same name, since an answer may be lost, for as
    long as the device has that key.

    A revoked name may enrol again with a new key; a name in use may not.

    Raises:
        EnrolRefused: the secret is unknown, used by another key, or expired; the name is taken; or the key is
            revoked, which it stays: somebody else may have it.
    """
    at_us = now_us(session)
    token = session.get(JoinTokenRow, attempt.secret_digest)
    if token is None:
        raise EnrolRefused(RefusalCode.TOKEN_WRONG, "the planner never gave out this join token")
    if token.used_at_us is not None:
        if token.used_by_key == attempt.public_key and token.enrolled_as:
            named = session.get(DeviceRow, token.enrolled_as)
            if named is None or named.revoked or named.public_key != attempt.public_key:
                raise EnrolRefused(RefusalCode.REVOKED, "this key was revoked; join with another one")
            return DeviceId(token.enrolled_as)
        raise EnrolRefused(RefusalCode.TOKEN_USED, "the join token was used by another device")
    if token.expires_at_us <= at_us:
        raise EnrolRefused(RefusalCode.TOKEN_EXPIRED, "the join token has expired")
    holder = session.scalar(select(DeviceRow).where(DeviceRow.public_key == attempt.public_key))
    if holder is not None and holder.revoked:
        raise EnrolRefused(RefusalCode.REVOKED, "this key was revoked; join with another one")
    if holder is not None:
        raise EnrolRefused(RefusalCode.NAME_TAKEN, "this key is enrolled already, under another token")
    name = DeviceId(token.device) if token.device else attempt.device
    row = session.get(DeviceRow, name)
    if row is not None and not row.revoked:
        raise EnrolRefused(RefusalCode.NAME_TAKEN, f"a device named {name} is enrolled already")
    if row is None:
        row = DeviceRow(name=name, last_seen_us=0)
        session.add(row)
    row.public_key, row.revoked, row.enrolled_at_us = attempt.public_key, False, at_us
    row.device_class, row.agent_version = attempt.device_class, attempt.agent_version
    _end_quarantine(session, name)
    token.used_at_us, token.used_by_key, token.enrolled_as = at_us, attempt.public_key, name
    add_event(session, name, "enrolled", f"as {name}")
    return name


def revoke_device(session: Session, device: DeviceId) -> None:
    """Take a device's key away; a repeat changes nothing.

    Raises:
        InputError: there is no such device.
    """
    row = known_device(session, device)
    if not row.revoked:
        row.revoked = True
        add_event(session, device, "revoked", "by operator")


def quarantine_device(session: Session, device: DeviceId, reason: str) -> None:
    """Refuse a device until an operator releases it; a repeat changes nothing.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    if session.get(QuarantineRow, device) is None:
        session.add(QuarantineRow(device=device, reason=bounded(reason), at_us=now_us(session)))
        add_event(session, device, "quarantined", reason)


def release_device(session: Session, device: DeviceId) -> None:
    """End a device's quarantine; a repeat changes nothing.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    if _end_quarantine(session, device):
        add_event(session, device, "released", "by operator")


def _end_quarantine(session: Session, device: DeviceId) -> bool:
    """Whether there was one to end."""
    row = session.get(QuarantineRow, device)
    if row is not None:
        session.delete(row)
    return row is not None


def store_reports(session: Session, records: Sequence[ReportRecord]) -> None:
    """Keep reports, except where the same boot's newer revision is stored; the history follows them.

    A fleet reports at once after a restart, so this takes a few statements for all, not a few for each. A
    report of a device that this database does not know must not hold up the others: it is left out.
    """
    at_us = now_us(session)
    wanted = {record.device for record in records}
    known = set(session.scalars(select(DeviceRow.name).where(DeviceRow.name.in_(wanted))))
    stored = {
        device: (boot, revision)
        for device, boot, revision in session.execute(
            select(ReportedRow.device, ReportedRow.boot, ReportedRow.revision).where(
                ReportedRow.device.in_(wanted)
            )
        )
    }
    newer: dict[DeviceId, ReportRecord] = {}
    for record in records:
        boot, revision = stored.get(record.device, (0, -1))
        if record.device in known and (record.boot != boot or record.report.revision > revision):
            stored[record.device] = (record.boot, record.report.revision)
            newer[record.device] = record
    connection = session.connection()
    seen = {
        record.device: (record.device, at_us, record.device_class, record.agent_version)
        for record in records
        if record.device in known
    }
    run_on_rows(connection, _SEEN, list(seen.values()))
    rows = [_reported(one, at_us) for one in newer.values()]
    insert_rows(connection, ReportedRow.__tablename__, _REPORT, rows, conflict=_NEWER)
    set_states(
        session,
        [
            (one.device, one.report.epoch, one.report.generation, one.report.state, one.report.reason, at_us)
            for one in newer.values()
            if one.report.state is not None
        ],
    )


def _reported(record: ReportRecord, at_us: int) -> tuple[Any, ...]:
    report = record.report
    return (
        *(record.device, record.boot, at_us),
        report.origin.value if report.origin else None,
        report.state.value if report.state else None,
        *(getattr(report, name) for name in _AS_REPORTED),
    )


def note_presence(session: Session, changes: Sequence[tuple[DeviceId, bool]]) -> list[None]:
    """Note that devices came (True) or went; one that this database does not know is left out."""
    at_us = now_us(session)
    wanted = {device for device, _ in changes}
    known = set(session.scalars(select(DeviceRow.name).where(DeviceRow.name.in_(wanted))))
    connection = session.connection()
    seen = {device: (device, at_us, "", "") for device, _ in changes if device in known}
    run_on_rows(connection, _SEEN, list(seen.values()))
    insert_rows(
        connection,
        EventRow.__tablename__,
        ("at_us", "device", "code", "text"),
        [
            (at_us, device, "online" if online else "offline", "")
            for device, online in changes
            if device in known
        ],
    )
    return [None] * len(changes)


def note_heard(session: Session, devices: Collection[DeviceId], *, after_us: int = 0) -> None:
    """Note that devices were heard of now, where that was noted more than `after_us` ago.

    The rows' versions stay: nobody who changes a device's row otherwise decides by when it was seen.
    """
    at_us = now_us(session)
    rows = [(device, at_us, at_us - after_us) for device in sorted(devices)]  # in one order: no deadlocks
    run_on_rows(session.connection(), _HEARD, rows)


def report_of(row: ReportedRow | None) -> Report:
    """The message form of a stored report."""
    if row is None:
        return Report()
    return Report(
        origin=Origin(row.origin) if row.origin else None,
        state=DeviceState(row.state) if row.state else None,
        **{name: getattr(row, name) for name in _AS_REPORTED},
    )


def device_infos(
    session: Session,
    *,
    device: DeviceId | None = None,
    devices: Collection[DeviceId] | None = None,
    after: str = "",
    limit: int = 256,
    with_revoked: bool = True,
    labels: Mapping[str, str] | None = None,
) -> list[DeviceInfo]:
    """Devices by name, of `devices` where they are named, those with all of `labels`.

    `online` is False here, since only a running planner knows.
    """
    wanted = (
        select(DeviceRow, DesiredRow, PlanRow.digest, ReportedRow, QuarantineRow)
        .outerjoin(DesiredRow, DesiredRow.device == DeviceRow.name)
        .outerjoin(PlanRow, PlanRow.name == DesiredRow.plan)
        .outerjoin(ReportedRow, ReportedRow.device == DeviceRow.name)
        .outerjoin(QuarantineRow, QuarantineRow.device == DeviceRow.name)
        .where(DeviceRow.name > after)
        .order_by(DeviceRow.name)
        .limit(limit)
    )
    if device is not None:
        wanted = wanted.where(DeviceRow.name == device)
    if devices is not None:
        wanted = wanted.where(DeviceRow.name.in_(devices))
    if not with_revoked:
        wanted = wanted.where(~DeviceRow.revoked)
    if labels:
        wanted = wanted.where(has_labels(labels))
    found = session.execute(wanted).all()
    labelled = labels_of(session, [row[0].name for row in found])
    unread = unreadable_by_device(session, found[0][0].name, found[-1][0].name) if found else {}
    return [
        shown(
            partial(_info, *row, *unread.get(row[0].name, (0, "")), labelled.get(row[0].name, {})),
            partial(_unshown, row[0], row[-1]),
        )
        for row in found
    ]


def device_info(session: Session, device: DeviceId) -> DeviceInfo:
    """One device.

    Raises:
        InputError: there is none of that name.
    """
    known_device(session, device)
    return device_infos(session, device=device)[0]


def _unshown(row: DeviceRow, refused: QuarantineRow | None, reason: str) -> DeviceInfo:
    """What is always to be had of a device: its name, and whether it is let in."""
    return blank_of(
        DeviceInfo,
        device=row.name,
        revoked=row.revoked,
        quarantine=refused.reason if refused else "",
        unshown=reason,
    )


def _info(
    row: DeviceRow,
    desired: DesiredRow | None,
    digest: str | None,
    reported: ReportedRow | None,
    refused: QuarantineRow | None,
    unread: int,
    unread_reason: str,
    labels: dict[str, str],
) -> DeviceInfo:
    return message_of(
        DeviceInfo,
        row,
        device=DeviceId(row.name),
        online=False,
        desired_epoch=desired.epoch if desired else 0,
        desired_generation=desired.generation if desired else 0,
        desired_plan=Digest(digest) if digest else None,
        report=report_of(reported),
        quarantine=refused.reason if refused else "",
        quarantined_at_us=refused.at_us if refused else 0,
        unreadable=unread,
        unreadable_reason=unread_reason,
        unshown="",
        labels=labels,
    )
