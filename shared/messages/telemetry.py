"""The telemetry conversation: numbered rows up, an acknowledgement down once they are committed.

A row is encoded once, when it is measured, and travels as opaque bytes from the spool to the planner, which
decodes each one by itself: a row that an old planner cannot read costs that row, not the batch behind it.
A batch numbers its rows by `ranges`, so even such a row has its (device, boot, sequence), which is unique:
a batch that is sent twice is stored once. Rows are arrays on the wire, with an integer tag for their kind.
"""

import bisect
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Final

from msgspec import Meta, Struct

from stageloom.shared.codec import Codec, CodecLimits, convert, unpack
from stageloom.shared.errors import DecodeError
from stageloom.shared.messages.base import (
    NO_NUL,
    BootId,
    Count,
    DigestText,
    Epoch,
    Generation,
    Line,
    Mask,
    Message,
    MicroSeconds,
    Name,
    Real,
    Refused,
    ShortText,
    SmallCount,
)
from stageloom.shared.messages.control import DeviceState, Origin
from stageloom.shared.messages.outputs import OutputsVerdict
from stageloom.shared.partition import Axis

MAX_ROW_BYTES: Final = 4 << 10
MAX_BATCH_ROWS: Final = 512
MAX_BATCH_BYTES: Final = 256 << 10

# Latency buckets: upper bounds in microseconds, a factor 2**(1/4) apart, from 10 us to about 168 s.
LATENCY_BOUNDS_US: Final = tuple(round(10 * 2 ** (step / 4)) for step in range(97))
Bucket = Annotated[int, Meta(ge=0, le=len(LATENCY_BOUNDS_US) - 1)]


class TaskCounters(Struct, frozen=True, tag=1, array_like=True):
    """Tasks of one model that ended in `interval_us`, by how they ended; `submitted` counts arrivals."""

    model: Name
    interval_us: MicroSeconds
    submitted: Count
    completed: Count
    refused: Count
    cancelled: Count
    expired: Count
    failed: Count


class LatencyHistogram(Struct, frozen=True, tag=2, array_like=True):
    """Task latencies of one model in one interval: (bucket index, count) pairs over `LATENCY_BOUNDS_US`."""

    model: Name
    count: Count
    sum_us: MicroSeconds
    max_us: MicroSeconds
    buckets: Annotated[tuple[tuple[Bucket, Count], ...], Meta(max_length=128)]


class QueueSample(Struct, frozen=True, tag=3, array_like=True):
    """One queue at one instant; `queued_work_us` is its length times the measured service time."""

    model: Name
    tasks: Count
    queued_work_us: MicroSeconds
    oldest_age_us: MicroSeconds


PLAN_CHARS: Final = 16
"""Of a plan's digest, by which rows of steps name it."""


class StepTimings(Struct, frozen=True, tag=4, array_like=True):
    """Steps of one (combined block, mask) in one interval; `plan` is the digest's first 16 characters."""

    plan: ShortText
    combined_block: SmallCount
    mask: Mask
    count: Count
    sum_us: MicroSeconds
    max_us: MicroSeconds


class GroupSpan(Struct, frozen=True, array_like=True):
    """One item of a step's launch list (a run of operators on one stream): times since the step began."""

    item: SmallCount
    stream: SmallCount
    begin_us: MicroSeconds
    end_us: MicroSeconds


class StepTrace(Struct, frozen=True, tag=5, array_like=True):
    """One sampled step, as a timeline of streams; `began_us` is on the device's monotonic clock.

    `whole`: all members active, each at its largest batch, by a prepared program, and every group is here.
    Such a step compares with a stage profile; `stageloom.shared.stage_times` tells the stages' times.
    """

    plan: ShortText
    combined_block: SmallCount
    mask: Mask
    lane: SmallCount
    duration_us: MicroSeconds
    groups: Annotated[tuple[GroupSpan, ...], Meta(max_length=128)]
    began_us: MicroSeconds = 0
    whole: bool = False


class OperatorTiming(Struct, frozen=True, array_like=True):
    """One operator, measured alone: median, and the half distance between the 16th and 84th percentile."""

    operator: SmallCount
    median_us: Real
    spread_us: Real
    runs: SmallCount


