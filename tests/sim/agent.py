"""A simulated agent: the lifecycle core in one main process, an engine process, and a disk.

The link's files are real ones, written by the real code in a folder of its own; failpoints in that code are
where the process stops, or where its disk is full.
"""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.check import PlanChecker, PlanUnusable
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.events import (
    CheckPlan,
    JournalNote,
    KeepFallback,
    LoadInEngine,
    StartEngine,
    StopEngine,
)
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.probation import ProbationConfig
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.statefile import load_state, save_state
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.edge_agent.link import fetch as fetching
from stageloom.edge_agent.store import ArtifactStore, StateFile
from stageloom.edge_agent.worker import messages as engine
from stageloom.edge_agent.worker.messages import OpenWindow, PauseLaunches, SwitchPlan, Unload
from stageloom.planner.dispatch.events import Lane
from stageloom.shared.engine.interval_guard import GuardConfig
from stageloom.shared.engine.steps import Outcome, PlanKey, Task
from stageloom.shared.engine.trial import TrialConfig
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import TaskId
from stageloom.shared.messages import telemetry
from stageloom.shared.messages.bulk import ChunkRequest
from stageloom.shared.messages.control import Alarm, Origin
from stageloom.shared.messages.telemetry import PlanActivated, TrialEnded
from tests.sim.engine import KILLED, STOPPED, EngineProcess
from tests.sim.library import KnownPlan
from tests.sim.spool import WatchedSpool

if TYPE_CHECKING:
    from tests.sim.world import World

CHUNK_BYTES: Final = 128
SPOOL_BYTES: Final = 20 << 10
_DISK_POINTS: Final = frozenset(
    {"agent.state.before", "agent.commit.before", "agent.artifact.append", "agent.spool.append"}
)
"""Failpoints at which a full disk shows as an error that the code is made for."""


_PROBATION: Final = ProbationConfig(length_s=2.0, min_failed=1, guard=GuardConfig(length_s=2.0))
_TRIAL: Final = TrialConfig(
    timing_s=3.0,
    shortest_window_s=0.4,
    instance_times=1.0,
    min_pairs=3,
    limit_s=8.0,
    stall_s=3.0,
    min_failed=1,
)


class Crash(BaseException):
    """The agent's main process stops here."""


