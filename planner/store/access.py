"""Access to the API: tokens, the audit log, and answers to requests that may come again."""

from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from stageloom.planner.schema.access import AccessInfo, AuditEntry, Role
from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import message_of
from stageloom.planner.store.tables import AccessTokenRow, AnswerRow, AuditRow
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.ids import Digest
from stageloom.shared.text import bounded

if TYPE_CHECKING:
    from stageloom.planner.api.access import Principal

AUDIT_ROWS: Final = 20_000
"""Entries that are kept of each client: what it did, and apart from that what was refused to it; beyond them
the oldest go. So a flood of one client, or of strangers, takes no entry of anybody else away."""

ANSWERS_KEEP_US: Final = 86_400_000_000

_THIN_EVERY: Final = 251  # a prime: no rhythm of requests stays clear of it


def add_access(session: Session, name: str, role: Role, digest: Digest) -> None:
    """Keep a new token.

    Raises:
        InputError: the name is taken, by one that was revoked, too: the audit log names it.
    """
    if session.get(AccessTokenRow, name) is not None:
        raise InputError(f"there is an access token {name!r} already", remedy="choose another name")
    session.add(
        AccessTokenRow(
            name=name, role=role.value, digest=digest, created_at_us=now_us(session), revoked_at_us=0
        )
    )


def revoke_access(session: Session, name: str) -> None:
    """Refuse a token from now on.

    Raises:
        NotFoundError: there is no such token.
    """
    row = session.get(AccessTokenRow, name)
    if row is None:
        raise NotFoundError(f"there is no access token {name!r}", remedy="see `stageloom access list`")
    row.revoked_at_us = row.revoked_at_us or now_us(session)


def access_infos(session: Session, *, after: str = "", limit: int = 1_000_000) -> list[AccessInfo]:
    """Tokens by name."""
    wanted = (
        select(AccessTokenRow).where(AccessTokenRow.name > after).order_by(AccessTokenRow.name).limit(limit)
    )
    return [message_of(AccessInfo, row, role=Role(row.role)) for row in session.scalars(wanted)]


def held_tokens(session: Session) -> list[tuple[Digest, str, Role]]:
    """Those that hold: (digest, name, role)."""
    rows = session.scalars(select(AccessTokenRow).where(AccessTokenRow.revoked_at_us == 0))
    return [(Digest(row.digest), row.name, Role(row.role)) for row in rows]


def note_request(session: Session, who: "Principal", operation: str, target: str, status: int) -> None:
    """Keep an entry of the audit log."""
    row = AuditRow(
        at_us=now_us(session),
        who=who.name[:128],
        role=who.role.value if who.role is not None else "",
        source=who.source[:128],
        operation=operation,
        target=bounded(target, 128),  # of a request that was refused it is whatever stood in its path
        status=status,
    )
    session.add(row)
    session.flush()
    if row.id % _THIN_EVERY == 0:
        done = AuditRow.status < 400 if status < 400 else AuditRow.status >= 400
        alike = select(AuditRow.id).where(AuditRow.who == row.who, done).order_by(AuditRow.id.desc())
        oldest = session.scalar(alike.offset(AUDIT_ROWS).limit(1))
        if oldest is not None:
            session.execute(delete(AuditRow).where(AuditRow.who == row.who, done, AuditRow.id <= oldest))


def audit_entries(
    session: Session,
    *,
    before: int = 0,
    limit: int = 64,
    who: str = "",
    about: str = "",
    refused: bool | None = None,
) -> tuple[list[AuditEntry], int]:
    """(entries newest first, the position after which to go on or 0).

    Of the client `who` alone, those with `about` in their operation or target, and those that were
    `refused` or done; empty and None: all.
    """
    wanted = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
    if before:
        wanted = wanted.where(AuditRow.id < before)
    if who:
        wanted = wanted.where(AuditRow.who == who)
    if about:
        found = [column.icontains(about, autoescape=True) for column in (AuditRow.operation, AuditRow.target)]
        wanted = wanted.where(or_(*found))
    if refused is not None:
        wanted = wanted.where(AuditRow.status >= 400 if refused else AuditRow.status < 400)
    rows = list(session.scalars(wanted))
    entries = [message_of(AuditEntry, row) for row in rows[:limit]]
    return entries, rows[limit - 1].id if len(rows) > limit else 0


class KeptAnswer(NamedTuple):
    """The answer to a request with an idempotency key; `body` is empty where it held a secret, `status` is 0
    while there is none."""

    request_digest: str
    status: int
    body: bytes


def take_key(session: Session, who: str, key: str, request_digest: Digest) -> KeptAnswer | None:
    """What this client's key stands for since less than a day; None if it is new: now it is taken."""
    at_us = now_us(session)
    session.execute(delete(AnswerRow).where(AnswerRow.at_us < at_us - ANSWERS_KEEP_US))
    row = session.get(AnswerRow, (who, key))
    if row is not None:
        return KeptAnswer(row.request_digest, row.status, row.body)
    session.add(AnswerRow(who=who, key=key, at_us=at_us, request_digest=request_digest, status=0, body=b""))
    return None


def keep_answer(session: Session, who: str, key: str, status: int, body: bytes) -> None:
    """Keep the answer to the request that took a key."""
    taken = AnswerRow.who == who, AnswerRow.key == key
    session.execute(update(AnswerRow).where(*taken).values(status=status, body=body))


def give_key_back(session: Session, who: str, key: str) -> None:
    """The request that took a key did nothing."""
    session.execute(delete(AnswerRow).where(AnswerRow.who == who, AnswerRow.key == key))
