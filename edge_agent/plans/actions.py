"""What the plan manager asks of the agent."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stageloom.edge_agent.ingest.messages import ModelSignature
from stageloom.edge_agent.link import events as link
from stageloom.edge_agent.link.events import Attempt, PlanRef, RunnablePlan
from stageloom.shared.engine.steps import PlanKey

Models: TypeAlias = Mapping[str, ModelSignature]


@dataclass(frozen=True)
class CheckPlan:
    """Decode, check legality and the artifacts' digests; answered by `checked` or `check_failed`."""

    plan: RunnablePlan


@dataclass(frozen=True)
class LoadPlan:
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
class Tell:
    """Hand an event to the link core."""

    event: link.Event


@dataclass(frozen=True)
class Note:
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


Action: TypeAlias = (
    CheckPlan
    | LoadPlan
    | SwapTo
    | UnloadPlan
    | DrainEngine
    | MeasureWindow
    | StartEngine
    | StopEngine
    | Tell
    | Note
    | KeepFallback
    | Activated
)
