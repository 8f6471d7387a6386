"""What requests and replies of the planner's API share: their bases, pages of lists, and bounded types."""

from typing import Annotated, Final, Generic, TypeVar

from msgspec import Meta, Struct

from stageloom.shared.messages.base import NO_NUL

T = TypeVar("T")

PAGE_MAX: Final = 256

PageSize = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
After = Annotated[str, Meta(max_length=128, pattern=NO_NUL)]
"""Where a list goes on: `next` of the page before; empty starts."""

LongText = Annotated[str, Meta(max_length=512 << 10, pattern=NO_NUL)]
UpToAMinute = Annotated[float, Meta(ge=0.0, le=60.0)]
Budget = Annotated[float, Meta(gt=0.0, le=3600.0)]
"""Seconds that a search or a measurement may take."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client asks; `stageloom.planner.api.route` says how it travels."""


class RequestPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value inside a request."""


class Reply(Struct, frozen=True, kw_only=True):
    """What a client gets. Later versions may add fields."""


class Page(Reply, Generic[T], frozen=True, kw_only=True):
    """Some items of a list; `next`, where it is not empty, goes on as `after`."""

    items: tuple[T, ...]
    next: After = ""


class Done(Reply, frozen=True, kw_only=True):
    """The request took effect, and there is nothing to tell."""
