"""Plans: searched, shown, pushed to one device or to many, and what became of them."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from stageloom.shared.launch_list import Barrier
from stageloom.shared.messages.admin.contests import ContestInfo
from stageloom.shared.messages.admin.fields import After, LongText, Page, UpToAMinute
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
    Seconds,
    ShortText,
    SmallCount,
)
from stageloom.shared.messages.control import Activation, Autonomy
from stageloom.shared.plan import QueueRule, StepChoice, Wait

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


class ModelChoice(Struct, frozen=True, kw_only=True):
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
    nobody is sure of costs the least that it may, so the answer is what is worth measuring. With `contest`
    rival policies and searches compete for `budget_s` on the device's twin, under `rates` or the arrivals
    that it counted; they decide scheduler, policy, combination, lanes, waiting, cuts and batches. The rest
    are rules of the plan.
    """

    plan: Name | None = None
    models: Annotated[tuple[ModelChoice, ...], Meta(min_length=1, max_length=64)]
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

    A contest does not fail but answers with its best so far.
    """

    ticket: Annotated[int, Meta(ge=1, le=MOST)]


class PlanProgressRequest(Message, frozen=True, kw_only=True, tag="plan_progress_request"):
    """How far is the contest of the `PlanCreateRequest` with this ticket?"""

    ticket: Annotated[int, Meta(ge=1, le=MOST)]


class PlanProgressReply(Message, frozen=True, kw_only=True, tag="plan_progress_reply"):
    """`size` entrants, 0 where no such contest is held now; `best` so far is empty until one was judged."""

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
    contest: ContestInfo | None = None


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
