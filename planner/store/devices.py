"""Enrolment, keys and what devices report; every function is one part of a transaction."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from planner.store.tables import (
    DesiredRow,
    DeviceRow,
    EventRow,
    GenerationRow,
    JoinTokenRow,
    PlannerRow,
    PlanRow,
    ReportedRow,
)
from shared.digest import digest_bytes
from shared.errors import InputError
from shared.ids import DeviceId, Digest
from shared.messages.admin import DeviceInfo
from shared.messages.base import RefusalCode
from shared.messages.control import DeviceState, Origin, Report


@dataclass(frozen=True, slots=True)
class EnrolledKey:
    """A key that is known, and whether it may still be used."""

    device: DeviceId
    public_key: str  # Z85
    revoked: bool


@dataclass(frozen=True, slots=True)
class Enrolment:
    """How an enrolment ended: a name, or why not."""

    device: DeviceId | None
    refusal: RefusalCode | None = None
    reason: str = ""


def planner_row(session: Session, now_us: int) -> PlannerRow:
    """This database's own row, made at first use with epoch 1."""
    row = session.get(PlannerRow, 1)
    if row is None:
        row = PlannerRow(id=1, epoch=1, created_at_us=now_us)
        session.add(row)
        session.flush()
    return row


def raise_epoch(session: Session, above: int, now_us: int) -> int:
    """Start an epoch above `above` unless the current one is; returns the current epoch.

    A device that reports a newer (epoch, generation) than this database ever gave out proves that the
    database was restored from an older copy; a new epoch keeps its generations from being taken for old ones.
    """
    row = planner_row(session, now_us)
    if row.epoch <= above:
        row.epoch = above + 1
        _event(session, now_us, None, "epoch", f"a device reports epoch {above}; this is epoch {row.epoch}")
    return row.epoch


def add_token(
    session: Session, secret: bytes, device: DeviceId | None, expires_at_us: int, now_us: int
) -> None:
    """Remember a one-time secret by its digest."""
    session.add(
        JoinTokenRow(
            secret_digest=digest_bytes([secret]),
            device=device,
            created_at_us=now_us,
            expires_at_us=expires_at_us,
        )
    )


def enrol(
    session: Session,
    *,
    secret: bytes,
    public_key: str,
    device: DeviceId,
    device_class: str,
    agent_version: str,
    now_us: int,
) -> Enrolment:
    """Use a token up. The same key and secret again get the same answer, since an answer may be lost.

    A revoked name may enrol again with a new key; a name in use may not.
    """
    token = session.get(JoinTokenRow, digest_bytes([secret]))
    if token is None:
        return Enrolment(None, RefusalCode.TOKEN_WRONG, "no such token was ever given out")
    if token.used_at_us is not None:
        if token.used_by_key == public_key and token.enrolled_as:
            return Enrolment(DeviceId(token.enrolled_as))
        return Enrolment(None, RefusalCode.TOKEN_USED, "the token was used by another key")
    if token.expires_at_us <= now_us:
        return Enrolment(None, RefusalCode.TOKEN_EXPIRED, "the token expired")
    name = DeviceId(token.device) if token.device else device
    if session.scalar(select(DeviceRow.name).where(DeviceRow.public_key == public_key)):
        return Enrolment(None, RefusalCode.NAME_TAKEN, "this key is enrolled already")
    row = session.get(DeviceRow, name)
    if row is not None and not row.revoked:
        return Enrolment(None, RefusalCode.NAME_TAKEN, f"a device named {name} is enrolled already")
    if row is None:
        row = DeviceRow(name=name, last_seen_us=0)
        session.add(row)
    row.public_key, row.revoked, row.enrolled_at_us = public_key, False, now_us
    row.device_class, row.agent_version = device_class, agent_version
    token.used_at_us, token.used_by_key, token.enrolled_as = now_us, public_key, name
    _event(session, now_us, name, "enrolled", f"as {name}")
    return Enrolment(name)


def keys(session: Session) -> list[EnrolledKey]:
    """Every key that was ever enrolled and not replaced."""
    found = session.execute(select(DeviceRow.name, DeviceRow.public_key, DeviceRow.revoked))
    return [EnrolledKey(DeviceId(name), key, revoked) for name, key, revoked in found]


def revoke(session: Session, device: DeviceId, now_us: int) -> None:
    """Take a device's key away; a repeat changes nothing.

    Raises:
        InputError: there is no such device.
    """
    row = known_device(session, device)
    if not row.revoked:
        row.revoked = True
        _event(session, now_us, device, "revoked", "by operator")


