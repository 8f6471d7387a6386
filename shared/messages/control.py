"""The control conversation: who is there, what is desired, what is reported.

Desired and reported are *levels*, not events: each message holds the whole value, so a lost, late or repeated
one changes nothing that the next one does not repair. (epoch, generation) orders desired values; `revision`
orders what one device reports over its whole life.
"""

from enum import Enum
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.messages.base import (
    MAX_PLAN_BYTES,
    BootId,
    Count,
    DeviceName,
    DigestText,
    Epoch,
    Generation,
    Line,
    Mask,
    Message,
    MicroSeconds,
    ModelVersion,
    Name,
    PlanBytes,
    PositiveBytes,
    Real,
    Refused,
    ShortText,
    SmallCount,
)
from stageloom.shared.messages.outputs import Tolerance


class DeviceState(str, Enum):
    """Where a desired plan stands; `stageloom.edge_agent.lifecycle.states` holds the transitions."""

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


class Activation(str, Enum):
    """How a desired plan comes to run."""

    TRIAL = "trial"  # it must win a trial against what runs, unless it is proven or nothing comparable runs
    NOW = "now"  # at once, under probation: an operator's order, or back to what ran before


class ArtifactNeed(Struct, frozen=True, omit_defaults=True):
    """An artifact that a plan names, and which version of the model it is."""

    model: Name
    digest: DigestText
    size_bytes: PositiveBytes
    version: ModelVersion = 1


MAX_POLICY_BYTES: Final = 64 << 20


class PolicyNeed(Struct, frozen=True):
    """A learned policy that a device plans with while the planner is away: a checkpoint's bytes."""

    digest: DigestText
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_POLICY_BYTES)]


MAX_PARTS: Final = 32
"""Extents of one axis of an operator that a request may ask for."""


class ProfileRequest(Struct, frozen=True):
    """Measure an artifact at one batch size: its operators, and the whole; `budget_s` bounds the time spent.

    On the executor and the number of threads that are named, else on those that the agent is set to. `parts`:
    of operators that may be split over two resources, parts of so many extents per axis, too; agents that do
    not know the field measure none.
    """

    request: Count
    artifact: ArtifactNeed
    batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 20.0
    executor: Name | UnsetType = UNSET
    intra_op_threads: Annotated[int, Meta(ge=1, le=256)] | UnsetType = UNSET
    parts: Annotated[int, Meta(ge=2, le=MAX_PARTS)] | UnsetType = UNSET


MAX_PROFILED: Final = 256
"""Combined blocks that a request may name; one about more is about all."""


class StageProfileRequest(Struct, frozen=True, kw_only=True):
    """Measure every stage of a plan, each combined block run alone with all its members active.

    The plan need not run and is not activated; `budget_s` bounds the time spent. `combined_blocks` are those
    that hold stages the planner is not sure of; empty: all.
    """

    request: Count
    plan_digest: DigestText
    plan: PlanBytes
    artifacts: Annotated[tuple[ArtifactNeed, ...], Meta(max_length=64)]
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 10.0
    combined_blocks: Annotated[tuple[SmallCount, ...], Meta(max_length=MAX_PROFILED)] = ()


class Desired(Message, frozen=True, kw_only=True, tag="desired"):
    """Planner to device: what it should run. `plan_digest` None: keep what runs, only the rest applies.

    `plan` is the plan's canonical wire form, whose digest is `plan_digest`; `profiles` and `stage_profile`
    are all the measurements wanted, and a device skips those whose `request` it has answered. `policy` is
    what it may plan with alone, as far as `autonomy` goes; None: with launch intervals only. With
    `compare_outputs` a plan that has other versions of models than the one that runs is activated only if
    their outputs agree within it, see `stageloom.shared.output_comparison`. With `needs_load` a plan that is
    to win a trial is no gain on an idle device: a re-plan found it for a load, and that is gone. Agents that
    do not know the field run it guarded there, as they do what somebody pushed.
    """

    epoch: Epoch
    generation: Generation
    plan_digest: DigestText | None = None
    plan: PlanBytes = b""
    artifacts: Annotated[tuple[ArtifactNeed, ...], Meta(max_length=64)] = ()
    profiles: Annotated[tuple[ProfileRequest, ...], Meta(max_length=64)] = ()
    stage_profile: StageProfileRequest | None = None
    autonomy: Autonomy = Autonomy.OFF
    activation: Activation = Activation.TRIAL
    policy: PolicyNeed | None = None
    compare_outputs: Tolerance | UnsetType = UNSET
    needs_load: bool | UnsetType = UNSET


