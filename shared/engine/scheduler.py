"""Lanes, steps in flight, and what could run next.

Whatever changes a slot touches combined blocks; `refresh` works out their moves again, `issue_next` runs one.
"""

from operator import attrgetter

from stageloom.shared.engine.choice import Chooser
from stageloom.shared.engine.history import DurationHistory
from stageloom.shared.engine.placing import PlanPlacement
from stageloom.shared.engine.records import COPY_LANE, Instance, ProgramState, ProgramStatus, StepRecord
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.slots import NO_LANE, CombinedState, InFlight, PlanState, Slot, Touched
from stageloom.shared.engine.steps import (
    Action,
    CopySlot,
    DropInstance,
    PrepareProgram,
    ReleasePlan,
    Step,
    StepMember,
    Task,
)
from stageloom.shared.engine.swap import find_place, move_to
from stageloom.shared.ids import StepId
from stageloom.shared.plan import Wait

_NEVER = float("inf")
_index = attrgetter("index")


def _age(pair: tuple[CombinedState, int]) -> tuple[int, int]:
    combined, _ = pair
    return (combined.oldest().id, combined.index)


class StepScheduler:
    """Steps and slots over all loaded plans; actions go to `out`.

    Plans that place their blocks predict steps by `history` and copies by `bus`.
    """

    __slots__ = (
        "_bus",
        "_max_preparing",
        "_max_programs",
        "capacity",
        "chooser",
        "fallback_steps",
        "free_s",
        "history",
        "in_flight",
        "lanes",
        "max_load",
        "out",
        "seeking",
        "steps",
        "timed",
        "touched",
    )

    def __init__(
        self,
        max_preparing: int,
        max_programs: int,
        history: DurationHistory | None = None,
        bus: Bus | None = None,
    ) -> None:
        self.history = DurationHistory() if history is None else history
        self._bus = bus or Bus()
        self._max_preparing = max_preparing
        self._max_programs = max_programs
        self.timed: Touched = {}  # those that wait for members under `wait: timeout`
        self.chooser = Chooser()
        self.fallback_steps = 0
        self.in_flight: InFlight = {}
        self.free_s: list[float] = [-_NEVER]  # per lane, when its last step ended
        self.lanes: list[int] = [0]  # steps in flight per lane
        self.max_load = 1  # the deepest run-ahead of any plan so far
        self.capacity = 1  # steps in flight in all lanes, at most; and the copies that are
        self.out: list[Action] = []
        self.seeking: dict[PlanPlacement, None] = {}  # those that have blocks to place
        self.steps = 0  # issued so far
        self.touched: Touched = {}

    def add(self, plan: PlanState) -> None:
        """Make room for the steps of one more plan."""
        self.free_s.extend([-_NEVER] * (plan.lanes - len(self.lanes)))
        before = len(self.lanes) * self.max_load
        self.lanes.extend([0] * (plan.lanes - len(self.lanes)))
        self.max_load = max(self.max_load, plan.run_ahead)
        self.capacity += len(self.lanes) * self.max_load - before
        if plan.bound.plan.places:
            plan.placement = PlanPlacement(plan, self.history, self._bus)
            for combined in plan.combined:
                combined.placement = plan.placement
        self.chooser.add(plan)

    def remove(self, plan: PlanState) -> None:
        """Nothing is left on this plan: its programs and slots can be freed."""
        self.chooser.remove(plan)
        self.out.append(ReleasePlan(plan.key))

    # What could run

    def refresh(self, now: float) -> None:
        """Work out again what the touched combined blocks would run, and in which lanes they could begin."""
        touched, chooser = self.touched, self.chooser
        alone = len(self.lanes) == 1
        sought: list[tuple[CombinedState, int]] = []
        while touched:
            combined, _ = touched.popitem()
            present = combined.ready | combined.empty
            moves = combined.moves = combined.find_moves(present) if present else 0
            if self.timed:
                self.timed.pop(combined, None)
            if not moves:
                combined.since_s = _NEVER
                if combined.rivals is not None:
                    chooser.dismiss(combined)
                if combined.sought is not None:
                    self._give_up(combined)
            elif moves != combined.full and combined.plan.waits and self._must_wait(combined, now):
                chooser.dismiss(combined)
            elif not moves & combined.ready:
                chooser.dismiss(combined)
                self._shift(combined)
            elif combined.placement is not None:
                self._stand_placed(combined, combined.placement, sought)
            elif alone or not self.in_flight:  # nothing has to be waited for in another lane
                chooser.admit(combined, NO_LANE)
            else:
                self._place(combined, now)
        if sought or self.seeking:
            self._seek(sought, now)

    def _stand_placed(
        self, combined: CombinedState, placement: PlanPlacement, sought: list[tuple[CombinedState, int]]
    ) -> None:
        """Let a combined block stand where it was placed, or have it placed once all that it reads is made.

        It stands in the line of idle lanes alone: behind a step in flight there is nothing to be placed.
        """
        if placement.awaits_copies(combined):
            return
        places = combined.place(combined.moves, self.in_flight)
        moves = next((moves for stand, moves in places if stand == NO_LANE), 0)
        if not moves:
            self.chooser.dismiss(combined)
            return
        combined.moves = moves
        before = combined.sought
        if before is not None and before.members == placement.members(combined, moves):
            if before.placed:
                self.chooser.admit(combined, NO_LANE)
            return
        self.chooser.dismiss(combined)
        if before is not None:
            self._give_up(combined)
        sought.append((combined, moves))

    def _give_up(self, combined: CombinedState) -> None:
        """It does not run as it was to: its place is free for others."""
        placement = combined.placement
        assert placement is not None
        placement.give_up(combined)
        if placement.seeking:
            self.seeking[placement] = None

    def _seek(self, sought: list[tuple[CombinedState, int]], now: float) -> None:
        """Have blocks placed, those of the oldest instances first; what they lack is copied."""
        for combined, moves in sorted(sought, key=_age):
            placement = combined.placement
            assert placement is not None
            placement.seek(combined, moves)
            self.seeking[placement] = None
        for placement in self.seeking:
            for combined, placed in placement.place(now):
                for slot in placed.copies:
                    self._copy(combined, slot, placement.placer.workers[placed.resource].spec.node, now)
                if not placed.copies:
                    self.chooser.admit(combined, NO_LANE)
        self.seeking.clear()

    def _copy(self, combined: CombinedState, slot: Slot, node: int, now: float) -> None:
        """Copy a slot to a memory node; the combined block, which was placed there, waits for it."""
        sought = combined.sought
        assert sought is not None
        readers = (combined.slots[position] for position, _, _ in sought.members)
        instance = next(reader.instance for reader in readers if reader.track is slot.track)
        assert instance is not None
        sought.copying += 1
        copy = StepId(self.steps)
        self.steps += 1
        plan = combined.plan
        record = StepRecord(combined, COPY_LANE, [(instance, slot)], False, plan.alone, now, task=sought.task)
        record.waiters = {combined: None}
        self.in_flight[copy] = record
        self.capacity += 1
        plan.steps += 1
        slot.writers.append(copy)
        slot.readers.append(copy)
        self.out.append(CopySlot(copy, instance.id, (plan.key, slot.member), node))

    def copied(self, copy: StepId) -> None:
        """A copy ended, well or badly: a step that misses its tensors fails by itself.

        Raises:
            ValueError: it is not in flight.
        """
        record = self.in_flight.get(copy)
        if record is None or record.lane != COPY_LANE:
            raise ValueError(f"copy {copy} is not in flight")
        del self.in_flight[copy]
        self.capacity -= 1
        combined = record.combined
        combined.plan.steps -= 1
        if combined.sought is not None and combined.sought.task == record.task:
            combined.sought.copying -= 1
        for waiter in sorted(record.waiters, key=_index):
            self.touched[waiter] = None

    def _place(self, combined: CombinedState, now: float) -> None:
        """Let a combined block stand where members could begin, if it may run without the others."""
        for stand, moves in combined.place(combined.moves, self.in_flight):
            if moves == combined.full or not combined.plan.waits or not self._must_wait(combined, now):
                combined.moves = moves
                self.chooser.admit(combined, stand)
                return
        self.chooser.dismiss(combined)

    def _must_wait(self, combined: CombinedState, now: float) -> bool:
        """Under `wait: all` always, under `timeout` until it is over."""
        if combined.plan.wait is Wait.ALL:
            return True
        if combined.since_s == _NEVER:
            combined.since_s = now
        if now >= combined.since_s + combined.plan.wait_timeout_s:
            return False
        self.timed[combined] = None
        return True

    def _shift(self, combined: CombinedState) -> None:
        """Only dead instances would move: they travel on without a step."""
        for slot in combined.order:
            if combined.moves & slot.bit:
                assert slot.instance is not None
                slot.advance(slot.instance, self.touched)
        combined.since_s = _NEVER

    def end_waits(self, now: float) -> None:
        """Look again at the combined blocks that have waited for members long enough."""
        for combined in sorted(self.timed, key=_index):
            if now >= combined.since_s + combined.plan.wait_timeout_s:
                self.touched[combined] = None

    @property
    def next_wait_s(self) -> float:
        """When the next combined block has waited long enough; infinity without one."""
        return min((c.since_s + c.plan.wait_timeout_s for c in self.timed), default=_NEVER)

    def loosen(self, plan: PlanState) -> None:
        """From now on the plan waits for nobody, until it is empty: it drains, or it is superseded."""
        if plan.wait is Wait.NONE:
            return
        plan.loose = True
        for combined in plan.combined:
            combined.since_s = _NEVER
            self.touched[combined] = None
            for slot in combined.slots:
                if slot.instance is not None and not slot.instance.live:
                    slot.vacate(self.touched)

    # Issuing

    def open_lanes(self, plan: PlanState) -> int:
        """The plan's lanes that could begin a step now, as a mask; its only one, that could take the next."""
        number = plan.lanes
        limit = plan.run_ahead if number == 1 else 1
        mask = 0
        for lane in range(number):
            if self.lanes[lane] < limit:
                mask |= 1 << lane
        return mask

    def issue_next(self, now: float) -> bool:
        """Issue one step into the least loaded lane that can take one."""
        if not self.chooser.candidates:
            return False
        lanes = self.lanes
        lane = 0
        if len(lanes) == 1:
            combined = self.chooser.choose(0, lanes[0], now) if lanes[0] < self.max_load else None
        else:
            for lane in sorted(range(len(lanes)), key=lanes.__getitem__):
                if lanes[lane] >= self.max_load:
                    return False
                combined = self.chooser.choose(lane, lanes[lane], now)
                if combined is not None:
                    break
        if combined is None:
            return False
        self._issue(combined, lane, now)
        return True

    def _issue(self, combined: CombinedState, lane: int, now: float) -> None:
        step_id = StepId(self.steps)
        self.steps += 1
        plan, moves = combined.plan, combined.moves
        active = moves & combined.ready
        program = combined.at_one.get(active) or combined.program(active)
        in_flight, touched = self.in_flight, self.touched
        after: set[StepId] = set()
        ran: list[tuple[Instance, Slot]] = []
        members: list[StepMember] = []
        last = False
        task = None if combined.placement is None else combined.placement.begin(combined, lane, now)
        for slot in combined.order:  # downstream first; the dead ones travel along
            bit = slot.bit
            if not moves & bit:
                continue
            instance = slot.instance
            assert instance is not None
            if active & bit:
                staged = slot.access(step_id, in_flight, after)
                instance.started = True
                instance.ready_s = now
                ran.append((instance, slot))
                members.append(
                    StepMember(slot.position, slot.member, instance.id, instance.task_ids, slot.last, staged)
                )
                if slot.last:
                    last = True
            slot.advance(instance, touched)
        in_flight[step_id] = StepRecord(combined, lane, ran, last, plan.alone, now, task=task)
        plan.steps += 1
        combined.lane = lane
        combined.in_flight += 1
        combined.runs += 1
        combined.active_sum += len(members)
        combined.since_s = _NEVER
        self.lanes[lane] += 1
        touched[combined] = None
        if not program.ready:
            self.fallback_steps += 1
            self._ask(plan, program)
        waits = tuple(sorted(after)) if after else ()
        self.out.append(Step(step_id, lane, program.key, tuple(members), waits, not program.ready))

    def _ask(self, plan: PlanState, program: ProgramState) -> None:
        """Have a program prepared that a step just lacked, within the bounds."""
        if (
            program.status is ProgramStatus.UNASKED
            and plan.preparing < self._max_preparing
            and plan.programs < self._max_programs
        ):
            plan.preparing += 1
            plan.programs += 1
            program.settle(ProgramStatus.PREPARING)
            program.on_demand = True
            self.out.append(PrepareProgram(program.key))

    # Leaving

    def retire(
        self, step_id: StepId, now: float, compute_s: float | None = None, *, failed: bool = False
    ) -> StepRecord:
        """A step ended: nothing waits for it any more. What it took is noted where tasks go by deadlines.

        `compute_s` is what it took for itself, where that is known. One that failed tells nothing of what one
        takes that does its work.

        Raises:
            ValueError: the step is not in flight.
        """
        record = self.in_flight.pop(step_id, None)
        if record is None:
            raise ValueError(f"step {step_id} is not in flight")
        combined = record.combined
        if record.task is not None:
            self._end_task(combined, record.task, compute_s)
        combined.in_flight -= 1
        if not combined.in_flight:
            combined.lane = NO_LANE
            if combined.moves:
                self.touched[combined] = None  # it could run in any lane now
        lane = record.lane
        self.lanes[lane] -= 1
        seconds = now - max(record.issued_s, self.free_s[lane])
        self.free_s[lane] = now
        paced = combined.plan.by_deadline and not failed
        for waiter in sorted(record.waiters, key=_index):  # in an order that does not hang on who asked first
            self.touched[waiter] = None
        for plan in record.holds:
            plan.steps -= 1
        for instance, slot in record.members:
            if instance.passed <= slot.block and instance.track is slot.track:
                instance.passed = slot.block + 1
            if paced:
                slot.track.model.pace.note(slot.block, seconds)
        return record

    def _end_task(self, combined: CombinedState, task: int, compute_s: float | None) -> None:
        """A step that was placed ended; blocks that wait for a free lane are looked at again."""
        placement = combined.placement
        assert placement is not None
        placement.end(task, compute_s)
        if placement.seeking:
            self.touched[placement.first_seeking()] = None
            self.seeking[placement] = None

    def drop_row(self, instance: Instance, task: Task) -> None:
        """A task that the instance carries has ended before its result."""
        if instance.over:
            return
        instance.live -= 1
        if not instance.live:
            self.bury(instance)
            instance.rows = []
        elif not instance.started:
            instance.rows.remove(task)
            instance.fit()
            self.touched[instance.track.slots[instance.block].home] = None
        elif instance.rank() and instance.block < instance.track.blocks:
            self.touched[instance.track.slots[instance.block].home] = None

    def bury(self, instance: Instance, *, failed: bool = False) -> None:
        """No task of the instance is left: it goes no further, or travels on empty where others wait."""
        instance.over = True
        instance.live = 0
        unfinished = instance.block < instance.track.blocks
        if instance.started and (unfinished or failed):
            waits = {step for step, record in self.in_flight.items() if record.carries(instance)}
            waits.update(step for step in instance.moved_after if step in self.in_flight)
            self.out.append(DropInstance(instance.id, tuple(sorted(waits))))
        if not unfinished:
            return
        slot = instance.track.slots[instance.block]
        if slot.home.plan.waits:
            slot.leave(self.touched)
            slot.enter(instance, self.touched)
        else:
            slot.vacate(self.touched)

    def move_over(self, old: PlanState, new: PlanState) -> None:
        """Let every instance of a superseded plan that can go over do so, the oldest first."""
        instances = [s.instance for c in old.combined for s in c.slots if s.instance is not None]
        for instance in sorted(instances, key=lambda i: i.id):
            place = find_place(instance, new)
            if place is not None:
                action = move_to(instance, place, self.in_flight, self.touched)
                if action is not None:
                    self.out.append(action)
