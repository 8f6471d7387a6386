"""Plans: what a search is asked for, plans that were made, pushes and their history."""

from enum import Enum
from typing import Annotated, Final, Literal

from msgspec import Meta

from stageloom.planner.schema.base import (
    After,
    Budget,
    LongText,
    PageSize,
    Reply,
    Request,
    RequestPart,
    UpToAMinute,
)
from stageloom.planner.schema.outputs import OutputsOnDevice
from stageloom.shared.launch_list import Barrier
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
    PlanBytes,
    Seconds,
    ShortText,
    SmallCount,
)
from stageloom.shared.messages.control import Activation, Autonomy
from stageloom.shared.messages.outputs import Tolerance
from stageloom.shared.plan import (
    MAX_CORES,
    MAX_LANES,
    MAX_MEMBERS,
    IssueOrder,
    PlacementPolicy,
    QueueRule,
    StepChoice,
    Wait,
)

MAX_PUSHED: Final = 512
"""Devices of one push."""


class TournamentFigures(Reply, frozen=True, kw_only=True):
    """The score of a candidate's plan, `at_s` after the start; `led`: it was the best so far then.

    A plan of the policy `refined` is a neighbour of the plan called `parent`, from which `move` made it.
    """

    name: ShortText
    policy: ShortText = ""
    parent: ShortText = ""
    move: ShortText = ""
    at_s: Seconds
    throughput_per_s: Seconds
    p99_s: Seconds
    utilisation: Seconds
    met: Seconds
    led: bool = False


class TournamentFailure(Reply, frozen=True, kw_only=True):
    """A candidate without a plan, or whose plan could not be evaluated."""

    name: ShortText
    reason: Line


class TournamentInfo(Reply, frozen=True, kw_only=True):
    """The course of a tournament. `left` counts the candidates that time did not suffice for.

    `twin` and `arrivals` say where the scenario is from. `neighbours` of plans that were the best so far were
    evaluated, too; of these `judged` has those that became the best so far themselves. `fresh` has the first
    valid plan, the best but for neighbours, and the best so far, on arrivals that did not choose; it is empty
    where `unchecked` says why, and the `winner` then goes by those that chose.
    """

    winner: ShortText
    twin: Line
    arrivals: Line
    judged: Annotated[tuple[TournamentFigures, ...], Meta(max_length=1024)]
    failed: Annotated[tuple[TournamentFailure, ...], Meta(max_length=256)]
    left: SmallCount
    neighbours: SmallCount = 0
    fresh: Annotated[tuple[TournamentFigures, ...], Meta(max_length=3)]
    unchecked: Line = ""


class PlanInfo(Reply, frozen=True, kw_only=True):
    """One plan; `text` holds its stage strings, `wire` its canonical bytes. `compared`: what devices found
    when its outputs were compared, the newest first; 64 of them at most."""

    plan: Name
    digest: DigestText
    scheduler: Name
    models: Annotated[tuple[Name, ...], Meta(max_length=64)]
    created_at_us: MicroSeconds
    text: LongText
    wire: PlanBytes
    text_bytes: Count
    wire_bytes: Count
    compared: Annotated[tuple[OutputsOnDevice, ...], Meta(max_length=64)] = ()


class HistoryEntry(Reply, frozen=True, kw_only=True):
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


Number = Annotated[int, Meta(ge=0, le=MAX_LANES - 1)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MAX_LANES)]
Cut = Annotated[int, Meta(ge=1, le=1 << 20)]
Core = Annotated[int, Meta(ge=0, le=MAX_CORES - 1)]


PrecisionName = Literal["fp32", "bf16", "tf32", "fp16"]


class FurtherExecutor(RequestPart, frozen=True, kw_only=True):
    """An executor beside the first one; see `stageloom.shared.plan.ExecutorOptions`."""

    name: Name
    intra_op_threads: Annotated[int, Meta(ge=1, le=256)] = 1
    precision: PrecisionName = "fp32"
    issue: IssueOrder = IssueOrder.DEVICE


class CoreSet(RequestPart, frozen=True, kw_only=True):
    """A resource: cores that its lanes have for themselves; without any the system chooses."""

    cores: Annotated[tuple[Core, ...], Meta(max_length=MAX_CORES)] = ()


class ModelOptions(RequestPart, frozen=True, kw_only=True):
    """How one model enters a plan; the fields after `resources` are those of
    `stageloom.shared.plan.ModelPlan`.

    `executors`: the number of the executor that runs each block, 0 is the request's `executor`, 1 the first
    of `further_executors`; one number is for all blocks. `resources`: the same of the resources whose lanes
    may run a block; empty: any.
    """

    model: NameOrVersion  # the newest version where none is named
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    partition: Name = "whole"  # a partition that the artifact offers: whole, base, paper where there is one
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=4096)] = ()  # instead: operators at which blocks begin
    executors: Annotated[tuple[Number, ...], Meta(max_length=4096)] = ()
    resources: Annotated[tuple[Numbers, ...], Meta(max_length=4096)] = ()
    launch_interval_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    batch_max_delay_s: UpToAMinute = 0.0
    work_conserving: bool = True
    weight: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    queue: QueueRule = QueueRule.REFUSE_NEWEST
    queue_max_tasks: Annotated[int, Meta(ge=1, le=1 << 24)] = 256
    queue_max_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 256 << 20


class ArrivalRate(RequestPart, frozen=True, kw_only=True):
    """Tasks of a model that arrive per second."""

    model: Name
    per_s: Annotated[float, Meta(gt=0.0, le=1e6)]


