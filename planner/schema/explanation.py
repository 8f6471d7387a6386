"""Why a plan is as it is: its schedules in words, what they cost, who decided, what else there was."""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta

from stageloom.planner.schema.base import LongText, Reply, Request
from stageloom.planner.schema.plan import HistoryEntry
from stageloom.planner.schema.replan import ReplanInfo, TrialInfo
from stageloom.shared.messages.base import (
    Count,
    DeviceName,
    DigestText,
    MicroSeconds,
    Name,
    Real,
    ShortText,
    SmallCount,
)

Prose = Annotated[str, Meta(max_length=512 << 10)]
"""Names of operators are what a model's file says, any character among them."""


class PlanExplainRequest(Request, frozen=True, kw_only=True):
    """Explain a plan, by its name or the beginning of its digest, under the costs of `device`; None: of the
    device that it was made for or given to last."""

    plan: Name
    device: DeviceName | None = None


class CostSource(str, Enum):
    """How a stage's predicted seconds are known, the best first."""

    MEASURED = "measured"  # this stage, as a whole
    FITTED = "fitted"  # its operators; what they cost together is fitted to other stages
    OPERATORS = "operators"  # its operators; what they cost together is the formula's default
    ANALYTIC = "analytic"  # from shapes, some operator at least, or a launch that merges several


class StageExplanation(Reply, frozen=True, kw_only=True):
    """One stage, or several of one operator each in a row; `first` and `last` number them from 0.

    Of a schedule of streams it is a stream: its operators in launch order, and what they take alone.
    """

    first: SmallCount
    last: SmallCount
    text: Prose
    merge: bool
    predicted_us: Real
    source: CostSource
    sure: bool  # it need not be measured (again)
    doubt: Real | None  # nine of ten such stages take so much more or less, as a share; None: not known
    measured_at_us: MicroSeconds | None  # the oldest measurement in it; None where there is an estimate in it
    runs: Count | None  # the fewest
    measured_on: Prose


class AlternativeSchedule(Reply, frozen=True, kw_only=True):
    """Another schedule of the same block under the same costs; `found_at_us` None: made just now."""

    scheduler: ShortText
    stage_string: LongText
    predicted_us: Real
    over_this: Real
    same: bool
    found_at_us: MicroSeconds | None


class BlockExplanation(Reply, frozen=True, kw_only=True):
    """A combined block of a plan. `streams` None: its schedule has stages. `over_optimum` None: too large to
    know, or no stages.

    `step_us`: what whole steps took when a device last measured this plan's stages in the class that it is of
    now. `resources`: those whose lanes may run it, empty where all may; `cores`: theirs, empty where the
    system chooses.
    """

    index: SmallCount
    members: LongText
    executor: Name
    intra_op_threads: SmallCount
    resources: Annotated[tuple[SmallCount, ...], Meta(max_length=16)]
    cores: Annotated[tuple[SmallCount, ...], Meta(max_length=1024)]
    operators: SmallCount
    stage_string: LongText
    lines: Annotated[tuple[StageExplanation, ...], Meta(max_length=1 << 16)]
    streams: SmallCount | None
    predicted_us: Real
    bound_us: Real
    over_bound: Real
    optimum_us: Real | None
    over_optimum: Real | None
    step_us: Real | None
    beside: Annotated[tuple[AlternativeSchedule, ...], Meta(max_length=1 << 10)]


class EvaluationVerdict(str, Enum):
    """What became of a plan that was evaluated."""

    FOUND = "found"  # an operator's search: the operator decides
    LED = "led"  # the best so far of a tournament, until another one was
    LOST = "lost"  # in a tournament, to the best so far
    TAKEN = "taken"
    BEHIND = "behind"  # another one is predicted to cost less
    SAME = "same"
    BARRED = "barred"
    WORSE = "worse"
    UNLIKELY = "unlikely"  # to gain enough, on the arrivals that it was judged by
    ILLEGAL = "illegal"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES: Final = {
    EvaluationVerdict.FOUND: "found by a search",
    EvaluationVerdict.LED: "was the best so far of a contest",
    EvaluationVerdict.LOST: "lost to the best so far of a contest",
    EvaluationVerdict.TAKEN: "taken",
    EvaluationVerdict.BEHIND: "another one was predicted to cost less",
    EvaluationVerdict.SAME: "equal to the plan that runs",
    EvaluationVerdict.BARRED: "did not gain here lately",
    EvaluationVerdict.WORSE: "predicted to cost no less",
    EvaluationVerdict.UNLIKELY: "not likely to gain 2 %",
    EvaluationVerdict.ILLEGAL: "not legal any more",
}


