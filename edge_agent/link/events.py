"""What happens to the link core, and what it answers with, as frozen values.

An *attempt* is the (epoch, generation) that a plan is tried for. The plan manager answers every
`VerifyPlan`, `StagePlan`, `RunTrial`, `TrialRecorded` and `ActivatePlan` with one of the matching events that
repeats the attempt, and answers again if it is asked again: after a failed write or a restart of the engine
the core asks for what it has no answer to.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct, structs

from stageloom.edge_agent.link.states import UNDONE, Cause, local_step, step
from stageloom.shared.engine.trial import TrialRecord, TrialResult
from stageloom.shared.ids import Digest
from stageloom.shared.messages.base import Count, DigestText, Epoch, Generation, Line, PlanBytes, ShortText
from stageloom.shared.messages.control import (
    AlarmSample,
    ArtifactNeed,
    ControlToDevice,
    ControlToPlanner,
    Desired,
    DeviceState,
    ModelLoad,
    Origin,
    ProfileRequest,
    StageProfileRequest,
)
from stageloom.shared.messages.telemetry import RowData
from stageloom.shared.text import bounded

Attempt = tuple[int, int]

LOCAL_EPOCH: Final = -1
"""The epoch of attempts at plans made here; they are numbered by the local counter."""


class PlanRef(Struct, frozen=True):
    """A plan that runs, and where it came from."""

    digest: DigestText
    origin: Origin
    local_counter: Count = 0


class RunnablePlan(Struct, frozen=True):
    """Everything it takes to run a plan without the planner: last-known-good is one of these."""

    ref: PlanRef
    wire: PlanBytes
    artifacts: tuple[ArtifactNeed, ...]


class Planned(Struct, frozen=True, kw_only=True):
    """Why a plan was made here, and which desired value was the newest then."""

    epoch: Epoch
    generation: Generation
    cause: ShortText


class LocalAttempt(Struct, frozen=True, kw_only=True):
    """A plan made here that is being tried: received, verified, staged, then under probation.

    `record` is there from before it first runs, `way` says what decides about it.
    """

    plan: RunnablePlan
    planned: Planned
    state: DeviceState
    record: TrialRecord | None = None
    way: ShortText = ""  # a value of stageloom.edge_agent.link.trials.Way

    @property
    def attempt(self) -> Attempt:
        """What the plan manager knows it by."""
        return (LOCAL_EPOCH, self.plan.ref.local_counter)

    def moved(self, cause: Cause) -> "LocalAttempt":
        """One step on.

        Raises:
            RuntimeError: the step is not in the table of local states, or ends the attempt.
        """
        state = local_step(self.state, cause)
        if state is None:
            raise RuntimeError(f"an attempt at a plan made here is over by {cause.value}")
        return structs.replace(self, state=state)


class Proven(Struct, frozen=True):
    """A plan but for its launch intervals (`Plan.structure`) that was committed, and the environment then."""

    structure: DigestText
    environment: ShortText


class LinkState(Struct, frozen=True, kw_only=True):
    """What survives a restart. `revision` counts changes of what is reported, over the device's life.

    `trial` is there from before a candidate first runs until the verdict: found at boot, it means that the
    agent stopped in the middle. `way` says what decides about the plan under probation. `planned` is set
    while last-known-good was made here; `barred` plans were, and failed in this environment.
    """

    revision: Count = 0
    desired: Desired | None = None
    state: DeviceState | None = None
    reason: Line = ""
    environment: ShortText = ""
    active: PlanRef | None = None
    last_good: RunnablePlan | None = None
    probation_boots: Count = 0
    trial: TrialRecord | None = None
    abandoned: Count = 0  # trials of this generation that ended without a verdict
    way: ShortText = ""  # a value of stageloom.edge_agent.link.trials.Way
    proven: tuple[Proven, ...] = ()
    local_counter: Count = 0
    answered: tuple[Count, ...] = ()
    local: LocalAttempt | None = None
    planned: Planned | None = None
    barred: Annotated[tuple[DigestText, ...], Meta(max_length=64)] = ()

    @property
    def attempt(self) -> Attempt:
        """What the desired plan is tried for."""
        return (self.desired.epoch, self.desired.generation) if self.desired else (0, 0)

    @property
    def candidate(self) -> RunnablePlan | None:
        """The plan that is desired."""
        if self.desired is None or self.desired.plan_digest is None:
            return None
        ref = PlanRef(self.desired.plan_digest, Origin.PLANNER)
        return RunnablePlan(ref, self.desired.plan, self.desired.artifacts)

    def same_at_start(self, other: "LinkState") -> bool:
        """A start that found either would go on alike: nothing of the desired plan ran yet, in both."""
        if self.state not in UNDONE or other.state not in UNDONE:
            return False
        undone = {"state": DeviceState.RECEIVED, "reason": "", "revision": 0, "abandoned": 0}
        return bool(structs.replace(self, **undone) == structs.replace(other, **undone))

    def moved(self, cause: Cause, reason: str) -> "LinkState":
        """One step on.

        Raises:
            RuntimeError: the step is not in the table of states.
        """
        return structs.replace(self, state=step(self.state, cause), reason=bounded(reason))

    def without_local(self, cause: Cause) -> "LinkState":
        """The attempt at a plan made here is over; nothing else changes.

        Raises:
            RuntimeError: the cause does not end it.
        """
        if self.local is not None and local_step(self.local.state, cause) is not None:
            raise RuntimeError(f"an attempt at a plan made here goes on after {cause.value}")
        return structs.replace(self, local=None)


@dataclass(frozen=True)
class Connected:
    """A connection to the control socket stands; a new one after each loss."""


@dataclass(frozen=True)
class Lost:
    """The control connection is gone."""


@dataclass(frozen=True)
class Received:
    """The planner said something."""

    message: ControlToDevice


@dataclass(frozen=True)
class ArtifactPresent:
    """The whole artifact lies in the local store, its digest checked."""

    digest: Digest


@dataclass(frozen=True)
class ArtifactGone:
    """An artifact was removed or found damaged."""

    digest: Digest


@dataclass(frozen=True)
class FetchFailed:
    """An artifact cannot be had now; the core asks again."""

    digest: Digest
    reason: str


@dataclass(frozen=True)
class PlanVerified:
    """It decodes and is legal, and its artifacts are whole."""

    attempt: Attempt


@dataclass(frozen=True)
class PlanStaged:
    """It can run. `control` is the plan that runs, if it serves the same artifacts: then the two compare."""

    attempt: Attempt
    control: Digest | None = None
    intervals_only: bool = False  # it differs from the control in launch intervals and in nothing else
    starves: str = ""  # why its launch intervals would admit fewer tasks than arrive


@dataclass(frozen=True)
class PlanRefused:
    """It does not decode, is not legal, or cannot be prepared; from verification or staging."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True)
