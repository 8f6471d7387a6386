"""The twin: the agent's own engine core on a virtual clock, with steps that take what `StepTimes` says.

Every decision is the core's. The twin plays the shell and the device around it: it submits what arrives, lets
issued steps begin when a device would (in order in their lane, after the steps that they name), lets running
steps share the device (`stageloom.planner.twin.lanes`), and reports each end. Programs are ready as soon as
the core asks for them, and nothing fails. At one instant steps end first, then tasks arrive, then time-outs
pass, then the queues are sampled; equal events come in order of their number.

Twins to train on: devices that a worker makes for itself, by seed."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stageloom.planner.twin.arrivals import Process, Tape, entered_anywhere
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.lanes import Lanes, added_up
from stageloom.planner.twin.times import PlanTimes, StepTimes
from stageloom.planner.twin.window import (
    ModelWindow,
    StepsWindow,
    TargetDevice,
    Window,
    counts_between,
    usual_samples,
)
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.history import DurationHistory
from stageloom.shared.engine.patience import PATIENCE_S
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.stats import Counts, EngineStats, QueueSnapshot
from stageloom.shared.engine.steps import (
    Action,
    CopySlot,
    FinishTask,
    Outcome,
    PlanKey,
    PrepareProgram,
    ReleasePlan,
    Step,
    Task,
)
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.search.costs import CostTable


class WindowRecorder:
    """The window that has begun, and the tasks that have not ended."""

    def __init__(self) -> None:
        self._open: dict[TaskId, tuple[tuple[str, ...], float]] = {}
        self._before: EngineStats | None = None
        self._latencies_s: dict[str, list[float]] = {}
        self._submitted: dict[str, int] = {}
        self._busy_s: dict[str, float] = {}
        self._steps: dict[tuple[PlanKey, int, int], list[float]] = {}
        self._glances: list[QueueSnapshot] = []
        self._busy_before_s = 0.0
        self._used_before_s = 0.0

    def begin(self, core: EngineCore, now: float, lanes: Lanes) -> None:
        """Count anew from this instant."""
        self._before = core.snapshot(now)
        self._latencies_s, self._submitted, self._busy_s = {}, {}, {}
        self._steps, self._glances = {}, []
        self._busy_before_s, self._used_before_s = lanes.busy_s, lanes.used_s

    def arrived(self, task: Task, now: float) -> None:
        self._open[task.id] = (task.models, now)
        for name in task.models:
            self._submitted[name] = self._submitted.get(name, 0) + 1

    def finished(self, action: FinishTask, now: float) -> None:
        """A task was answered at `now`."""
        models, arrived_s = self._open.pop(action.task)
        if action.outcome is Outcome.COMPLETED:
            for name in models:
                self._latencies_s.setdefault(name, []).append(now - arrived_s)

    def step(self, step: Step, names: Sequence[str], taken_s: float) -> None:
        for name in names:
            self._busy_s[name] = self._busy_s.get(name, 0.0) + taken_s / len(names)
        program = step.program
        self._steps.setdefault((program.plan, program.combined, program.mask), []).append(taken_s)

    def look(self, core: EngineCore, now: float) -> None:
        """Note the queues."""
        self._glances.append(core.sample(now))

    def end(self, core: EngineCore, now: float, lanes: Lanes, bound: BoundPlan) -> Window:
        """The window up to this instant."""
        before, after = self._before, core.snapshot(now)
        assert before is not None
        earlier = {model.name: model.ended for model in before.models}
        models = tuple(
            ModelWindow(
                name=model.name,
                submitted=self._submitted.get(model.name, 0),
                ended=counts_between(earlier.get(model.name, Counts()), model.ended),
                queued=model.queued,
                busy_s=self._busy_s.get(model.name, 0.0),
                latencies_s=tuple(self._latencies_s.get(model.name, ())),
            )
            for model in after.models
        )
        return Window(
            plan=bound.plan.digest,
            began_s=before.now_s,
            seconds=now - before.now_s,
            busy_s=lanes.busy_s - self._busy_before_s,
            used_s=lanes.used_s - self._used_before_s,
            models=models,
            steps=self._steps_of(after.active),
            glances=tuple(self._glances),
            open_before=before.open_tasks,
            open_after=after.open_tasks,
        )

    def _steps_of(self, active: PlanKey | None) -> tuple[StepsWindow, ...]:
        """Of the active plan alone, as an agent reports them."""
        return tuple(
            StepsWindow(
                combined=combined, mask=mask, count=len(taken), sum_s=added_up(taken), max_s=max(taken)
            )
            for (key, combined, mask), taken in sorted(self._steps.items())
            if key == active
        )


class Twin:
    """A simulated device; satisfies `stageloom.planner.twin.window.TargetDevice`.

    `arrivals` by model; `shared` by the models of tasks that share their input. `deadlines_s`: from arrival
    to deadline, by model, of tasks of one model; without one they have none, and count as due after
    `patience_s`. Equal arguments and calls give equal windows.

    Plans that place their blocks: what a step takes on a resource is what it takes on the device, `slower`
    times as long, by resource; copies go over `bus` one after another. `history`: what is known beforehand.
    """

    def __init__(
        self,
        times: StepTimes,
        arrivals: Mapping[str, Process],
        *,
        shared: Mapping[tuple[str, ...], Process] | None = None,
        seed: int = 0,
        deadlines_s: Mapping[str, float] | None = None,
        slower: Mapping[int, float] | None = None,
        bus: Bus | None = None,
        history: DurationHistory | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.times = times
        self.now_s = 0.0
        self._core = EngineCore(history=history, bus=bus, patience_s=patience_s)
        self._slower = dict(slower or {})
        self._bus = bus or Bus()
        self._copies: deque[tuple[float, StepId]] = deque()  # when they end, in their order
        sources: dict[tuple[str, ...], Process] = {(name,): process for name, process in arrivals.items()}
        sources.update(shared or {})
        self._sources = list(sources)
        self._deadlines_s = dict(deadlines_s or {})
        self._tape = Tape(list(sources.values()), seed)
        self._arrivals: deque[tuple[float, int]] = deque()  # of the window: when, and from which source
        self._lanes = Lanes(times.device, seed)
        self._plans: dict[PlanKey, PlanTimes] = {}
        self._bound: BoundPlan | None = None
        self._record = WindowRecorder()
        self._next_key = 0
        self._next_task = 0

    @property
    def stats(self) -> EngineStats:
        """The engine at this instant."""
        return self._core.snapshot(self.now_s)

    def deploy(self, bound: BoundPlan) -> None:
        """Send new launches to this plan (`EngineCore.activate`); it costs no time."""
        key = PlanKey(self._next_key)
        self._next_key += 1
        self._plans[key] = self.times.of_plan(bound)
        self._bound = bound
        self._lanes.make(bound.plan.lanes)
        self._act(self._core.load(key, bound, self.now_s))
        self._act(self._core.activate(key, self.now_s))

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Go on for `seconds`; see `TargetDevice.run`.

        Raises:
            PlanError: no plan was deployed.
        """
        if self._bound is None:
            raise PlanError("nothing is deployed on the twin", remedy="deploy a plan first")
        begin_s, end_s = self.now_s, self.now_s + seconds
        if sample_at_s is None:
            sample_at_s = usual_samples(seconds)
        samples = deque(min(begin_s + at_s, end_s) for at_s in sample_at_s)
        times_s, sources = self._tape.between(self._next_task, end_s)
        self._arrivals = deque(zip(times_s.tolist(), sources.tolist(), strict=True))
        self._record.begin(self._core, begin_s, self._lanes)
        while self._event(end_s, samples):
            pass
        self._lanes.advance(end_s)
        self._tape.forget(self._next_task)
        self.now_s = end_s
        for at_s in samples:
            self._record.look(self._core, at_s)
        return self._record.end(self._core, end_s, self._lanes, self._bound)

    # Events

    def _event(self, end_s: float, samples: "deque[float]") -> bool:
        """Let the next thing happen; False if that is not before `end_s`."""
        step_s = self._lanes.next_end_s
        arrival_s = self._arrivals[0][0] if self._arrivals else math.inf
        wakeup = self._core.next_wakeup(self.now_s)
        wakeup_s = math.inf if wakeup is None else wakeup
        sample_s = samples[0] if samples else math.inf
        copy_s = self._copies[0][0] if self._copies else math.inf
        at_s = min(step_s, copy_s, arrival_s, wakeup_s, sample_s)
        if at_s >= end_s:
            return False
        self.now_s = at_s
        if at_s == step_s:
            self._end_step()
        elif at_s == copy_s:
            self._act(self._core.copy_done(self._copies.popleft()[1], at_s))
        elif at_s == arrival_s:
            self._submit()
        elif at_s == wakeup_s:
            self._act(self._core.tick(at_s))
        else:
            self._record.look(self._core, samples.popleft())
        return True

    def _end_step(self) -> None:
        ended, taken_s = self._lanes.end_next()
        models = self._plans[ended.program.plan].bound.plan.models
        self._record.step(ended, [models[member.member.model].name for member in ended.members], taken_s)
        self._act(self._core.step_done(ended.id, self.now_s, compute_s=taken_s))

    def _submit(self) -> None:
        """The next task comes, as large as the plan's model says."""
        assert self._bound is not None
        models = self._sources[self._arrivals.popleft()[1]]
        index = self._bound.model_index.get(models[0])
        deadline_s = self._deadlines_s.get(models[0]) if len(models) == 1 else None
        task = Task(
            id=TaskId(self._next_task),
            models=models,
            nbytes=1 if index is None else self._bound.models[index].input_bytes,
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
        )
        self._next_task += 1
        self._record.arrived(task, self.now_s)
        self._act(self._core.submit(task, self.now_s))

    def _act(self, actions: Sequence[Action]) -> None:
        """Do what the core says; moves and drops take no time."""
        for action in actions:
            if isinstance(action, Step):
                self._issue(action)
            elif isinstance(action, FinishTask):
                self._record.finished(action, self.now_s + self.times.device.task_s)
            elif isinstance(action, CopySlot):
                self._copy(action)
            elif isinstance(action, PrepareProgram):
                self._act(self._core.program_ready(action.program, self.now_s))
            elif isinstance(action, ReleasePlan):
                del self._plans[action.plan]

    def _issue(self, step: Step) -> None:
        program = step.program
        times = self._plans[program.plan].step(
            program.combined, program.mask, program.buckets, fallback=step.fallback
        )
        owners = self._plans[program.plan].bound.plan.lane_resources
        if owners and owners[step.lane] in self._slower:
            slower = self._slower[owners[step.lane]]
            times = times._replace(seconds=times.seconds * slower, crowded_s=times.crowded_s * slower)
        self._lanes.issue(step, times, self.now_s)

    def _copy(self, copy: CopySlot) -> None:
        """The bus takes it after those before it."""
        key, (model, _, number) = copy.slot
        bound = self._plans[key].bound.models[model]
        made = bound.graph.inputs if not number else bound.blocks[number - 1].makes
        begins_s = max(self.now_s, self._copies[-1][0] if self._copies else self.now_s)
        taken_s = self._bus.copy_s(bound.graph.tensors[tensor].nbytes for tensor in made)
        self._copies.append((begins_s + taken_s, copy.id))


@dataclass(frozen=True)
class TwinDevices:
    """Makes twins of one device; all of a process share what steps take.

    Compiled ones by default, with every program ready at once: a plan is not judged by being new. The
    reference twin is slower and, like an engine, runs a program's first steps member by member.
    """

    device: DeviceFile
    costs: CostTable
    arrivals: Mapping[str, Process]
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    compiled: bool = True

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self.device, self.costs)

    def __call__(self, seed: int) -> TargetDevice:
        """A twin with empty queues and the arrivals of a seed."""
        arrivals = entered_anywhere(self.arrivals, seed)
        if not self.compiled:
            return Twin(self._times, arrivals, seed=seed, deadlines_s=self.deadlines_s)
        from stageloom.planner.twin.compiled.twin import CompiledTwin  # numba only where it is used

        return CompiledTwin(self._times, arrivals, seed=seed, deadlines_s=self.deadlines_s, prepared=True)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_times"}
