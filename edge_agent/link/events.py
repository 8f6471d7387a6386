"""What happens to the link core, and what it answers with, as frozen values.

An *attempt* is the (epoch, generation) that a plan is tried for. The plan manager answers every
`VerifyPlan`, `StagePlan` and `ActivatePlan` with one of the matching events that repeats the attempt, and
answers again if it is asked again: after a failed write or a restart of the engine the core asks for what it
has no answer to.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from shared.ids import Digest
from shared.messages.base import Count, DigestText, Epoch, Generation, Line, PlanBytes, ShortText
from shared.messages.control import (
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
    """A plan made here that is being tried: received, verified, staged, then under probation."""

    plan: RunnablePlan
    planned: Planned
    state: DeviceState

    @property
    def attempt(self) -> Attempt:
        """What the plan manager knows it by."""
        return (LOCAL_EPOCH, self.plan.ref.local_counter)


class LinkState(Struct, frozen=True, kw_only=True):
    """What survives a restart. `revision` counts changes of what is reported, over the device's life.

    `planned` is set while last-known-good was made here; `barred` plans were, and failed in this environment.
    """

    revision: Count = 0
    desired: Desired | None = None
    state: DeviceState | None = None
    reason: Line = ""
    environment: ShortText = ""
    active: PlanRef | None = None
    last_good: RunnablePlan | None = None
    probation_boots: Count = 0
    local_counter: Count = 0
    answered: tuple[Count, ...] = ()
    local: LocalAttempt | None = None
    planned: Planned | None = None
    barred: Annotated[tuple[DigestText, ...], Meta(max_length=64)] = ()


@dataclass(frozen=True)
class Connected:
    """A connection to the control socket stands; a new one after each loss."""


@dataclass(frozen=True)
class Lost:
    """The control connection is gone."""


@dataclass(frozen=True)
class Received:
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
    digest: Digest
    reason: str


@dataclass(frozen=True)
class PlanVerified:
    attempt: Attempt


@dataclass(frozen=True)
class PlanStaged:
    attempt: Attempt


@dataclass(frozen=True)
class PlanRefused:
    """It does not decode, is not legal, or cannot be prepared; from verification or staging."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True)
class ProbationPassed:
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
    """A trigger fired. `local` is the plan that would be run without the planner; None: none that differs."""

    at_us: int
    cause: str
    value: float
    threshold: float
    plan: Digest | None
    loads: tuple[ModelLoad, ...]
    samples: tuple[AlarmSample, ...]
    local: RunnablePlan | None = None


@dataclass(frozen=True)
class PersistFailed:
    """The last `Persist` did not reach the disk; the actions after it were not carried out."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Outcome = PlanVerified | PlanStaged | PlanRefused | ProbationPassed | ProbationFailed

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
    | PersistFailed
    | Tick
)


@dataclass(frozen=True)
class Persist:
    """Write this durably before the actions that follow; if that fails, drop them and say `PersistFailed`."""

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
    attempt: Attempt
    plan: RunnablePlan


@dataclass(frozen=True)
class StagePlan:
    attempt: Attempt
    plan: RunnablePlan


@dataclass(frozen=True)
class ActivatePlan:
    """Swap to the staged plan and watch it: the guard decides about probation, and rolls back by itself."""

    attempt: Attempt
    plan: RunnablePlan


@dataclass(frozen=True)
class RestorePlan:
    """Run last-known-good now, unless it runs already."""

    plan: RunnablePlan


@dataclass(frozen=True)
class AbandonPlan:
    """A newer generation took this attempt's place: free what is staged, let what runs run."""

    attempt: Attempt


@dataclass(frozen=True)
class RunProfile:
    request: ProfileRequest


@dataclass(frozen=True)
class RunStageProfile:
    """Measure a plan's stages beside what runs; answered by `ProfileAnswered`."""

    request: StageProfileRequest


@dataclass(frozen=True)
class Reconnect:
    """The planner is silent or refuses: drop the connection and come back after `delay_s` (or backoff)."""

    reason: str
    delay_s: float | None = None


Action = (
    Persist
    | Send
    | FetchArtifact
    | VerifyPlan
    | StagePlan
    | ActivatePlan
    | RestorePlan
    | AbandonPlan
    | RunProfile
    | RunStageProfile
    | Reconnect
)
