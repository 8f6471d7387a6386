"""Telemetry of a device, as it was measured or rolled up."""

from enum import Enum
from typing import Annotated, Any, Final

from msgspec import Meta

from stageloom.planner.schema.base import After, Reply, Request
from stageloom.shared.messages.base import Count, DeviceName, MicroSeconds, SmallCount
from stageloom.shared.messages.telemetry import RowKind

TELEMETRY_PAGE: Final = 1024
END_US: Final = 253_402_300_800_000_000
"""Of what is taken for microseconds since 1970: the end of the year 9999."""


class RollUp(str, Enum):
    """The spans of time to which telemetry can be rolled up."""

    MINUTE = "minute"
    HOUR = "hour"


class DeviceTelemetryRequest(Request, frozen=True, kw_only=True):
    """Telemetry of a device over its whole age, newest first.

    Old rows are rolled up into minutes, then hours. `kind` may be repeated; none: all. `by`: what is kept
    finer is rolled up to this; hours stay hours, and kinds that are not rolled up are left out.
    """

    device: DeviceName
    kind: Annotated[tuple[RowKind, ...], Meta(max_length=32)] = ()
    by: RollUp | None = None
    since_us: Annotated[int, Meta(ge=0, le=END_US)] = 0
    after: After = ""
    limit: Annotated[int, Meta(ge=1, le=TELEMETRY_PAGE)] = 256


class TelemetryItem(Reply, frozen=True, kw_only=True):
    """One row, or what `rows` of them say in the `width_s` seconds from `at_us` on (0: it is a row).

    `values` has the fields of its kind (`stageloom.shared.messages.telemetry`); samples that were rolled up
    are objects with `mean`, `min`, `max` and `samples`. A row that cannot be read is `unreadable`.
    """

    at_us: MicroSeconds
    kind: RowKind
    width_s: SmallCount = 0
    rows: Count = 1
    values: Annotated[dict[str, Any], Meta(max_length=64)]


class DeviceBooksRequest(Request, frozen=True, kw_only=True):
    """The rows that a device produced, and what became of them."""

    device: DeviceName
