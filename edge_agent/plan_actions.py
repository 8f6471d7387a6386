"""What the plan manager asks of the agent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edge_agent.ingest.messages import ModelInfo
from edge_agent.link import events as link
from edge_agent.link.events import RunnablePlan
from shared.engine.steps import PlanKey

Models: TypeAlias = Mapping[str, ModelInfo]


@dataclass(frozen=True)
class CheckPlan:
    """Decode, check legality and the artifacts' digests; answered by `checked` or `check_failed`."""

    plan: RunnablePlan


@dataclass(frozen=True)
class LoadPlan:
    """Load in the engine process; answered by `loaded` or `load_failed`."""

    key: PlanKey
    plan: RunnablePlan


@dataclass(frozen=True)
class SwapTo:
    """Send new launches to this loaded plan; answered by `activated` or `load_failed`."""

    key: PlanKey


@dataclass(frozen=True)
class UnloadPlan:
    """Free a loaded plan that does not run."""

    key: PlanKey


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


Action: TypeAlias = (
    CheckPlan | LoadPlan | SwapTo | UnloadPlan | StartEngine | StopEngine | Tell | Note | KeepFallback
)
