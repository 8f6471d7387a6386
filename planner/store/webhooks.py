"""Webhooks, and the messages that wait for them.

A message is written in the transaction of what it tells of, and goes once its receiver took it. What nobody
takes is bounded: in number for each webhook, shared fairly among devices, and in age.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

import msgspec
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.webhook import WebhookEvent, WebhookInfo
from stageloom.planner.store.database import now_us
from stageloom.planner.store.tables import WebhookMessageRow, WebhookRow
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.text import bounded

MOST_WEBHOOKS: Final = 32
MOST_WAITING: Final = 1000  # messages of one webhook
GIVE_UP_US: Final = 86_400_000_000
"""A message this old goes when it fails once more."""

_FIELDS: Final = {
    WebhookEvent.ALARM: ("boot", "number", "at_us", "cause", "value", "threshold", "plan"),
    WebhookEvent.VERDICT: (
        *("epoch", "generation", "origin", "how", "verdict", "figure", "candidate", "control", "ratio"),
        *("ratio_low", "ratio_high", "pairs", "began_us", "decided_us", "reason"),
    ),
}
"""What is told of each; see docs/webhooks.md."""

_FIRST_US: Final = 5_000_000
_LONGEST_US: Final = 3_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """The oldest message of a webhook, with all that sending it takes."""

    webhook: str
    number: int
    message: str
    url: str
    secret: str
    private: bool
    body: bytes


def add_webhook(
    session: Session, name: str, url: str, events: tuple[WebhookEvent, ...], secret: str, *, private: bool
) -> None:
    """Keep a new webhook.

    Raises:
        InputError: the name is taken, or there are as many as may be.
    """
    if session.get(WebhookRow, name) is not None:
        raise InputError(f"there is a webhook {name!r} already", remedy="choose another --name, or remove it")
    if (session.scalar(select(func.count()).select_from(WebhookRow)) or 0) >= MOST_WEBHOOKS:
        raise InputError(f"there are {MOST_WEBHOOKS} webhooks", remedy="remove one")
    session.add(
        WebhookRow(
            name=name,
            url=url,
            events=[event.value for event in events],
            secret=secret,
            private=int(private),
            created_at_us=now_us(session),
            next_at_us=0,
            failures=0,
            arrived=0,
            dropped=0,
            problem="",
        )
    )


def remove_webhook(session: Session, name: str) -> None:
    """Forget a webhook and what waits for it.

    Raises:
        NotFoundError: there is no such webhook.
    """
    row = session.get(WebhookRow, name)
    if row is None:
        raise NotFoundError(f"there is no webhook {name!r}", remedy="see `stageloom webhook list`")
    session.execute(delete(WebhookMessageRow).where(WebhookMessageRow.webhook == name))
    session.delete(row)


def webhook_infos(session: Session) -> list[WebhookInfo]:
    """All webhooks by name, without their secrets."""
    waiting = dict(
        session.execute(
            select(WebhookMessageRow.webhook, func.count()).group_by(WebhookMessageRow.webhook)
        ).all()
    )
    return [
        WebhookInfo(
            webhook=row.name,
            url=row.url,
            events=tuple(WebhookEvent(event) for event in row.events),
            private=bool(row.private),
            created_at_us=row.created_at_us,
            waiting=waiting.get(row.name, 0),
            arrived=row.arrived,
            dropped=row.dropped,
            failures=row.failures,
            problem=row.problem,
        )
        for row in session.scalars(select(WebhookRow).order_by(WebhookRow.name))
    ]


def tell_webhooks(session: Session, event: WebhookEvent, device: str, data: Mapping[str, Any]) -> None:
    """Have a message of this device wait for every webhook that listens to this event; JSON of `data`."""
    rows = [row for row in session.scalars(select(WebhookRow)) if event.value in row.events]
    if not rows:
        return
    at_us = now_us(session)
    at = datetime.fromtimestamp(at_us / 1e6, timezone.utc).isoformat().replace("+00:00", "Z")
    body = msgspec.json.encode({"type": event.value, "timestamp": at, "data": {"device": device, **data}})
    for row in rows:
        session.add(
            WebhookMessageRow(
                webhook=row.name, device=device, message=f"msg_{uuid.uuid4().hex}", body=body, at_us=at_us
            )
        )
        waiting = select(func.count()).where(WebhookMessageRow.webhook == row.name)
        if (session.scalar(waiting) or 0) > MOST_WAITING:
            _drop_one(session, row)


def told_of(event: WebhookEvent, message: msgspec.Struct) -> dict[str, object]:
    """What a webhook is told of an alarm or of a trial's end, by the names that the message has."""
    return {field: getattr(message, field) for field in _FIELDS[event]}


