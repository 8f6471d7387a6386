"""Re-plans, and the trials of their plans."""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta

from stageloom.planner.schema.base import After, Budget, PageSize, Reply, Request
from stageloom.planner.schema.outputs import OutputsInfo
from stageloom.shared.messages.base import (
    NO_NUL,
    BootId,
    Count,
    DeviceName,
    DigestText,
    Epoch,
    Generation,
    Line,
    MicroSeconds,
    Name,
    Real,
    Seconds,
    ShortText,
    SmallCount,
)
from stageloom.shared.plan import MAX_MEMBERS
from stageloom.shared.text import counted


class TrialInfo(Reply, frozen=True, kw_only=True):
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
    figure: ShortText = ""
    latency_ratio: Real | None = None
    busy_ratio: Real | None = None
    outputs: OutputsInfo | None = None

    @property
    def way(self) -> str:
        """What decided, in words: a trial, outputs, or why there was no trial."""
        said = _WAYS.get(self.how, f"decided by {self.how}")
        return said if self.outputs is None else f"{said} on {counted(self.outputs.inputs, 'input')}"


_WAYS: Final = {
    "trial": "trial",
    "outputs": "outputs compared",
    "first": "no trial: nothing comparable ran",
    "now": "no trial: it was ordered to run at once",
    "proven": "no trial: it had won one there before",
    "guard": "no trial: it ran guarded",
}


class ReplanInfo(Reply, frozen=True, kw_only=True):
    """One re-plan. `predicted` is the candidate's predicted cost over the incumbent's.

    `outcome`: pending, committed, rejected, no_gain or rolled_back. Both `trigger_to_` times are by the
    device's clock, except the decision of a re-plan that pushed nothing: the planner made it. `reason` is why
    it ended so, `remark` what went into the decision beside the plans. `figure`: what `ratio` compares.
    """

    replan: Count
    device: DeviceName
    cause: ShortText
    value: Real
    threshold: Real
    at_us: MicroSeconds
    boot: BootId
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
    figure: ShortText = ""


class Proposer(str, Enum):
    """Whom the planner asks for the plans of a re-plan."""

    ALL = "all"  # everyone; the plan that is predicted to cost least is pushed
    LEARNED = "learned"  # the trained policy alone, without a search; the others where none fits
    PLAIN = "plain"  # everyone but the trained policy


class ReplanListRequest(Request, frozen=True, kw_only=True):
    """Re-plans, newest first."""

    device: DeviceName | None = None
    after: After = ""
    limit: PageSize = 64


class RegimeLoad(Reply, frozen=True, kw_only=True):
    """Arrivals of one model in a regime, and what a task of it took when the plans were compared."""

    model: Name
    arrivals_per_s: Real
    service_s: Real


class RegimeInfo(Reply, frozen=True, kw_only=True):
    """The plan that won a trial under such arrivals; or the one that is expected to be best, found ahead and
    not tried yet. When is by the planner's clock.

    `plan`: a name of it; empty where it has none any more. `active`: it is what the device runs. `chance`:
    that the expected plan gains over the one it was compared with; None where it is that one.
    """

    loads: Annotated[tuple[RegimeLoad, ...], Meta(max_length=64)]
    plan: Annotated[str, Meta(max_length=64, pattern=NO_NUL)]
    digest: DigestText
    active: bool
    proven_at_us: MicroSeconds | None = None
    expected_at_us: MicroSeconds | None = None
    chance: Real | None = None


class RegimeListRequest(Request, frozen=True, kw_only=True):
    """What a device's re-plans know without a search, newest first."""

    device: DeviceName


class ReplanningShowRequest(Request, frozen=True, kw_only=True):
    device: DeviceName


class ReplanningChangeRequest(Request, frozen=True, kw_only=True):
    """Change what is not None of how a device is re-planned."""

    device: DeviceName
    enabled: bool | None = None
    scheduler: Name | None = None
    members_max: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] | None = None
    budget_s: Budget | None = None
    proposer: Proposer | None = None
    attach: bool | None = None


class Replanning(Reply, frozen=True, kw_only=True):
    """How the device is re-planned now."""

    enabled: bool
    scheduler: Name
    members_max: SmallCount
    budget_s: Seconds
    attach: bool = True
    proposer: Proposer = Proposer.ALL
