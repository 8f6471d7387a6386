"""The admin conversation: the `stageloom` command and a running planner, over a local socket of mode 0600.

Whoever opens the socket is the operator. Lists come in pages: a reply's `more` says that the last item's
name continues as `after`. Every reply to a request is its own reply type or `Failed`.
"""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta, Struct

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.launch_list import Barrier
from stageloom.shared.messages.base import (
    MOST,
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
    PlanBytes,
    PositiveBytes,
    Real,
    Seconds,
    ShortText,
    SmallCount,
)
from stageloom.shared.messages.control import Activation, Autonomy, Report
from stageloom.shared.plan import QueueRule, StepChoice, Wait

# -- fields that several messages share -------------------------------------------------------------------

Page = Annotated[int, Meta(ge=1, le=256)]
PathText = Annotated[str, Meta(min_length=1, max_length=4096, pattern=NO_NUL)]
After = Annotated[str, Meta(max_length=64, pattern=NO_NUL)]
LongText = Annotated[str, Meta(max_length=512 << 10, pattern=NO_NUL)]
UpToAMinute = Annotated[float, Meta(ge=0.0, le=60.0)]


# -- tournaments ------------------------------------------------------------------------------------------


class TournamentFigures(Struct, frozen=True, kw_only=True):
    """The score of a candidate's plan, `at_s` after the start; `led`: it was the best so far then."""

    name: ShortText
    at_s: Seconds
    throughput_per_s: Seconds
    p99_s: Seconds
    utilisation: Seconds
    met: Seconds
    led: bool = False


class TournamentFailure(Struct, frozen=True, kw_only=True):
    """A candidate without a plan, or whose plan could not be evaluated."""

    name: ShortText
    reason: Line


class TournamentInfo(Struct, frozen=True, kw_only=True):
    """The course of a tournament. `left` counts the candidates that time did not suffice for.

    `twin` and `arrivals` say where the scenario is from. `fresh` has the best so far and the first valid plan
    on arrivals that did not choose; it is empty where `unchecked` says why, and the first valid plan is the
    `winner` then.
    """

    winner: ShortText
    twin: Line
    arrivals: Line
    judged: Annotated[tuple[TournamentFigures, ...], Meta(max_length=256)]
    failed: Annotated[tuple[TournamentFailure, ...], Meta(max_length=256)]
    left: SmallCount
    fresh: Annotated[tuple[TournamentFigures, ...], Meta(max_length=2)]
    unchecked: Line = ""


# -- plans: searched, shown, pushed to one device or to many ----------------------------------------------


MAX_PUSHED: Final = 512
"""Devices of one push; their names fit into a request."""


class PlanInfo(Struct, frozen=True, kw_only=True):
    """One plan; `text` holds its stage strings, `wire` its canonical bytes."""

    plan: Name
    digest: DigestText
    scheduler: Name
    models: Annotated[tuple[Name, ...], Meta(max_length=64)]
    created_at_us: MicroSeconds
    text: LongText
    wire: PlanBytes
    text_bytes: Count
    wire_bytes: Count


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """One generation of one device: what was asked, who decided, how it ended."""

    device: DeviceName
    epoch: Epoch
    generation: Generation
    plan: Annotated[str, Meta(max_length=64, pattern=NO_NUL)]
    digest: DigestText | None
    decided_by: ShortText
    state: ShortText
    reason: Line
    at_us: MicroSeconds


class ModelOptions(Struct, frozen=True, kw_only=True):
    """How one model enters a plan; the fields after `partition` are those of
    `stageloom.shared.plan.ModelPlan`."""

    model: Name
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    partition: Name = "whole"  # a partition that the artifact offers: whole, base, paper where there is one
    launch_interval_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    batch_max_delay_s: UpToAMinute = 0.0
    work_conserving: bool = True
    weight: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    queue: QueueRule = QueueRule.REFUSE_NEWEST
    queue_max_tasks: Annotated[int, Meta(ge=1, le=1 << 24)] = 256
    queue_max_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 256 << 20


