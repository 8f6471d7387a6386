"""What must be true of the core between events, worked out again from where the instances stand."""

from stageloom.shared.bitmask import bits
from stageloom.shared.engine.choice import Chooser
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.patience import wanted_by_s
from stageloom.shared.engine.queues import Launcher
from stageloom.shared.engine.records import COPY_LANE, Instance
from stageloom.shared.engine.slots import NO_LANE, CombinedState, PlanState, Slot, Track
from stageloom.shared.engine.steps import Action, Step
from stageloom.shared.plan import PlacementPolicy, StepChoice, Wait


class SpyChooser(Chooser):
    """Counts on its own how often each combined block is passed over, and judges every choice."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_over: dict[CombinedState, int] = {}
        self.worst: dict[CombinedState, int] = {}
        self.plans: list[PlanState] = []  # loaded
        self.released: list[PlanState] = []
        self.population = 0  # combined blocks of all loaded plans, at most, since the last choice of each

    def add(self, plan: PlanState) -> None:
        """A plan was loaded."""
        super().add(plan)
        self.plans.append(plan)

    def remove(self, plan: PlanState) -> None:
        """It is released."""
        super().remove(plan)
        self.plans.remove(plan)
        self.released.append(plan)

    def dismiss(self, combined: CombinedState) -> None:
        """What it was passed over for is gone."""
        super().dismiss(combined)
        self.passed_over.pop(combined, None)

    def choose(self, lane: int, load: int, now: float) -> CombinedState | None:
        """Check the choice against the rules, worked out the slow way."""
        could = [
            c
            for plan in self.plans
            for c in runnable(plan)
            if load < plan.run_ahead and c.lanes >> lane & 1
            if plan.lanes == 1 or stands(c) == (lane if load else NO_LANE)
        ]
        for c in could:
            assert c.skips == self.passed_over.get(c, 0), "what it was passed over was miscounted"
        due = [c for c in could if c.skips >= c.plan.max_skips]
        late = [c for c in could if _late(c, now)]
        ratios = {c: (c.moves & c.ready).bit_count() / c.size for c in could}
        chosen = super().choose(lane, load, now)
        if chosen is None:
            assert not could
            return None
        assert chosen in could
        if due:
            assert chosen in due, "an overdue combined block was passed over by one that is not"
        elif late:
            assert chosen in late, "a late combined block was passed over by one that is not"
        elif chosen.plan.bound.plan.step_choice is StepChoice.RATIO:
            rivals = [c for c in could if c.plan is chosen.plan]
            assert ratios[chosen] == max(ratios[c] for c in rivals), "not the highest input ratio"
        elif chosen.plan.bound.plan.step_choice is StepChoice.DEADLINE:
            rivals = [c for c in could if c.plan is chosen.plan]
            assert _wanted_s(chosen) == min(map(_wanted_s, rivals)), "not what is wanted first"
        for c in could:
            if c is chosen:
                self.passed_over.pop(c, None)
                continue
            count = self.passed_over[c] = self.passed_over.get(c, 0) + 1
            bound = c.plan.max_skips + self.population - 1
            assert count <= bound, f"passed over {count} times, more than {bound}"
        return chosen


def runnable(plan: PlanState) -> list[CombinedState]:
    """The combined blocks that could run if a lane took them."""
    return [combined for combined in plan.combined if combined.rivals is not None]


def stands(combined: CombinedState) -> int:
    """The lane behind whose steps it could begin, or `NO_LANE`: in any idle one; of one lane both are 0."""
    found = combined.stands.index(combined.rivals)  # type: ignore[arg-type]
    return NO_LANE if found == combined.plan.lanes else found


def _wanted_s(combined: CombinedState) -> float:
    instances = [combined.slots[p].instance for p in bits(combined.moves & combined.ready)]
    return min(instance.wanted_by_s for instance in instances if instance is not None)


def _late(combined: CombinedState, now: float) -> bool:
    if combined.plan.step_choice is StepChoice.DEADLINE:
        return False
    active = [combined.slots[p].instance for p in bits(combined.moves & combined.ready)]
    oldest = min((i for i in active if i is not None), key=lambda i: i.id)
    return now >= (oldest.ready_s + oldest.deadline_s) / 2


class SpyCore(EngineCore):
    """An engine core that notes its launches and checks their spacing."""

    def __init__(self, *, max_preparing: int = 2, max_programs: int = 1024) -> None:
        super().__init__(max_preparing=max_preparing, max_programs=max_programs)
        self.spy = self._scheduler.chooser = SpyChooser()
        self.launches: list[tuple[float, str, int]] = []  # when, model, tasks
        self._last: dict[Launcher, tuple[float, int]] = {}  # launch of each, and its tasks

    def _launch_one(self, launcher: Launcher, now: float, lanes: int = -1) -> None:
        assert launcher.target is not None
        plan = launcher.target.bound.plan
        last_s, tasks = self._last.get(launcher, (now, 0))
        if now < last_s + plan.launch_interval_us * 1e-6 * tasks:
            assert plan.work_conserving, "a strict model was launched before its interval was over"
            assert 0 in self._scheduler.lanes, "launched early without an idle lane"
        before = launcher.launched
        super()._launch_one(launcher, now, lanes)
        taken = launcher.launched - before
        assert 1 <= taken <= plan.batch
        self.launches.append((now, launcher.name, taken))
        self._last[launcher] = now, taken

    @property
    def plans(self) -> list[PlanState]:
        """The loaded plans."""
        return list(self._plans.values())

    def audit(self, now: float) -> None:
        """Check everything that the core keeps incrementally."""
        assert self.spy.plans == self.plans
        for plan in self.spy.released:
            assert not runnable(plan), "a released plan still has what could run"
        self.spy.population = max(self.spy.population, sum(len(p.combined) for p in self.plans))
        for plan in self.plans:
            for model in plan.models:
                for track in model.tracks:
                    _audit_track(track)
            for combined in plan.combined:
                self._audit_combined(combined)
            self._audit_placement(plan, now)
            inside = {s.instance.id for c in plan.combined for s in c.slots if s.instance is not None}
            assert plan.population == len(inside)
            assert plan.steps == sum(plan in record.holds for record in self._scheduler.in_flight.values())
            assert not (plan.superseded and plan.empty), "a plan that ran empty was not released"
        self._audit_lanes()
        self._audit_tasks(now)
        assert not self._scheduler.touched

    def audit_stand_still(self) -> None:
        """With nothing more to come, `wait: all` may wait only for tasks that have not arrived."""
        assert not self._scheduler.in_flight
        waiting = sum(plan.population for plan in self.plans)
        for launcher in self._registry.launchers.values():
            target = launcher.target
            if target is not None and target.free_tracks:
                assert not launcher.queue.launchable, "a task was not launched"
        free = any(model.free_tracks for plan in self.plans for model in plan.models)
        assert free or not waiting, "every model has its next task, yet nothing runs"

    def _end(self, now: float, *, stirred: bool = True) -> list[Action]:
        actions = super()._end(now, stirred=stirred)
        for action in actions:
            if isinstance(action, Step):
                self._check_lane(action)
        return actions

    def _check_lane(self, step: Step) -> None:
        """With several lanes no step waits for another lane, and in a busy one it waits for a step there."""
        in_flight = self._scheduler.in_flight
        plan = self._plans[step.program.plan]
        assert plan.bound.lanes_of(step.program.combined) >> step.lane & 1, "a block runs where it may not"
        after = {in_flight[one].lane for one in step.after if one in in_flight}
        assert after <= {step.lane}, "a lane waits for another one"
        before = [one for one, record in in_flight.items() if record.lane == step.lane and one < step.id]
        assert plan.lanes == 1 or not before or after, "a step lies behind one that it need not wait for"

    def _audit_combined(self, combined: CombinedState) -> None:
        moves = _slow_moves(combined, combined.ready | combined.empty)
        assert bool(combined.moves) == bool(moves)
        waits = combined.plan.wait is not Wait.NONE and not combined.plan.loose
        if not waits:
            assert not combined.empty, "a dead instance was not freed"
        elif moves == combined.full:
            assert moves & combined.ready, "dead instances did not travel on"
        places = self._places(combined, moves)
        if waits and combined.plan.wait is Wait.ALL:
            places = [(lane, mask) for lane, mask in places if mask == combined.full]
        if combined.rivals is not None:
            assert (stands(combined), combined.moves) in places
        elif combined.sought is not None and not combined.sought.placed:
            _audit_seeking(combined)
        elif combined.placement is not None and combined.placement.awaits_copies(combined):
            assert any(record.combined is combined for record in self._scheduler.in_flight.values())
        elif not waits or combined.plan.wait is Wait.ALL:
            assert not places, "a combined block that could begin does not compete"

    def _audit_placement(self, plan: PlanState, now: float) -> None:
        """What the placer has booked is what was placed and has not ended, and nothing lies in the past."""
        if plan.placement is None:
            return
        bound, workers = plan.bound, plan.placement.placer.workers
        waiting: list[set[object]] = [set() for _ in workers]
        begun: list[set[object]] = [set() for _ in workers]
        for combined in plan.combined:
            if combined.sought is not None and combined.sought.placed:
                (resource,) = {bound.plan.lane_resources[lane] for lane in bits(combined.lanes)}
                waiting[resource].add(combined.sought.task)
        for record in self._scheduler.in_flight.values():
            if record.task is not None and record.combined.plan is plan and record.lane != COPY_LANE:
                begun[bound.plan.lane_resources[record.lane]].add(record.task)
        for resource, worker in enumerate(workers):
            assert worker.tasks == len(waiting[resource]) + len(begun[resource]), "a task was not taken back"
            assert set(worker._placed) == waiting[resource], "a prediction was not taken back"
            assert set(worker._begun) == begun[resource], "a prediction was not taken back"
            assert worker.exp_start_s(now) >= now, "exp_start lies in the past"
            assert worker.exp_len_s == sum(sum(pair) for pair in worker._placed.values())

    def _places(self, combined: CombinedState, moves: int) -> list[tuple[int, int]]:
        """Where members could begin: in any idle lane, or behind steps whose results they read."""
        lanes, found = combined.plan.lanes, []
        needed = {p: self._lanes_before(combined.slots[p]) for p in bits(moves & combined.ready)}
        free = moves & combined.empty
        for position, (made, overwritten) in needed.items():
            if not made | overwritten or (lanes == 1 and made | overwritten == {0}):
                free |= 1 << position
        mask = _slow_moves(combined, free)
        if mask & combined.ready and (lanes == 1 or not combined.in_flight):
            found.append((0 if lanes == 1 else NO_LANE, mask))
        if combined.placement is not None:
            return found  # what reads the result of a step in flight is placed when that ends
        for lane in range(lanes) if lanes > 1 else ():
            own = 0
            for position, (made, overwritten) in needed.items():
                alone = combined.slots[position].track.blocks == 1
                if made | overwritten == {lane} and (made or alone):
                    own |= 1 << position
            mask = _slow_moves(combined, free | own)
            if not combined.lanes >> lane & 1:
                continue
            if mask & own and (not combined.in_flight or combined.lane == lane):
                found.append((lane, mask))
        return found

    def _lanes_before(self, slot: Slot) -> tuple[set[int], set[int]]:
        """The lanes of steps that make what the block reads, and of those that read what it overwrites.

        Worked out from the steps in flight; only what a move stands for is taken from the slots' books.
        """
        made: set[int] = set()
        overwritten: set[int] = set()
        reads = {one.block for one in slot.reads} if slot.block else set()
        writes = {slot.block + 1} | ({0} if not slot.block else set())
        for record in self._scheduler.in_flight.values():
            for _, other in record.members:
                if other.track is slot.track and record.lane == COPY_LANE:
                    if other.block in reads:
                        made.add(COPY_LANE)
                    if other.block in writes:
                        overwritten.add(COPY_LANE)
                elif other.track is slot.track:
                    if reads & {other.block + 1}:
                        made.add(record.lane)
                    touched = {one.block for one in other.reads} | {other.block + 1}
                    touched |= {0} if not other.block else set()
                    if writes & touched - {slot.track.blocks}:
                        overwritten.add(record.lane)
        if len(self._plans) > 1 or slot.track.newest is None or slot.track.newest.moved_after:
            masks = slot.lanes_before(self._scheduler.in_flight)
            made, overwritten = (
                set(bits(mask)) | own for mask, own in zip(masks, (made, overwritten), strict=True)
            )
        return made, overwritten

    def _audit_lanes(self) -> None:
        loads = [0] * len(self._scheduler.lanes)
        lanes_of: dict[CombinedState, set[int]] = {}
        steps = [record for record in self._scheduler.in_flight.values() if record.lane != COPY_LANE]
        for record in steps:
            loads[record.lane] += 1
            lanes_of.setdefault(record.combined, set()).add(record.lane)
        assert loads == self._scheduler.lanes
        assert all(len(lanes) == 1 for lanes in lanes_of.values()), "a combined block is in two lanes"
        for combined in (c for plan in self.plans for c in runnable(plan)):
            plan, stand = combined.plan, stands(combined)
            for lane in bits(combined.lanes) if stand == NO_LANE else [stand]:
                limit = 1 if stand == NO_LANE else plan.run_ahead
                assert loads[lane] >= limit, "a lane was left without work"

    def _audit_tasks(self, now: float) -> None:
        stats = self.snapshot(now)
        assert stats.submitted == stats.ended.total + stats.open_tasks
        for launcher in self._registry.launchers.values():
            queued = list(launcher.queue.entries())
            assert not any(entry.ended for entry in queued)
            assert len(queued) == len(launcher.queue) <= launcher.queue.plan.max_tasks
            assert launcher.queue.nbytes == sum(entry.nbytes for entry in queued)
        for entry in self._registry.tasks.values():
            assert entry.deadline_s > now, "an expired task was not answered"


def _audit_seeking(combined: CombinedState) -> None:
    """Only `eager` leaves a block without a place, and only while no lane is free for it."""
    placement = combined.placement
    assert placement is not None
    assert placement.placer.policy is PlacementPolicy.EAGER, "a block was not placed"
    for resource in combined.plan.bound.combined[combined.index].plan.variant_on:
        worker = placement.placer.workers[resource]
        assert worker.tasks >= worker.spec.lanes, "a lane is free for a block that was not placed"


def _audit_track(track: Track) -> None:
    """One instance per block, and each slot held by exactly the instance that still needs it."""
    readers = track.bound.slot_readers
    holder: list[Instance | None] = [None] * track.blocks
    for block, slot in enumerate(track.slots):
        instance, home, bit = slot.instance, slot.home, slot.bit
        assert home.slots[slot.position] is slot and bit == 1 << slot.position
        if instance is None:
            assert not (home.ready | home.empty) & bit
            continue
        assert instance.block == block and instance.track is track
        assert bool(home.ready & bit) == bool(instance.live) != bool(home.empty & bit)
        if instance.live:
            wanted_s = min(wanted_by_s(row, instance.turn_s) for row in instance.rows if not row.ended)
            assert instance.wanted_by_s == wanted_s, "it is ranked by a task that has ended"
        for held in range(block + 1):
            if readers[held] >= block:
                assert holder[held] is None, "two instances hold one slot"
                holder[held] = instance
    assert holder == [slot.holder for slot in track.slots]
    assert bool(track.model.free_tracks >> track.replica & 1) == (holder[0] is None)


def _slow_moves(combined: CombinedState, moving: int) -> int:
    """By trial: drop members that cannot move until those left free each other's next slots."""
    while True:
        kept = 0
        for position in bits(moving):
            slot = combined.slots[position]
            assert slot.instance is not None
            ahead = slot.ahead
            if ahead is None or ahead.holder is None:
                kept |= 1 << position
                continue
            track = slot.track
            reader = track.slots[ahead.holder.block]
            frees = track.bound.slot_readers[ahead.block] == reader.block
            if frees and reader.home is combined and moving & reader.bit:
                kept |= 1 << position
        if kept == moving:
            return moving
        moving = kept