class ProfileResult(Struct, frozen=True, tag=6, array_like=True):
    """Part of the answer to a `ProfileRequest`; `last` marks the part after which it is answered."""

    request: Count
    artifact: DigestText
    batch: SmallCount
    environment: ShortText
    timings: Annotated[tuple[OperatorTiming, ...], Meta(max_length=64)]
    last: bool
    reason: Line = ""


class StateChange(Struct, frozen=True, tag=7, array_like=True):
    """The device moved a generation to another state, and why."""

    epoch: Epoch
    generation: Generation
    state: DeviceState
    plan: DigestText | None
    origin: Origin
    reason: Line = ""


class Event(Struct, frozen=True, tag=8, array_like=True):
    """Something a person may want to know: an engine restart, a full disk, a wrong setting."""

    code: ShortText
    text: Line = ""


class Utilisation(Struct, frozen=True, tag=9, array_like=True):
    """One metric of the machine; `value` None: this machine cannot tell (never a false 0)."""

    metric: ShortText
    value: Real | None
    unit: ShortText = ""


class DifferenceSample(Struct, frozen=True, tag=10, array_like=True):
    """A served output compared with the whole model: relative difference, and sensitivity to the input."""

    model: Name
    difference: Real
    sensitivity: Real


class StageTiming(Struct, frozen=True, array_like=True):
    """One stage of a schedule: median, and the half distance between the 16th and 84th percentile.

    `stages` of one group that follow each other run as one: then this is the time of all of them.
    """

    stage: SmallCount
    median_us: Real
    spread_us: Real
    runs: SmallCount
    stages: SmallCount = 1


class StageProfileResult(Struct, frozen=True, tag=11, array_like=True):
    """Part of the answer to a `StageProfileRequest`: stages of one combined block, run alone.

    `step_us` is the median of whole steps. `last` marks the part after which the request is answered.
    """

    request: Count
    plan: DigestText
    combined_block: SmallCount
    environment: ShortText
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=64)]
    step_us: Real
    last: bool
    reason: Line = ""


class TrialEnded(Struct, frozen=True, tag=12, array_like=True):
    """How a generation's trial ended. `ratio` above 1: the candidate is better; None where none was measured.

    `how` is what decided: `trial`, `outputs` (those of two versions of models), `proven` (won one here
    before), `guard` (it ran guarded: only launch intervals changed, or no task came), `now` (ordered) or
    `first` (nothing comparable ran). `verdict` is one of `stageloom.shared.engine.trial.Verdict`. Times are
    the device's wall clock, microseconds. `figure` is what `ratio` compares, a value of
    `stageloom.shared.engine.evidence.Figure`; empty where nothing was compared, and in rows of agents that
    knew busy seconds and tasks per second alone. `outputs`: what two versions of models gave for the same
    inputs, where `how` is `outputs` and it came to that. A plan that the device made has `origin` local and
    the generation that was desired meanwhile. `environment`: the device class that the verdict holds for;
    empty in rows of agents that did not tell it.
    """

    epoch: Epoch
    generation: Generation
    origin: Origin
    how: ShortText
    verdict: ShortText
    candidate: DigestText
    control: DigestText | None
    ratio: Real | None
    ratio_low: Real | None  # 95 % interval
    ratio_high: Real | None
    pairs: SmallCount
    began_us: MicroSeconds
    decided_us: MicroSeconds
    reason: Line = ""
    figure: ShortText = ""
    latency_ratio: Real | None = None
    busy_ratio: Real | None = None
    outputs: OutputsVerdict | None = None
    environment: ShortText = ""


class PlanActivated(Struct, frozen=True, tag=13, array_like=True):
    """New launches go to this plan from the row's time on, other than in the windows of a trial."""

    plan: DigestText
    origin: Origin
    epoch: Epoch
    generation: Generation


class CoreRange(Struct, frozen=True, array_like=True):
    """The cores `first` to `last`, both included, as the device's system numbers them."""

    first: SmallCount
    last: SmallCount


class ExecutorFact(Struct, frozen=True, array_like=True):
    """An executor of this version; `problem`: why it cannot be used there, empty where it can."""

    name: ShortText
    problem: Annotated[str, Meta(max_length=160, pattern=NO_NUL)] = ""


class MachineFacts(Struct, frozen=True, tag=14, array_like=True):
    """What a device can run plans with, as it was when its agent started.

    `cores` are those that the agent may use, ascending, and no more than a quota pays for. The
    first of `executors` is the one that the agent measures with where a request names none, on
    `intra_op_threads` threads.
    """

    cores: Annotated[tuple[CoreRange, ...], Meta(max_length=64)]
    executors: Annotated[tuple[ExecutorFact, ...], Meta(max_length=16)]
    intra_op_threads: SmallCount


