"""The agent's main process: the link, the local endpoint and the engine process on one loop.

Nothing here decides about plans or tasks: `PlanManager`, `TaskLedger` and the link core do; this part carries
their actions out and turns each outcome into the next event. No heavy package is imported on this path.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TypeAlias

import msgspec

from edge_agent import __version__
from edge_agent.alarms import Alarms, AlarmSettings
from edge_agent.background import Background
from edge_agent.candidate import ManagerConfig
from edge_agent.config import AgentConfig
from edge_agent.engine_host import EngineHost
from edge_agent.fallback import FallbackFile
from edge_agent.heartbeat import EngineSigns, Heartbeat, Patience
from edge_agent.ingest.connection import Arena, ConnectionLimits, Layout
from edge_agent.ingest.endpoint import Accepted, Endpoint
from edge_agent.ingest.ledger import TaskLedger
from edge_agent.ingest.messages import ModelInfo
from edge_agent.ingest.paths import runtime_directory
from edge_agent.link import events as link
from edge_agent.links import Link
from edge_agent.local_planner import LocalPlanner
from edge_agent.local_plans import alarm_raised
from edge_agent.loop import READ, Loop
from edge_agent.plan_actions import (
    Action,
    Activated,
    CheckPlan,
    DrainEngine,
    KeepFallback,
    LoadPlan,
    MeasureWindow,
    Note,
    StartEngine,
    StopEngine,
    SwapTo,
    Tell,
    UnloadPlan,
)
from edge_agent.plan_check import PlanChecker, PlanUnusable
from edge_agent.plan_facts import PlanFacts
from edge_agent.plans import PlanManager
from edge_agent.policy import PolicyDesk
from edge_agent.probation import ProbationConfig
from edge_agent.profiles import ProfileDesk
from edge_agent.recordings import Recordings
from edge_agent.status import (
    AgentStatus,
    EngineStatus,
    plan_status,
    queue_status,
    task_totals,
    trial_status,
)
from edge_agent.store import ArtifactStore
from edge_agent.supervisor import Supervisor
from edge_agent.telemetry import ServiceTimes, engine_rows, task_rows, trace_row
from edge_agent.utilisation.chain import this_machine
from edge_agent.utilisation.watch import MachineWatch
from edge_agent.waiting import WaitingLog
from edge_agent.worker import messages as engine
from edge_agent.worker.config import WorkerConfig
from shared.engine.steps import Outcome, PlanKey
from shared.errors import TaskRefused
from shared.failpoint import failpoint
from shared.ids import TaskId
from shared.messages.telemetry import Event, PlanActivated, RowData
from shared.systemd.notify import manager_of

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_PROBLEMS = 16  # of the newest, shown by `status`
_ENDS = link.ProbationPassed | link.ProbationFailed | link.PlanRefused | link.TrialDecided
"""Events with which an attempt may end."""

LinkFactory: TypeAlias = Callable[[], tuple[Link, Sequence[str]]]
"""Makes the link, and says what was wrong with the state it found."""


class Agent:
    """Wires the parts together; `run` returns when `request_stop` was called and the last task has ended."""

    def __init__(self, config: AgentConfig, make_link: LinkFactory) -> None:
        """Start the engine process, then make the link: the two take their time side by side.

        Raises:
            StageloomError: the link cannot be made; nothing is left running.
        """
        home = config.home_path
        self.config = config
        self.loop = Loop()
        self.artifacts = ArtifactStore(home / "artifacts")
        self._started_s = self.loop.now()
        self._home = home
        self._problems: deque[str] = deque(maxlen=_PROBLEMS)
        self._fallback = FallbackFile(home / "fallback")
        fallback, problem = self._fallback.load()
        self._problems += [problem] if problem else []
        self._supervisor = Supervisor(Random())
        self._waiting = WaitingLog()
        self._plans = PlanManager(
            self._supervisor,
            ManagerConfig(
                probation=ProbationConfig(length_s=config.probation_s, guard=config.guard.guard()),
                trial=config.trial.trial(),
                timing_s=config.trial.timing_s,
                load_limit_s=config.load_limit_s,
            ),
            fallback,
            waiting=self._waiting,
            coin=Random(),
        )
        self._ledger = TaskLedger()
        self._endpoint = Endpoint(
            self.loop,
            self,
            self._ledger,
            ConnectionLimits(max_tasks=config.max_tasks, max_arena_bytes=config.max_arena_bytes),
        )
        self._engine = EngineHost(
            self.loop,
            WorkerConfig(
                stats_interval_s=config.stats_interval_s,
                glance_interval_s=config.alarm_interval_s if config.alarms else 0.0,
                memory_bytes=config.memory_bytes,
                log_level=config.log_level,
            ),
            config.silent_engine_s,
            self._on_report,
        )
        self._recordings = Recordings(self._engine)
        self._engine.start()
        try:
            self._link, problems = make_link()
        except BaseException:
            self._engine.shut_down()
            raise
        self._problems += problems
        self._machine = MachineWatch(this_machine())
        self._mode_told = self._machine.power_mode
        self._background = Background(self.loop)
        self._checker = PlanChecker(self.artifacts)  # used on the background's thread only
        self._local = LocalPlanner(
            self._background,
            PolicyDesk(self._checker.graph, self._machine.environment),
            self._link.tell,
            self._note,
            Path(config.policy) if config.policy else None,
        )
        self._service: ServiceTimes = ServiceTimes(())
        self._alarms = Alarms(
            AlarmSettings(
                measure=config.alarm_measure,
                threshold=config.alarm_threshold,
                cooldown_s=config.alarm_cooldown_s,
            )
        )
        self._profiles = ProfileDesk(
            self._engine,
            self.artifacts.path,
            self._record,
            self._link.tell,
            environment=self._machine.environment,
            clocks=self._machine.clocks,
            executor=config.executor,
            intra_op_threads=config.intra_op_threads,
            wall_s=config.profile_wall_s,
        )
        self._stats: engine.Stats | None = None
        self._last_exit = ""
        self._stopping = False
        self._settled = False  # an attempt has ended
        self._counted_s = self._started_s
        self._heartbeat = Heartbeat(
            manager_of(os.environ),
            Patience(silent_s=config.silent_engine_s, load_limit_s=config.load_limit_s),
        )

    # -- life -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        self._endpoint.listen(runtime_directory(self._home))
        self._heartbeat.up()
        self.loop.watch(self._link.fileno(), READ, self._on_link)
        self.loop.call_every(_TICK_S, self._tick)
        self.loop.call_every(self.config.stats_interval_s, self._count)
        self.loop.call_every(self.config.trace_interval_s, self._sample_steps)
        self.loop.call_every(self.config.machine_interval_s, self._look_at_machine)
        self._local.start()
        for problem in self._problems:
            _log.warning("%s", problem)
            self._record([Event("state", problem[:512])])
        try:
            self.loop.run()
        finally:
            self._endpoint.end_all(Outcome.FAILED, "agent_restarted", "the agent was stopped")
            self._count()
            self._endpoint.close("the agent was stopped")
            self._engine.shut_down()
            self._background.close()
            self._link.stop()
            self.loop.close()
            self._heartbeat.close()

    def request_stop(self) -> None:
        """Take no more tasks, let those that are open end for a while, then return from `run`."""
        if self._stopping:
            self.loop.stop()
            return
        self._stopping = True
        self._heartbeat.stopping()
        self._do(self._plans.shut_down(self.loop.now()))
        self._engine.drain(refuse=True)
        self.loop.call_at(self.loop.now() + self.config.drain_s, self.loop.stop)
        self._stop_when_empty()

    def _stop_when_empty(self) -> None:
        if self._stopping and not len(self._ledger):
            self.loop.stop()

    def _tick(self) -> None:
        self._do(self._plans.tick(self.loop.now()))
        self._link.tick()
        serving = self._plans.engine_up and not self._plans.loading
        self._engine.check_alive(busy=not serving)
        self._heartbeat.beat(self.loop.now(), EngineSigns(self._engine.sign_s, serving), self._summary)

    def _summary(self) -> str:
        """One line for `systemctl status`."""
        reason, active = self.not_ready(), self._plans.active
        plan = f", plan {active.ref.digest[:12]} for {', '.join(self._plans.models)}" if active else ""
        return f"{f'not ready: {reason}' if reason else 'ready'}{plan}; link {self._link.status().state}"

    def _sample_steps(self) -> None:
        """Trace for a short while: every step of a window, so that its timeline has no holes."""
        if self._plans.active is not None and self._plans.runner is None:  # tracing would cost a window time
            self._engine.trace(True)
            self.loop.call_at(self.loop.now() + self.config.trace_window_s, lambda: self._engine.trace(False))

    # -- the endpoint's backend -----------------------------------------------------------------------------

    def models(self) -> Mapping[str, ModelInfo]:
        """What the active plan serves."""
        return self._plans.models

    def not_ready(self) -> str:
        """Why no task is taken; empty when one is."""
        if self._stopping:
            return "the agent is stopping"
        if not self._plans.engine_up:
            return "the engine process is starting"
        if self._plans.active is None and not self._plans.exchanging:
            return "a plan is being loaded" if self._plans.loading else "no plan is active"
        return ""

    def submit(self, task: Accepted) -> None:
        """To the engine."""
        try:
            self._engine.submit(task)
        except TaskRefused as error:
            self._endpoint.task_ended(task.id, Outcome.REFUSED, error.code, str(error))

    def cancel(self, task: TaskId) -> None:
        """To the engine; its answer ends the task."""
        self._engine.cancel(task)

    def add_arena(self, arena: Arena) -> None:
        """To the engine."""
        self._engine.add_arena(arena)

    def drop_arena(self, arena: Arena) -> None:
        """To the engine."""
        self._engine.drop_arena(arena)

    def drop_layout(self, layout: Layout) -> None:
        """To the engine."""
        self._engine.drop_layout(layout)

    def trace(self, seconds: float, file: int, ended: Callable[[str], None]) -> None:
        """To the engine; its answer comes later."""
        self._recordings.order(seconds, file, ended)

    def status(self) -> bytes:
        """As JSON."""
        active, pause_s = self._plans.active, self._plans.last_pause_s
        reason = self.not_ready()
        found = AgentStatus(
            version=__version__,
            pid=os.getpid(),
            home=str(self._home.absolute()),
            uptime_s=round(self.loop.now() - self._started_s, 3),
            ready=not reason,
            reason=reason,
            engine=EngineStatus(
                pid=self._engine.pid,
                up=self._plans.engine_up,
                restarts=self._supervisor.restarts,
                last_exit=self._last_exit,
            ),
            plan=plan_status(active.ref, self._plans.models) if active else None,
            trial=trial_status(self._plans, self.loop.now()),
            policy=self._local.status,
            last_pause_ms=None if pause_s is None else round(pause_s * 1e3, 1),
            link=self._link.status(),
            queues=queue_status(self._stats, self._plans.models) if self._stats else (),
            tasks=task_totals(self._ledger),
            applications=self._endpoint.num_connections,
            problems=tuple(self._problems),
        )
        return msgspec.json.encode(found)

    # -- the engine process ---------------------------------------------------------------------------------

    def _on_report(self, report: engine.Report) -> None:
        match report:
            case engine.TaskDone():
                self._task_done(report)
            case engine.Stats():
                self._stats_arrived(report)
            case engine.Ready():
                self._supervisor.started(self.loop.now())
                for arena in self._endpoint.arenas():
                    self._engine.add_arena(arena)
                self._do(self._plans.ready())
                self._profiles.engine_ready()
            case engine.PlanLoaded():
                key = PlanKey(report.key)
                self._do(self._plans.loaded(key, report.stated_bytes, report.memory_bytes))
            case engine.PlanTooLarge():
                self._do(self._plans.too_large(report))
            case engine.Measured():
                self._do(self._plans.measured(report, self.loop.now()))
            case engine.PlanFailed():
                _log.warning("plan %d failed in the engine: %s", report.key, report.reason)
                self._do(self._plans.load_failed(PlanKey(report.key), report.reason))
            case engine.PlanActive():
                self._plan_active(PlanKey(report.key), report.paused_s)
            case engine.PlanReleased():
                self._do(self._plans.released(PlanKey(report.key)))
                self._collect()
            case engine.OperatorTimes():
                self._profiles.operator_times(report)
            case engine.StageTimes():
                self._profiles.stage_times(report)
            case engine.Glance():
                self._glanced(report)
            case engine.RecordingEnded():
                self._recordings.ended(report)
            case engine.Traced():
                plan = self._plans.plan_of(PlanKey(report.key))
                if plan is not None:
                    self._record([trace_row(report, plan.ref.digest)])
            case engine.Exited():
                self._exited(report.returncode)
            case engine.ArenaRefused():
                text = f"tasks that name arena {report.arena} are refused: {report.reason}"
                self._note("arena_refused", text)
            case engine.Drained():
                self._do(self._plans.drained(self.loop.now()))
                self._stop_when_empty()

    def _task_done(self, done: engine.TaskDone) -> None:
        outcome = Outcome(done.outcome)
        if outcome is Outcome.COMPLETED:
            self._waiting.task_completed(done.queued_s, done.ended_s)
        self._endpoint.task_ended(TaskId(done.task), outcome, done.code, done.reason, done.queued_s)
        if self._plans.phase is not None:
            key = None if done.key is None else PlanKey(done.key)
            self._do(self._plans.task_ended(outcome, done.reason, key))
        if self._stopping:
            self._stop_when_empty()

    def _plan_active(self, key: PlanKey, paused_s: float) -> None:
        failpoint("agent.swap.after")
        plan = self._plans.plan_of(key)
        facts = self._plans.facts_of(plan.ref.digest) if plan else None
        if facts is not None:
            self._service = ServiceTimes(facts.members)
        self._do(self._plans.activated(key, self.loop.now(), paused_s))

    def _exited(self, returncode: int) -> None:
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        self._last_exit = how
        self._waiting.engine_restarted()
        self._stats = None
        self._endpoint.end_all(
            Outcome.FAILED,
            "agent_restarted",
            f"the engine process ended ({how}) while the task was in flight; submit it again if wanted",
        )
        self._profiles.engine_exited()
        self._recordings.engine_exited()
        self._do(self._plans.exited(how, self.loop.now()))
        self._collect()

    # -- plans ----------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case CheckPlan(plan):
                self._background.run(lambda: self._checker.check(plan), self._checked)
            case LoadPlan(key, plan):
                paths = {need.digest: str(self.artifacts.path(need.digest)) for need in plan.artifacts}
                self._engine.load_plan(key, plan.wire, paths)
            case SwapTo(key, keep):
                failpoint("agent.swap.before")
                self._engine.activate(key, keep=keep)
            case DrainEngine():
                self._engine.drain(refuse=False)
            case MeasureWindow(number, from_s, to_s, brake_age_s):
                self._engine.measure(engine.Measure(number, from_s, to_s, brake_age_s))
            case Activated(ref, attempt):
                _log.info("plan %s is active", ref.digest[:12])
                self._record([PlanActivated(ref.digest, ref.origin, *attempt)])
                self._local.activated(ref.digest)
            case UnloadPlan(key):
                self._engine.unload(key)
            case StartEngine(delay_s):
                if not self._stopping:
                    self._engine.start_in(delay_s)
            case StopEngine():
                self._engine.end()
            case Tell(event):
                if isinstance(event, link.PlanStaged):
                    failpoint("agent.staged")
                self._link.tell(event)
                if isinstance(event, _ENDS):
                    self._settled = True
                    self._collect(downloads=isinstance(event, link.ProbationPassed))
            case Note(code, text):
                self._note(code, text)
            case KeepFallback(plan):
                failpoint("agent.fallback")
                if problem := self._fallback.save(plan):
                    self._note("storage", problem)

    def _checked(self, result: PlanFacts | PlanUnusable) -> None:
        if isinstance(result, PlanUnusable):
            self._note("plan_unusable", f"plan {result.digest[:12]}: {result.reason}")
            self._do(self._plans.check_failed(result.digest, result.reason, result.damaged))
            return
        self._do(self._plans.checked(result))

    def _collect(self, *, downloads: bool = False) -> None:
        """Remove artifacts that nothing here names; before an attempt has ended the link may hold others."""
        if not self._settled:
            return
        keep = self._plans.needed() | self._profiles.needed() | self._local.needed()
        gone = self.artifacts.collect(keep, downloads=downloads)
        for digest in gone:
            self._link.tell(link.ArtifactGone(digest))

    # -- the link -------------------------------------------------------------------------------------------

    def _on_link(self, events: int) -> None:
        for order in self._link.take():
            match order:
                case link.RestorePlan(plan):
                    self._do(self._plans.restore(plan))
                case link.VerifyPlan(attempt, plan):
                    self._do(self._plans.verify(attempt, plan))
                case link.StagePlan(attempt, plan):
                    self._do(self._plans.stage(attempt, plan))
                case link.RunTrial():
                    self._do(self._plans.run_trial(order, self.loop.now()))
                case link.TrialRecorded(attempt):
                    failpoint("agent.trial.begin")
                    self._do(self._plans.trial_recorded(attempt, self.loop.now()))
                case link.ActivatePlan(attempt, plan, guarded):
                    self._do(self._plans.activate(attempt, plan, guarded=guarded))
                case link.AbandonPlan(attempt):
                    self._do(self._plans.abandon(attempt))
                case link.UsePolicy(digest):
                    self._local.use(digest, self.artifacts)
                case link.RunProfile(request):
                    self._profiles.wanted(request)
                case link.RunStageProfile(stages):
                    self._profiles.wanted(stages)

    # -- telemetry ------------------------------------------------------------------------------------------

    def _count(self) -> None:
        now_s = self.loop.now()
        length_us, self._counted_s = round((now_s - self._counted_s) * 1e6), now_s
        self._record(task_rows(self._ledger.take_intervals(), length_us))

    def _stats_arrived(self, stats: engine.Stats) -> None:
        self._stats = stats
        self._service.add(stats)
        plan = self._plans.plan_of(PlanKey(stats.key)) if stats.key is not None else None
        digest = plan.ref.digest if plan else None
        facts = self._plans.facts_of(digest) if digest else None
        self._profiles.drift.add(
            stats, digest, facts.members if facts else (), lanes=facts.lanes if facts else 1
        )
        self._record(engine_rows(stats, digest, self._service.per_task_us()))

    def _glanced(self, seen: engine.Glance) -> None:
        """Ten times a second: is a re-plan due? Not while a plan is on its way or on trial."""
        oldest_age_s = max((one.oldest_age_s for one in seen.queues), default=0.0)
        self._waiting.seen(seen.at_s, oldest_age_s, {one.name: one.arrived for one in seen.queues})
        if seen.key is None or self._stopping:
            return
        service_s = {name: us * 1e-6 for name, us in self._service.per_task_us().items()}
        held = self._plans.phase is not None
        self._tell_mode()
        drift, mode = self._profiles.drift.ratio, self._machine.power_mode
        fired = self._alarms.glance(seen, service_s, held=held, drift=drift, power_mode=mode)
        if fired is None:
            return
        if self._alarms.told_of(drift):
            self._profiles.drift.answered()
        running = self._plans.plan_of(PlanKey(seen.key))
        self._link.tell(alarm_raised(fired, running, round(time.time() * 1e6)))
        self._local.fired(fired, running)
        firing = fired.firing
        values = f"{firing.value:.6g}, above {firing.threshold:.6g}"
        self._note("alarm", f"{firing.cause.value} is {values}: the planner is asked for another plan")

    def _look_at_machine(self) -> None:
        self._record(self._machine.look())
        self._tell_mode()

    def _tell_mode(self) -> None:
        """Another power mode is another environment; the link knows of it before an alarm that it causes."""
        if self._machine.power_mode != self._mode_told:
            self._mode_told = self._machine.power_mode
            self._link.tell(link.EnvironmentChanged(self._machine.environment()))

    def _note(self, code: str, text: str) -> None:
        _log.warning("%s: %s", code, text)
        self._problems.append(f"{time.strftime('%H:%M:%S')} {code}: {text}")
        self._record([Event(code[:128], text[:512])])

    def _record(self, rows: Sequence[RowData]) -> None:
        if rows:
            self._link.record(rows)
