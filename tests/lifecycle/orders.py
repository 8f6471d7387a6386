"""Both halves of the lifecycle apart: calls between core and plan manager as values."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.events import PlanStaged
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.states import AttemptId, PlanRef, RunnablePlan
from stageloom.shared.engine.trial import TrialRecord, TrialResult
from stageloom.shared.ids import Digest

# -- what the core asks of the plan manager -----------------------------------------------------------------


@dataclass(frozen=True)
class RestorePlan:
    plan: RunnablePlan


@dataclass(frozen=True)
class VerifyPlan:
    attempt: AttemptId
    plan: RunnablePlan


@dataclass(frozen=True)
class StagePlan:
    attempt: AttemptId
    plan: RunnablePlan


@dataclass(frozen=True)
class RunTrial:
    attempt: AttemptId
    plan: RunnablePlan
    environment: str
    at_us: int


@dataclass(frozen=True)
class CompareOutputs:
    attempt: AttemptId
    plan: RunnablePlan
    tolerance: float


@dataclass(frozen=True)
class TrialRecorded:
    attempt: AttemptId


@dataclass(frozen=True)
class ActivatePlan:
    attempt: AttemptId
    plan: RunnablePlan
    guarded: bool = False
    idle: bool = False


@dataclass(frozen=True)
class AbandonPlan:
    attempt: AttemptId


class RecordingPlans:
    """In the plan manager's place: each call becomes an action that nobody carries out."""

    outcomes: Any

    def restore(self, plan: RunnablePlan) -> list[Any]:
        return [RestorePlan(plan)]

    def verify(self, attempt: AttemptId, plan: RunnablePlan) -> list[Any]:
        return [VerifyPlan(attempt, plan)]

    def stage(self, attempt: AttemptId, plan: RunnablePlan) -> list[Any]:
        return [StagePlan(attempt, plan)]

    def run_trial(
        self, attempt: AttemptId, plan: RunnablePlan, environment: str, at_us: int, now_s: float
    ) -> list[Any]:
        return [RunTrial(attempt, plan, environment, at_us)]

    def compare_outputs(
        self,
        attempt: AttemptId,
        plan: RunnablePlan,
        tolerance: float,
        environment: str,
        at_us: int,
        now_s: float,
    ) -> list[Any]:
        return [CompareOutputs(attempt, plan, tolerance)]

    def trial_recorded(self, attempt: AttemptId, now_s: float) -> list[Any]:
        return [TrialRecorded(attempt)]

    def activate(
        self, attempt: AttemptId, plan: RunnablePlan, *, guarded: bool = False, idle: bool = False
    ) -> list[Any]:
        return [ActivatePlan(attempt, plan, guarded, idle)]

    def environment_changed(self) -> list[Any]:
        return []

    def abandon(self, attempt: AttemptId) -> list[Any]:
        return [AbandonPlan(attempt)]


# -- what the plan manager calls ----------------------------------------------------------------------------


class PlanVerified(NamedTuple):
    attempt: AttemptId


class PlanFailed(NamedTuple):
    attempt: AttemptId
    reason: str


class TrialBegins(NamedTuple):
    attempt: AttemptId
    record: TrialRecord
    lasts: str = "the trial takes up to 60 s"


class TrialDecided(NamedTuple):
    attempt: AttemptId
    control: Digest | None
    result: TrialResult


class ProbationPassed(NamedTuple):
    attempt: AttemptId


class RestoreFailed(NamedTuple):
    reason: str


class ActiveChanged(NamedTuple):
    active: PlanRef | None


class ArtifactGone(NamedTuple):
    """An artifact was found damaged."""

    digest: Digest


class ManagerRestarted(NamedTuple):
    pass


class _Tell(NamedTuple):
    """One of the values above, or PlanStaged."""

    event: Any


Tell: Any = _Tell
"""Stands among the actions of a plan manager, whose type does not know it."""


def happen(core: Lifecycle, event: Any, now_s: float) -> None:
    """An event of the core, or a call of the plan manager's."""
    match event:
        case PlanVerified(attempt):
            core.add(core.verified(attempt))
        case PlanStaged():
            core.add(core.staged(event))
        case PlanFailed(attempt, reason):
            core.add(core.failed(attempt, reason))
        case TrialBegins(attempt, record, lasts):
            core.add(core.trial_begins(attempt, record, lasts))
        case TrialDecided(attempt, control, result):
            core.add(core.trial_decided(attempt, control, result))
        case ProbationPassed(attempt):
            core.add(core.passed(attempt))
        case RestoreFailed(reason):
            core.add(core.restore_failed(reason))
        case ActiveChanged(active):
            core.active_changed(active)
        case ManagerRestarted():
            core.forgot()
        case _:
            core.handle(event, now_s)


class Told:
    """In the core's place: what the plan manager tells becomes an action, or lies in `said`."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def tell(*values: Any) -> list[Any]:
            event = _OUTCOMES[name](*values)
            if name in ("active_changed", "artifact_gone", "forgot"):
                self.said.append(event)
            return [Tell(event)]

        return tell


_OUTCOMES: dict[str, Any] = {
    "verified": PlanVerified,
    "staged": lambda staged: staged,
    "trial_begins": TrialBegins,
    "trial_decided": TrialDecided,
    "passed": ProbationPassed,
    "failed": PlanFailed,
    "restore_failed": RestoreFailed,
    "active_changed": ActiveChanged,
    "artifact_gone": ArtifactGone,
    "forgot": ManagerRestarted,
}


def manager_alone(*args: Any, **options: Any) -> PlanManager:
    """A plan manager whose outcomes are told to a `Told`."""
    manager = PlanManager(*args, **options)
    manager.outcomes = Told()
    return manager


def said(manager: PlanManager) -> list[Any]:
    """What the manager told that asks for no action, oldest first."""
    told = manager.outcomes
    assert isinstance(told, Told)
    return told.said