class TrialBegins:
    """Everything is ready: the candidate runs once the record is durable (`TrialRecorded`)."""

    attempt: Attempt
    record: TrialRecord


@dataclass(frozen=True)
class TrialDecided:
    """The trial ended, or was refused: after a commit the candidate runs, else the control."""

    attempt: Attempt
    control: Digest | None
    result: TrialResult


@dataclass(frozen=True)
class ProbationPassed:
    """It ran for as long as it had to, and nothing speaks against it."""

    attempt: Attempt


@dataclass(frozen=True)
class ProbationFailed:
    """The manager is back on the plan before, or on its way there."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True)
class RestoreFailed:
    """Last-known-good does not run any more."""

    reason: str


@dataclass(frozen=True)
class ActiveChanged:
    """What runs changed without the core having asked: a fallback, or a plan made locally."""

    active: PlanRef | None


@dataclass(frozen=True)
class ManagerRestarted:
    """The plan manager forgot what it was asked to do."""


@dataclass(frozen=True)
class EnvironmentChanged:
    """Power mode, executor versions, precision: what a verdict on a plan depends on, as one text."""

    environment: str


@dataclass(frozen=True)
class ProfileAnswered:
    """Every row of a profile is in the spool."""

    request: int


@dataclass(frozen=True)
class AlarmRaised:
    """A trigger fired; `PlansMade` follows."""

    at_us: int
    cause: str
    value: float
    threshold: float
    plan: Digest | None
    loads: tuple[ModelLoad, ...]
    samples: tuple[AlarmSample, ...]


@dataclass(frozen=True)
class PlansMade:
    """What would be run without the planner, for the newest alarm, best first; empty: nothing."""

    plans: tuple[RunnablePlan, ...]


@dataclass(frozen=True)
class PersistFailed:
    """The last `Persist` did not reach the disk; the actions after it were not carried out."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Outcome = (
    PlanVerified | PlanStaged | PlanRefused | TrialBegins | TrialDecided | ProbationPassed | ProbationFailed
)

