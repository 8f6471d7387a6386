"""Webhooks: addresses that hear of alarms and verdicts."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from stageloom.planner.schema.base import Reply, Request
from stageloom.shared.messages.base import NO_NUL, Count, Line, MicroSeconds, Name, ShortText, SmallCount

Url = Annotated[str, Meta(min_length=1, max_length=2048, pattern=NO_NUL)]


class WebhookEvent(str, Enum):
    """What a webhook may hear of; the `type` of its messages."""

    ALARM = "alarm"  # a device asks for another plan
    VERDICT = "verdict"  # a trial on a device ended


class WebhookAddRequest(Request, frozen=True, kw_only=True):
    """Send messages about these events to a URL. `private`: it may be in a local network, and plain http."""

    webhook: Name
    url: Url
    events: Annotated[tuple[WebhookEvent, ...], Meta(min_length=1, max_length=2)] = tuple(WebhookEvent)
    private: bool = False


class WebhookAddReply(Reply, frozen=True, kw_only=True):
    """The secret that messages are signed with, shown once."""

    webhook: Name
    secret: ShortText


class WebhookListRequest(Request, frozen=True, kw_only=True):
    """All webhooks."""


class WebhookInfo(Reply, frozen=True, kw_only=True):
    """One webhook. `events` empty: its receiver answered that it is gone. `waiting` messages are still to
    arrive, `dropped` never will; `failures` in a row since the last that arrived, `problem` of the newest."""

    webhook: Name
    url: Url
    events: Annotated[tuple[WebhookEvent, ...], Meta(max_length=2)]
    private: bool
    created_at_us: MicroSeconds
    waiting: SmallCount
    arrived: Count
    dropped: Count
    failures: Count
    problem: Line


class WebhookRemoveRequest(Request, frozen=True, kw_only=True):
    """Forget a webhook, and what waits for it."""

    webhook: Name
