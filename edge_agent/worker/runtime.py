"""Drives the engine core with threads: one per lane, one for time, one for preparing programs.

Leader and follower: the thread that ends a step takes the core's lock, reports the end, carries out what the
core decides, and goes on with its lane's next step with the lock released. An idle lane waits on a bell of
its own, and may take commands meanwhile. Nothing here knows where tensors come from or who asks: see
`inprocess` and `process`.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from stageloom.edge_agent.executor.base import (
    CopyRunner,
    DeviceRunner,
    Rows,
    StepResult,
    StepRunner,
    one_line,
)
from stageloom.edge_agent.worker.accounting import StepCounter, WindowCounter
from stageloom.edge_agent.worker.bells import Bell, CommandBell, LockBell
from stageloom.edge_agent.worker.messages import StepStats, WindowMeasured
from stageloom.edge_agent.worker.pinning import LanePin, require_cores
from stageloom.edge_agent.worker.recorder import Recorder
from stageloom.edge_agent.worker.tasks import Answers, EngineTask, TaskTable
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.history import DurationHistory
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.stats import EngineStats, QueueSnapshot
from stageloom.shared.engine.steps import (
    Action,
    CopySlot,
    DropInstance,
    FinishTask,
    InstanceId,
    MoveInstance,
    PlanKey,
    PrepareProgram,
    ProgramKey,
    Step,
)
from stageloom.shared.errors import ExecutorError, StageloomError
from stageloom.shared.failpoint import ARMED, failpoint
from stageloom.shared.ids import Digest, StepId, TaskId

if TYPE_CHECKING:
    import numpy

log = logging.getLogger(__name__)

_TICK_S = 0.001
"""The timer's shortest sleep: a time that has come and cannot be acted on yet must not make it spin."""


StepObserver = Callable[[Step, StepResult], None]


def _held_lock() -> threading.Lock:
    """A lock on which the next thread that acquires it sleeps."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Commands(Protocol):
    """What idle lanes take before anybody else is woken for it."""

    def fileno(self) -> int:
        """Readable when a command waits."""

    def take(self) -> None:
        """Carry out every command that waits."""


class TaskSampler(Protocol):
    """What is told of tasks that come."""

    def offer(self, task: EngineTask) -> None:
        """A task has come, and none of its steps has run; on the caller's thread, so it must be short."""


@dataclass(slots=True)
class _LaneQueue:
    """One lane's issued steps and the bell that its thread sleeps on."""

    bell: Bell
    pending: deque[tuple[Step, str | None]] = field(default_factory=deque)  # with why it was not issued
    idle: bool = False