class ExecutorTime(Struct, frozen=True, tag=15, array_like=True):
    """One run of a whole model on an executor in a session of so many threads, while nothing was served.

    `time_us` None: it cannot run there, for the `reason`. The median of `runs`; 0: not told.
    """

    artifact: DigestText
    executor: ShortText
    intra_op_threads: SmallCount
    batch: SmallCount
    environment: ShortText
    time_us: Real | None
    runs: SmallCount
    reason: Line = ""


class PartTiming(Struct, frozen=True, array_like=True):
    """The part [0, extent) of an operator's output along an axis, measured alone; see `OperatorTiming`."""

    operator: SmallCount
    axis: Axis
    extent: Annotated[int, Meta(ge=1, le=1 << 24)]
    median_us: Real
    spread_us: Real
    runs: SmallCount


class PartProfileResult(Struct, frozen=True, tag=16, array_like=True):
    """Parts of operators that a `ProfileRequest` asked for; rows of them come before its last answer.

    Of operators that are alike only the first was measured. `handover_us`: of calling another resource of
    the same executor and waiting for it, within a step; `copy_bytes_per_s`: of putting two halves together.
    None: not measured. `reason`: why parts are missing.
    """

    request: Count
    artifact: DigestText
    environment: ShortText
    timings: Annotated[tuple[PartTiming, ...], Meta(max_length=64)]
    handover_us: Real | None = None
    copy_bytes_per_s: Real | None = None
    reason: Line = ""


RowData = (
    TaskCounters
    | LatencyHistogram
    | QueueSample
    | StepTimings
    | StepTrace
    | ProfileResult
    | StateChange
    | Event
    | Utilisation
    | DifferenceSample
    | StageProfileResult
    | TrialEnded
    | PlanActivated
    | MachineFacts
    | ExecutorTime
    | PartProfileResult
)


class Row(Struct, frozen=True, array_like=True):
    """One row; `at_us` is the agent's wall clock, microseconds since 1970."""

    at_us: MicroSeconds
    data: RowData


class Ledger(Struct, frozen=True, array_like=True):
    """What the spool has done in one boot, so far: planner and agent can balance their books."""

    boot: BootId
    produced: Count
    dropped: Count


class RowRange(Struct, frozen=True, array_like=True):
    """The rows of `boot` from sequence `first` to `last`, both included."""

    boot: BootId
    first: Count
    last: Count


RowBytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_ROW_BYTES)]


class TelemetryBatch(Message, frozen=True, kw_only=True, tag="telemetry_batch"):
    """Device to planner: rows, oldest first, and the ledgers of the boots not yet balanced.

    `ranges` numbers the rows in order: the lengths of the ranges add up to the number of rows.
    """

    rows: Annotated[tuple[RowBytes, ...], Meta(max_length=MAX_BATCH_ROWS)]
    ranges: Annotated[tuple[RowRange, ...], Meta(max_length=64)]
    ledgers: Annotated[tuple[Ledger, ...], Meta(max_length=64)]


class TelemetryAck(Message, frozen=True, kw_only=True, tag="telemetry_ack"):
    """Planner to device: the batch's rows and ledgers are committed; repeats what the batch said."""

    ranges: Annotated[tuple[RowRange, ...], Meta(max_length=64)]
    ledgers: Annotated[tuple[Ledger, ...], Meta(max_length=64)]


TelemetryToPlanner = TelemetryBatch
TelemetryToDevice = TelemetryAck | Refused

TO_PLANNER: Codec[TelemetryToPlanner] = Codec(
    TelemetryToPlanner, CodecLimits(frame_bytes=MAX_BATCH_BYTES, body_bytes=MAX_BATCH_BYTES)
)
TO_DEVICE: Codec[TelemetryToDevice] = Codec(
    TelemetryToDevice, CodecLimits(frame_bytes=8 << 10, body_bytes=8 << 10)
)

_ROW_LIMITS: Final = CodecLimits(
    frame_bytes=MAX_ROW_BYTES, body_bytes=MAX_ROW_BYTES, array_items=128, map_items=0
)
_ROW: Final = Codec[Row](Row, _ROW_LIMITS)


