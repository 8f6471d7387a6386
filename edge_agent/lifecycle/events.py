"""What happens to the lifecycle core, and what it answers with, as frozen values.

An *attempt* is the (epoch, generation) that a plan is tried for.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from stageloom.edge_agent.lifecycle.states import Attempt, LinkState, PlanRef, RunnablePlan
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.engine.trial import TrialResult
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import (
    AlarmSample,
    ArtifactNeed,
    ControlToDevice,
    ControlToPlanner,
    ModelLoad,
    ProfileRequest,
    StageProfileRequest,
)
from stageloom.shared.messages.telemetry import RowData


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

    attempt: Attempt
    control: Digest | None = None
    intervals_only: bool = False  # it differs from the control in launch intervals and in nothing else
    starves: str = ""  # why its launch intervals would admit fewer tasks than arrive


@dataclass(frozen=True)
class TrialDecided:
    """The trial ended, or was refused: after a commit the candidate runs, else the control."""

    attempt: Attempt
    control: Digest | None
    result: TrialResult


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
    | AlarmRaised
    | PlansMade
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
    """Measure the operators of a model beside what runs; answered by `ProfileAnswered`."""

    request: ProfileRequest


@dataclass(frozen=True)
class RunStageProfile:
    """Measure a plan's stages beside what runs; answered by `ProfileAnswered`."""

    request: StageProfileRequest


@dataclass(frozen=True)
class RecordRow:
    """Keep this telemetry for the planner."""

    row: RowData


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
class SwapTo:
    """Send new launches to this loaded plan; answered by `activated` or `load_failed`.

    The plan before frees itself; with `keep` it stays loaded, for the windows of a trial.
    """

    key: PlanKey
    keep: bool = False


@dataclass(frozen=True)
class UnloadPlan:
    """Free a loaded plan that does not run."""

    key: PlanKey


@dataclass(frozen=True)
class DrainEngine:
    """Launch nothing until the next `SwapTo`, queued tasks wait; answered by `drained`."""


@dataclass(frozen=True)
class MeasureWindow:
    """Count what happens between two instants; answered by `measured`. Ends early at `brake_age_s`."""

    number: int
    from_s: float
    to_s: float
    brake_age_s: float = math.inf


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
class Activated:
    """New launches go to this plan, other than in the windows of a trial."""

    ref: PlanRef
    attempt: Attempt  # that it runs for; (0, 0) where it was not desired just now


@dataclass(frozen=True)
class CollectArtifacts:
    """An attempt is over: remove artifacts that no plan names any more, and `downloads` that were begun."""

    downloads: bool = False


Action: TypeAlias = (
    Persist
    | Hold
    | SendMessage
    | FetchArtifact
    | RecordRow
    | Reconnect
    | UsePolicy
    | RunProfile
    | RunStageProfile
    | CheckPlan
    | LoadInEngine
    | SwapTo
    | UnloadPlan
    | DrainEngine
    | MeasureWindow
    | StartEngine
    | StopEngine
    | JournalNote
    | KeepFallback
    | Activated
    | CollectArtifacts
)