class EngineRuntime:
    """The engine core with an executor, running.

    `on_released` is told about plans that were freed, on the preparing thread, and `on_lost` of a failure
    after which the executor's device is found lost, before the tasks hear of it. Public methods may be called
    from any thread; callbacks must be short.
    """

    def __init__(
        self,
        executor: StepRunner,
        *,
        on_released: Callable[[PlanKey], None] = lambda key: None,
        on_lost: Callable[[str], None] = lambda problem: None,
        commands: Commands | None = None,
        clock: Callable[[], float] = time.monotonic,
        history: DurationHistory | None = None,
        bus: Bus | None = None,
    ) -> None:
        """`history` and `bus`: what plans that place their blocks know of steps and copies beforehand."""
        self.executor = executor
        self.on_step: StepObserver | None = None  # set while nothing runs; to trace, see `observe`
        self.sampler: TaskSampler | None = None  # told of every task that comes, while one is set
        self._observed = False
        self._traces_beside = False
        self._tally = StepCounter()
        self._on_released = on_released
        self._on_lost = on_lost
        self._commands = commands
        self._clock = clock
        self._core = EngineCore(history=history, bus=bus)
        self._lock = threading.Lock()
        self._tasks = TaskTable()
        self._plans: dict[PlanKey, BoundPlan] = {}
        self._active: PlanKey | None = None
        self._served: BoundPlan | None = None
        self._in_flight: set[StepId] = set()
        self._drops: list[tuple[set[StepId], InstanceId]] = []  # instances to drop once these have ended
        self._lanes: list[_LaneQueue] = []
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._timer = _held_lock()
        self._timer_until_s = -math.inf  # what the timer sleeps until; -inf while it is awake
        self._chores: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._copies: SimpleQueue[CopySlot | None] = SimpleQueue()
        self._copies_run = False  # there is a thread for them
        self._unprepared: dict[PlanKey, set[ProgramKey]] = {}
        self._prepared = threading.Condition(self._lock)
        self._start(self._keep_time, "timer")
        self._start(self._do_chores, "prepare")

    # Plans

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Load a plan and ask for its programs; slow, on the caller's thread.

        Raises:
            ExecutorError: the executor cannot load it, or cores, memory nodes or threads are missing; nothing
                has changed but that lanes may have been added, for the next plan.
            ValueError: a plan with this key is loaded.
        """
        if key in self._plans:
            raise ValueError(f"plan {key} is loaded already")
        require_cores(bound.plan)
        if any(one.memory for one in bound.plan.resources) and not isinstance(self.executor, CopyRunner):
            raise ExecutorError("this executor copies nothing to another memory node")
        self._ready_threads(bound)  # before anything knows the plan: one without its lanes would hang
        self.executor.load(key, bound, artifacts)
        with self._lock:
            now = self._clock()
            actions = self._core.load(key, bound, now)
            self._plans[key] = bound
            self._act(actions, now)

    def _ready_threads(self, bound: BoundPlan) -> None:
        """Start what threads the plan needs beside those that are here; none counts before it runs.

        Raises:
            ExecutorError: the system gives no more threads or descriptors; those that it gave stay.
        """
        try:
            with self._lock:
                while len(self._lanes) < bound.plan.lanes:
                    self._add_lane()
                if bound.plan.places and not self._copies_run and isinstance(self.executor, CopyRunner):
                    self._start(self._do_copies, "copy", self.executor)
                    self._copies_run = True
        except (RuntimeError, OSError) as error:  # threading's, where there are too many threads
            raise ExecutorError(
                f"the plan's {bound.plan.lanes} lanes cannot be had: {error}",
                remedy="raise the limits of threads and open files (TasksMax and LimitNOFILE of the service)",
            ) from error

    def _add_lane(self) -> None:
        bell = LockBell() if self._commands is None else CommandBell(self._commands.fileno())
        lane = _LaneQueue(bell)
        try:
            self._start(self._run_lane, f"lane-{len(self._lanes)}", lane)
        except BaseException:
            bell.close()
            raise
        self._lanes.append(lane)

    def is_whole(self, step: Step) -> bool:
        """All members are active, each at its largest batch, and the program is prepared."""
        bound = self._plans.get(step.program.plan)
        if bound is None or step.fallback:
            return False
        members = bound.combined[step.program.combined].members
        return step.program.buckets == tuple(bound.models[member.model].buckets[-1] for member in members)

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        """Hand the executor a step that is not the core's, between two that are; wait for it there."""
        with self._lock:
            self.executor.issue(step, feeds)

    def drop(self, instance: InstanceId) -> None:
        """Let the executor forget an instance of such a step."""
        with self._lock:
            self.executor.drop(instance)

    def set_tracing(self, on: bool) -> None:
        """Trace such a step; an observer of steps keeps tracing on in any case."""
        with self._lock:
            self._traces_beside = on
            self._set_tracing()

    def observe(self, observer: StepObserver | None) -> None:
        """Have every step traced and handed over from now on; None: no more."""
        with self._lock:
            self._observed = observer is not None
            self.on_step = observer
            self._set_tracing()

    def record(self, recorder: Recorder | None) -> None:
        """Have everything that happens recorded from now on; None: no more."""
        with self._lock:
            self._tasks.recorder = recorder
            self._set_tracing()
            if recorder is not None:
                recorder.note_queues(self._core, self._active, self._clock())

    def _set_tracing(self) -> None:
        self.executor.tracing = self._observed or self._traces_beside or self._tasks.recorder is not None

    def wait_prepared(self, key: PlanKey, timeout_s: float) -> int:
        """Wait until the programs that were asked for so far are ready; the number still missing."""
        with self._prepared:
            self._prepared.wait_for(lambda: not self._unprepared.get(key), timeout_s)
            return len(self._unprepared.get(key, ()))

    def activate(self, key: PlanKey, *, keep: bool = False) -> None:
        """Send new launches to a loaded plan; with `keep` the one before stays loaded.

        Raises:
            ValueError: the plan is not loaded.
        """
        with self._lock:
            now = self._clock()
            actions = self._core.activate(key, now, keep=keep)
            self._active = key
            self._served = self._plans[key]
            answers = self._act(actions, now)
        self._answer(answers)

    def unload(self, key: PlanKey) -> None:
        """Give up a plan that is not in use; `on_released` follows.

        Raises:
            ValueError: the plan is not loaded or in use.
        """
        with self._lock:
            now = self._clock()
            actions = self._core.unload(key, now)
            if self._active == key:
                self._active = None
            self._act(actions, now)

    def drain(self, *, refuse: bool) -> None:
        """Stop launching; with `refuse` queued and new tasks are refused, without they wait."""
        with self._lock:
            now = self._clock()
            answers = self._act(self._core.drain(now, refuse=refuse), now)
        self._answer(answers)

    @property
    def active(self) -> BoundPlan | None:
        """The plan that new launches go to."""
        key = self._active
        return None if key is None else self._plans.get(key)

    @property
    def served(self) -> BoundPlan | None:
        """The plan that tasks are taken for: the active one, or the last while it gives way to another."""
        return self._served

    def plan(self, key: PlanKey) -> BoundPlan | None:
        """The loaded plan of that key."""
        return self._plans.get(key)

    @property
    def active_key(self) -> PlanKey | None:
        return self._active

    @property
    def quiet(self) -> bool:
        """No task is queued or in flight."""
        return not self._tasks.tasks and not self._in_flight

    @property
    def arrived(self) -> int:
        """Tasks that came so far; `quiet` knows of them until they end."""
        with self._lock:  # a task that is just being taken in counts once it is known there
            return self._core.submitted

    @property
    def idle(self) -> bool:
        """Nothing is in flight; tasks may be queued."""
        with self._lock:
            return self._core.idle and not self._in_flight

    @property
    def settled(self) -> bool:
        """Nothing is in flight but on the active plan."""
        with self._lock:
            return self._core.settled

    def snapshot(self) -> tuple[EngineStats, tuple[StepStats, ...], float]:
        """The core's state, the steps since the last call, and the busy seconds so far."""
        with self._lock:
            now = self._clock()
            return self._core.snapshot(now), self._tally.take(), self._tally.busy_s(now)

    def sample(self) -> QueueSnapshot:
        """The queues at this instant."""
        with self._lock:
            now = self._clock()
            return structs.replace(self._core.sample(now), oldest_age_s=self._core.oldest_age_s(now))

    # Windows

    def begin_window(self, to_s: float) -> None:
        """Count anew from this instant, for `end_window` at about `to_s`."""
        with self._lock:
            now = self._clock()
            busy_s = self._tally.busy_s(now)
            self._tasks.window = WindowCounter.begin(self._core, self._active, busy_s, now, to_s)

    def sample_window(self) -> float:
        """Sample the queues for the window that has begun; the greatest age of a waiting task, seconds."""
        with self._lock:
            window = self._tasks.window
            if window is None:
                return 0.0
            window.sample(self._core, self._clock())
            return window.oldest_age_s

    def end_window(self, number: int) -> WindowMeasured | None:
        """What happened since `begin_window`; None without one."""
        with self._lock:
            window, self._tasks.window = self._tasks.window, None
            now = self._clock()
            waiting = self._tasks.tasks.values()
            return window.end(number, self._core, self._tally.busy_s(now), now, waiting) if window else None

    # Tasks

    def submit(self, task: EngineTask) -> None:
        """Take in a task; its `answer` is called once, perhaps before this returns.

        Raises:
            ValueError: a task of this id has not ended, or it names no model or one twice.
        """
        sampler = self.sampler
        if sampler is not None:
            sampler.offer(task)
        now = self._clock()
        with self._lock:
            if task.id in self._tasks.tasks:  # also while a lane writes its outputs
                raise ValueError(f"task {task.id} is here already")
            actions = self._core.submit(task, now)
            self._tasks.tasks[task.id] = task
            answers = self._act(actions, now)
        self._answer(answers)

    def cancel(self, task: TaskId) -> None:
        """End a task if it has not ended."""
        with self._lock:
            now = self._clock()
            answers = self._act(self._core.cancel(task, now), now)
        self._answer(answers)

    def close(self) -> None:
        """Stop all threads after the steps in flight and free the executor. Tasks left are never answered."""
        with self._lock:
            self._stopping = True
            for lane in self._lanes:
                if lane.idle:
                    lane.idle = False
                    lane.bell.ring()
            if self._timer_until_s > -math.inf:
                self._wake_timer()
        self._chores.put(None)
        self._copies.put(None)
        for thread in self._threads:
            thread.join()
        for lane in self._lanes:
            lane.bell.close()
        self.executor.close()

    # Actions; the lock is held

    def _act(self, actions: list[Action], now: float) -> Answers:
        """Carry out what the core decided; the answers are given after the lock is released."""
        answers: Answers = []
        for action in actions:
            if isinstance(action, Step):
                if not self._stopping:  # its lane's thread may have ended, and a step after it would hang
                    self._issue(action, now)
            elif isinstance(action, FinishTask):
                self._tasks.finish(action, now, answers)
            elif isinstance(action, MoveInstance):
                self.executor.move(action)
            elif isinstance(action, DropInstance):
                self._drop(action)
            elif isinstance(action, CopySlot):
                self._in_flight.add(action.id)
                self._copies.put(action)
            elif isinstance(action, PrepareProgram):
                self._unprepared.setdefault(action.program.plan, set()).add(action.program)
                self._chores.put(partial(self._prepare, action.program))
            else:
                self._chores.put(partial(self._release, action.plan))
        window, recorder = self._tasks.window, self._tasks.recorder
        if window is not None and window.saturated:
            window.saturated = self._core.waiting
        if recorder is not None:
            recorder.note_queues(self._core, self._active, now)
        wakeup_s = self._core.next_wakeup(now)
        if wakeup_s is not None and wakeup_s < self._timer_until_s:
            self._wake_timer()
        return answers

    def _issue(self, step: Step, now: float) -> None:
        feeds: dict[InstanceId, Rows] = {}
        for member in step.members:
            if member.member.block == 0:
                model = self._plans[step.program.plan].models[member.member.model]
                feeds[member.instance] = self._tasks.rows(model, member)
        self._in_flight.add(step.id)
        self._tally.step_issued(now)
        problem = None
        try:
            if ARMED:
                failpoint("engine.step")
            self.executor.issue(step, feeds)
        except Exception as error:  # a backend's; the lane's thread reports it as the step's end
            problem = _one_line(error)
        lane = self._lanes[step.lane]
        lane.pending.append((step, problem))
        if lane.idle:
            lane.idle = False
            lane.bell.ring()

    def _drop(self, action: DropInstance) -> None:
        waits = self._in_flight & set(action.after)
        if waits:
            self._drops.append((waits, action.instance))
        else:
            self.executor.drop(action.instance)

    def _wake_timer(self) -> None:
        self._timer_until_s = -math.inf
        self._timer.release()

    @staticmethod
    def _answer(answers: Answers) -> None:
        for task, done in answers:
            task.answer(done)

    # Threads

    def _start(self, target: Callable[..., None], name: str, *arguments: object) -> None:
        thread = threading.Thread(target=_named, args=(name, target, *arguments), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _do_copies(self, copier: CopyRunner) -> None:
        """One after another: they share the bus."""
        while (copy := self._copies.get()) is not None:
            try:
                copier.copy(copy)
            except Exception as error:  # the step that wants the tensors fails for lack of them
                log.warning("a copy to memory node %d: %s", copy.node, _one_line(error))
            with self._lock:
                now = self._clock()
                self._in_flight.discard(copy.id)
                if self._drops:
                    self._drop_after(copy.id)
                answers = self._act(self._core.copy_done(copy.id, now), now)
            self._answer(answers)

    def _run_lane(self, lane: _LaneQueue) -> None:
        pin, plan = LanePin(), None
        while True:
            while lane.pending:
                step, problem = lane.pending.popleft()
                if step.program.plan != plan:
                    plan = step.program.plan
                    pin.keep_to(self._plans[plan].plan.cores_of(step.lane))
                if problem is None:
                    self._finish_step(step)
                else:
                    self._step_failed(step, problem)
            with self._lock:
                if lane.pending:
                    continue
                if self._stopping:
                    return
                lane.idle = True
            if lane.bell.wait():
                self._take_commands(lane)

    def _take_commands(self, lane: _LaneQueue) -> None:
        assert self._commands is not None
        with self._lock:
            lane.idle = False  # a step that comes of them is found in the queue
        self._commands.take()

    def _finish_step(self, step: Step) -> None:
        self._tasks.note_reached(step, self._clock())
        try:
            result = self.executor.wait(step.id)
        except Exception as error:  # a backend's; the tasks fail and the engine goes on
            self._step_failed(step, _one_line(error))
            return
        observer, recorder = self.on_step, self._tasks.recorder
        if observer is not None:
            observer(step, result)
        if recorder is not None:
            recorder.step(step, result, self._plans.get(step.program.plan))
        if result.outputs:
            self._deliver(step, result)
        self._step_ended(step, result, None)

    def _step_failed(self, step: Step, problem: str) -> None:
        self._ask_device(problem)
        self._step_ended(step, None, problem)

    def _ask_device(self, problem: str) -> None:
        """After a failure of the executor's: on a lost device all that follows would fail, too."""
        if isinstance(self.executor, DeviceRunner) and self.executor.lost():
            self._on_lost(problem)

    def _deliver(self, step: Step, result: StepResult) -> None:
        """Write outputs with the lock released; a task that ends meanwhile is answered after the writing."""
        models = self._plans[step.program.plan].models
        with self._lock:
            writes = self._tasks.begin_writing(step, result, models)
        for task, name, row in writes:
            _write(task, name, row)
        answers: Answers = []
        with self._lock:
            self._tasks.end_writing(writes, self._clock, answers)
        self._answer(answers)

    def _step_ended(self, step: Step, result: StepResult | None, error: str | None) -> None:
        with self._lock:
            now = self._clock()
            self._in_flight.discard(step.id)
            self._tally.step_ended(step, result, now)
            tasks = self._tasks
            if result is not None:
                tasks.note_start(step, result.started_s)
                if tasks.window is not None:
                    tasks.note_window(tasks.window, step, result, self._plans[step.program.plan].models, now)
            if self._drops:
                self._drop_after(step.id)
            taken_s = None if result is None else result.ended_s - result.started_s
            answers = self._act(self._core.step_done(step.id, now, error, taken_s), now)
        if answers:
            self._answer(answers)

    def _drop_after(self, step: StepId) -> None:
        kept = []
        for waits, instance in self._drops:
            waits.discard(step)
            if waits:
                kept.append((waits, instance))
            else:
                self.executor.drop(instance)
        self._drops = kept

    def _keep_time(self) -> None:
        while True:
            with self._lock:
                if self._stopping:
                    return
                self._timer_until_s = -math.inf  # nobody wakes whoever is awake
                self._timer.acquire(blocking=False)
                now = self._clock()
                answers = self._act(self._core.tick(now), now)
                now = self._clock()
                wakeup_s = self._core.next_wakeup(now)
                self._timer_until_s = math.inf if wakeup_s is None else max(wakeup_s, now + _TICK_S)
                sleep_s = self._timer_until_s - now
            self._answer(answers)
            self._timer.acquire(timeout=-1 if sleep_s == math.inf else sleep_s)

    def _do_chores(self) -> None:
        while (chore := self._chores.get()) is not None:
            chore()

    def _prepare(self, program: ProgramKey) -> None:
        report = self._core.program_ready
        if program.plan in self._plans:
            try:
                self.executor.prepare(program)
            except Exception as error:  # a backend's; its members go on running one after another
                problem = _one_line(error)
                log.warning("program of combined block %d: %s", program.combined, problem)
                self._ask_device(problem)
                report = self._core.program_failed
        with self._prepared:
            now = self._clock()
            answers = self._act(report(program, now), now)
            self._unprepared.get(program.plan, set()).discard(program)
            self._prepared.notify_all()
        self._answer(answers)

    def _release(self, key: PlanKey) -> None:
        with self._lock:
            self._plans.pop(key, None)
            self._unprepared.pop(key, None)
        try:
            self.executor.unload(key)
        except Exception as error:  # a backend's; other plans serve on
            problem = _one_line(error)
            log.error("plan %d is not freed as a whole: %s", key, problem)
            self._ask_device(problem)
        finally:
            self._on_released(key)


def _named(name: str, target: Callable[..., None], *arguments: object) -> None:
    """Run a thread under a name that `top -H` and the benchmarks show, too."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)
    target(*arguments)


def _write(task: EngineTask, model: str, row: "Mapping[str, numpy.ndarray]") -> None:
    try:
        task.deliver(model, row)
    except Exception as error:  # its owner's: the task fails and the engine goes on
        task.problem = _one_line(error)


def _one_line(error: Exception) -> str:
    """The error in one line; the log has the traceback of one that is not of Stageloom's own tree."""
    if not isinstance(error, StageloomError):
        log.error("the executor failed", exc_info=error)
    return one_line(error)
