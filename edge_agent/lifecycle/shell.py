"""Runs the lifecycle core on the main loop: carries out its actions, and brings their outcomes back to it.

Nothing here decides about plans.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.check import PlanUnusable
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.statefile import save_state
from stageloom.edge_agent.lifecycle.states import LinkState, RunnablePlan
from stageloom.edge_agent.reporting.status import LinkStatus
from stageloom.edge_agent.worker import messages as engine
from stageloom.edge_agent.worker.client import memory_file
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import DeviceState, Origin
from stageloom.shared.messages.telemetry import Event, PlanActivated, RowData, StateChange, TrialEnded
from stageloom.shared.text import bounded

if TYPE_CHECKING:
    from stageloom.edge_agent.parts import Parts

_log = logging.getLogger(__name__)


class Link(Protocol):
    """Moves messages between this device and its planner; called from one thread, never waits."""

    def fileno(self) -> int:
        """Readable while events wait."""

    def take(self) -> Sequence[ev.Event]:
        """The events that wait, in order."""

    def act(self, action: ev.SendMessage | ev.FetchArtifact | ev.Reconnect) -> None:
        """Carry out what concerns the planner; losing it is fine."""

    def record(self, rows: Sequence[RowData]) -> None:
        """Keep telemetry for the planner."""

    def status(self) -> LinkStatus:
        """State, telemetry counts, and what is wrong with the connection."""

    def stop(self) -> None:
        """End the connection and free what the link holds."""


class NoLink:
    """The link of an agent that cannot reach for a planner: it has not joined one, or its key is unusable."""

    def __init__(self, state: str, detail: str) -> None:
        self._status = LinkStatus(state=state, detail=detail)
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._read

    def take(self) -> Sequence[ev.Event]:
        return ()

    def act(self, action: ev.SendMessage | ev.FetchArtifact | ev.Reconnect) -> None:
        """There is no planner to ask or to tell."""

    def record(self, rows: Sequence[RowData]) -> None:
        """An agent that has joined no planner owes it no telemetry."""

    def status(self) -> LinkStatus:
        return self._status

    def stop(self) -> None:
        os.close(self._read)
        os.close(self._write)


class LifecycleShell:
    """Runs the core on the main loop, from `start` to `stop`; checks of plans run in the background."""

    def __init__(
        self,
        core: Lifecycle,
        link: Link,
        path: Path | None,
        *,
        environment: str,
        present: frozenset[Digest],
        problem: str = "",
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`path` is the state's file, None to keep the state in memory; `problem`: what was wrong with it."""
        self.core = core
        self.link = link
        self._path = path
        self._environment = environment
        self._present = present
        self._problem = problem
        self._now, self._wall = now, wall
        self._parts: Parts
        self._recorded: tuple[int, int, DeviceState] | None = None
        self._settled = False  # an attempt has ended, or begun
        self._stopping = False

    def start(self, parts: "Parts") -> None:
        """Restore last-known-good; the other `parts` carry out what is not about state or link."""
        self._parts = parts
        if self._problem:
            self._record_event("state_set_aside", self._problem)
        self._set_clock()
        self.core.boot(self._environment, self._present, self._now())
        self._run()

    def take(self) -> None:
        """Handle the events of the link that wait."""
        for event in self.link.take():
            self.handle(event)

    def handle(self, event: ev.Event) -> None:
        """Handle an event, and carry out what follows from it."""
        self._set_clock()
        self.core.handle(event, self._now())
        self._run()

    def _set_clock(self) -> None:
        """A machine may learn what time it is, or sleep, while it runs; verdicts bear the time of then."""
        self.core.wall_s = self._wall() - self._now()

    def do(self, actions: Sequence[ev.Action]) -> None:
        """Carry out what the plan manager decided."""
        self.core.add(actions)
        self._run()

    def record(self, rows: Sequence[RowData]) -> None:
        """Keep telemetry for the planner."""
        self.link.record(rows)

    def status(self) -> LinkStatus:
        """Of the link, and of the plan that the planner desires."""
        found, report, session = self.link.status(), self.core.report(), self.core.session
        joined = found.state not in ("alone", "not_joined")
        problems = [found.detail if joined else ""]
        if session.denied is not None:
            problems.append(f"{session.denied.code.value}: {session.denied.reason}")
        if self.core.disk.error:
            problems.append(f"the link's state cannot be stored: {self.core.disk.error}")
        connected = found.state == "connecting" and session.welcomed
        return structs.replace(
            found,
            state="connected" if connected else found.state,
            detail=next((problem for problem in problems if problem), found.detail),
            device=session.device or found.device,
            desired=f"{report.epoch}.{report.generation}" if report.state else "",
            desired_state=report.state.value if report.state else "",
            reason=report.reason,
        )

    def shut_down(self, now_s: float) -> None:
        """The agent stops: no engine process is started any more."""
        self._stopping = True
        self.do(self.core.plans.shut_down(now_s))

    def collect(self, *, downloads: bool = False) -> None:
        """Remove artifacts that nothing here names; a start has to settle first what it has found."""
        if not self._settled:
            return
        parts = self._parts
        keep = self.core.needed() | parts.profiles.needed() | parts.local.needed()
        for digest in parts.artifacts.collect(keep, downloads=downloads):
            self.handle(ev.ArtifactGone(digest))

    def stop(self) -> None:
        """Stop the link; everything that must survive is on disk already."""
        self.link.stop()

    def _run(self) -> None:
        while (action := self.core.next(self._now())) is not None:
            self._carry_out(action)

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Persist(state):
                self._persist(state)
            case ev.Hold(state):
                self.core.held(state)
                self._stored(state)
            case ev.SendMessage() | ev.FetchArtifact() | ev.Reconnect():
                self.link.act(action)
            case TrialEnded():
                self.link.record([action])
            case _:
                self.carry_on(action)

    def carry_on(self, action: ev.Action) -> None:
        """Carry out what concerns engine, policy, profiles and journal."""
        parts = self._parts
        match action:
            case ev.CheckPlan(plan):
                parts.background.run(lambda: parts.checker.check(plan), self._checked)
            case ev.LoadInEngine(key, plan):
                paths = {str(need.digest): str(parts.artifacts.path(need.digest)) for need in plan.artifacts}
                with memory_file(plan.wire) as fd:
                    parts.engine.send(engine.LoadPlan(key, paths), [fd])
            case engine.SwitchPlan():
                failpoint("agent.swap.before")
                parts.engine.send(action)
            case engine.Unload() | engine.PauseLaunches() | engine.OpenWindow() | engine.CompareOutputs():
                parts.engine.send(action)
            case PlanActivated():
                _log.info("plan %s is active", action.plan[:12])
                parts.journal.record([action])
                if (running := self.core.plans.active) is not None:
                    parts.local.activated(running)
            case ev.StartEngine(delay_s):
                if not self._stopping:
                    parts.engine.start_in(delay_s)
            case ev.StopEngine():
                parts.engine.end()
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
            plans, may_pass = self.core.plans, result.may_pass
            self.do(plans.check_failed(result.digest, result.reason, result.damaged, may_pass=may_pass))
            return
        self.do(self.core.plans.checked(result))

    def _persist(self, state: LinkState) -> None:
        commits = state.state is DeviceState.COMMITTED
        try:
            if commits:
                failpoint("agent.commit.before")
            if self._path is not None:
                save_state(self._path, state)
            if commits:
                failpoint("agent.commit.after")
        except OSError as error:
            _log.error("the link's state cannot be stored: %s", error)
            self._record_event("storage", f"the link's state cannot be stored: {error}")
            self.core.persist_failed(str(error), self._now())
            return
        self.core.persisted(state)
        self._stored(state)

    def _stored(self, state: LinkState) -> None:
        """A start would find this state: tell the planner of a step that is new."""
        tried = state.local.state if state.local is not None else None
        if DeviceState.STAGED in (state.state, tried):
            failpoint("agent.staged")
        if DeviceState.TRIAL in (state.state, tried):
            failpoint("agent.trial.begin")
        if state.desired is None or state.state is None:
            return
        step = (*state.attempt, state.state)
        if step == self._recorded:
            return
        self._recorded = step
        origin = state.active.origin if state.active else Origin.FALLBACK
        row = StateChange(*step, state.desired.plan_digest, origin, state.reason)
        self.link.record([row])

    def _record_event(self, code: str, text: str) -> None:
        self.link.record([Event(bounded(code, 128), bounded(text))])


def alone(plan: RunnablePlan, plans: PlanManager) -> LifecycleShell:
    """The shell of an agent that runs one plan that was made here, without a planner or a state on disk."""
    core = Lifecycle(LinkState(last_good=plan), config=LinkConfig(boot=1), plans=plans)
    link = NoLink("alone", "this agent runs without a planner")
    present = frozenset(need.digest for need in plan.artifacts)
    return LifecycleShell(core, link, None, environment="", present=present)
