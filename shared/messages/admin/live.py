"""The planner itself, and devices as they run."""

from typing import Annotated

from msgspec import Meta, Struct

from stageloom.shared.messages.admin.devices import DeviceInfo
from stageloom.shared.messages.base import (
    Count,
    DeviceName,
    Epoch,
    Line,
    Message,
    MicroSeconds,
    Name,
    Real,
    Seconds,
    ShortText,
    SmallCount,
)


class ModelRate(Struct, frozen=True, kw_only=True):
    """One model on one device over the last few seconds."""

    device: DeviceName
    model: Name
    throughput_per_s: Real
    latency_p50_ms: Real
    latency_p99_ms: Real
    queued: Count


class TelemetryBooks(Struct, frozen=True, kw_only=True):
    """Rows of one or all devices as the planner counts them: produced = stored + dropped + lost.

    Lost rows were acknowledged once and are not in the database, which was restored from an older copy.
    """

    produced: Count
    stored: Count
    dropped: Count
    lost: Count


class WatchRequest(Message, frozen=True, kw_only=True, tag="watch_request"):
    """One snapshot; a live view asks again."""

    device: DeviceName | None = None


class WatchReply(Message, frozen=True, kw_only=True, tag="watch_reply"):
    at_us: MicroSeconds
    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=256)]
    rates: Annotated[tuple[ModelRate, ...], Meta(max_length=1024)]
    telemetry: TelemetryBooks


class StatusRequest(Message, frozen=True, kw_only=True, tag="status_request"):
    """Is the planner alive, and how are its parts?"""


class StatusReply(Message, frozen=True, kw_only=True, tag="status_reply"):
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


class ClockTrustRequest(Message, frozen=True, kw_only=True, tag="clock_trust_request"):
    """An operator says that the planner's clock is right: what is too old by it may go."""
