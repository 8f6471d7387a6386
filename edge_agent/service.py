"""The agent's main process: the link, the local endpoint and the engine process on one loop.

Nothing here decides about plans or tasks: the lifecycle core and `TaskLedger` do. This part hands
each report of the engine process to the part that needs it. No heavy package is imported on this path.
"""

import logging
import os
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

import msgspec

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.executor_choice import ExecutorChoice, told_at_start
from stageloom.edge_agent.ingest.channel import runtime_directory, socket_of
from stageloom.edge_agent.ingest.connection import ConnectionLimits
from stageloom.edge_agent.ingest.endpoint import Endpoint
from stageloom.edge_agent.ingest.ledger import TaskLedger
from stageloom.edge_agent.ingest.messages import ModelSignature
from stageloom.edge_agent.lifecycle.events import TimePassed
from stageloom.edge_agent.loop import READ, Loop
from stageloom.edge_agent.metrics.settings import metrics_keeper
from stageloom.edge_agent.parts import LifecycleFactory, Parts, make_parts
from stageloom.edge_agent.replan.load_watch import ChosenFile, LoadWatch
from stageloom.edge_agent.reporting.status import (
    AgentStatus,
    EngineStatus,
    plan_status,
    queue_status,
    task_totals,
    trial_status,
)
from stageloom.edge_agent.reporting.telemetry import task_rows, trace_row
from stageloom.edge_agent.serving.keeper import serving_keeper
from stageloom.edge_agent.way_measuring import OWN_REQUESTS
from stageloom.edge_agent.way_watch import WayWatch
from stageloom.edge_agent.worker import messages as engine
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.failpoint import failpoint
from stageloom.shared.systemd.notify import Notifier, manager_of
from stageloom.shared.version import __version__

if TYPE_CHECKING:
    from stageloom.edge_agent.metrics.counting import AgentCounters

_GRACE_S = 15.0
_BEATS = 4  # per watchdog interval; systemd asks for at least two


class Watchdog:
    """What the agent tells systemd, and when it stops saying that it lives: the watchdog sees real progress.

    A turn of the main loop brings each beat here, so a loop that hangs is silent. Beyond that the engine
    process must have shown a sign of life: within `silent_s` while it serves, within `load_limit_s` while it
    starts, loads a plan or is about to be started again. The agent itself ends an engine that is silent or
    loads for too long, and `_GRACE_S` gives it the time to. What is left for systemd is an agent whose own
    remedy fails.
    """

    def __init__(self, notifier: Notifier, *, silent_s: float, load_limit_s: float) -> None:
        self._notifier = notifier
        self._silent_s = silent_s
        self._load_limit_s = load_limit_s
        self._said = ""
        self._next_s = 0.0

    def stalled(self, sign_s: float, now_s: float, *, serving: bool) -> bool:
        """The engine process has shown no sign since `sign_s`: for longer than anything legitimate takes."""
        limit_s = self._silent_s if serving else max(self._silent_s, self._load_limit_s)
        return now_s - sign_s > limit_s + _GRACE_S

    def up(self) -> None:
        """The local socket answers. An agent without a plan is up: it waits for one and must not time out."""
        self._notifier.send(READY="1")

    def beat(self, now_s: float, sign_s: float, summary: Callable[[], str], *, serving: bool) -> None:
        """Say the summary where it has changed, and that the agent lives where it does."""
        if not self._notifier.listens:
            return
        if (status := summary()) != self._said:
            self._said = status
            self._notifier.send(STATUS=status)
        interval_s = self._notifier.watchdog_s
        if interval_s is None or now_s < self._next_s or self.stalled(sign_s, now_s, serving=serving):
            return
        self._next_s = now_s + interval_s / _BEATS
        self._notifier.send(WATCHDOG="1")

    def stopping(self) -> None:
        self._notifier.send(STOPPING="1", STATUS="stopping")

    def close(self) -> None:
        self._notifier.close()


_log = logging.getLogger(__name__)

_TICK_S = 0.25
_LINK_TICK_S = 0.1


