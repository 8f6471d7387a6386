"""The plan of one attempt on its way to be last-known-good, and the manager's patience with it."""

from dataclasses import dataclass, field
from enum import Enum

from stageloom.edge_agent.link.events import Attempt, RunnablePlan
from stageloom.edge_agent.plans.probation import Probation, ProbationConfig
from stageloom.edge_agent.plans.trial_runner import TrialRunner
from stageloom.shared.engine.trial import TrialConfig
from stageloom.shared.engine.windows import Side
from stageloom.shared.ids import Digest


class Phase(Enum):
    """How far a candidate has come."""

    VERIFYING = "verifying"
    STAGING = "staging"
    STAGED = "staged"
    TRIAL = "trial"
    ACTIVATING = "activating"
    PROBATION = "probation"


@dataclass(frozen=True, kw_only=True)
class ManagerConfig:
    """Limits of the manager's patience."""

    probation: ProbationConfig = field(default_factory=ProbationConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)
    timing_s: float = 10.0  # the models of a trial are timed for so long at most
    load_limit_s: float = 120.0  # an engine process that loads one plan for so long is taken to hang
    restore_patience_s: float = 300.0  # last-known-good may fail to load for so long, and no verdict be told


@dataclass
class Candidate:
    """A plan, how far it has come, and what watches it there."""

    attempt: Attempt
    plan: RunnablePlan
    phase: Phase
    guarded: bool = False
    probation: Probation | None = None
    runner: TrialRunner | None = None

    @property
    def digest(self) -> Digest:
        return self.plan.ref.digest

    @property
    def runs(self) -> bool:
        """It runs or is to run next, for good."""
        return self.phase in (Phase.ACTIVATING, Phase.PROBATION)

    @property
    def in_window(self) -> bool:
        """It runs in a trial, or has won it and waits for the word to stay."""
        return self.runner is not None and self.runner.side is Side.CANDIDATE
