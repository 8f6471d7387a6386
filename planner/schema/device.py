"""Devices: join tokens, the list, what one does, quarantine, revocation, profiles."""

from typing import Annotated, Final

from msgspec import Meta, field

from stageloom.planner.schema.base import After, Budget, PageSize, Reply, Request
from stageloom.planner.schema.plan import HistoryEntry
from stageloom.shared.messages.base import (
    NO_NUL,
    Count,
    DeviceName,
    DigestText,
    Epoch,
    Generation,
    Line,
    MicroSeconds,
    Name,
    NameOrVersion,
    Real,
    ShortText,
    SmallCount,
)
from stageloom.shared.messages.control import Report

MOST_LABELS: Final = 32
"""Labels of one device, and of one selection."""

LabelText = Annotated[str, Meta(max_length=129, pattern=NO_NUL)]

Labels = Annotated[dict[ShortText, ShortText], Meta(max_length=MOST_LABELS)]
"""Names and values; `stageloom.planner.labels` says what they may hold."""

Selection = Annotated[tuple[LabelText, ...], Meta(max_length=MOST_LABELS)]
"""Labels as `NAME=VALUE`: devices that have all of them."""


class DeviceInfo(Reply, frozen=True, kw_only=True):
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
    labels: Labels = field(default_factory=dict)


class DeviceTokenRequest(Request, frozen=True, kw_only=True):
    """Make a one-time join token; `device` fixes the name that may enrol with it."""

    device: DeviceName | None = None
    lifetime_s: Annotated[float, Meta(gt=0.0, le=31_536_000.0)] = 3600.0


class DeviceTokenReply(Reply, frozen=True, kw_only=True):
    """The token's text, shown once and stored nowhere."""

    token: Annotated[str, Meta(min_length=1, max_length=1024, pattern=NO_NUL)]
    expires_at_us: MicroSeconds


class DeviceListRequest(Request, frozen=True, kw_only=True):
    """Devices by name; with `label`, those that have each label `NAME=VALUE`."""

    after: After = ""
    limit: PageSize = 128
    label: Selection = ()


class DeviceLabelRequest(Request, frozen=True, kw_only=True):
    """Give labels to a device, and take those away that `remove` names; others stay."""

    device: DeviceName
    labels: Labels = field(default_factory=dict)
    remove: Annotated[tuple[ShortText, ...], Meta(max_length=MOST_LABELS)] = ()


class DeviceLabels(Reply, frozen=True, kw_only=True):
    """All labels of a device."""

    device: DeviceName
    labels: Labels


class DeviceShowRequest(Request, frozen=True, kw_only=True):
    device: DeviceName


class ExecutorInfo(Reply, frozen=True, kw_only=True):
    """An executor of a device; `problem`: why plans cannot name it there, empty where they can."""

    name: ShortText
    problem: Line = ""


class MachineInfo(Reply, frozen=True, kw_only=True):
    """What a device can run plans with, as its agent told."""

    cores: Annotated[tuple[SmallCount, ...], Meta(max_length=1024)]
    executors: Annotated[tuple[ExecutorInfo, ...], Meta(max_length=16)]


class DeviceShowReply(Reply, frozen=True, kw_only=True):
    """`machine` None: its agent is too old to tell."""

    device: DeviceInfo
    machine: MachineInfo | None = None
    history: Annotated[tuple[HistoryEntry, ...], Meta(max_length=64)] = ()


class DeviceRevokeRequest(Request, frozen=True, kw_only=True):
    """Take a device's key away; effective at its next message. A repeat changes nothing."""

    device: DeviceName


class DeviceReleaseRequest(Request, frozen=True, kw_only=True):
    """End a device's quarantine; effective at its next message. A repeat changes nothing."""

    device: DeviceName


MOST_PROFILED: Final = 256
"""Models that are measured where none is named."""


class DeviceProfileRequest(Request, frozen=True, kw_only=True):
    """Have a device measure the operators of some models, or the stages of a plan; takes a generation.

    `models` empty: all of the store. On `executor` with `intra_op_threads`; None: on what runs a model there,
    else on what the agent is set to. With `plan` its stages are measured as it is, no models named; with
    `unsure_only` the combined blocks with stages that neither a measurement nor the model of the device's
    class is sure of. `splits`: and parts of the operators that a plan may split over two resources. The job
    waits for the answers for `wait_s` at most.
    """

    device: DeviceName
    models: Annotated[tuple[NameOrVersion, ...], Meta(max_length=16)] = ()
    plan: Name | None = None
    batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    executor: Name | None = None
    intra_op_threads: Annotated[int, Meta(ge=1, le=256)] | None = None
    budget_s: Budget = 20.0
    unsure_only: bool = False
    splits: bool = False
    wait_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 120.0


class ModelMeasured(Reply, frozen=True, kw_only=True):
    """What a device measured of one model: how many operators, and their summed time in microseconds.

    `executor` is empty where the device does not tell. `whole_us`: one run of the whole; None: not known.
    `parts`: times of parts of operators that are kept; None: none were asked for.
    """

    model: Name
    batch: SmallCount
    executor: ShortText
    intra_op_threads: SmallCount
    whole_us: Real | None
    operators: SmallCount
    measured: SmallCount
    total_us: Real
    reason: Line = ""
    parts: SmallCount | None = None


class DeviceProfileReply(Reply, frozen=True, kw_only=True):
    """The requests' numbers; once they are answered `measured` of each model, or how many `stages` of the
    plan, and `reasons` why some failed.

    Without a request nothing was unsure, and the generation is 0.
    """

    requests: Annotated[tuple[Count, ...], Meta(max_length=MOST_PROFILED)]
    epoch: Epoch
    generation: Generation
    measured: Annotated[tuple[ModelMeasured, ...], Meta(max_length=MOST_PROFILED)] = ()
    stages: SmallCount | None = None
    reasons: Annotated[tuple[Line, ...], Meta(max_length=MOST_PROFILED)] = ()


class PolicyAttachRequest(Request, frozen=True, kw_only=True):
    """Have a device plan alone with a policy: its digest's beginning or its kind; empty: with none.

    One that did not pass its check is refused, unless it may go `unchecked`.
    """

    device: DeviceName
    policy: ShortText
    unchecked: bool = False