class Agent:
    """Wires the parts together; `run` returns when `request_stop` was called and the last task has ended."""

    def __init__(
        self, config: AgentConfig, make_lifecycle: LifecycleFactory, choice: ExecutorChoice | None = None
    ) -> None:
        """Start the engine process and make the link. `choice`: what has yet to be measured, where it plans.

        Raises:
            StageloomError: the link cannot be made; nothing is left running.
        """
        self._config = config
        self.loop = Loop()
        self._started_s = self._counted_s = self.loop.now()
        self._parts = parts = make_parts(config, self.loop, make_lifecycle, self._on_report)
        self._engine, self._plans, self._lifecycle = parts.engine, parts.plans, parts.lifecycle
        self._journal, self._profiles = parts.journal, parts.profiles
        chosen = ChosenFile(config.home_path / "chosen_for")
        self._load = LoadWatch(parts, parts.lifecycle.core.state.environment, chosen)
        self._choice = choice
        self._ways = WayWatch(parts)
        self._counters = _counted(parts) if config.metrics.listen else None
        self._ledger = TaskLedger(self._counters, lambda: parts.plans.models)
        self._endpoint = Endpoint(
            self.loop,
            self,
            self._engine,
            self._ledger,
            ConnectionLimits(max_tasks=config.max_tasks, max_arena_bytes=config.max_arena_bytes),
        )
        self._watchdog = Watchdog(
            manager_of(os.environ), silent_s=config.silent_engine_s, load_limit_s=config.load_limit_s
        )
        socket, note = socket_of(config.home_path), self._journal.note
        self._serving = serving_keeper(
            self.loop,
            config.serving,
            socket,
            note,
            Random(),
            config.log_level,
            count=bool(config.metrics.listen),
        )
        self._metrics = metrics_keeper(self.loop, config.metrics, socket, note, Random(), config.log_level)
        self._last_exit = ""
        self._stopping = False

    # -- life -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        self._endpoint.listen(runtime_directory(self._config.home_path))
        self._serving.start()
        self._metrics.start()
        self._watchdog.up()
        self.loop.watch(self._lifecycle.link.fileno(), READ, lambda _: self._lifecycle.take())
        self.loop.call_every(_LINK_TICK_S, lambda: self._lifecycle.handle(TimePassed()))
        self._lifecycle.start(self._parts)
        self.loop.call_every(_TICK_S, self._tick)
        self.loop.call_every(self._config.stats_interval_s, self._count)
        self.loop.call_every(self._config.trace_interval_s, self._sample_steps)
        self.loop.call_every(self._config.machine_interval_s, self._look_at_machine)
        self._parts.local.start()
        self._profiles.on_steps = self._model_timed
        if self._choice is not None:
            for request in self._choice.requests():
                self._profiles.wanted(request)
        for problem in self._parts.found:
            self._journal.found(problem)
        self._journal.record(told_at_start(self._config))
        try:
            self.loop.run()
        finally:
            self._serving.begin_stop()
            self._metrics.begin_stop()
            self._engine.take_ends()  # of tasks that have not failed
            self._endpoint.end_all(Outcome.FAILED, "agent_restarted", "the agent was stopped")
            self._count()
            self._endpoint.close("the agent was stopped")
            self._engine.shut_down()
            self._serving.stop()
            self._metrics.stop()
            self._parts.background.close()
            self._lifecycle.stop()
            self.loop.close()
            self._watchdog.close()

    def _model_timed(self, request: int, step_us: Mapping[int, float], reason: str, cannot: bool) -> None:
        if request >= OWN_REQUESTS:
            quiet = not len(self._ledger)
            self._ways.answered(step_us.get(0), cannot=cannot, quiet=quiet, reason=reason)
            return
        choice = self._choice
        if choice is None:
            return
        environment = self._parts.machine.environment()
        better = choice.answered(request, step_us.get(0), reason, environment, cannot=cannot)
        while choice.problems:
            self._journal.note("executor_choice", choice.problems.pop())
        if better is not None:
            _log.info("a better plan: %s", better.cause)
            self._lifecycle.handle(better)

    def request_stop(self) -> None:
        """Take no more tasks, let those that are open end for a while, then return from `run`."""
        if self._stopping:
            self.loop.stop()
            return
        self._stopping = True
        self._watchdog.stopping()
        self._serving.begin_stop()
        self._lifecycle.shut_down(self.loop.now())
        self._engine.send(engine.PauseLaunches(refuse=True))
        self.loop.call_at(self.loop.now() + self._config.drain_s, self.loop.stop)
        self._stop_when_empty()

    def _stop_when_empty(self) -> None:
        if self._stopping and not len(self._ledger):
            self.loop.stop()

    def _tick(self) -> None:
        self._engine.take_ends()
        self._lifecycle.do(self._plans.tick(self.loop.now()))
        serving = self._plans.engine_up and not self._plans.loading
        self._ways.tick(free=serving and self._plans.phase is None and not self._stopping)
        limit_s = self._config.silent_engine_s
        if not self._plans.engine_up:  # it starts, for which it has the time of a load
            limit_s = max(limit_s, self._config.load_limit_s)
        self._engine.check_alive(limit_s, busy=self._plans.loading)
        self._watchdog.beat(self.loop.now(), self._engine.sign_s, self._summary, serving=serving)

    def _summary(self) -> str:
        """One line for `systemctl status`."""
        reason, active = self.not_ready(), self._plans.active
        plan = f", plan {active.ref.digest[:12]} for {', '.join(self._plans.models)}" if active else ""
        return f"{f'not ready: {reason}' if reason else 'ready'}{plan}; link {self._lifecycle.status().state}"

    def _count(self) -> None:
        self._engine.take_ends()
        now_s = self.loop.now()
        length_us, self._counted_s = round((now_s - self._counted_s) * 1e6), now_s
        self._journal.record(task_rows(self._ledger.take_intervals(), length_us))

    def _look_at_machine(self) -> None:
        self._journal.record(self._parts.machine.look())
        self._load.tell_mode()

    def _sample_steps(self) -> None:
        """Trace for a short while: every step of a window, so that its timeline has no holes."""
        if self._plans.active is not None and self._plans.runner is None:  # tracing would cost a window time
            self._engine.send(engine.TraceSteps(True))
            self.loop.call_at(self.loop.now() + self._config.trace_window_s, self._end_sample)

    def _end_sample(self) -> None:
        self._engine.send(engine.TraceSteps(False))

    # -- the endpoint's backend -----------------------------------------------------------------------------

    def models(self) -> Mapping[str, ModelSignature]:
        """What the active plan serves."""
        return self._plans.models

    def not_ready(self) -> str:
        """Why no task is taken; empty when one is."""
        if self._stopping:
            return "the agent is stopping"
        if not self._plans.engine_up:
            return "the engine process is starting"
        if self._plans.active is None and not self._plans.exchanging:
            if self._plans.loading:
                return "a plan is being loaded"
            trouble = self._plans.trouble
            return f"no plan is active: {trouble}" if trouble else "no plan is active"
        return ""

    def status(self) -> bytes:
        self._engine.take_ends()
        active, pause_s = self._plans.active, self._plans.last_pause_s
        reason = self.not_ready()
        found = AgentStatus(
            version=__version__,
            pid=os.getpid(),
            home=str(self._config.home_path.absolute()),
            uptime_s=round(self.loop.now() - self._started_s, 3),
            ready=not reason,
            reason=reason,
            engine=EngineStatus(
                pid=self._engine.pid,
                up=self._plans.engine_up,
                restarts=self._parts.supervisor.restarts,
                last_exit=self._last_exit,
            ),
            plan=plan_status(active.ref, self._plans.models) if active else None,
            trial=trial_status(self._plans, self.loop.now()),
            policy=self._parts.local.status,
            last_pause_ms=None if pause_s is None else round(pause_s * 1e3, 1),
            link=self._lifecycle.status(),
            queues=queue_status(self._load.stats, self._plans.models) if self._load.stats else (),
            tasks=task_totals(self._ledger),
            applications=self._endpoint.num_connections,
            problems=tuple(self._journal.problems),
            serving=self._serving.status,
            metrics=self._metrics.status,
            measuring=self._choice.left if self._choice is not None else self._ways.left,
        )
        return msgspec.json.encode(found)

    def metrics(self, start: int) -> tuple[bytes, bool]:
        """As `AgentCounters.page`; an empty object where nothing is counted."""
        if self._counters is None:
            return b"{}", False
        self._engine.take_ends()
        stats = self._load.stats
        return self._counters.page(start, stats.busy_s if stats is not None else 0.0, self._serving.counts)

    # -- the engine process ---------------------------------------------------------------------------------

    def _on_report(self, report: engine.Report) -> None:
        match report:
            case engine.TaskDone():
                self._task_done(report)
            case engine.Stats(sign=False):
                self._load.stats_arrived(report)
            case engine.Ready():
                self._parts.supervisor.started(self.loop.now())
                self._endpoint.engine_ready()
                self._lifecycle.do(self._plans.ready())
                self._profiles.engine_ready()
            case engine.PlanLoaded():
                key = PlanKey(report.key)
                self._lifecycle.do(self._plans.loaded(key, report.stated_bytes, report.memory_bytes))
            case engine.PlanTooLarge():
                self._lifecycle.do(self._plans.too_large(report))
            case engine.WindowMeasured():
                self._lifecycle.do(self._plans.measured(report, self.loop.now()))
            case engine.OutputsCompared():
                self._lifecycle.do(self._plans.outputs_compared(report, self.loop.now()))
            case engine.PlanFailed():
                _log.warning("plan %d failed in the engine: %s", report.key, report.reason)
                self._lifecycle.do(self._plans.load_failed(PlanKey(report.key), report.reason))
            case engine.PlanActive():
                self._plan_active(PlanKey(report.key), report.paused_s)
            case engine.PlanReleased():
                self._lifecycle.do(self._plans.released(PlanKey(report.key)))
                self._lifecycle.collect()
            case engine.WholeTime():
                self._profiles.whole_time(report)
            case engine.Profiling():
                self._profiles.working_on(report.request)
            case engine.PartsTimed():
                self._profiles.parts_timed(report)
            case engine.OperatorTimes():
                self._profiles.operator_times(report)
            case engine.StageTimes():
                self._profiles.stage_times(report)
            case QueueSnapshot():
                self._load.glanced(report, alarms=not self._stopping, disturbed=self._ways.disturbs)
            case engine.RecordingEnded():
                self._endpoint.recording_ended(report.number, report.reason)
            case engine.StepTraced():
                plan = self._plans.plan_of(PlanKey(report.key))
                if plan is not None:
                    self._journal.record([trace_row(report, plan.ref.digest)])
            case engine.Exited():
                self._exited(report.returncode)
            case engine.PassOn():
                self._endpoint.pass_on(report.application, report.packet)
            case engine.ArenaRefused():
                text = f"tasks that name arena {report.arena} are refused: {report.reason}"
                self._journal.note("arena_refused", text)
            case engine.Settled():
                self._lifecycle.do(self._plans.settled(PlanKey(report.key), self.loop.now()))
            case engine.Drained():
                self._lifecycle.do(self._plans.drained())
                self._stop_when_empty()

    def _task_done(self, done: engine.TaskDone) -> None:
        if done.outcome is Outcome.COMPLETED:
            self._parts.waiting.task_completed(done.queued_s, done.ended_s)
        elif done.outcome is Outcome.EXPIRED:
            self._parts.waiting.task_expired(done.queued_s, done.ended_s)
        self._endpoint.task_done(done)
        if self._plans.phase is not None:
            self._lifecycle.do(self._plans.task_ended(done.outcome, done.reason, done.plan))
        if self._stopping:
            self._stop_when_empty()

    def _plan_active(self, key: PlanKey, paused_s: float) -> None:
        failpoint("agent.swap.after")
        plan = self._plans.plan_of(key)
        facts = self._plans.facts_of(plan.ref.digest) if plan else None
        if facts is not None:
            self._load.plan_active(key, facts)
        if plan is not None:
            self._ways.plan_active(plan)
        self._lifecycle.do(self._plans.activated(key, self.loop.now(), paused_s))

    def _exited(self, returncode: int) -> None:
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        self._last_exit = how
        self._parts.waiting.engine_restarted()
        self._load.engine_exited()
        self._endpoint.end_all(
            Outcome.FAILED,
            "agent_restarted",
            f"the engine process ended ({how}) while the task was in flight; submit it again if wanted",
        )
        plans = self._plans
        measuring = self._profiles.engine_exited(blameless=plans.engine_stopping or plans.tries_plan)
        self._lifecycle.do(self._plans.exited(how, self.loop.now(), measuring=measuring))
        self._lifecycle.collect()


def _counted(parts: Parts) -> "AgentCounters":
    """Counters of what the link is given from now on."""
    from stageloom.edge_agent.metrics.counting import AgentCounters, CountedLink

    counters = AgentCounters(lambda: parts.plans.models)
    parts.lifecycle.link = CountedLink(parts.lifecycle.link, counters)
    return counters
