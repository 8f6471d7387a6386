"""Records as replies hold them. One that no reply can hold stands there with the reason why, not its page."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from stageloom.shared.errors import DecodeError
from stageloom.shared.messages.telemetry import Row, decode_row
from stageloom.shared.text import bounded, counted

T = TypeVar("T", bound=msgspec.Struct)


def shown(make: Callable[[], T], instead: Callable[[str], T]) -> T:
    """What `make` makes, or what `instead` makes of the reason why nobody could read that."""
    try:
        made = make()
        return msgspec.convert(msgspec.to_builtins(made), type(made))
    except (ValueError, DecodeError) as error:
        return instead(bounded(f"cannot be shown: {error}"))


def read_row(body: bytes) -> Row | DecodeError:
    """A stored telemetry row, or why this version cannot read it."""
    try:
        return decode_row(body)
    except DecodeError as error:
        return error


def readable(bodies: Iterable[bytes]) -> tuple[list[Row], str]:
    """Stored telemetry rows, and what of them this version cannot read; empty where it reads all."""
    found = [read_row(body) for body in bodies]
    errors = [one for one in found if isinstance(one, DecodeError)]
    unread = f"{counted(len(errors), 'telemetry row')}: {errors[-1].cause}" if errors else ""
    return [one for one in found if isinstance(one, Row)], bounded(unread)
