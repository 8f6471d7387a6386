"""The engine process: commands from the agent drive the engine, what becomes of them goes back as reports.

Commands are taken one after the other, in the order in which they came, by an idle lane or, while every lane
is busy, by the main thread.
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import SimpleQueue
from typing import NoReturn

from msgspec.structs import replace

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.executor.timing import Idleness
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.accounting import WindowTimer
from stageloom.edge_agent.worker.arena_tasks import Application, ArenaTasks
from stageloom.edge_agent.worker.channel import Channel, ChannelClosed
from stageloom.edge_agent.worker.messages import MAX_MESSAGE_BYTES, Handlers, Report, WorkerConfig
from stageloom.edge_agent.worker.output_comparer import OutputComparer
from stageloom.edge_agent.worker.profiling import Profiler, read_plan
from stageloom.edge_agent.worker.recorder import Recording
from stageloom.edge_agent.worker.resources import ArtifactTable, MemoryBudget, budget
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.engine.steps import Outcome, PlanKey, Step
from stageloom.shared.errors import StageloomError, UnavailableError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.plan import decode_plan

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 60.0
"""A plan is reported as loaded after this time even where programs are missing: those run as a fallback."""

_DISPENSABLE = (messages.StepTraced, QueueSnapshot)
"""Reports that nobody waits for: one that fits no message must not end the process."""

_DRAIN_POLL_S = 0.005
_EXIT_BUG = 70


class EngineProcess:
    """One life of the engine; `run` is its main thread, and reports what is due."""

    def __init__(self, channel: Channel, ends: Channel, config: WorkerConfig) -> None:
        """`ends` takes what wakes nobody: ends of tasks that their application is told of here."""
        self._config = config
        self._channel = channel
        self._ends = ends
        self._sending = threading.Lock()  # through either
        self._taking = threading.Lock()  # while commands are carried out, and what they asked for
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._executors = Executors()
        self._driver: EngineRuntime | None = None  # from the first plan on
        self._tasks = ArenaTasks(self.report, self._report_end, lambda: self._driver)
        self._artifacts = ArtifactTable()
        self._loads: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loading = set[PlanKey]()  # and those that wait for their turn
        self._profiler = Profiler(
            self.report,
            lambda: self._driver,
            self._executors,
            self._artifacts,
            Idleness(self._quiet, lambda: 0 if self._driver is None else self._driver.arrived),
            config.memory_bytes,
            tries_plan=lambda: bool(self._loading) or self._comparer.busy,
            on_lost=_end_without_device,
        )
        self._comparer = OutputComparer(
            self.report,
            lambda: self._driver,
            self._executors,
            self._artifacts,
            self._quiet,
            config.memory_bytes,
            on_lost=_end_without_device,
        )
        self._draining = False
        self._settling: PlanKey | None = None  # took the place of a plan that still may have steps in flight
        self._paused_s: float | None = None  # since when nothing is launched
        self._measuring = WindowTimer(lambda: self._driver, self.report)
        self._recording = Recording(lambda: self._driver, self.report)
        self._handlers: Handlers = {
            **self._tasks.handlers,
            **self._profiler.handlers,
            **self._comparer.handlers,
            messages.LoadPlan: self._load_plan,
            messages.SwitchPlan: self._switch,
            messages.Unload: self._switch,
            messages.PauseLaunches: self._pause,
            messages.TraceSteps: self._trace,
            messages.OpenWindow: self._measuring.order,
            messages.StartRecording: self._record,
            messages.Stop: self._stop,
        }
        self._next_stats_s = time.monotonic() + config.stats_interval_s
        self._next_sign_s = time.monotonic() if config.sign_interval_s else math.inf
        self._next_sample_s = time.monotonic() if config.sample_interval_s else math.inf

    def run(self) -> NoReturn:
        """Serve until told to stop or until the agent is gone; then end the process.

        Threads inside a backend cannot be interrupted and would hold up an ordinary exit.
        """
        threading.Thread(target=_work, args=(self._loads,), name="load", daemon=True).start()
        self._profiler.start()
        self._comparer.start()
        self.report(messages.Ready(os.getpid()))
        self._serve()

    def _report_end(self, done: messages.TaskDone, application: Application | None, packet: bytes) -> None:
        """Report an end where it wakes nobody, then tell the application.

        One end at a time: if the process ends between the two, the last one that was reported is the only one
        that its application may not know, and the agent tells it. The agent is woken to tell an end itself,
        and for a failure, by which it may judge a plan.
        """
        if application is None or done.outcome is Outcome.FAILED:
            self.report(done)
            return
        with self._sending:
            reported = self._ends.try_send(messages.encode(replace(done, told=True)))
            if reported and not application.take(packet):
                self._send(messages.PassOn(application.id, packet))
        if not reported:
            self.report(done)

    def report(self, report: Report) -> None:
        """Send a report, from any thread."""
        with self._sending:
            self._send(report)

    def _send(self, report: Report) -> None:
        message = messages.encode(report)
        if len(message) > MAX_MESSAGE_BYTES and isinstance(report, _DISPENSABLE):
            log.error("a %s of %d bytes is left out: it fits no message", type(report).__name__, len(message))
            return
        try:
            self._channel.send(message)
        except ChannelClosed:
            return  # the main thread reads the same end and ends the process
        except UnavailableError:
            log.error("the agent has not read its reports for a long time")
            os._exit(_EXIT_BUG)
        if self._channel.backlog:
            os.eventfd_write(self._nudge, 1)

    def _serve(self) -> NoReturn:
        epoll, channel = select.epoll(), self._channel.fileno()
        epoll.register(self._nudge, select.EPOLLIN)
        while True:
            # Anew each time: this thread is the last to be woken, behind every lane.
            sends = select.EPOLLOUT if self._channel.backlog else 0
            epoll.register(channel, select.EPOLLIN | select.EPOLLEXCLUSIVE | sends)
            wait_s = max(self._due_s - time.monotonic(), 0.0)
            if self._awaits_steps:
                wait_s = min(wait_s, _DRAIN_POLL_S)
            for fd, _ in epoll.poll(wait_s):
                if fd == self._nudge:
                    os.eventfd_read(self._nudge)
            epoll.unregister(channel)
            if sends:
                with self._sending, contextlib.suppress(ChannelClosed):  # reading finds out, too
                    self._channel.flush()
            self.take()
            if self._awaits_steps or self._due_s <= time.monotonic():
                with self._taking:
                    self._report_regularly()

    @property
    def _awaits_steps(self) -> bool:
        """Whether to look often: something waits for the last step of a plan to end."""
        return self._draining or self._settling is not None

    @property
    def _due_s(self) -> float:
        """When there is something to report or to measure."""
        reports_s = min(self._next_stats_s, self._next_sign_s, self._next_sample_s)
        return min(reports_s, self._measuring.due_s, self._recording.due_s)

    def fileno(self) -> int:
        """What commands come from."""
        return self._channel.fileno()

    def take(self) -> None:
        """Carry out the commands that wait, on any thread; end the process once the agent is gone."""
        try:
            with self._taking:
                while (received := self._channel.receive()) is not None:
                    self._execute(*received)
        except ChannelClosed:
            log.info("the agent is gone")
            os._exit(0)

    def _execute(self, message: bytes, fds: list[int]) -> None:
        try:
            command = messages.decode_command(message)
            kind = type(command)
            self._handlers[kind](command, fds)
            if kind not in self._tasks.handlers:
                os.eventfd_write(self._nudge, 1)  # it may have something to report, or to wait for
        except (StageloomError, ValueError, OSError) as error:
            log.error("a command could not be carried out: %s", error)
        finally:
            for fd in fds:
                os.close(fd)

    def _stop(self, command: messages.Stop, fds: list[int]) -> NoReturn:
        with self._sending:
            self._channel.flush()
        os._exit(0)

    # Plans

    def _load_plan(self, command: messages.LoadPlan, fds: list[int]) -> None:
        key, wire = PlanKey(command.key), read_plan(fds)
        self._loading.add(key)
        self._loads.put(lambda: self._load(key, wire, command.artifacts))

    def _load(self, key: PlanKey, wire: bytes, paths: Mapping[str, str]) -> None:
        """Load a plan on the loading thread; whatever goes wrong is reported, and what runs goes on."""
        try:
            failpoint("engine.load")
            plan = decode_plan(wire)
            artifacts = {m.artifact: self._artifacts.use(key, m.artifact, paths) for m in plan.models}
            bound = bind(plan, {digest: artifact.graph for digest, artifact in artifacts.items()})
            driver = self._driver or EngineRuntime(
                self._executors, on_released=self._released, on_lost=_end_without_device, commands=self
            )
            try:
                stated_bytes, free = self._admit(bound)
                driver.load(key, bound, artifacts)
            except BaseException:
                if driver is not self._driver:
                    driver.close()  # its threads; the next plan gets another
                raise
            self._driver = driver
            missing = driver.wait_prepared(key, PREPARE_TIMEOUT_S)
        except _TooLargeError as error:
            self._artifacts.release(key)
            self.report(messages.PlanTooLarge(key, *error.args))
        except Exception as error:  # the plan is refused and what ran before runs on
            reason = str(error)
            if not isinstance(error, StageloomError | ValueError | OSError):  # a backend's
                log.exception("plan %d could not be loaded", key)
                reason = f"{type(error).__name__}: {error}"
            if self._executors.lost():
                _end_without_device(reason)  # unanswered, so that it is this plan's
            self._artifacts.release(key)
            self.report(messages.PlanFailed(key, reason))
        else:
            failpoint("engine.loaded")
            self.report(messages.PlanLoaded(key, missing == 0, stated_bytes, free.memory_bytes))
        self._loading.discard(key)  # behind the report: from it on a crash may be a measurement's again

    def _admit(self, bound: BoundPlan) -> tuple[int, MemoryBudget]:
        """What a plan would add, and what there is for it.

        Raises:
            ExecutorError: its executor cannot be made.
            _TooLargeError: it does not fit beside what is loaded.
        """
        stated_bytes, free = self._room(bound)
        if stated_bytes > free.room_bytes:
            self._executors.drop_idle()
            stated_bytes, free = self._room(bound)
        if stated_bytes > free.room_bytes:
            alone_bytes = self._executors.stated_bytes(bound, alone=True)
            raise _TooLargeError(stated_bytes, free.room_bytes, alone_bytes, free.memory_bytes)
        return stated_bytes, free

    def _room(self, bound: BoundPlan) -> tuple[int, MemoryBudget]:
        executors = self._executors
        return executors.stated_bytes(bound), budget(self._config.memory_bytes, executors.held_bytes)

    def _switch(self, command: messages.SwitchPlan | messages.Unload, fds: list[int]) -> None:
        key = PlanKey(command.key)
        try:
            if self._driver is None:
                raise ValueError("no plan is loaded")
            if isinstance(command, messages.Unload):
                self._driver.unload(key)
                return
            failpoint("engine.activate")
            self._driver.activate(key, keep=command.keep)
        except ValueError as error:
            self.report(messages.PlanFailed(key, str(error)))
        else:
            paused_s = time.monotonic() - self._paused_s if self._paused_s is not None else 0.0
            self._draining, self._paused_s = False, None
            self._settling = key if command.keep else None
            failpoint("engine.activated")
            self.report(messages.PlanActive(key, paused_s))

    def _pause(self, command: messages.PauseLaunches, fds: list[int]) -> None:
        self._draining = True
        self._paused_s = time.monotonic() if self._paused_s is None else self._paused_s
        if self._driver is not None:
            self._driver.drain(refuse=command.refuse)

    def _released(self, key: PlanKey) -> None:
        self._artifacts.release(key)
        self.report(messages.PlanReleased(key))

    # Observation

    def _report_regularly(self) -> None:
        driver = self._driver
        self._measuring.advance(time.monotonic())
        self._recording.advance(time.monotonic())
        if self._draining and (driver is None or driver.idle):
            self._draining = False
            self.report(messages.Drained())
        if self._settling is not None and driver is not None and driver.settled:
            settled, self._settling = self._settling, None
            self.report(messages.Settled(settled))
        now = time.monotonic()
        if now >= self._next_stats_s:
            self._next_stats_s = now + self._config.stats_interval_s
            self.report(_stats(driver))  # without a plan, too: silence means that the process hangs
        if now >= self._next_sign_s:
            self._next_sign_s = now + self._config.sign_interval_s
            self.report(messages.Stats(now, None, 0.0, (), (), sign=True))
        if now >= self._next_sample_s:
            # An even pace, but no crowd of samples after a pause.
            self._next_sample_s = max(self._next_sample_s + self._config.sample_interval_s, now)
            if driver is not None and driver.active_key is not None:
                self.report(driver.sample())

    def _trace(self, command: messages.TraceSteps, fds: list[int]) -> None:
        if self._driver is not None:
            self._driver.observe(self._traced if command.on else None)

    def _record(self, command: messages.StartRecording, fds: list[int]) -> None:
        try:
            if not fds:
                raise OSError("it came without its file")
            self._recording.order(command, fds[0], time.monotonic())
        except OSError as error:
            self.report(messages.RecordingEnded(command.number, f"it cannot begin: {error}"))

    def _traced(self, step: Step, result: StepResult) -> None:
        driver = self._driver
        self.report(traced(step, result, whole=driver is not None and driver.is_whole(step)))

    def _quiet(self) -> bool:
        """Whether something else may run: not beside a task, and not in a window of a trial."""
        return (self._driver is None or self._driver.quiet) and not self._measuring.busy


def traced(step: Step, result: StepResult, *, whole: bool) -> messages.StepTraced:
    """The report of a step; it fits a message however many groups there are. `whole`: but for its groups."""
    program, groups = step.program, result.groups
    return messages.StepTraced(
        step.id,
        step.lane,
        program.plan,
        program.combined,
        program.mask,
        result.started_s,
        result.ended_s,
        groups[: messages.MAX_GROUPS],
        whole and len(groups) <= messages.MAX_GROUPS,
    )


def _work(jobs: SimpleQueue[Callable[[], None]]) -> NoReturn:
    while True:
        jobs.get()()


def _end_without_device(problem: str) -> NoReturn:
    """The agent starts another process, which has the device anew, and counts the crash against what was
    worked on."""
    log.critical("the device is lost to the engine process, which ends: %s", problem)
    os._exit(_EXIT_BUG)


class _TooLargeError(Exception):
    """What the plan states does not fit beside what is loaded; its arguments are PlanTooLarge's sizes."""


def _stats(driver: EngineRuntime | None) -> messages.Stats:
    if driver is None:
        return messages.Stats(time.monotonic(), None, 0.0, (), ())
    engine, combined, busy_s = driver.snapshot()
    models = tuple(
        messages.QueueStats(m.name, m.queued, m.oldest_age_s, asdict(m.ended)) for m in engine.models
    )
    return messages.Stats(engine.now_s, engine.active, busy_s, models, combined)