class ArrivalRate(Struct, frozen=True, kw_only=True):
    """Tasks of a model that arrive per second."""

    model: Name
    per_s: Annotated[float, Meta(gt=0.0, le=1e6)]


class PlanCreateRequest(Message, frozen=True, kw_only=True, tag="plan_create_request"):
    """Search a plan; `device` names whose measured costs to use, none means estimates.

    `plan` None names it by the first characters of its digest. `combination` and `members_max` (H) are those
    of `stageloom.shared.search.compose`, `r` and `s` the limits of a stage. `policy` names a rival policy of
    `stageloom.shared.search.rivals`, which decides some of the rest. With `budget_s` the search looks on for
    so long and answers with the best so far. `ticket` is what `PlanCancelRequest` names. `optimistic`: what
    is unsure costs the least that it may, so the answer is what is worth measuring. With `contest` policies
    and searches compete for `budget_s` on the device's twin, under `rates` or the arrivals
    that it counted; they decide scheduler, policy, combination, lanes, waiting, cuts and batches. The rest
    are rules of the plan.
    """

    plan: Name | None = None
    models: Annotated[tuple[ModelOptions, ...], Meta(min_length=1, max_length=64)]
    scheduler: Name = "greedy"
    policy: Name | None = None
    device: DeviceName | None = None
    combination: Name = "alone"
    members_max: Annotated[int, Meta(ge=1, le=64)] = 2
    lanes: Annotated[int, Meta(ge=1, le=16)] = 1
    executor: Name = "onnx"
    intra_op_threads: Annotated[int, Meta(ge=1, le=256)] = 1
    r: Annotated[int, Meta(ge=1, le=1024)] | None = None
    s: Annotated[int, Meta(ge=1, le=1024)] | None = None
    step_choice: StepChoice = StepChoice.RATIO
    wait: Wait = Wait.NONE
    wait_timeout_s: UpToAMinute = 0.0
    run_ahead: Annotated[int, Meta(ge=1, le=64)] = 2
    max_skips: Annotated[int, Meta(ge=1, le=1 << 20)] = 8
    barrier: Barrier = Barrier.FULL
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] | None = None
    ticket: Count = 0
    optimistic: bool = False
    contest: bool = False
    rates: Annotated[tuple[ArrivalRate, ...], Meta(max_length=64)] = ()


class PlanCancelRequest(Message, frozen=True, kw_only=True, tag="plan_cancel_request"):
    """End the search of the `PlanCreateRequest` with this ticket, which then fails; unknown: nothing.

    A tournament does not fail but answers with its best so far.
    """

    ticket: Annotated[int, Meta(ge=1, le=MOST)]


class PlanProgressRequest(Message, frozen=True, kw_only=True, tag="plan_progress_request"):
    """How far is the tournament of the `PlanCreateRequest` with this ticket?"""

    ticket: Annotated[int, Meta(ge=1, le=MOST)]


class PlanProgressReply(Message, frozen=True, kw_only=True, tag="plan_progress_reply"):
    """`size` candidates, 0 where no such tournament runs; `best` so far is empty until one was evaluated."""

    done: SmallCount = 0
    size: SmallCount = 0
    elapsed_s: Seconds = 0.0
    best: ShortText = ""
    throughput_per_s: Seconds = 0.0
    p99_s: Seconds = 0.0


class PlanReply(Message, frozen=True, kw_only=True, tag="plan_reply"):
    """`search_s`: how long making the plan took, 0 for one that was read back."""

    plan: PlanInfo
    search_s: Seconds = 0.0
    contest: TournamentInfo | None = None


class PlanShowRequest(Message, frozen=True, kw_only=True, tag="plan_show_request"):
    plan: Name


class PlanPushRequest(Message, frozen=True, kw_only=True, tag="plan_push_request"):
    """Desire a plan on a device, as its next generation. `autonomy` None keeps what is set there."""

    plan: Name
    device: DeviceName
    autonomy: Autonomy | None = None
    activation: Activation = Activation.TRIAL


