"""What happens to the lifecycle core, and what it answers with, as frozen values.

An event of the engine process is a method of the plan manager. Among the actions are commands to that process
as they are sent: a `SwitchPlan` is answered by `activated` or `load_failed`, an `Unload` by `released`, a
`PauseLaunches`, which ends with the next switch, by `drained`, an `OpenWindow` by `measured`. A row of
telemetry among them is to be kept for the planner.
"""

from dataclasses import dataclass
from typing import TypeAlias

from stageloom.edge_agent.lifecycle.states import AttemptId, LinkState, RunnablePlan
from stageloom.edge_agent.worker.messages import CompareOutputs, OpenWindow, PauseLaunches, SwitchPlan, Unload
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import (
    Alarm,
    ArtifactNeed,
    ControlToDevice,
    ControlToPlanner,
    ProfileRequest,
    StageProfileRequest,
)
from stageloom.shared.messages.telemetry import PlanActivated, TrialEnded


@dataclass(frozen=True)
class Connected:
    """A connection to the control socket stands; a new one after each loss."""


@dataclass(frozen=True)
class Lost:
    """The control connection is gone."""


@dataclass(frozen=True)
class Received:
    """A message of the planner came on the control lane."""

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
class PlanStaged:
    """It can run. `control` is the plan that runs, if it serves the same artifacts: then the two compare."""

    attempt: AttemptId
    control: Digest | None = None
    intervals_only: bool = False  # it differs from the control in launch intervals and in nothing else
    starves: str = ""  # why its launch intervals would admit fewer tasks than arrive
    interface: str = ""  # which model would have other inputs or outputs than now
    versions: tuple[str, ...] = ()  # models of which the plan that runs has another version
    alone: bool = False  # no plan runs that it could be compared with in any way


@dataclass(frozen=True)
class EnvironmentChanged:
    """Power mode, executor versions, precision: what a verdict on a plan depends on, as one text."""

    environment: str


@dataclass(frozen=True)
class ProfileAnswered:
    """Every row of a profile is in the spool."""

    request: int


@dataclass(frozen=True)
class PlansMade:
    """What would be run without the planner, for the newest `Alarm`, best first; empty: nothing."""

    plans: tuple[RunnablePlan, ...]


@dataclass(frozen=True)
class PlanMeasured:
    """A plan whose parts were each measured here, and are faster than those of what runs.

    So it counts as proven, and takes over under the guard without a trial; `cause` says what was measured.
    """

    plan: RunnablePlan
    cause: str


@dataclass(frozen=True)
class TimePassed:
    """Ten times a second: what depends on time is looked at again."""


Event = (
    Connected
    | Lost
    | Received
    | ArtifactPresent
    | ArtifactGone
    | FetchFailed
    | EnvironmentChanged
    | ProfileAnswered
    | Alarm
    | PlansMade
    | PlanMeasured
    | TimePassed
)


@dataclass(frozen=True)
class Persist:
    """Write this durably, then call `persisted`, or `persist_failed` if it cannot be written."""

    state: LinkState


@dataclass(frozen=True)
class Hold:
    """Believe a state without writing it: a start would find it as the one on disk anyway."""

    state: LinkState


@dataclass(frozen=True)
class SendMessage:
    """Send on the control lane if it stands; losing it is fine."""

    message: ControlToPlanner


@dataclass(frozen=True)
class FetchArtifact:
    """Fetch it, resuming what is there. Asked for again while it is missing."""

    need: ArtifactNeed


@dataclass(frozen=True)
class UsePolicy:
    """Plan with this policy, which lies whole among the artifacts; None: with none of the planner's."""

    digest: Digest | None


@dataclass(frozen=True)
class RunProfile:
    """Measure a model's operators or a plan's stages beside what runs; answered by `ProfileAnswered`."""

    request: ProfileRequest | StageProfileRequest


@dataclass(frozen=True)
class Reconnect:
    """The planner is silent or refuses: drop the connection and come back after `delay_s` (or backoff)."""

    reason: str
    delay_s: float | None = None


@dataclass(frozen=True)
class CheckPlan:
    """Decode, check legality and the artifacts' digests; answered by `checked` or `check_failed`."""

    plan: RunnablePlan


@dataclass(frozen=True)
class LoadInEngine:
    """Load in the engine process; answered by `loaded`, `too_large` or `load_failed`."""

    key: PlanKey
    plan: RunnablePlan


@dataclass(frozen=True)
class StartEngine:
    """Start the engine process; answered by `ready` or `exited`."""

    delay_s: float


@dataclass(frozen=True)
class StopEngine:
    """End the engine process: it runs what nobody wants, or hangs; answered by `exited`."""


@dataclass(frozen=True)
class JournalNote:
    """Something a person may want to know."""

    code: str
    text: str


@dataclass(frozen=True)
class KeepFallback:
    """Write down the good plan before the present one."""

    plan: RunnablePlan


@dataclass(frozen=True)
class CollectArtifacts:
    """Remove artifacts that no plan or desired value names any more, and `downloads` that were begun."""

    downloads: bool = False


Action: TypeAlias = (
    Persist
    | Hold
    | SendMessage
    | FetchArtifact
    | Reconnect
    | UsePolicy
    | RunProfile
    | CheckPlan
    | LoadInEngine
    | SwitchPlan
    | Unload
    | PauseLaunches
    | OpenWindow
    | CompareOutputs
    | StartEngine
    | StopEngine
    | JournalNote
    | KeepFallback
    | PlanActivated
    | TrialEnded
    | CollectArtifacts
)
