"""The engine process on the main loop: started, listened to, watched. What it runs is decided elsewhere."""

import logging
from collections.abc import Callable, Mapping

from stageloom.edge_agent.ingest.connection import Arena, Layout
from stageloom.edge_agent.ingest.endpoint import Accepted
from stageloom.edge_agent.loop import READ, WRITE, Loop, Timer
from stageloom.edge_agent.worker.channel import ChannelClosed
from stageloom.edge_agent.worker.config import WorkerConfig
from stageloom.edge_agent.worker.handle import WorkerHandle
from stageloom.edge_agent.worker.messages import Exited, Measure, Profile, ProfileStages, Record, Report
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import StageloomError, TaskRefused, UnavailableError
from stageloom.shared.ids import Digest, TaskId

_log = logging.getLogger(__name__)


class EngineHost:
    """At most one engine process at a time. `on_report` gets everything it says, `Exited` last."""

    def __init__(
        self, loop: Loop, config: WorkerConfig, silent_s: float, on_report: Callable[[Report], None]
    ) -> None:
        self._loop = loop
        self._config = config
        self._silent_s = silent_s
        self._on_report = on_report
        self._handle: WorkerHandle | None = None
        self._life = 0  # counts processes: which of them was told what
        self._timer: Timer | None = None
        self._heard_s = loop.now()
        self._sign_s = loop.now()
        self._watched = 0  # readiness that the loop was last asked for

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return self._handle.pid if self._handle else None

    @property
    def sign_s(self) -> float:
        """When the process last spoke, was started or was seen to end."""
        return self._sign_s

    def start_in(self, delay_s: float) -> None:
        """Start a process after a while; replaces an earlier wish."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._loop.now() + delay_s, self.start)

    def start(self) -> None:
        """Start a process now, if there is none."""
        if self._handle is not None:
            return
        self._watched = 0
        self._life += 1
        try:
            self._handle = WorkerHandle.start(self._config)
        except UnavailableError as error:
            _log.error("%s; trying again in a second", error)
            self.start_in(1.0)
            return
        self._heard_s = self._sign_s = self._loop.now()
        self._watch()

    def _watch(self) -> None:
        if self._handle is None or (file := self._handle.fileno()) < 0:
            return
        events = READ | (WRITE if self._handle.wants_write else 0)
        if events != self._watched:
            self._watched = events
            self._loop.watch(file, events, self._ready)

    def _ready(self, events: int) -> None:
        handle = self._handle
        if handle is None:
            return
        file = handle.fileno()
        reports = handle.poll()
        if handle.fileno() < 0:
            self._loop.watch(file, 0, self._ready)
            self._handle = None
        self._heard_s = self._sign_s = self._loop.now()
        for report in reports:
            self._on_report(report)
        self._watch()

    def check_alive(self, *, busy: bool) -> None:
        """Kill a process that has been silent for too long, unless it is loading (`busy`)."""
        if self._handle is None or busy:
            self._heard_s = self._loop.now()
        elif self._loop.now() - self._heard_s > self._silent_s:
            _log.error("the engine process has been silent for %g s and is killed", self._silent_s)
            self.end()

    def end(self) -> None:
        """End the process by force; `Exited` is reported as after a crash."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._sign_s = self._loop.now()
        self._loop.watch(handle.fileno(), 0, self._ready)
        self._on_report(Exited(handle.stop(timeout_s=0.2)))

    def shut_down(self) -> None:
        """End the process for good, without a report."""
        if self._timer is not None:
            self._timer.cancel()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._loop.watch(handle.fileno(), 0, self._ready)
            handle.stop(timeout_s=2.0)

    def submit(self, task: Accepted) -> None:
        """Hand a task over.

        Raises:
            TaskRefused: the process does not take more now (`engine_busy`).
        """
        handle, layout = self._handle, task.layout
        if handle is None:
            return  # it has just ended: the task is answered with the others
        try:
            if layout.told != self._life:
                handle.declare(layout.id, layout.declared.models, layout.inputs, layout.outputs)
                layout.told = self._life
            handle.submit(task.id, layout.id, task.priority, task.deadline_s)
        except ChannelClosed:
            return  # as above: `Exited` is on its way
        except UnavailableError as error:
            raise TaskRefused("engine_busy", error.cause, remedy="submit more slowly") from error
        except ValueError as error:
            raise TaskRefused("too_many_tensors", str(error)) from error
        self._sent(handle)

    def cancel(self, task: TaskId) -> None:
        """End a task early."""
        self._send(lambda handle: handle.cancel(task))

    def add_arena(self, arena: Arena) -> None:
        """Let the process map an application's arena."""
        self._send(lambda handle: handle.add_arena(arena.id, arena.descriptor, arena.nbytes))

    def drop_arena(self, arena: Arena) -> None:
        """Let it forget the arena."""
        self._send(lambda handle: handle.drop_arena(arena.id))

    def drop_layout(self, layout: Layout) -> None:
        """Let it forget a layout, if it knows it."""
        if layout.told == self._life:
            self._send(lambda handle: handle.retract(layout.id))

    def load_plan(self, key: PlanKey, wire: bytes, artifacts: Mapping[Digest, str]) -> None:
        """Load a plan beside the one that runs."""
        self._send(lambda handle: handle.load_plan(key, wire, artifacts))

    def activate(self, key: PlanKey, *, keep: bool = False) -> None:
        """Send new launches to a loaded plan; with `keep` the one before stays loaded."""
        self._send(lambda handle: handle.activate(key, keep=keep))

    def measure(self, window: Measure) -> None:
        """Count what happens between two instants."""
        self._send(lambda handle: handle.measure(window))

    def unload(self, key: PlanKey) -> None:
        """Free a loaded plan that does not run."""
        self._send(lambda handle: handle.unload(key))

    def profile(self, request: Profile) -> None:
        """Time the operators of an artifact."""
        self._send(lambda handle: handle.profile(request))

    def profile_stages(self, request: ProfileStages, wire: bytes) -> None:
        """Time the stages of a plan."""
        self._send(lambda handle: handle.profile_stages(request, wire))

    def trace(self, on: bool) -> None:
        """Report every step with the times of its groups, or stop doing so."""
        self._send(lambda handle: handle.trace(on))

    def record(self, order: Record, fd: int) -> bool:
        """Record everything for a while into a file; False if there is no process to do it."""
        self._send(lambda handle: handle.record(order, fd))
        return self._handle is not None

    def drain(self, *, refuse: bool) -> None:
        """Launch nothing, report `Drained`; with `refuse` take no more tasks, else they wait."""
        self._send(lambda handle: handle.drain(refuse=refuse))

    def _send(self, command: Callable[[WorkerHandle], None]) -> None:
        if self._handle is None:
            return
        try:
            command(self._handle)
        except StageloomError as error:
            # Gone: `Exited` is on its way. Not reading: `check_alive` ends it.
            _log.warning("a command did not reach the engine process: %s", error)
            return
        self._sent(self._handle)

    def _sent(self, handle: WorkerHandle) -> None:
        if handle.wants_write:
            self._watch()
