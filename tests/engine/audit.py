"""What must be true of the core between events, worked out again from where the instances stand."""

from shared.bitmask import bits
from shared.engine.choice import Chooser
from shared.engine.core import EngineCore
from shared.engine.launcher import Launcher
from shared.engine.records import Instance
from shared.engine.slots import CombinedState, PlanState, Track
from shared.plan import StepChoice, Wait


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
            if (not c.in_flight or c.lane == lane) and load < plan.run_ahead and lane < plan.lanes
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


def _late(combined: CombinedState, now: float) -> bool:
    active = [combined.slots[p].instance for p in bits(combined.moves & combined.ready)]
    oldest = min((i for i in active if i is not None), key=lambda i: i.id)
    return now >= (oldest.ready_s + oldest.deadline_s) / 2


class SpyCore(EngineCore):
    """An engine core that notes its launches and checks their spacing."""

    def __init__(self, *, max_preparing: int = 2, max_programs: int = 1024) -> None:
        super().__init__(max_preparing=max_preparing, max_programs=max_programs)
        self.spy = self._board.chooser = SpyChooser()
        self.launches: list[tuple[float, str, int]] = []  # when, model, tasks
        self._allowed_s: dict[str, float] = {}

    def _launch_one(self, launcher: Launcher, now: float) -> None:
        assert launcher.target is not None
        plan = launcher.target.bound.plan
        if now < self._allowed_s.get(launcher.name, now):
            assert plan.work_conserving, "a strict model was launched before its interval was over"
            assert 0 in self._board.lanes, "launched early without an idle lane"
        before = launcher.launched
        super()._launch_one(launcher, now)
        taken = launcher.launched - before
        assert 1 <= taken <= plan.batch
        self.launches.append((now, launcher.name, taken))
        self._allowed_s[launcher.name] = now + plan.launch_interval_us * 1e-6 * taken

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
                self._audit_combined(combined, now)
            inside = {s.instance.id for c in plan.combined for s in c.slots if s.instance is not None}
            assert plan.population == len(inside)
            assert plan.steps == sum(plan in record.holds for record in self._board.in_flight.values())
            assert not (plan.superseded and plan.empty), "a plan that ran empty was not released"
        self._audit_lanes()
        self._audit_tasks(now)
        assert not self._board.touched

    def audit_stand_still(self) -> None:
        """With nothing more to come, `wait: all` may wait only for tasks that have not arrived."""
        assert not self._board.in_flight
        waiting = sum(plan.population for plan in self.plans)
        for launcher in self._ledger.launchers.values():
            target = launcher.target
            if target is not None and target.free_tracks:
                assert not launcher.queue.launchable, "a task was not launched"
        free = any(model.free_tracks for plan in self.plans for model in plan.models)
        assert free or not waiting, "every model has its next task, yet nothing runs"

    def _audit_combined(self, combined: CombinedState, now: float) -> None:
        assert combined.moves == _slow_moves(combined)
        active = combined.moves & combined.ready
        waits = combined.plan.wait is not Wait.NONE and not combined.plan.loose
        if not waits:
            assert not combined.empty, "a dead instance was not freed"
            assert (combined.rivals is not None) == bool(active)
        elif combined.moves == combined.full:
            assert (combined.rivals is not None) == bool(active)
            assert active, "dead instances did not travel on"
        elif combined.plan.wait is Wait.ALL:
            assert combined.rivals is None

    def _audit_lanes(self) -> None:
        loads = [0] * len(self._board.lanes)
        lanes_of: dict[CombinedState, set[int]] = {}
        for record in self._board.in_flight.values():
            loads[record.lane] += 1
            lanes_of.setdefault(record.combined, set()).add(record.lane)
        assert loads == self._board.lanes
        assert all(len(lanes) == 1 for lanes in lanes_of.values()), "a combined block is in two lanes"
        for combined in (c for plan in self.plans for c in runnable(plan)):
            assert combined.rivals is combined.plan.rivals[combined.lane]
            for lane in range(combined.plan.lanes):
                free = not combined.in_flight or combined.lane == lane
                assert not free or loads[lane] >= combined.plan.run_ahead, "a lane was left without work"

    def _audit_tasks(self, now: float) -> None:
        stats = self.snapshot(now)
        assert stats.submitted == stats.ended.total + stats.open_tasks
        for launcher in self._ledger.launchers.values():
            queued = list(launcher.queue.entries())
            assert not any(entry.ended for entry in queued)
            assert len(queued) == len(launcher.queue) <= launcher.queue.plan.max_tasks
            assert launcher.queue.nbytes == sum(entry.task.nbytes for entry in queued)
        for entry in self._ledger.tasks.values():
            assert entry.deadline_s > now, "an expired task was not answered"


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
        for held in range(block + 1):
            if readers[held] >= block:
                assert holder[held] is None, "two instances hold one slot"
                holder[held] = instance
    assert holder == [slot.holder for slot in track.slots]
    assert bool(track.model.free_tracks >> track.replica & 1) == (holder[0] is None)


def _slow_moves(combined: CombinedState) -> int:
    """By trial: drop members that cannot move until those left free each other's next slots."""
    moving = combined.ready | combined.empty
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
