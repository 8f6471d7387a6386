"""The control conversation: who is there, what is desired, what is reported.

Desired and reported are *levels*, not events: each message holds the whole value, so a lost, late or repeated
one changes nothing that the next one does not repair. (epoch, generation) orders desired values; `revision`
orders what one device reports over its whole life.
"""

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from shared.codec import Codec, Limits
from shared.messages.base import (
    MAX_PLAN_BYTES,
    BootId,
    Count,
    DeviceName,
    DigestText,
    Epoch,
    Generation,
    Line,
    Message,
    Name,
    PlanBytes,
    PositiveBytes,
    Refused,
    ShortText,
    SmallCount,
)


class DeviceState(str, Enum):
    """Where a desired plan stands on the device; `edge_agent.link.states` holds the transitions."""

    RECEIVED = "received"
    WAITING = "waiting"  # for artifacts
    VERIFIED = "verified"
    STAGED = "staged"
    TRIAL = "trial"
    PROBATION = "probation"
    COMMITTED = "committed"
    REJECTED = "rejected"
    NO_GAIN = "no_gain"
    ROLLED_BACK = "rolled_back"


class Origin(str, Enum):
    """Who made the plan that runs."""

    PLANNER = "planner"
    LOCAL = "local"
    FALLBACK = "fallback"


class Autonomy(str, Enum):
    """What the agent may re-plan without the planner."""

    OFF = "off"
    PROVEN = "proven"
    FULL = "full"


class ArtifactNeed(Struct, frozen=True):
    """An artifact that a plan names."""

    model: Name
    digest: DigestText
    size_bytes: PositiveBytes


class ProfileRequest(Struct, frozen=True):
    """Measure every operator of an artifact at one batch size; `budget_s` bounds the time spent."""

    request: Count
    artifact: ArtifactNeed
    batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 20.0


class Desired(Message, frozen=True, kw_only=True, tag="desired"):
    """Planner to device: what it should run. `plan_digest` None: keep what runs, only the rest applies.

    `plan` is the plan's canonical wire form, whose digest is `plan_digest`; `profiles` is the whole set of
    profiles wanted, and a device skips those whose `request` it has answered.
    """

    epoch: Epoch
    generation: Generation
    plan_digest: DigestText | None = None
    plan: PlanBytes = b""
    artifacts: Annotated[tuple[ArtifactNeed, ...], Meta(max_length=64)] = ()
    profiles: Annotated[tuple[ProfileRequest, ...], Meta(max_length=64)] = ()
    autonomy: Autonomy = Autonomy.OFF


class Report(Struct, frozen=True, kw_only=True):
    """What a device is doing. `seen` is the plan digest of the generation seen, `active` what really runs.

    `state` None: nothing was ever desired here. `revision` rises with every change, over restarts too.
    """

    revision: Count = 0
    epoch: Epoch = 0
    generation: Generation = 0
    seen: DigestText | None = None
    active: DigestText | None = None
    origin: Origin | None = None
    local_counter: Count = 0
    state: DeviceState | None = None
    reason: Line = ""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Device to planner, first on every connection; `connection` counts connections of this boot."""

    boot: BootId
    connection: SmallCount
    agent_version: ShortText
    device_class: ShortText
    report: Report


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Planner to device: the session stands. The planner sets the pace, since it knows the fleet's size."""

    device: DeviceName
    epoch: Epoch
    heartbeat_interval_s: Annotated[float, Meta(ge=0.01, le=3600.0)]
    bulk_credits: Annotated[int, Meta(ge=1, le=64)]


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Device to planner: alive, which generation it has in which state, and which report tells more."""

    boot: BootId
    epoch: Epoch
    generation: Generation
    state: DeviceState | None
    revision: Count


class HeartbeatAck(Message, frozen=True, kw_only=True, tag="heartbeat_ack"):
    """Planner to device: alive; the newest desired value and the newest report it has on record."""

    epoch: Epoch
    generation: Generation
    revision: Count


class Reported(Message, frozen=True, kw_only=True, tag="reported"):
    """Device to planner: the whole report, whenever it changed or the planner has an older one."""

    boot: BootId
    report: Report


class ReportedAck(Message, frozen=True, kw_only=True, tag="reported_ack"):
    """Planner to device: this revision is stored."""

    revision: Count


ControlToPlanner = Hello | Heartbeat | Reported
ControlToDevice = Welcome | HeartbeatAck | Desired | ReportedAck | Refused

TO_PLANNER: Codec[ControlToPlanner] = Codec(ControlToPlanner, Limits(frame_bytes=8 << 10, body_bytes=8 << 10))
TO_DEVICE: Codec[ControlToDevice] = Codec(
    ControlToDevice,
    Limits(frame_bytes=MAX_PLAN_BYTES + (64 << 10), body_bytes=MAX_PLAN_BYTES + (64 << 10)),
)
