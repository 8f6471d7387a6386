"""An engine core that runs on a device in memory: actions are carried out, every one of them checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import (
    Action,
    CopySlot,
    DropInstance,
    FinishTask,
    InstanceId,
    MoveInstance,
    Outcome,
    PrepareProgram,
    ProgramKey,
    ReleasePlan,
    Step,
    Task,
)
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import StepChoice
from tests.engine.hazards import Hazards
from tests.engine.memory import Device, Wrong

Later = Callable[[float, Callable[[], list[Action]]], None]
"""Let something happen after a while, in seconds; what it answers is performed then."""


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
    copies: int = 0
    placed: int = 0  # steps of plans that place their blocks
    shared: int = 0
    given_up: int = 0  # as too late, before their deadline
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))


class PlayedEngine:
    """One core with its device. Whoever drives it hands events in by `perform`.

    To plant a defect `spoil` alters each action before it is carried out; `check_after=False` leaves it to
    the device's memory alone to notice a missing dependency.
    """

    failure_rate = 0.0  # of steps

    def __init__(
        self,
        random: Random,
        core: EngineCore,
        later: Later,
        *,
        spoil: Callable[[Action], Action] | None = None,
        check_after: bool = True,
    ) -> None:
        self.random = random
        self.core = core
        self.device = Device(lane_order=random.random() < 0.5)
        self.tally = Tally()
        self.now = 0.0
        self.tasks: dict[TaskId, Task] = {}
        self.ended: dict[TaskId, FinishTask] = {}
        self._later = later
        self._spoil = spoil
        self._check_after = check_after
        self._hazards = Hazards()
        self._progress: dict[InstanceId, int] = {}  # the model's operators that it has passed
        self._preparing: set[ProgramKey] = set()
        self._began_s: dict[StepId, float] = {}
        self._issued_s: dict[StepId, float] = {}
        self._longest_s: dict[str, float] = {}  # by model, from a step's issue to its end

    # What the device and the applications do

    def submit(self, task: Task) -> list[Action]:
        """A task arrives."""
        self.tasks[task.id] = task
        self.device.live.add(task.id)
        return self.core.submit(task, self.now)

    def duration_s(self, step: Step) -> float:
        """How long a step takes."""
        return self.random.choice([1e-5, 1e-4, self.random.expovariate(1.0) * 1e-3])

    def fails(self, step: Step) -> bool:
        """Whether a step ends in an error."""
        return self.random.random() < self.failure_rate

    def answered(self, finish: FinishTask) -> None:
        """A task has ended."""

    def released(self, action: ReleasePlan) -> None:
        """A plan has left the device."""

    def _prepared(self, program: ProgramKey) -> list[Action]:
        self._preparing.discard(program)
        if self.random.random() < 0.1:
            return self.core.program_failed(program, self.now)
        return self.core.program_ready(program, self.now)

    def _end_step(self, step: Step) -> list[Action]:
        failed = self.fails(step)
        self.device.end(step.id, failed=failed)
        self._hazards.ended(step.id)
        elapsed_s = self.now - self._issued_s.pop(step.id)
        for member in step.members:
            name = self.device.plans[step.program.plan].models[member.member.model].plan.name
            self._longest_s[name] = max(self._longest_s.get(name, 0.0), elapsed_s)
        taken_s = self.now - self._began_s.pop(step.id)
        return self.core.step_done(step.id, self.now, "made to fail" if failed else None, taken_s)

    def _end_copy(self, copy: CopySlot) -> list[Action]:
        self.device.end_copy(copy.id)
        self._hazards.ended(copy.id)
        return self.core.copy_done(copy.id, self.now)

    # Actions

    def perform(self, actions: list[Action]) -> None:
        """Carry out what the core decided, and start the steps that nothing holds back."""
        for action in actions:
            self.carry_out(self._spoil(action) if self._spoil else action)
        for step_id in self.device.startable():
            step = self.device.start(step_id)
            self._began_s[step_id] = self.now
            self._later(self.duration_s(step), lambda step=step: self._end_step(step))  # type: ignore[misc]

    def carry_out(self, action: Action) -> None:
        """One action."""
        match action:
            case Step() as step:
                self._issue(step)
            case FinishTask():
                self._answer(action)
            case PrepareProgram(program):
                assert program not in self._preparing, "a program was asked for twice"
                self._preparing.add(program)
                self._later(self.random.choice([0.0, 1e-3, 1.0]), lambda: self._prepared(program))
            case CopySlot():
                self.tally.copies += 1
                self._hazards.check_copy(action)
                self.device.copy(action)
                self._later(self.random.choice([0.0, 1e-4, 1e-2]), lambda: self._end_copy(action))
            case MoveInstance():
                self.tally.moves += 1
                self._move(action)
            case DropInstance():
                self.tally.drops += 1
                self.device.drop(action)
            case ReleasePlan(plan):
                self.device.unload(plan)
                self.released(action)

    def _issue(self, step: Step) -> None:
        bound = self.device.plans[step.program.plan]
        self.tally.steps += 1
        self.tally.placed += bound.plan.places
        self.tally.staged += sum(member.staged for member in step.members)
        self.tally.fallbacks += step.fallback
        self.tally.waits += len(step.after)
        self._issued_s[step.id] = self.now
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
            self._hazards.check(step, bound)
        self.device.issue(step)

    def _move(self, move: MoveInstance) -> None:
        old, new = self.device.plans[move.old[0]], self.device.plans[move.new[0]]
        source, target = old.models[move.old[1].model], new.models[move.new[1].model]
        assert source.plan.artifact == target.plan.artifact
        assert source.blocks[move.old[1].block].start == target.blocks[move.new[1].block].start
        if self._check_after:
            self._hazards.check_move(move, source, target)
        self.device.move(move)

    def _answer(self, finish: FinishTask) -> None:
        task = self.tasks[finish.task]
        if finish.task in self.ended:
            raise Wrong(f"task {finish.task} ended twice")
        self.ended[finish.task] = finish
        self.device.live.discard(finish.task)
        self.tally.outcomes[finish.outcome] += 1
        self.answered(finish)
        assert bool(finish.code) == (finish.outcome is not Outcome.COMPLETED)
        if finish.outcome is Outcome.COMPLETED:
            for model in task.models:
                if (task.id, model) not in self.device.outputs:
                    raise Wrong(f"task {task.id} was completed without outputs of {model}")
        if task.deadline_s is not None:
            if finish.outcome is Outcome.EXPIRED:
                self.tally.given_up += self.now < task.deadline_s
                assert task.deadline_s - self.now <= self._rest_s(task), "not expired exactly at the deadline"
            else:
                assert self.now < task.deadline_s

    def _rest_s(self, task: Task) -> float:
        """What the task may be thought to need before it ends, at the most."""
        active = self.core.snapshot(self.now).active
        if active is None or self.device.plans[active].plan.step_choice is not StepChoice.DEADLINE:
            return 0.0
        blocks = {model.plan.name: len(model.blocks) for model in self.device.plans[active].models}
        return max(blocks.get(name, 0) * self._longest_s.get(name, 0.0) for name in task.models)