class PlanPushReply(Message, frozen=True, kw_only=True, tag="plan_push_reply"):
    """What is desired now."""

    epoch: Epoch
    generation: Generation
    autonomy: Autonomy


class PolicyAttachRequest(Message, frozen=True, kw_only=True, tag="policy_attach_request"):
    """Have a device plan alone with a policy: its digest's beginning or its kind; empty: with none. Answered
    as a push."""

    device: DeviceName
    policy: ShortText


class FleetPushRequest(Message, frozen=True, kw_only=True, tag="fleet_push_request"):
    """Desire a plan on many devices, in one transaction; `devices` empty: the next ones after `after` by
    name, of all that are not revoked. `autonomy` None keeps what is set on each."""

    plan: Name
    devices: Annotated[tuple[DeviceName, ...], Meta(max_length=MAX_PUSHED)] = ()
    after: After = ""
    autonomy: Autonomy | None = None
    activation: Activation = Activation.TRIAL


class Pushed(Struct, frozen=True, kw_only=True):
    """One device of a `FleetPushRequest`; a refused one (`cause` says why) has no generation."""

    device: DeviceName
    epoch: Epoch = 0
    generation: Generation = 0
    autonomy: Autonomy | None = None
    cause: Line = ""


class FleetPushReply(Message, frozen=True, kw_only=True, tag="fleet_push_reply"):
    pushed: Annotated[tuple[Pushed, ...], Meta(max_length=MAX_PUSHED)]
    more: bool = False


class PlanHistoryRequest(Message, frozen=True, kw_only=True, tag="plan_history_request"):
    """Newest first; `before` is the position after which to continue, 0 starts."""

    device: DeviceName | None = None
    before: Count = 0
    limit: Page = 64


class PlanHistoryReply(Message, frozen=True, kw_only=True, tag="plan_history_reply"):
    entries: Annotated[tuple[HistoryEntry, ...], Meta(max_length=256)]
    next_before: Count = 0  # 0: no more


# -- devices: enrolment, the list, revocation, profiles ---------------------------------------------------


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


# -- models -----------------------------------------------------------------------------------------------


class ModelInfo(Struct, frozen=True, kw_only=True):
    """One model of the store; `size_bytes` is its artifact's."""

    model: Name
    digest: DigestText
    size_bytes: PositiveBytes
    operators: SmallCount
    base_cuts: SmallCount
    opaque: SmallCount
    added_at_us: MicroSeconds


class ModelAddRequest(Message, frozen=True, kw_only=True, tag="model_add_request"):
    """Take an artifact that the command has imported; `path` is on this machine and is copied."""

    model: Name
    path: PathText
    digest: DigestText


class ModelReply(Message, frozen=True, kw_only=True, tag="model_reply"):
    model: ModelInfo


class ModelListRequest(Message, frozen=True, kw_only=True, tag="model_list_request"):
    after: After = ""
    limit: Page = 128


class ModelListReply(Message, frozen=True, kw_only=True, tag="model_list_reply"):
    models: Annotated[tuple[ModelInfo, ...], Meta(max_length=256)]
    more: bool = False


class ModelRemoveRequest(Message, frozen=True, kw_only=True, tag="model_remove_request"):
    model: Name


# -- re-plans and the trials of their plans ---------------------------------------------------------------


class TrialInfo(Struct, frozen=True, kw_only=True):
    """One trial as the device told it (`stageloom.shared.messages.telemetry.TrialEnded`), under its
    environment."""

    device: DeviceName
    epoch: Epoch
    generation: Generation
    origin: ShortText
    how: ShortText
    verdict: ShortText
    candidate: DigestText
    control: DigestText | None
    environment: ShortText
    ratio: Real | None
    ratio_low: Real | None
    ratio_high: Real | None
    pairs: SmallCount
    began_us: MicroSeconds
    decided_us: MicroSeconds
    reason: Line


