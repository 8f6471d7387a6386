"""The planner itself, and devices as they run."""

from typing import Annotated, Final

from msgspec import Meta

from stageloom.planner.schema.base import PAGE_MAX, Reply, Request
from stageloom.planner.schema.device import DeviceInfo
from stageloom.shared.messages.base import (
    Count,
    DeviceName,
    Epoch,
    Line,
    MicroSeconds,
    Name,
    Real,
    Seconds,
    ShortText,
    SmallCount,
)

MAX_RATES: Final = 1024
"""Models of devices in one look."""


class ModelRate(Reply, frozen=True, kw_only=True):
    """One model on one device over the last few seconds."""

    device: DeviceName
    model: Name
    throughput_per_s: Real
    latency_p50_ms: Real
    latency_p99_ms: Real
    queued: Count


class TelemetryBooks(Reply, frozen=True, kw_only=True):
    """Rows of one or all devices as the planner counts them: produced = stored + dropped + lost.

    Lost rows were acknowledged once and are not in the database, which was restored from an older copy.
    """

    produced: Count
    stored: Count
    dropped: Count
    lost: Count


class WatchRequest(Request, frozen=True, kw_only=True):
    """One snapshot; a live view asks again."""

    device: DeviceName | None = None


class WatchReply(Reply, frozen=True, kw_only=True):
    """Devices by name. `cut`: there are more of them, or more rates, than one reply holds."""

    at_us: MicroSeconds
    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=PAGE_MAX)]
    rates: Annotated[tuple[ModelRate, ...], Meta(max_length=MAX_RATES)]
    telemetry: TelemetryBooks
    cut: bool = False


class StatusRequest(Request, frozen=True, kw_only=True):
    """Is the planner alive, and how are its parts?"""


class StatusReply(Reply, frozen=True, kw_only=True):
    """`quarantined` counts devices, `unreadable` what devices sent and the database would not take."""

    planner_version: ShortText
    epoch: Epoch
    devices: SmallCount
    online: SmallCount
    telemetry_backlog: Count
    telemetry: TelemetryBooks
    uptime_s: Seconds
    quarantined: SmallCount = 0
    unreadable: Count = 0
    notices: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()  # what an operator should know of


class ClockTrustRequest(Request, frozen=True, kw_only=True):
    """An operator says that the planner's clock is right: what is too old by it may go.

    `confirmed`: telemetry that lies in the future by it may be filed under now, and lose its times.
    """

    confirmed: bool = False


class WatchEventsRequest(Request, frozen=True, kw_only=True):
    """A snapshot every `interval_s`, as a server-sent event `look`."""

    device: DeviceName | None = None
    interval_s: Annotated[float, Meta(ge=0.5, le=3600.0)] = 1.0


class BackupRequest(Request, frozen=True, kw_only=True):
    """Everything of a planner. It holds the secret key: keep the file as safe as the data directory."""


class SettingsRequest(Request, frozen=True, kw_only=True):
    """The planner's settings."""


class SettingInfo(Reply, frozen=True, kw_only=True):
    """One setting in force; `default`: nobody changed it."""

    name: ShortText
    value: Line
    unit: ShortText
    about: Line
    default: bool


class SettingsReply(Reply, frozen=True, kw_only=True):
    settings: tuple[SettingInfo, ...]