class PlanCreateRequest(Request, frozen=True, kw_only=True):
    """Search a plan; `device` names whose measured costs to use, none means estimates.

    Without a scheduler, a policy, a budget and rules of its own, a device's plan is `auto`
    (`stageloom.shared.search.auto`): what is known of the device decides executors, lanes, cores, cuts and
    replicas. `models` empty: the versions that the device should run now, else all models. `plan` None
    names it by the first characters of its digest. `combination` and `members_max` (H) are those of
    `stageloom.shared.search.compose`, `r` and `s` the limits of a stage. `policy` names a rival policy of
    `stageloom.shared.search.rivals`, which decides some of the rest. With `budget_s` the search looks on for
    so long and answers with the best so far. With `budget_s` and neither `scheduler` nor `policy`, policies
    and searches compete for it on the device's twin, under `rates` or the arrivals that it counted; they
    decide scheduler, policy, combination, lanes, waiting, cuts and batches. `measure_s`: between rounds of
    searching the device measures the stages that are unsure, so many seconds a plan. A `scheduler` of
    `stageloom.shared.search.eop` splits operators of one model over two resources of the device. The rest are
    rules of the plan; see `stageloom.shared.search.assignment` for those of executors and resources.
    """

    plan: Name | None = None
    models: Annotated[tuple[ModelOptions, ...], Meta(max_length=64)] = ()
    scheduler: Name | None = None  # one by name, or auto; None: the policy's, else as above, else sequential
    policy: Name | None = None
    device: DeviceName | None = None
    combination: Name = "alone"
    members_max: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] = 2
    lanes: Annotated[int, Meta(ge=1, le=16)] = 1
    executor: Name = "onnx"
    intra_op_threads: Annotated[int, Meta(ge=1, le=256)] = 1
    further_executors: Annotated[tuple[FurtherExecutor, ...], Meta(max_length=15)] = ()
    resources: Annotated[tuple[CoreSet, ...], Meta(max_length=MAX_LANES)] = ()
    lane_resources: Numbers = ()  # per lane its resource, where there are resources
    placement: PlacementPolicy = PlacementPolicy.FIXED  # of blocks on their resources
    precision: PrecisionName = "fp32"
    issue: IssueOrder = IssueOrder.DEVICE
    r: Annotated[int, Meta(ge=1, le=1024)] | None = None
    s: Annotated[int, Meta(ge=1, le=1024)] | None = None
    step_choice: StepChoice = StepChoice.RATIO
    wait: Wait = Wait.NONE
    wait_timeout_s: UpToAMinute = 0.0
    run_ahead: Annotated[int, Meta(ge=1, le=64)] = 2
    max_skips: Annotated[int, Meta(ge=1, le=1 << 20)] = 8
    barrier: Barrier = Barrier.FULL
    budget_s: Budget | None = None
    measure_s: Budget | None = None
    rates: Annotated[tuple[ArrivalRate, ...], Meta(max_length=64)] = ()


class PlanReply(Reply, frozen=True, kw_only=True):
    """A plan that was made; `search_s`: how long that took. `known`: of an `auto` plan what was known of the
    device and what was not, in a sentence; and that the plan has not the name that was asked for."""

    plan: PlanInfo
    search_s: Seconds = 0.0
    known: LongText = ""
    contest: TournamentInfo | None = None


class PlanShowRequest(Request, frozen=True, kw_only=True):
    plan: Name


class ExportFormat(str, Enum):
    """Formats of other tools."""

    DOT = "dot"  # Graphviz: combined blocks, stages, groups, operators
    PERFETTO = "perfetto"  # the predicted timeline as a Chrome trace
    ORT_PARTITION = "ort-partition"  # onnxruntime's session.node_partition_config_file, one per model


class PlanExportRequest(Request, frozen=True, kw_only=True):
    """`device`: whose costs the timeline takes; None: estimates."""

    plan: Name
    format: ExportFormat
    device: DeviceName | None = None


class ExportedFile(Reply, frozen=True, kw_only=True):
    """One text, and the name that fits it."""

    name: Line
    text: Annotated[str, Meta(max_length=64 << 20, pattern=NO_NUL)]


class PlanExport(Reply, frozen=True, kw_only=True):
    """A plan in a format of another tool."""

    plan: Name
    digest: DigestText
    format: ExportFormat
    files: Annotated[tuple[ExportedFile, ...], Meta(max_length=64)]


class PlanRequestRequest(Request, frozen=True, kw_only=True):
    plan: Name


class PlanPushRequest(Request, frozen=True, kw_only=True):
    """Desire a plan on devices, as the next generation of each, in one transaction; `devices` empty: the next
    ones after `after` by name, of all that are not revoked. `autonomy` None keeps what is set on each. With
    `compare_outputs` new versions of models are activated only if their outputs agree within it."""

    plan: Name
    devices: Annotated[tuple[DeviceName, ...], Meta(max_length=MAX_PUSHED)] = ()
    after: After = ""
    autonomy: Autonomy | None = None
    activation: Activation = Activation.TRIAL
    compare_outputs: Tolerance | None = None


class Pushed(Reply, frozen=True, kw_only=True):
    """What is desired of one device now; a refused one (`cause` says why) has no generation."""

    device: DeviceName
    epoch: Epoch = 0
    generation: Generation = 0
    autonomy: Autonomy | None = None
    cause: Line = ""


class PlanPushReply(Reply, frozen=True, kw_only=True):
    """Each device that was named, or as many as one request takes; `next`, where not empty, goes on."""

    pushed: Annotated[tuple[Pushed, ...], Meta(max_length=MAX_PUSHED)]
    next: After = ""


class PlanListRequest(Request, frozen=True, kw_only=True):
    after: After = ""
    limit: PageSize = 128


class PlanHistoryRequest(Request, frozen=True, kw_only=True):
    """Generations, newest first."""

    device: DeviceName | None = None
    after: After = ""
    limit: PageSize = 64
