"""Devices: enrolment, the list, revocation, and profiles that they are asked for."""

from typing import Annotated

from msgspec import Meta, Struct

from stageloom.shared.messages.admin.fields import After, Page
from stageloom.shared.messages.admin.plans import HistoryEntry
from stageloom.shared.messages.base import (
    NO_NUL,
    Count,
    DeviceName,
    DigestText,
    Epoch,
    Generation,
    Line,
    Message,
    MicroSeconds,
    Name,
    ShortText,
)
from stageloom.shared.messages.control import Report


class DeviceInfo(Struct, frozen=True, kw_only=True):
    """One enrolled device as the planner sees it now.

    `quarantine`: why the planner refuses it, since `quarantined_at_us`; empty where it does not. `unreadable`
    counts what it sent and the database would not take, `unreadable_reason` is the newest one's. `unshown`:
    what of it cannot be shown, and why.
    """

    device: DeviceName
    online: bool
    revoked: bool
    device_class: ShortText
    agent_version: ShortText
    enrolled_at_us: MicroSeconds
    last_seen_us: MicroSeconds
    desired_epoch: Epoch
    desired_generation: Generation
    desired_plan: DigestText | None
    report: Report
    quarantine: Line = ""
    quarantined_at_us: MicroSeconds = 0
    unreadable: Count = 0
    unreadable_reason: Line = ""
    unshown: Line = ""


class DeviceTokenRequest(Message, frozen=True, kw_only=True, tag="device_token_request"):
    """Make a one-time join token; `device` fixes the name that may enrol with it."""

    device: DeviceName | None = None
    lifetime_s: Annotated[float, Meta(gt=0.0, le=31_536_000.0)] = 3600.0


class DeviceTokenReply(Message, frozen=True, kw_only=True, tag="device_token_reply"):
    """The token's text, shown once and stored nowhere."""

    token: Annotated[str, Meta(min_length=1, max_length=1024, pattern=NO_NUL)]
    expires_at_us: MicroSeconds


class DeviceListRequest(Message, frozen=True, kw_only=True, tag="device_list_request"):
    after: After = ""
    limit: Page = 128


class DeviceListReply(Message, frozen=True, kw_only=True, tag="device_list_reply"):
    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=256)]
    more: bool = False


class DeviceShowRequest(Message, frozen=True, kw_only=True, tag="device_show_request"):
    device: DeviceName


class DeviceShowReply(Message, frozen=True, kw_only=True, tag="device_show_reply"):
    device: DeviceInfo
    history: Annotated[tuple[HistoryEntry, ...], Meta(max_length=64)] = ()


class DeviceRevokeRequest(Message, frozen=True, kw_only=True, tag="device_revoke_request"):
    """Take a device's key away; effective at its next message. A repeat changes nothing."""

    device: DeviceName


class DeviceReleaseRequest(Message, frozen=True, kw_only=True, tag="device_release_request"):
    """End a device's quarantine; effective at its next message. A repeat changes nothing."""

    device: DeviceName


class DeviceProfileRequest(Message, frozen=True, kw_only=True, tag="device_profile_request"):
    """Have a device measure the operators of some models; takes a generation of its own."""

    device: DeviceName
    models: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=16)]
    batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 20.0


class DeviceProfileReply(Message, frozen=True, kw_only=True, tag="device_profile_reply"):
    """The requests' numbers, in the order of the models; results arrive as telemetry."""

    requests: Annotated[tuple[Count, ...], Meta(max_length=16)]
    epoch: Epoch
    generation: Generation


class StageProfileCreate(Message, frozen=True, kw_only=True, tag="stage_profile_create"):
    """Have a device measure the stages of a plan; takes a generation. Answered as a profile is.

    `unsure_only`: the combined blocks with stages that neither a measurement nor the model of the device's
    class is sure of; where there is none nothing is asked, and the answer has no request and generation 0.
    """

    device: DeviceName
    plan: Name
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 10.0
    unsure_only: bool = False