class ReplanInfo(Struct, frozen=True, kw_only=True):
    """One re-plan. `predicted` is the candidate's predicted cost over the incumbent's.

    `outcome`: pending, committed, rejected, no_gain or rolled_back. Both `trigger_to_` times are by the
    device's clock, except the decision of a re-plan that pushed nothing: the planner made it. `reason` is why
    it ended so, `remark` what went into the decision beside the plans.
    """

    replan: Count
    device: DeviceName
    cause: ShortText
    value: Real
    threshold: Real
    at_us: MicroSeconds
    boot: Count
    alarm: Count
    control: DigestText | None
    plan: Annotated[str, Meta(max_length=64, pattern=NO_NUL)]
    digest: DigestText | None
    epoch: Epoch
    generation: Generation
    how: ShortText
    predicted: Real | None
    outcome: ShortText
    ratio: Real | None
    ratio_low: Real | None
    ratio_high: Real | None
    pairs: SmallCount
    trigger_to_decision_ms: Real | None
    trigger_to_active_ms: Real | None
    later_alarms: Count
    reason: Line
    remark: Line = ""


class Proposer(str, Enum):
    """Whom the planner asks for the plans of a re-plan."""

    ALL = "all"  # everyone; the plan that is predicted to cost least is pushed
    LEARNED = "learned"  # the trained policy alone, without a search; the others where none fits
    PLAIN = "plain"  # everyone but the trained policy


class DeviceReplanRequest(Message, frozen=True, kw_only=True, tag="device_replan_request"):
    """Read how a device is re-planned, and change what is not None."""

    device: DeviceName
    enabled: bool | None = None
    scheduler: Name | None = None
    members_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    budget_s: Annotated[float, Meta(gt=0.0, le=3600.0)] | None = None
    proposer: Proposer | None = None
    attach: bool | None = None


class DeviceReplanReply(Message, frozen=True, kw_only=True, tag="device_replan_reply"):
    """How the device is re-planned now."""

    enabled: bool
    scheduler: Name
    members_max: SmallCount
    budget_s: Seconds
    attach: bool = True
    proposer: Proposer = Proposer.ALL


# -- the planner itself, and devices as they run ----------------------------------------------------------


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


# -- the conversation -------------------------------------------------------------------------------------


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The request took effect, and there is nothing to tell."""


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The request did not take effect; `exit_code` is what the command ends with."""

    cause: Line
    remedy: Line = ""
    exit_code: Annotated[int, Meta(ge=1, le=255)] = 1


AdminRequest = (
    DeviceTokenRequest
    | DeviceListRequest
    | DeviceShowRequest
    | DeviceReleaseRequest
    | DeviceRevokeRequest
    | DeviceProfileRequest
    | StageProfileCreate
    | DeviceReplanRequest
    | ModelAddRequest
    | ModelListRequest
    | ModelRemoveRequest
    | PlanCreateRequest
    | PlanCancelRequest
    | PlanProgressRequest
    | PlanShowRequest
    | PlanPushRequest
    | PolicyAttachRequest
    | FleetPushRequest
    | PlanHistoryRequest
    | WatchRequest
    | StatusRequest
    | ClockTrustRequest
)

AdminReply = (
    DeviceTokenReply
    | DeviceListReply
    | DeviceShowReply
    | DeviceProfileReply
    | DeviceReplanReply
    | ModelReply
    | ModelListReply
    | PlanReply
    | PlanProgressReply
    | PlanPushReply
    | FleetPushReply
    | PlanHistoryReply
    | WatchReply
    | StatusReply
    | Done
    | Failed
)

REQUESTS: Codec[AdminRequest] = Codec(AdminRequest, CodecLimits(frame_bytes=64 << 10, body_bytes=64 << 10))
REPLIES: Codec[AdminReply] = Codec(AdminReply, CodecLimits(frame_bytes=1 << 20, body_bytes=1 << 20))