class Report(Struct, frozen=True, kw_only=True):
    """What a device is doing. `seen` is the plan digest of the generation seen, `active` what really runs.

    `state` None: nothing was ever desired here. `revision` rises with every change, over restarts too.
    `activation` and `autonomy` are those of the generation seen: with its plan they tell a planner whose
    database was restored that it gave this generation out before, for something else.
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
    activation: Activation | None = None
    autonomy: Autonomy | None = None


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


class ModelLoad(Struct, frozen=True, array_like=True):
    """One model's load as the device sees it; `service_us` is the measured device time of one task."""

    model: Name
    arrivals_per_s: Real
    service_us: Real
    queued: Count
    oldest_age_us: MicroSeconds


class UsualLoad(Struct, frozen=True, array_like=True):
    """What is usual for one model, over a minute or since its load changed; 0: not known, or no deadline."""

    arrivals_per_s: Real
    deadline_us: MicroSeconds  # the usual one of its tasks of late, from arrival; 0 where none had one


class AlarmSample(Struct, frozen=True, array_like=True):
    """One instant before an alarm, as a policy reads it, in the order of the alarm's `loads`."""

    progress: Annotated[tuple[Mask, ...], Meta(max_length=64)]  # per model, bit b: an instance is in block b
    deviations: Annotated[tuple[Real, ...], Meta(max_length=64)]  # of queued work from the mean, seconds


class Alarm(Message, frozen=True, kw_only=True, tag="alarm"):
    """Device to planner: a trigger fired, plan this device anew. Sent again until acknowledged.

    `number` counts the alarms of this boot from 1; (device, boot, number) is unique. `cause` is one of
    `stageloom.shared.policy.trigger.Cause`, `value` and `threshold` are in its unit. `environment` is the
    device class that the device was at that moment, power mode and all: it may have changed with the alarm.
    `usual` is in the order of `loads`, whose arrivals are those of the last seconds.
    """

    boot: BootId
    number: Annotated[int, Meta(ge=1, le=1_000_000)]
    at_us: MicroSeconds
    cause: ShortText
    value: Real
    threshold: Real
    plan: DigestText | None
    loads: Annotated[tuple[ModelLoad, ...], Meta(max_length=64)]
    samples: Annotated[tuple[AlarmSample, ...], Meta(max_length=32)]
    environment: ShortText = ""
    usual: Annotated[tuple[UsualLoad, ...], Meta(max_length=64)] | UnsetType = UNSET


class AlarmAck(Message, frozen=True, kw_only=True, tag="alarm_ack"):
    """Planner to device: this alarm is stored."""

    boot: BootId
    number: Annotated[int, Meta(ge=1, le=1_000_000)]


class LocalPlan(Message, frozen=True, kw_only=True, tag="local_plan"):
    """Device to planner: what runs was planned here, while (epoch, generation) was the newest desired value.

    The planner adopts it as the next generation if that is still so; the new desired value is the answer.
    Otherwise it is kept: the newer desired plan is tried against it, and may lose.
    """

    boot: BootId
    epoch: Epoch
    generation: Generation
    local_counter: Count
    plan_digest: DigestText
    plan: PlanBytes
    artifacts: Annotated[tuple[ArtifactNeed, ...], Meta(max_length=64)]
    cause: ShortText


ControlToPlanner = Hello | Heartbeat | Reported | Alarm | LocalPlan
ControlToDevice = Welcome | HeartbeatAck | Desired | ReportedAck | AlarmAck | Refused

_TO_PLANNER_BYTES: Final = MAX_PLAN_BYTES + (64 << 10)
_TO_DEVICE_BYTES: Final = 2 * MAX_PLAN_BYTES + (64 << 10)

TO_PLANNER: Codec[ControlToPlanner] = Codec(
    ControlToPlanner, CodecLimits(frame_bytes=_TO_PLANNER_BYTES, body_bytes=_TO_PLANNER_BYTES)
)
TO_DEVICE: Codec[ControlToDevice] = Codec(
    ControlToDevice,
    CodecLimits(frame_bytes=_TO_DEVICE_BYTES, body_bytes=_TO_DEVICE_BYTES),
)