def encode_row(row: Row) -> bytes:
    """Plain msgpack of one row (no flag byte: the batch around it is what gets compressed).

    Raises:
        DecodeError: a value outside its bounds, such as NaN: better lost here, where the cause is, than
            at the planner.
    """
    body = _ROW.encode_body(row)
    decode_row(body)
    return body


def decode_row(body: bytes) -> Row:
    """One row.

    Raises:
        DecodeError: too large, malformed, or a kind that this version does not know.
    """
    if len(body) > MAX_ROW_BYTES:
        raise DecodeError(f"a telemetry row has {len(body)} bytes, more than {MAX_ROW_BYTES}")
    row: Row = convert(unpack(body, _ROW_LIMITS), Row)
    return row


def latency_bucket(latency_us: int) -> int:
    """Index of the first bucket whose bound is not below `latency_us`; the last bucket takes all above."""
    return min(bisect.bisect_left(LATENCY_BOUNDS_US, latency_us), len(LATENCY_BOUNDS_US) - 1)


def histogram_of(model: str, latencies_us: Sequence[int]) -> LatencyHistogram:
    """The histogram of one interval's latencies."""
    counts: dict[int, int] = {}
    for latency_us in latencies_us:
        bucket = latency_bucket(latency_us)
        counts[bucket] = counts.get(bucket, 0) + 1
    return LatencyHistogram(
        model,
        len(latencies_us),
        sum(latencies_us),
        max(latencies_us, default=0),
        tuple(sorted(counts.items())),
    )


def quantile_us(histograms: Sequence[LatencyHistogram], fraction: float) -> float:
    """Latency below which `fraction` of all tasks lie, off by at most a bucket's width (19 %); 0 if none."""
    counts: dict[int, int] = {}
    for histogram in histograms:
        for bucket, count in histogram.buckets:
            counts[bucket] = counts.get(bucket, 0) + count
    rank = fraction * sum(counts.values())
    reached = 0
    for bucket, count in sorted(counts.items()):
        if reached + count >= rank and count:
            low = LATENCY_BOUNDS_US[bucket - 1] if bucket else 0
            high = LATENCY_BOUNDS_US[min(bucket, len(LATENCY_BOUNDS_US) - 1)]
            return low + (high - low) * max(rank - reached, 0.0) / count
        reached += count
    return 0.0


class RowKind(str, Enum):
    """Names of the row kinds, as the store spells them; `UNREADABLE`: bytes that this planner cannot read."""

    TASK_COUNTERS = "task_counters"
    LATENCY_HISTOGRAM = "latency_histogram"
    QUEUE_SAMPLE = "queue_sample"
    STEP_TIMINGS = "step_timings"
    STEP_TRACE = "step_trace"
    PROFILE_RESULT = "profile_result"
    STATE_CHANGE = "state_change"
    EVENT = "event"
    UTILISATION = "utilisation"
    DIFFERENCE_SAMPLE = "difference_sample"
    STAGE_PROFILE_RESULT = "stage_profile_result"
    TRIAL_ENDED = "trial_ended"
    PLAN_ACTIVATED = "plan_activated"
    MACHINE_FACTS = "machine_facts"
    EXECUTOR_TIME = "executor_time"
    PART_PROFILE_RESULT = "part_profile_result"
    UNREADABLE = "unreadable"


KIND_OF: Final[dict[type, RowKind]] = {
    TaskCounters: RowKind.TASK_COUNTERS,
    LatencyHistogram: RowKind.LATENCY_HISTOGRAM,
    QueueSample: RowKind.QUEUE_SAMPLE,
    StepTimings: RowKind.STEP_TIMINGS,
    StepTrace: RowKind.STEP_TRACE,
    ProfileResult: RowKind.PROFILE_RESULT,
    StateChange: RowKind.STATE_CHANGE,
    Event: RowKind.EVENT,
    Utilisation: RowKind.UTILISATION,
    DifferenceSample: RowKind.DIFFERENCE_SAMPLE,
    StageProfileResult: RowKind.STAGE_PROFILE_RESULT,
    TrialEnded: RowKind.TRIAL_ENDED,
    PlanActivated: RowKind.PLAN_ACTIVATED,
    MachineFacts: RowKind.MACHINE_FACTS,
    ExecutorTime: RowKind.EXECUTOR_TIME,
    PartProfileResult: RowKind.PART_PROFILE_RESULT,
}