Event = (
    Connected
    | Lost
    | Received
    | ArtifactPresent
    | ArtifactGone
    | FetchFailed
    | Outcome
    | RestoreFailed
    | ActiveChanged
    | ManagerRestarted
    | EnvironmentChanged
    | ProfileAnswered
    | AlarmRaised
    | PlansMade
    | PersistFailed
    | Tick
)


@dataclass(frozen=True)
class Persist:
    """Write this durably before the actions that follow; if that fails, drop them and say `PersistFailed`."""

    state: LinkState


@dataclass(frozen=True)
class Hold:
    """Believe a state without writing it: a start would find it as the one on disk anyway."""

    state: LinkState


@dataclass(frozen=True)
class Send:
    """Send on the control lane if it stands; losing it is fine."""

    message: ControlToPlanner


@dataclass(frozen=True)
class FetchArtifact:
    """Fetch it, resuming what is there. Asked for again while it is missing."""

    need: ArtifactNeed


@dataclass(frozen=True)
class VerifyPlan:
    """Check it: `PlanVerified` or `PlanRefused` answers."""

    attempt: Attempt
    plan: RunnablePlan


@dataclass(frozen=True)
class StagePlan:
    """Load it beside the one that runs: `PlanStaged` or `PlanRefused` answers."""

    attempt: Attempt
    plan: RunnablePlan


@dataclass(frozen=True)
class RunTrial:
    """Compare the staged plan with the one that runs: `TrialBegins` or `TrialDecided` answers."""

    attempt: Attempt
    plan: RunnablePlan
    environment: str
    at_us: int  # wall clock


@dataclass(frozen=True)
class TrialRecorded:
    """The record is durable: the candidate may run. `TrialDecided` answers."""

    attempt: Attempt


@dataclass(frozen=True)
class ActivatePlan:
    """Swap to the staged plan and watch it: the guard decides about probation, and rolls back by itself.

    `guarded`: also against tasks that wait longer than before.
    """

    attempt: Attempt
    plan: RunnablePlan
    guarded: bool = False


@dataclass(frozen=True)
class RestorePlan:
    """Run last-known-good now, unless it runs already."""

    plan: RunnablePlan


@dataclass(frozen=True)
class AbandonPlan:
    """A newer generation took this attempt's place: free what is staged, let what runs run."""

    attempt: Attempt


@dataclass(frozen=True)
class UsePolicy:
    """Plan with this policy, which lies whole among the artifacts; None: with none of the planner's."""

    digest: Digest | None


@dataclass(frozen=True)
class RunProfile:
    """Measure the operators of a model beside what runs; answered by `ProfileAnswered`."""

    request: ProfileRequest


@dataclass(frozen=True)
class RunStageProfile:
    """Measure a plan's stages beside what runs; answered by `ProfileAnswered`."""

    request: StageProfileRequest


@dataclass(frozen=True)
class Record:
    """Keep this telemetry for the planner."""

    row: RowData


@dataclass(frozen=True)
class Reconnect:
    """The planner is silent or refuses: drop the connection and come back after `delay_s` (or backoff)."""

    reason: str
    delay_s: float | None = None


Order = (
    RestorePlan
    | VerifyPlan
    | StagePlan
    | RunTrial
    | TrialRecorded
    | ActivatePlan
    | AbandonPlan
    | UsePolicy
    | RunProfile
    | RunStageProfile
)
"""What the link asks of the agent; the other actions are the link's own."""

Action = Persist | Hold | Send | FetchArtifact | Record | Reconnect | Order