class PlanEvaluation(Reply, frozen=True, kw_only=True):
    """A plan, and what became of it.

    `busy`: predicted busy device seconds per second, at the arrivals of that moment, or at one task of each
    model a second where there were none; None for a plan that is not legal. `predicted` is that over the
    incumbent's. `measured`: every stage in it was measured by then. `how`: `operator`, `contest`, or a
    proposal's. In a contest it was judged `judged_at_s` after the start, and had these figures on the twin.
    In a re-plan `p50_s`, `p99_s` and `share_in_time` are what a simulation found at the arrivals, deadlines
    and queues of the alarm, and `predicted` is the inverse of the gain there; `chance`: that it gains 2 %.
    """

    plan: DigestText
    serves: DigestText
    scheduler: ShortText
    how: ShortText
    verdict: EvaluationVerdict
    blocks: SmallCount
    members_max: SmallCount
    busy: Real | None
    predicted: Real | None
    measured: bool
    search_s: Real | None = None
    judged_at_s: Real | None = None
    throughput_per_s: Real | None = None
    p99_s: Real | None = None
    p50_s: Real | None = None
    share_in_time: Real | None = None
    chance: Real | None = None


class PlanDecision(Reply, frozen=True, kw_only=True):
    """The newest generation of a device that has the plan. `replan` None: no re-plan pushed it.

    `left`: the other plans that the re-plan looked at. `trial`: that generation's, else the plan's newest
    there; None where none is known.
    """

    generation: HistoryEntry
    replan: ReplanInfo | None
    left: SmallCount
    trial: TrialInfo | None


class RelatedPlan(Reply, frozen=True, kw_only=True):
    """One plan over the same models, the explained one included; `times` it was looked at.

    `now_ms`: busy device milliseconds for one task of each model, predicted from today's costs; None where
    the plan was not kept. `steps_ms`: the same as a device measured it, block by block; None where not all
    blocks were. `last`: how it was looked at last. `trial`: the newest in which it was the candidate.
    """

    digest: DigestText
    name: ShortText
    this: bool
    times: SmallCount
    last: PlanEvaluation
    at_us: MicroSeconds
    now_ms: Real | None
    steps_ms: Real | None
    trial: TrialInfo | None


class CostsCalibration(Reply, frozen=True, kw_only=True):
    """How a device's costs follow its class's: `own`, if it has some of its own; then its steps took `ratio`
    of what was planned, as was found at `at_us`."""

    own: bool
    ratio: Real
    at_us: MicroSeconds


class SplitExplanation(Reply, frozen=True, kw_only=True):
    """Operators `first` to `last` of a model, split over two resources: [0, boundary) of `extent` on the
    first one.

    `halves_us`: each half alone; `whole_us`: the operators whole, on the plan's first executor. `measured`:
    parts were, on each executor; else halves are taken to be linear in their extent.
    """

    model: Name
    first: SmallCount
    last: SmallCount
    names: Prose
    axis: ShortText
    boundary: SmallCount
    extent: SmallCount
    halves_us: tuple[Real, Real]
    whole_us: Real
    measured: bool


class PlanExplanation(Reply, frozen=True, kw_only=True):
    """A plan explained. `device`, `device_class` and `calibration` say whose costs these are; empty where
    there are estimates alone.

    `predicted_ms`: busy device milliseconds for one task of each model. `splits`: of operators over two
    resources; `unsplit_ms`: the same without them, None where there are none.
    """

    plan: Name
    digest: DigestText
    scheduler: ShortText
    created_at_us: MicroSeconds
    models: Annotated[tuple[Name, ...], Meta(max_length=64)]
    device: ShortText
    device_class: ShortText
    calibration: CostsCalibration | None
    contention: Real
    fitted_to: SmallCount  # measured stages of the class that say what operators cost together
    operators: SmallCount
    operators_measured: SmallCount
    stages_measured: SmallCount
    predicted_ms: Real
    decided: PlanDecision | None
    active: DigestText | None  # what the device runs now
    blocks: Annotated[tuple[BlockExplanation, ...], Meta(max_length=1 << 12)]
    others: Annotated[tuple[RelatedPlan, ...], Meta(max_length=1 << 10)]
    splits: Annotated[tuple[SplitExplanation, ...], Meta(max_length=1 << 12)] = ()
    unsplit_ms: Real | None = None