class Agent:
    """One agent over all its lives."""

    def __init__(self, world: "World", name: str, folder: Path, key: str) -> None:
        self.world = world
        self.name = name
        self.key = key
        self.home = folder / name
        self.home.mkdir()
        self.up = False
        self.life = 0
        self.ended = False  # it never comes back
        self.route = b""
        self.environment = "here"
        self.open: dict[TaskId, Task] = {}
        self.engine: EngineProcess | None = None
        self._state_path = self.home / "link.state"

    # -- life and death -------------------------------------------------------------------------------------

    def start(self) -> None:
        """The main process starts: only the disk remains."""
        if self.ended:
            return
        world, rng = self.world, self.world.rng
        self.life += 1
        self.up = True
        state, problem = load_state(self._state_path)
        world.watch.booted(self, state, problem)
        world.note(self.name, "starts: %s %s", state.state and state.state.value, problem or "")
        boot = rng.getrandbits(61) | 1
        wall_s = world.wall_us() * 1e-6 - world.now_s
        self.fetcher = fetching.FetchCore(chunk_bytes=CHUNK_BYTES, again_after_s=2.0)
        self.spool = WatchedSpool(self.home / "spool", boot=boot, limit_bytes=SPOOL_BYTES, write=self._write)
        self.artifacts = ArtifactStore(self.home / "artifacts")
        self._checker = PlanChecker(self.artifacts)
        self._fallback_file = StateFile(self.home / "fallback")
        self.supervisor = Supervisor(Random(rng.random()))
        self.waiting = WaitingLog()
        self.manager = PlanManager(
            self.supervisor,
            self._load_fallback(),
            waiting=self.waiting,
            rng=Random(rng.random()),
            probation=_PROBATION,
            trial=_TRIAL,
            load_limit_s=6.0,
        )
        self.core = Lifecycle(state, config=LinkConfig(boot=boot), plans=self.manager)
        self.core.wall_s = wall_s
        self.batch_sent_s = float("-inf")
        self._told_state: object = None
        self._settled = False
        self._background = world.pipe()
        self._begin_engine()
        self._guard(self._boot)
        self._again(world.pace.tick_s, self._tick)
        self._again(world.pace.measure_s, self._measure)
        self._again(world.pace.task_s, self._submit)
        self.reconnect(0.1)

    def _boot(self) -> None:
        self.core.boot(self.environment, self.artifacts.present(), self.world.now_s)
        self.run()

    def crash(self, *, torn: bool = False, away_s: float | None = None) -> None:
        """The main process is gone, and the engine process with it; it starts again after a while."""
        world = self.world
        if not self.up:
            return
        world.note(self.name, "main process stops%s", ", the last write is cut off" if torn else "")
        world.happened["torn" if torn else "agent_crash"] += 1
        self.up = False
        self._background.close()
        if self.engine is not None:
            self.engine.reports.close()
            self.engine.exit(KILLED, "the agent is gone")
            self.engine = None
        self.spool.close()
        self.open.clear()
        world.network.closed(self.route)
        self.route = b""
        if torn:
            self._tear()
        world.later(world.rng.random() * 3 if away_s is None else away_s, self.start)

    def _tear(self) -> None:
        """What was written last is cut off at some byte, as after a loss of power with a careless disk."""
        unsent = sorted((self.home / "spool").glob("*.new"), key=lambda path: path.stat().st_mtime_ns)
        fresh = self._state_path.with_name(self._state_path.name + ".new")
        state = fresh if fresh.exists() else self._state_path
        for path in (state, *unsent[-1:]):
            if path.exists() and self.world.rng.random() < 0.7:
                os.truncate(path, self.world.rng.randrange(path.stat().st_size + 1))

    def _guard(self, do: Callable[[], None]) -> None:
        """Run a part of the main process, which may stop at any failpoint within."""
        world = self.world
        before, world.runs_now = world.runs_now, self
        try:
            do()
        except Crash:
            self.crash(torn=world.chance(world.faults.torn))
        finally:
            world.runs_now = before

    def reached(self, point: str) -> None:
        """A failpoint in code of the main process."""
        world = self.world
        world.points.add(point)
        if world.chance(world.faults.agent_crash):
            world.note(self.name, "stops at %s", point)
            raise Crash
        if point in _DISK_POINTS and world.chance(world.faults.disk):
            world.happened["disk"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def _again(self, every_s: float, do: Callable[[], None]) -> None:
        life = self.life

        def go() -> None:
            if self.up and self.life == life:
                self._guard(do)
                self.world.later(every_s, go)

        self.world.later(every_s, go)

    def _write(self, file: int, data: bytes) -> int:
        if self.world.chance(self.world.faults.disk):
            os.write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, data)

    # -- the link's thread ----------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """An event of the core."""
        if self.up:
            self._guard(lambda: self.handle(event))

    def handle(self, event: ev.Event) -> None:
        """The same, within the main process."""
        self.core.handle(event, self.world.now_s)
        self.run()

    def manage(self, actions: Sequence[ev.Action]) -> None:
        """Carry out what the plan manager decided."""
        self.core.add(actions)
        self.run()

    def run(self) -> None:
        """Carry out what the core decided, as `stageloom.edge_agent.lifecycle.shell` does."""
        while (action := self.core.next(self.world.now_s)) is not None:
            self.reached(f"lifecycle.{type(action).__name__}")
            self._carry_out(action)

    def _persist(self, state: LinkState) -> None:
        self.world.watch.saving(self, state)
        try:
            save_state(self._state_path, state)
        except OSError as error:
            self.core.persist_failed(str(error), self.world.now_s)
            return
        self.core.persisted(state)
        self.world.watch.saved(self, state)
        self._record_state(state)

    def _record_state(self, state: LinkState) -> None:
        if state.desired is None or state.state is None:
            return
        told = (state.desired.epoch, state.desired.generation, state.state)
        if told != self._told_state:
            self._told_state = told
            self.world.note(self.name, "is %s in %s.%s %s", state.state.value, *told[:2], state.reason)
            self.record([telemetry.Event("state", state.state.value)])

    def _tick(self) -> None:
        world = self.world
        if world.chance(world.faults.environment * world.pace.tick_s):
            world.happened["environment"] += 1
            self.environment = world.rng.choice(("here", "there"))
            self.handle(ev.EnvironmentChanged(self.environment))
        self.handle(ev.TimePassed())
        self._fetch(self.fetcher.tick(world.now_s))
        if self.core.session.welcomed and world.now_s - self.batch_sent_s > 2.0:
            batch = self.spool.next_batch(int(world.now_s * 1000))
            if batch is not None:
                self.batch_sent_s = world.now_s
                self.send(Lane.TELEMETRY, batch)
        self.manage(self.manager.tick(world.now_s))

    def _fetch(self, actions: Sequence[fetching.FetchAction]) -> None:
        for action in actions:
            match action:
                case ChunkRequest():
                    self.send(Lane.BULK, action)
                case ev.FetchFailed():
                    self.handle(action)
                case fetching.Write() | fetching.Finish():
                    if not self._keep(action):
                        return

    def _keep(self, action: fetching.Write | fetching.Finish) -> bool:
        digest = action.digest
        try:
            if isinstance(action, fetching.Write):
                self.artifacts.append(digest, action.offset_bytes, action.data)
            elif self.artifacts.finish(digest):
                self.handle(ev.ArtifactPresent(digest))
            else:
                self.handle(ev.FetchFailed(digest, "damaged"))
        except OSError as error:
            self.fetcher.stop(digest)
            self.handle(ev.FetchFailed(digest, f"cannot be stored: {error}"))
            return False
        return True

    # -- telemetry ------------------------------------------------------------------------------------------

    def record(self, rows: Sequence[telemetry.RowData]) -> None:
        """Into the spool, stamped by a clock that jumps."""
        at_us = self.world.wall_us()
        self.spool.append([telemetry.encode_row(telemetry.Row(at_us, row)) for row in rows])

    def _measure(self) -> None:
        rng = self.world.rng
        if self.world.measures:
            row = telemetry.Event("x" * rng.randint(1, 128), "y" * rng.randint(0, 400))
            self.record([row] * rng.randint(1, 12))

    # -- the main loop: plans -------------------------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:
        process, world = self.engine, self.world
        match action:
            case ev.Persist(state):
                self._persist(state)
            case ev.Hold(state):
                self.core.held(state)
                world.watch.held(self, state)
                self._record_state(state)
            case ev.SendMessage(message):
                self.send(Lane.CONTROL, message)
            case ev.FetchArtifact(need):
                self.fetcher.credits = self.core.session.bulk_credits
                self._fetch(self.fetcher.want(need, self.artifacts.partial_bytes(need.digest), world.now_s))
            case TrialEnded():
                self.record([action])
            case ev.Reconnect(reason, delay_s):
                world.note(self.name, "reconnects: %s", reason)
                self.reconnect(delay_s if delay_s is not None else world.rng.random())
            case CheckPlan(plan):
                self._background.put(lambda: self._guard(lambda: self._checked(self._checker.check(plan))))
            case LoadInEngine(key, plan):
                if process is not None:
                    process.command(lambda: process.load(PlanKey(key), plan.ref.digest))
            case SwitchPlan(key, keep):
                if process is not None:
                    process.command(lambda: process.activate(PlanKey(key), keep))
            case PauseLaunches():
                if process is not None:
                    process.command(process.drain)
            case OpenWindow():
                if process is not None:
                    process.command(lambda: process.measure(action))
            case PlanActivated():
                telemetry.encode_row(telemetry.Row(world.wall_us(), action))  # it may leave the device
                self.world.note(self.name, "runs %s", action.plan[:8])
            case Unload(key):
                if process is not None:
                    process.command(lambda: process.unload(PlanKey(key)))
            case StartEngine(delay_s):
                life = self.life
                self.world.later(
                    delay_s, lambda: self._begin_engine() if self.up and self.life == life else None
                )
            case StopEngine():
                if process is not None:
                    process.exit(STOPPED, "told to stop")
            case ev.CollectArtifacts(downloads):
                self._settled = True
                self._collect(downloads=downloads)
            case JournalNote(code, text):
                self.world.note(self.name, "notes %s: %s", code, text)
            case KeepFallback(plan):
                try:
                    self._fallback_file.save(msgspec.msgpack.encode(plan))
                except StorageError as error:
                    self.world.note(self.name, "%s", error)
            case _:
                raise AssertionError(f"the simulated agent does not know {action}")

    def _checked(self, result: PlanFacts | PlanUnusable) -> None:
        if isinstance(result, PlanUnusable):
            failed = self.manager.check_failed
            self.manage(failed(result.digest, result.reason, result.damaged, may_pass=result.may_pass))
        else:
            self.manage(self.manager.checked(result))

    def _load_fallback(self) -> RunnablePlan | None:
        body = self._fallback_file.load().body
        return None if body is None else msgspec.msgpack.decode(body, type=RunnablePlan)

    def _collect(self, *, downloads: bool = False) -> None:
        if self._settled:
            for digest in self.artifacts.collect(self.core.needed(), downloads=downloads):
                self.handle(ev.ArtifactGone(digest))

    # -- the engine process and its tasks -------------------------------------------------------------------

    def _begin_engine(self) -> None:
        if self.engine is None:
            self.engine = EngineProcess(self)

    def report(self, process: EngineProcess, report: engine.Report) -> None:
        """The engine process says something."""
        if self.up and process is self.engine:
            self._guard(lambda: self._reported(report))

    def _reported(self, report: engine.Report) -> None:
        manager, now_s = self.manager, self.world.now_s
        match report:
            case engine.Ready():
                self.supervisor.started(now_s)
                self.manage(manager.ready())
            case engine.PlanLoaded(key, _, stated_bytes, memory_bytes):
                self.manage(manager.loaded(PlanKey(key), stated_bytes, memory_bytes))
            case engine.PlanFailed(key, reason):
                self.manage(manager.load_failed(PlanKey(key), reason))
            case engine.PlanActive(key):
                self.manage(manager.activated(PlanKey(key), now_s, 0.0))
            case engine.Drained():
                self.manage(manager.drained())
            case engine.Settled(key):
                self.manage(manager.settled(PlanKey(key), now_s))
            case engine.WindowMeasured():
                self.manage(manager.measured(report, now_s))
            case engine.PlanReleased(key):
                self.manage(manager.released(PlanKey(key)))
                self._collect()
            case engine.TaskDone():
                self._task_done(report)
            case engine.Exited(returncode):
                self.engine = None
                self.world.happened["engine_exit"] += 1
                self.world.watch.tasks_ended(self, len(self.open))
                self.open.clear()
                self.waiting.engine_restarted()
                how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
                self.manage(manager.exited(how, now_s))
                self._collect()

    def _submit(self) -> None:
        """An application sends a few tasks, as the endpoint would let it."""
        models = list(self.manager.models)
        process = self.engine
        if process is None or not self.manager.engine_up or self.manager.active is None or not models:
            return
        for _ in range(self.world.rng.randint(1, 2)):
            task = Task(id=self.world.new_task(), models=(self.world.rng.choice(models),), nbytes=10)
            self.open[task.id] = task
            process.command(lambda task=task: process.take(task))  # type: ignore[misc]

    def _task_done(self, done: engine.TaskDone) -> None:
        assert self.open.pop(done.task, None), "a task ended that was not open"
        self.world.watch.tasks_ended(self, 1)
        self.world.outcomes[done.outcome] += 1
        if done.outcome is Outcome.COMPLETED:
            self.waiting.task_completed(done.queued_s, done.ended_s)
        if self.manager.phase is not None:
            self.manage(self.manager.task_ended(done.outcome, done.reason, done.plan))

    # -- the network ----------------------------------------------------------------------------------------

    def reconnect(self, delay_s: float) -> None:
        """Drop the connection; the next stands after a while, if there is a planner to be reached."""
        network, life = self.world.network, self.life
        network.closed(self.route)
        self.route = b""
        self.fetcher.lost()
        self.batch_sent_s = float("-inf")

        def connect() -> None:
            if not self.up or self.life != life or self.route:
                return
            if not network.open:
                self.world.later(0.5 + self.world.rng.random(), connect)
                return
            self.route = network.connect(self)
            self.tell(ev.Connected())

        self.world.later(delay_s, connect)

    def lost(self) -> None:
        """The connection broke, and this end has noticed."""
        if self.up:
            self.reconnect(0.2)
            self.tell(ev.Lost())

    def send(self, lane: Lane, message: Any) -> None:
        """Towards the planner, if there is a connection."""
        if self.route:
            self.world.network.up(self, lane, message)

    def receive(self, lane: Lane, message: Any) -> None:
        """From the planner."""
        if lane is Lane.CONTROL:
            self.tell(ev.Received(message))
        elif lane is Lane.BULK:
            self._guard(lambda: self._fetch(self.fetcher.received(message, self.world.now_s)))
        elif isinstance(message, telemetry.TelemetryAck):
            self._guard(lambda: self.spool.acknowledge(message))
            self.batch_sent_s = float("-inf")

    # -- a trigger ------------------------------------------------------------------------------------------

    def alarm(self, plan: KnownPlan) -> None:
        """Queues diverge, and this plan would be run without the planner."""
        ref = PlanRef(plan.digest, Origin.LOCAL)
        local = RunnablePlan(ref, plan.wire, plan.needs)
        raised = Alarm(
            boot=0,
            number=1,
            at_us=self.world.wall_us(),
            cause="variance",
            value=2.0,
            threshold=1.0,
            plan=None,
            loads=(),
            samples=(),
        )
        self.tell(raised)
        self.tell(ev.PlansMade((local,)))

    # -- what the disk does by itself -----------------------------------------------------------------------

    def damage(self) -> None:
        """One byte of one artifact changes, whole or partial."""
        rng = self.world.rng
        folder = self.home / "artifacts"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if files:
            path = rng.choice(files)
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 + rng.randrange(255)
            path.write_bytes(data)
            self.world.happened["corrupt"] += 1
            self.world.note(self.name, "artifact %s is damaged", path.name[:12])
