"""The engine core on a virtual clock, with steps of known times: what each lane did, and could have done.

A lane runs its steps in the order of their issue, each as soon as the steps that it names have ended. Equal
events come in the order in which they were made.

Whether a lane that is idle could begin something, worked out from what was issued and what has ended.

Nothing of the engine's own books is used, so that a defect in them shows: a replica's slots follow from
where its instances stand, and what runs follows from the steps. A task that has not started counts as
able to begin in whichever replica its model's first block could. Only in a plan that waits for members it
stands where the engine launched it, as which members are there decides what may run.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from random import Random

from stageloom.shared.bitmask import mask_of
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import (
    Action,
    DropInstance,
    FinishTask,
    InstanceId,
    Outcome,
    PlanKey,
    PrepareProgram,
    Step,
    Task,
)
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import Member, Wait

_Replica = tuple[int, int]  # model, replica


class Watch:
    """The instances of one plan, batches of one, on its replicas.

    `launched` tells whether a task that has not started was launched into a replica, by model and replica.
    """

    def __init__(self, bound: BoundPlan, launched: Callable[[int, int], bool]) -> None:
        self._bound = bound
        self._launched = launched
        self._waiting: Counter[int] = Counter()  # tasks that have not started, by model
        self._standing: dict[_Replica, dict[InstanceId, int]] = {}  # the next block of each that has started
        self._running: dict[_Replica, Counter[int]] = {}  # blocks in flight
        self._replica_of: dict[InstanceId, _Replica] = {}
        self._in_flight: Counter[int] = Counter()  # steps, by combined block
        self._since_s: dict[int, float] = {}  # since when a member of a combined block could move
        for index, model in enumerate(bound.models):
            for replica in range(model.plan.replicas):
                self._standing[index, replica], self._running[index, replica] = {}, Counter()

    def arrived(self, model: int) -> None:
        self._waiting[model] += 1

    def gave_up(self, model: int) -> None:
        """A task ended before it started."""
        self._waiting[model] -= 1

    def issued(self, step: Step) -> None:
        """A step was handed to its lane: its members' instances stand at the next block from now on."""
        self._in_flight[step.program.combined] += 1
        for one in step.members:
            model, replica, block = one.member
            if block == 0:
                self._waiting[model] -= 1
            if one.last:
                self._standing[model, replica].pop(one.instance, None)
            else:
                self._standing[model, replica][one.instance] = block + 1
            self._running[model, replica][block] += 1
            self._replica_of[one.instance] = model, replica

    def ended(self, step: Step) -> None:
        self._in_flight[step.program.combined] -= 1
        for one in step.members:
            model, replica, block = one.member
            self._running[model, replica] -= Counter({block: 1})

    def dropped(self, instance: InstanceId) -> None:
        """An instance goes no further."""
        self._standing[self._replica_of[instance]].pop(instance, None)

    def could_begin(self, now: float) -> int:
        """The lanes in which some combined block could begin if they are idle, as a mask."""
        found = 0
        plan = self._bound.plan
        for index, combined in enumerate(self._bound.combined):
            able = 0 if self._in_flight[index] else self._able(combined.members)
            if not able:
                self._since_s.pop(index, None)
                continue
            since_s = self._since_s.setdefault(index, now)
            timed_out = plan.wait is Wait.TIMEOUT and now > since_s + plan.wait_timeout_us * 1e-6
            if plan.wait is Wait.NONE or timed_out or able == len(combined.members):
                found |= self._bound.lanes_of(index)
        return found

    def _able(self, members: Iterable[Member]) -> int:
        """How many of the members could run in one step now."""
        able = {member for member in members if self._is_there(member) and self._is_clear(member)}
        while True:
            kept = {member for member in able if self._has_room(member, able)}
            if kept == able:
                return len(able)
            able = kept

    def _is_there(self, member: Member) -> bool:
        """An instance stands at the block, or a task waits for its launch and slot 0 is free."""
        model, replica, block = member
        if block in self._standing[model, replica].values():
            return True
        if self._bound.plan.wait is not Wait.NONE:
            return block == 0 and self._launched(model, replica)
        return block == 0 and self._waiting[model] > 0 and not self._holders(member, 0)

    def _is_clear(self, member: Member) -> bool:
        """No step in flight writes what the block reads, or touches what it overwrites."""
        model, replica, block = member
        bound = self._bound.models[model]
        reads, writes = set(bound.slot_reads[block]), _writes(bound, block)
        for running in self._running[model, replica]:
            theirs = _writes(bound, running)
            if reads & theirs - ({0} if block == 0 else set()) or writes & (
                theirs | set(bound.slot_reads[running])
            ):
                return False
        return True

    def _has_room(self, member: Member, able: set[Member]) -> bool:
        """Its next slot is free, or is freed by another member of the same step."""
        model, _, block = member
        bound = self._bound.models[model]
        if block + 1 == len(bound.blocks):
            return True
        holders = self._holders(member, block + 1)
        freer = member._replace(block=bound.slot_readers[block + 1])
        return not holders or (freer in able and holders == [freer.block])

    def _holders(self, member: Member, slot: int) -> list[int]:
        """Where the instances stand that hold a slot of the member's replica."""
        model, replica, _ = member
        last = self._bound.models[model].slot_readers[slot]
        return [block for block in self._standing[model, replica].values() if slot <= block <= last]


