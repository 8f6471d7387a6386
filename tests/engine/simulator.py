"""A seeded simulator: random plans, arrivals, cancels, deadlines, failures, swaps and drains on one core."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from shared.bound import BoundPlan
from shared.engine.steps import (
    Action,
    DropInstance,
    FinishTask,
    InstanceId,
    IssueStep,
    MoveInstance,
    Outcome,
    PlanKey,
    PrepareProgram,
    ProgramKey,
    ReleasePlan,
    Step,
    Task,
)
from shared.ids import StepId, TaskId
from shared.plan import Wait
from tests.engine.audit import SpyCore
from tests.engine.generate import Library, random_library, random_plan
from tests.engine.hazards import Hazards
from tests.engine.memory import Device, Wrong

MAX_EVENTS = 60_000


@dataclass
class Tally:
    """What a scenario exercised, so that a test can demand that all of it happens."""

    steps: int = 0
    moves: int = 0
    drops: int = 0
    swaps: int = 0
    staged: int = 0
    fallbacks: int = 0
    waits: int = 0  # entries of `after`
    shared: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))


class Scenario:
    """One run.

    To plant a defect `spoil` alters each action before it is carried out, `misread` what the core is told of
    a plan; `check_after=False` leaves it to the device's memory alone to notice a missing dependency.
    """

    def __init__(
        self,
        seed: int,
        *,
        spoil: Callable[[Action], Action] | None = None,
        misread: Callable[[BoundPlan], BoundPlan] | None = None,
        check_after: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.library: Library = random_library(self.random)
        self.core = SpyCore(
            max_preparing=self.random.randint(1, 3), max_programs=self.random.choice([8, 1000])
        )
        self.device = Device(lane_order=self.random.random() < 0.5)
        self.hazards = Hazards()
        self.tally = Tally()
        self._spoil = spoil
        self._misread = misread
        self._check_after = check_after
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], list[Action]]]] = []
        self._sequence = 0
        self._tasks: dict[TaskId, Task] = {}
        self._ended: dict[TaskId, FinishTask] = {}
        self._progress: dict[InstanceId, int] = {}  # the model's operators that it has passed
        self._preparing: set[ProgramKey] = set()
        self._next_key = 0
        self._active: PlanKey | None = None
        self._waiting_plan: PlanKey | None = None
        self._drained_swap = False
        self._failure_rate = self.random.choice([0.0, 0.0, 0.03])
        self._load = self.random.choice([0.3, 1.0, 3.0, 10.0])

    def at(self, delay_s: float, event: Callable[[], list[Action]]) -> None:
        """Let something happen later."""
        self._sequence += 1
        heappush(self._events, (self._now + delay_s, self._sequence, event))

    # The course of a scenario

    def run(self, tasks: int = 60, swaps: int = 3) -> Tally:
        """Play it to the end and check that nothing is left."""
        self._perform(self._load_plan())
        self._perform(self._activate())
        when = 0.0
        for number in range(tasks):
            when += self.random.expovariate(1.0) * 1e-3 / self._load
            self.at(when, lambda number=number: self._submit(number))  # type: ignore[misc]
        for _ in range(self.random.randint(0, swaps)):
            self.at(self.random.uniform(0, when), self._begin_swap)
        self._play()
        self._finish()
        return self.tally

    def _play(self) -> None:
        for _ in range(MAX_EVENTS):
            wakeup = self.core.next_wakeup(self._now)
            due = self._events[0][0] if self._events else None
            if due is None and wakeup is None:
                return
            if wakeup is not None and (due is None or wakeup <= due):
                self._now = max(self._now, wakeup)
                self._perform(self.core.tick(self._now))
            else:
                self._now, _, event = heappop(self._events)
                self._perform(event())
        raise Wrong("the scenario never ends")

    def _finish(self) -> None:
        """After all that was to happen: shut down, and look for anything left."""
        (plan,) = self.core.plans
        open_tasks = set(self._tasks) - set(self._ended)
        if plan.wait is Wait.ALL:
            self.core.audit_stand_still()
        else:
            assert not open_tasks, f"tasks {sorted(open_tasks)} never end"
        self._perform(self.core.drain(self._now, refuse=True))
        self._play()
        assert set(self._tasks) == set(self._ended)
        assert self.core.idle
        stats = self.core.snapshot(self._now)
        assert stats.open_tasks == stats.instances == sum(stats.lane_loads) == 0
        assert stats.submitted == stats.ended.total == len(self._tasks)
        for key in stats.loaded:
            self._perform(self.core.unload(key, self._now))
        assert not self.device.plans
        assert not self.device.live

    # Events

    def _load_plan(self) -> list[Action]:
        key = PlanKey(self._next_key)
        self._next_key += 1
        bound = random_plan(self.random, self.library)
        self.device.load(key, bound)
        self._waiting_plan = key
        return self.core.load(key, self._misread(bound) if self._misread else bound, self._now)

    def _activate(self) -> list[Action]:
        assert self._waiting_plan is not None
        self._active, self._waiting_plan = self._waiting_plan, None
        return self.core.activate(self._active, self._now)

    def _begin_swap(self) -> list[Action]:
        """A new plan beside the old one, one that is given up, back and forth, or a drain first."""
        if self._waiting_plan is not None or self._drained_swap:
            return []
        self.tally.swaps += 1
        kind = self.random.choice(["beside", "beside", "beside", "given up", "drained", "pause"])
        if kind == "pause":
            self.at(self.random.uniform(0, 5e-3), self._resume)
            self._drained_swap = True
            return self.core.drain(self._now)
        if kind == "drained":
            self._drained_swap = True
            self.at(1e-3, self._poll_drained)
            return self.core.drain(self._now)
        key = PlanKey(self._next_key)
        actions = self._load_plan()
        if kind == "given up":
            self._waiting_plan = None
            self.at(1e-3, lambda: self.core.unload(key, self._now))
        else:
            self.at(self.random.uniform(0, 2e-3), self._activate)
        return actions

    def _resume(self) -> list[Action]:
        self._drained_swap = False
        assert self._active is not None
        return self.core.activate(self._active, self._now)

    def _poll_drained(self) -> list[Action]:
        if not self.core.idle:
            self.at(1e-3, self._poll_drained)
            return []
        assert self._active is not None
        self._perform(self.core.unload(self._active, self._now))
        self._perform(self._load_plan())
        self._drained_swap = False
        return self._activate()

    def _submit(self, number: int) -> list[Action]:
        random = self.random
        names = sorted(set(self.library.names.values()))
        count = random.randint(2, len(names)) if len(names) > 1 and random.random() < 0.25 else 1
        if random.random() < 0.02:
            names.append("nobody knows")
        deadline = self._now + random.uniform(0, 0.03) if random.random() < 0.25 else None
        task = Task(
            id=TaskId(number),
            models=tuple(random.sample(names, k=count)),
            nbytes=random.choice([10, 30, 61]),
            priority=random.randint(0, 2),
            deadline_s=deadline,
        )
        self._tasks[task.id] = task
        self.device.live.add(task.id)
        self.tally.shared += count > 1
        if random.random() < 0.15:
            self.at(random.uniform(0, 0.02), lambda: self.core.cancel(task.id, self._now))
        return self.core.submit(task, self._now)

    def _prepared(self, program: ProgramKey) -> list[Action]:
        self._preparing.discard(program)
        if self.random.random() < 0.1:
            return self.core.program_failed(program, self._now)
        return self.core.program_ready(program, self._now)

    def _end_step(self, step_id: StepId) -> list[Action]:
        failed = self.random.random() < self._failure_rate
        self.device.end(step_id, failed=failed)
        self.hazards.ended(step_id)
        return self.core.step_done(step_id, self._now, "made to fail" if failed else None)

    # Actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._carry_out(self._spoil(action) if self._spoil else action)
        for step_id in self.device.startable():
            self.device.start(step_id)
            duration = self.random.choice([1e-5, 1e-4, self.random.expovariate(1.0) * 1e-3])
            self.at(duration, lambda step_id=step_id: self._end_step(step_id))  # type: ignore[misc]
        self.core.audit(self._now)

    def _carry_out(self, action: Action) -> None:
        match action:
            case IssueStep(step):
                self._issue(step)
            case FinishTask():
                self._answer(action)
            case PrepareProgram(program):
                assert program not in self._preparing, "a program was asked for twice"
                self._preparing.add(program)
                delay = self.random.choice([0.0, 1e-3, 1.0])
                self.at(delay, lambda: self._prepared(program))
            case MoveInstance():
                self.tally.moves += 1
                self._move(action)
            case DropInstance():
                self.tally.drops += 1
                self.device.drop(action)
            case ReleasePlan(plan):
                self.device.unload(plan)

    def _issue(self, step: Step) -> None:
        bound = self.device.plans[step.program.plan]
        self.tally.steps += 1
        self.tally.staged += sum(member.staged for member in step.members)
        self.tally.fallbacks += step.fallback
        self.tally.waits += len(step.after)
        assert step.lane < bound.plan.lanes
        mask = 0
        for member in step.members:
            mask |= 1 << member.position
            assert bound.combined[step.program.combined].members[member.position] == member.member
            model = bound.models[member.member.model]
            block = model.blocks[member.member.block]
            passed = self._progress.get(member.instance, 0)
            assert block.start == passed, "a block was skipped or run twice"
            self._progress[member.instance] = block.stop
            assert member.last == (block.stop == len(model.graph.operators))
        assert step.program.mask == mask
        assert len(step.program.buckets) == len(step.members)
        if self._check_after:
            self.hazards.check(step, bound)
        self.device.issue(step)

    def _move(self, move: MoveInstance) -> None:
        old, new = self.device.plans[move.old[0]], self.device.plans[move.new[0]]
        source, target = old.models[move.old[1].model], new.models[move.new[1].model]
        assert source.plan.artifact == target.plan.artifact
        assert source.blocks[move.old[1].block].start == target.blocks[move.new[1].block].start
        if self._check_after:
            self.hazards.check_move(move, source, target)
        self.device.move(move)

    def _answer(self, finish: FinishTask) -> None:
        task = self._tasks[finish.task]
        if finish.task in self._ended:
            raise Wrong(f"task {finish.task} ended twice")
        self._ended[finish.task] = finish
        self.device.live.discard(finish.task)
        self.tally.outcomes[finish.outcome] += 1
        assert bool(finish.code) == (finish.outcome is not Outcome.COMPLETED)
        if finish.outcome is Outcome.COMPLETED:
            for model in task.models:
                if (task.id, model) not in self.device.outputs:
                    raise Wrong(f"task {task.id} was completed without outputs of {model}")
        if task.deadline_s is not None:
            if finish.outcome is Outcome.EXPIRED:
                assert self._now == task.deadline_s, "not expired exactly at the deadline"
            else:
                assert self._now < task.deadline_s
