"""The plan manager's shell: the link's orders go in, what it decides is carried out.

Nothing here decides about plans; each action's outcome comes back as the manager's next event.
"""

import logging
from collections.abc import Sequence

from stageloom.edge_agent.lifecycle import events as link
from stageloom.edge_agent.lifecycle.check import PlanUnusable
from stageloom.edge_agent.lifecycle.events import (
    Activated,
    CheckPlan,
    DrainEngine,
    KeepFallback,
    LoadPlan,
    MeasureWindow,
    Note,
    PlanAction,
    StartEngine,
    StopEngine,
    SwapTo,
    Tell,
    UnloadPlan,
)
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.parts import Parts
from stageloom.edge_agent.worker.messages import Measure
from stageloom.shared.failpoint import failpoint
from stageloom.shared.messages.telemetry import PlanActivated

_log = logging.getLogger(__name__)

_ENDS = link.ProbationPassed | link.ProbationFailed | link.PlanRefused | link.TrialDecided
"""Events with which an attempt may end."""


class PlanShell:
    """Runs on the main loop; checks of plans run in the background."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._plans = parts.plans
        self._engine = parts.engine
        self._stopping = False
        self._settled = False  # an attempt has ended

    def obey(self, order: link.Order) -> None:
        """What the link asks for."""
        plans, now_s = self._plans, self._parts.loop.now()
        match order:
            case link.RestorePlan(plan):
                self.do(plans.restore(plan))
            case link.VerifyPlan(attempt, plan):
                self.do(plans.verify(attempt, plan))
            case link.StagePlan(attempt, plan):
                self.do(plans.stage(attempt, plan))
            case link.RunTrial():
                self.do(plans.run_trial(order, now_s))
            case link.TrialRecorded(attempt):
                failpoint("agent.trial.begin")
                self.do(plans.trial_recorded(attempt, now_s))
            case link.ActivatePlan(attempt, plan, guarded):
                self.do(plans.activate(attempt, plan, guarded=guarded))
            case link.AbandonPlan(attempt):
                self.do(plans.abandon(attempt))
            case link.UsePolicy(digest):
                self._parts.local.use(digest, self._parts.artifacts)
            case link.RunProfile(request):
                self._parts.profiles.wanted(request)
            case link.RunStageProfile(stages):
                self._parts.profiles.wanted(stages)

    def do(self, actions: Sequence[PlanAction]) -> None:
        """Carry out what the manager decided."""
        for action in actions:
            self._carry_out(action)

    def shut_down(self) -> None:
        """The agent stops: no engine process is started any more."""
        self._stopping = True
        self.do(self._plans.shut_down(self._parts.loop.now()))

    def collect(self, *, downloads: bool = False) -> None:
        """Remove artifacts that nothing here names; before an attempt has ended the link may hold others."""
        if not self._settled:
            return
        parts = self._parts
        keep = self._plans.needed() | parts.profiles.needed() | parts.local.needed()
        for digest in parts.artifacts.collect(keep, downloads=downloads):
            parts.link.tell(link.ArtifactGone(digest))

    def _carry_out(self, action: PlanAction) -> None:
        parts = self._parts
        match action:
            case CheckPlan(plan):
                parts.background.run(lambda: parts.checker.check(plan), self._checked)
            case LoadPlan(key, plan):
                paths = {need.digest: str(parts.artifacts.path(need.digest)) for need in plan.artifacts}
                self._engine.load_plan(key, plan.wire, paths)
            case SwapTo(key, keep):
                failpoint("agent.swap.before")
                self._engine.activate(key, keep=keep)
            case DrainEngine():
                self._engine.drain(refuse=False)
            case MeasureWindow(number, from_s, to_s, brake_age_s):
                self._engine.measure(Measure(number, from_s, to_s, brake_age_s))
            case Activated(ref, attempt):
                _log.info("plan %s is active", ref.digest[:12])
                parts.journal.record([PlanActivated(ref.digest, ref.origin, *attempt)])
                if (running := self._plans.active) is not None:
                    parts.local.activated(running)
            case UnloadPlan(key):
                self._engine.unload(key)
            case StartEngine(delay_s):
                if not self._stopping:
                    self._engine.start_in(delay_s)
            case StopEngine():
                self._engine.end()
            case Tell(event):
                self._tell(event)
            case Note(code, text):
                parts.journal.note(code, text)
            case KeepFallback(plan):
                failpoint("agent.fallback")
                if problem := parts.fallback.save(plan):
                    parts.journal.note("storage", problem)

    def _tell(self, event: link.Event) -> None:
        if isinstance(event, link.PlanStaged):
            failpoint("agent.staged")
        self._parts.link.tell(event)
        if isinstance(event, _ENDS):
            self._settled = True
            self.collect(downloads=isinstance(event, link.ProbationPassed))

    def _checked(self, result: PlanFacts | PlanUnusable) -> None:
        if isinstance(result, PlanUnusable):
            self._parts.journal.note("plan_unusable", f"plan {result.digest[:12]}: {result.reason}")
            self.do(self._plans.check_failed(result.digest, result.reason, result.damaged))
            return
        self.do(self._plans.checked(result))