def _writes(bound: BoundModel, block: int) -> set[int]:
    written = {block + 1} if block + 1 < len(bound.blocks) else set()
    return written | {0} if block == 0 else written


StepSeconds = Callable[[Step], float]


@dataclass(frozen=True)
class LaneUse:
    """What the lanes of one run did, after the first tenth of it."""

    completed: int
    seconds: float
    busy: float  # share of all lane time; W x rate / lanes, if a task is W seconds of steps
    could_idle: float  # share of all lane time in which a lane was idle though something could begin there
    beyond_bound: int  # the most times that a combined block was passed over, less max_skips + C - 1


class VirtualDevice:
    """One plan under a closed load (`tasks` in the system at any time) or a Poisson one (`rate`, tasks/s).

    Models come at random; with `even`, for a closed load, each model has its share of the tasks at any time.
    """

    def __init__(
        self,
        bound: BoundPlan,
        seconds: StepSeconds,
        *,
        seed: int,
        tasks: int = 0,
        rate: float = 0.0,
        even: bool = False,
        deadlines_s: tuple[float, float] | None = None,
    ) -> None:
        self._bound = bound
        self._step_seconds = seconds
        self._random = Random(seed)
        self._tasks, self._rate, self._even, self._deadlines_s = tasks, rate, even, deadlines_s
        self._times_out = bound.plan.wait is Wait.TIMEOUT
        self._core = EngineCore()
        self._watch = Watch(bound, self._launched)
        self._pending: list[deque[Step]] = [deque() for _ in range(bound.plan.lanes)]
        self._running: list[Step | None] = [None] * bound.plan.lanes
        self._in_flight: set[StepId] = set()
        self._started: set[TaskId] = set()
        self._model_of: dict[TaskId, int] = {}
        self._events: list[tuple[float, int, Callable[[], list[Action]]]] = []
        self._made = self._submitted = self._completed = 0
        self._now = self._busy_s = self._could_idle_s = 0.0

    def run(self, completions: int) -> LaneUse:
        """Go on until so many tasks have completed."""
        core = self._core
        self._act(core.load(PlanKey(0), self._bound, 0.0))
        self._act(core.activate(PlanKey(0), 0.0))
        for number in range(self._tasks):
            self._at(0.0, partial(self._submit, number % len(self._bound.models) if self._even else None))
        if self._rate:
            self._at(self._random.expovariate(self._rate), self._arrive)
        cut, began_s = completions // 10, 0.0
        while self._completed < completions:
            if self._completed < cut:
                began_s, self._busy_s, self._could_idle_s = self._now, 0.0, 0.0
            self._next_event()
        seconds = self._now - began_s
        lane_s = seconds * self._bound.plan.lanes
        most = max(one.most_skips for one in core.snapshot(self._now).combined)
        allowed = self._bound.plan.max_skips + len(self._bound.combined) - 1
        return LaneUse(
            completed=self._completed - cut,
            seconds=seconds,
            busy=self._busy_s / lane_s,
            could_idle=self._could_idle_s / lane_s,
            beyond_bound=most - allowed,
        )

    def _launched(self, model: int, replica: int) -> bool:
        # The engine says nowhere else where it launched a task to.
        instance = self._core._plans[PlanKey(0)].models[model].tracks[replica].slots[0].instance
        return instance is not None

    # Events

    def _at(self, when_s: float, event: Callable[[], list[Action]]) -> None:
        heappush(self._events, (when_s, self._made, event))
        self._made += 1

    def _next_event(self) -> None:
        wakeup = self._core.next_wakeup(self._now)
        due_s = self._events[0][0] if self._events else None
        if wakeup is not None and (due_s is None or wakeup < due_s):
            self._pass(wakeup)
            self._act(self._core.tick(wakeup))
            return
        if due_s is None:
            raise RuntimeError("nothing is left to happen")
        self._pass(due_s)
        _, _, event = heappop(self._events)
        self._act(event())

    def _pass(self, now: float) -> None:
        """Count what the lanes do until `now`."""
        passed_s = now - self._now
        if passed_s > 0.0:
            idle = mask_of(
                lane
                for lane, (pending, running) in enumerate(zip(self._pending, self._running, strict=True))
                if not pending and running is None
            )
            self._busy_s += passed_s * sum(running is not None for running in self._running)
            # A plan with a time-out is watched all the time: what counts is since when a member could move.
            if idle or self._times_out:
                self._could_idle_s += passed_s * (self._watch.could_begin(self._now) & idle).bit_count()
        self._now = now

    def _arrive(self) -> list[Action]:
        self._at(self._now + self._random.expovariate(self._rate), self._arrive)
        return self._submit()

    def _submit(self, model: int | None = None) -> list[Action]:
        models = self._bound.plan.models
        index = self._random.randrange(len(models)) if model is None else model
        deadline_s = None
        if self._deadlines_s is not None:
            deadline_s = self._now + self._random.uniform(*self._deadlines_s)
        id = TaskId(self._submitted)
        self._submitted += 1
        self._model_of[id] = index
        self._watch.arrived(index)
        task = Task(id=id, models=(models[index].name,), nbytes=1, deadline_s=deadline_s)
        return self._core.submit(task, self._now)

    def _end(self, lane: int) -> list[Action]:
        step = self._running[lane]
        assert step is not None
        self._running[lane] = None
        self._in_flight.discard(step.id)
        self._watch.ended(step)
        return self._core.step_done(step.id, self._now)

    # Actions

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Step):
                self._watch.issued(action)
                self._in_flight.add(action.id)
                self._pending[action.lane].append(action)
                for member in action.members:
                    self._started.update(member.tasks)
            elif isinstance(action, FinishTask):
                self._finish(action)
            elif isinstance(action, DropInstance):
                self._watch.dropped(action.instance)
            elif isinstance(action, PrepareProgram):
                self._act(self._core.program_ready(action.program, self._now))
        for lane, pending in enumerate(self._pending):
            if pending and self._running[lane] is None and self._in_flight.isdisjoint(pending[0].after):
                step = self._running[lane] = pending.popleft()
                self._at(self._now + self._step_seconds(step), lambda lane=lane: self._end(lane))  # type: ignore[misc]

    def _finish(self, action: FinishTask) -> None:
        model = self._model_of.pop(action.task)
        if action.task not in self._started:
            self._watch.gave_up(model)
        self._started.discard(action.task)
        self._completed += action.outcome is Outcome.COMPLETED
        if self._tasks:
            self._at(self._now, partial(self._submit, model if self._even else None))