def known_device(session: Session, device: DeviceId) -> DeviceRow:
    """The device's row.

    Raises:
        InputError: there is no such device.
    """
    row = session.get(DeviceRow, device)
    if row is None:
        raise InputError(f"there is no device {device!r}", remedy="see `stageloom device list`")
    return row


def hello(session: Session, device: DeviceId, device_class: str, agent_version: str, now_us: int) -> None:
    """Keep what a device says about itself when it connects."""
    row = known_device(session, device)
    row.device_class, row.agent_version, row.last_seen_us = device_class, agent_version, now_us


def seen(session: Session, last_seen_us: dict[DeviceId, int]) -> None:
    """Keep when devices were last heard; written now and then, never per heartbeat."""
    for device, at_us in last_seen_us.items():
        row = session.get(DeviceRow, device)
        if row is not None and row.last_seen_us < at_us:
            row.last_seen_us = at_us


def store_report(session: Session, device: DeviceId, boot: int, report: Report, now_us: int) -> bool:
    """Keep a report unless a newer revision is stored; the history follows it. True if it was news."""
    row = session.get(ReportedRow, device)
    if row is None:
        known_device(session, device)
        row = ReportedRow(device=device, revision=-1)
        session.add(row)
    if report.revision <= row.revision:
        return False
    row.revision, row.boot, row.at_us = report.revision, boot, now_us
    row.epoch, row.generation = report.epoch, report.generation
    row.seen, row.active, row.local_counter = report.seen, report.active, report.local_counter
    row.origin = report.origin.value if report.origin else None
    row.state = report.state.value if report.state else None
    row.reason = report.reason
    if report.state is not None:
        generation = session.scalar(
            select(GenerationRow).where(
                GenerationRow.device == device,
                GenerationRow.epoch == report.epoch,
                GenerationRow.generation == report.generation,
            )
        )
        if generation is not None:
            generation.state, generation.reason = report.state.value, report.reason
            generation.state_at_us = now_us
    return True


def report_of(row: ReportedRow | None) -> Report:
    """The message form of a stored report."""
    if row is None:
        return Report()
    return Report(
        revision=row.revision,
        epoch=row.epoch,
        generation=row.generation,
        seen=Digest(row.seen) if row.seen else None,
        active=Digest(row.active) if row.active else None,
        origin=Origin(row.origin) if row.origin else None,
        local_counter=row.local_counter,
        state=DeviceState(row.state) if row.state else None,
        reason=row.reason,
    )


def highest_reported(session: Session) -> tuple[int, int]:
    """The highest (epoch, generation) that any device reported."""
    epoch = session.scalar(select(func.max(ReportedRow.epoch))) or 0
    generation = session.scalar(select(func.max(ReportedRow.generation)).where(ReportedRow.epoch == epoch))
    return epoch, generation or 0


def device_infos(
    session: Session, *, device: DeviceId | None = None, after: str = "", limit: int = 256
) -> list[DeviceInfo]:
    """Devices by name; `online` is False here, since only a running planner knows."""
    wanted = (
        select(DeviceRow, DesiredRow, PlanRow.digest, ReportedRow)
        .outerjoin(DesiredRow, DesiredRow.device == DeviceRow.name)
        .outerjoin(PlanRow, PlanRow.name == DesiredRow.plan)
        .outerjoin(ReportedRow, ReportedRow.device == DeviceRow.name)
        .where(DeviceRow.name > after)
        .order_by(DeviceRow.name)
        .limit(limit)
    )
    if device is not None:
        wanted = wanted.where(DeviceRow.name == device)
    return [_info(*row) for row in session.execute(wanted)]


def _info(
    row: DeviceRow, desired: DesiredRow | None, digest: str | None, reported: ReportedRow | None
) -> DeviceInfo:
    return DeviceInfo(
        device=DeviceId(row.name),
        online=False,
        revoked=row.revoked,
        device_class=row.device_class,
        agent_version=row.agent_version,
        enrolled_at_us=row.enrolled_at_us,
        last_seen_us=row.last_seen_us,
        desired_epoch=desired.epoch if desired else 0,
        desired_generation=desired.generation if desired else 0,
        desired_plan=Digest(digest) if digest else None,
        report=report_of(reported),
    )


def _event(session: Session, now_us: int, device: DeviceId | None, code: str, text: str) -> None:
    session.add(EventRow(at_us=now_us, device=device, code=code, text=text))
