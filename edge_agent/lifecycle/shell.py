"""Carries out what the lifecycle core decides about engine, policy and profiles, on the main loop.

Nothing here decides about plans; each action's outcome comes back to the core.
"""

import logging
from collections.abc import Sequence

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.check import PlanUnusable
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.parts import Parts
from stageloom.edge_agent.worker import messages as engine
from stageloom.edge_agent.worker.client import memory_file
from stageloom.shared.failpoint import failpoint
from stageloom.shared.messages.telemetry import PlanActivated

_log = logging.getLogger(__name__)


class PlanShell:
    """Runs on the main loop; checks of plans run in the background."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._plans = parts.plans
        self._engine = parts.engine
        self._stopping = False
        self._settled = False  # an attempt has ended

    def start(self) -> None:
        """Begin to carry out actions; the first restore last-known-good."""
        self._parts.lifecycle.start(self._carry_out)

    def do(self, actions: Sequence[ev.Action]) -> None:
        """Carry out what the plan manager decided, and what follows from it."""
        self._parts.lifecycle.do(actions)

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
            parts.lifecycle.handle(ev.ArtifactGone(digest))

    def _carry_out(self, action: ev.Action) -> None:
        parts = self._parts
        match action:
            case ev.CheckPlan(plan):
                parts.background.run(lambda: parts.checker.check(plan), self._checked)
            case ev.LoadInEngine(key, plan):
                paths = {str(need.digest): str(parts.artifacts.path(need.digest)) for need in plan.artifacts}
                with memory_file(plan.wire) as fd:
                    self._engine.send(engine.LoadPlan(key, paths), [fd])
            case engine.SwitchPlan():
                failpoint("agent.swap.before")
                self._engine.send(action)
            case engine.Unload() | engine.PauseLaunches() | engine.OpenWindow():
                self._engine.send(action)
            case ev.Activated(ref, attempt):
                _log.info("plan %s is active", ref.digest[:12])
                parts.journal.record([PlanActivated(ref.digest, ref.origin, *attempt)])
                if (running := self._plans.active) is not None:
                    parts.local.activated(running)
            case ev.StartEngine(delay_s):
                if not self._stopping:
                    self._engine.start_in(delay_s)
            case ev.StopEngine():
                self._engine.end()
            case ev.CollectArtifacts(downloads):
                self._settled = True
                self.collect(downloads=downloads)
            case ev.UsePolicy(digest):
                parts.local.use(digest, parts.artifacts)
            case ev.RunProfile(request):
                parts.profiles.wanted(request)
            case ev.JournalNote(code, text):
                parts.journal.note(code, text)
            case ev.KeepFallback(plan):
                failpoint("agent.fallback")
                if problem := parts.fallback.save(plan):
                    parts.journal.note("storage", problem)

    def _checked(self, result: PlanFacts | PlanUnusable) -> None:
        if isinstance(result, PlanUnusable):
            self._parts.journal.note("plan_unusable", f"plan {result.digest[:12]}: {result.reason}")
            self.do(self._plans.check_failed(result.digest, result.reason, result.damaged))
            return
        self.do(self._plans.checked(result))