def _drop_one(session: Session, row: WebhookRow) -> None:
    """Drop the oldest message of the device that has most: one device's storm does not silence the others.
    The webhook's oldest stays, as it may be under way."""
    mine = WebhookMessageRow.webhook == row.name
    under_way = select(func.min(WebhookMessageRow.number)).where(mine).scalar_subquery()
    oldest = func.min(WebhookMessageRow.number)
    dropped = session.scalar(
        select(oldest)
        .where(mine, WebhookMessageRow.number > under_way)
        .group_by(WebhookMessageRow.device)
        .order_by(func.count().desc(), oldest)
        .limit(1)
    )
    session.execute(delete(WebhookMessageRow).where(WebhookMessageRow.number == dropped))
    row.dropped += 1


def waiting_messages(session: Session, at_us: int) -> list[WaitingMessage]:
    """The oldest message of every webhook that is due; a clock that was set back makes all due."""
    oldest = select(func.min(WebhookMessageRow.number)).group_by(WebhookMessageRow.webhook).scalar_subquery()
    found = session.execute(
        select(WebhookRow, WebhookMessageRow)
        .join(WebhookMessageRow, WebhookMessageRow.webhook == WebhookRow.name)
        .where(WebhookMessageRow.number.in_(oldest))
        .where((WebhookRow.next_at_us <= at_us) | (WebhookRow.next_at_us > at_us + _LONGEST_US))
        .order_by(WebhookRow.next_at_us)
    )
    return [
        WaitingMessage(
            webhook=row.name,
            number=waits.number,
            message=waits.message,
            url=row.url,
            secret=row.secret,
            private=bool(row.private),
            body=waits.body,
        )
        for row, waits in found
    ]


def message_arrived(session: Session, sent: WaitingMessage) -> None:
    """The receiver has it."""
    row = _sender(session, sent)
    session.execute(delete(WebhookMessageRow).where(WebhookMessageRow.message == sent.message))
    if row is not None:
        row.arrived += 1
        row.failures, row.next_at_us, row.problem = 0, 0, ""


def message_failed(session: Session, sent: WaitingMessage, problem: str, *, gone: bool, at_us: int) -> None:
    """It did not arrive: the webhook is tried later, 5 s to an hour. `gone`: it hears of nothing more."""
    row = _sender(session, sent)
    if row is None:
        return
    row.failures += 1
    row.next_at_us = at_us + retry_us(row.failures)
    row.problem = bounded(problem)
    mine = WebhookMessageRow.webhook == sent.webhook
    if gone:
        row.events = []
    else:
        mine &= WebhookMessageRow.at_us < at_us - GIVE_UP_US
    row.dropped += session.scalar(select(func.count()).where(mine)) or 0
    session.execute(delete(WebhookMessageRow).where(mine))


def _sender(session: Session, sent: WaitingMessage) -> WebhookRow | None:
    """The webhook whose message it is; None where that was removed meanwhile, and perhaps added anew."""
    waits = session.get(WebhookMessageRow, sent.number)
    if waits is None or waits.message != sent.message:
        return None
    return session.get(WebhookRow, sent.webhook)


def retry_us(failures: int) -> int:
    """Microseconds until the next try after so many failures in a row: 5 s, 15 s, 45 s and so on to 1 h."""
    return min(_FIRST_US * int(3 ** min(failures - 1, 8)), _LONGEST_US)
