"""The engine core: one method per event, each returns what to do about it. No clock, thread or socket.

`now` is in seconds on one monotonic clock and must not go back. The caller carries out the actions in order,
reports what became of them (`step_done`, `program_ready`), and calls `tick` no later than `next_wakeup`.

A task lives through: submitted -> queued -> (shared: in the buffers) -> launched into an instance in slot 0
-> its blocks issued one after another -> the last block's step ended. It can end at any of these points.
"""

from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.history import DurationHistory
from stageloom.shared.engine.patience import PATIENCE_S, next_turn_s, wanted_by_s
from stageloom.shared.engine.queues import Launcher
from stageloom.shared.engine.records import Instance, ProgramStatus
from stageloom.shared.engine.registry import TaskRegistry
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.scheduler import StepScheduler
from stageloom.shared.engine.slots import CombinedState, ModelState, PlanState, Track
from stageloom.shared.engine.stats import (
    EngineStats,
    QueueSnapshot,
    combined_stats,
    counts,
    model_queue,
    model_stats,
    progress_of,
)
from stageloom.shared.engine.steps import (
    Action,
    Code,
    InstanceId,
    Outcome,
    PlanKey,
    PrepareProgram,
    ProgramKey,
    Task,
)
from stageloom.shared.ids import StepId, TaskId

_NEVER = float("inf")
_TOO_LATE = "its deadline was too close for what was left to do"


class EngineCore:
    """Queues, launcher, slots, step choice and swaps of one device.

    `max_preparing` bounds the programs per plan that are asked for on demand at any time, `max_programs` all
    that are asked for in the life of a plan. Plans that place their blocks predict steps by `history`, which
    learns from `step_done`, and copies by `bus`. After `patience_s` a task without a deadline counts as due.
    """

    def __init__(
        self,
        *,
        max_preparing: int = 2,
        max_programs: int = 1024,
        history: DurationHistory | None = None,
        bus: Bus | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._scheduler = StepScheduler(max_preparing, max_programs, history, bus)
        self._registry = TaskRegistry(self._scheduler.drop_row, patience_s)
        self._plans: dict[PlanKey, PlanState] = {}
        self._active: PlanState | None = None
        self._draining = False
        self._activations = 0
        self._next_instance = 0
        self._launch_s = _NEVER  # the next launch that is allowed and finds a free slot 0; see `_launch`

    # Plans

    def load(self, key: PlanKey, bound: BoundPlan, now: float) -> list[Action]:
        """Make a plan known and ask for the programs of its full masks, at the largest and smallest batch.

        Raises:
            ValueError: a plan with this key is loaded.
        """
        if key in self._plans:
            raise ValueError(f"plan {key} is loaded already")
        out = self._begin(now)
        plan = self._plans[key] = PlanState(key, bound)
        self._scheduler.add(plan)
        for combined in plan.combined:
            models = [bound.models[member.model] for member in bound.combined[combined.index].members]
            largest = tuple(model.buckets[-1] for model in models)
            variants = range(len(bound.combined[combined.index].plan.variants))
            for buckets in dict.fromkeys((largest, (1,) * combined.size)):
                for variant in variants:
                    program = combined.programs.find(combined.full, buckets, variant)
                    program.settle(ProgramStatus.PREPARING)
                    plan.programs += 1
                    out.append(PrepareProgram(program.key))
        return self._end(now)

    def activate(self, key: PlanKey, now: float, *, keep: bool = False) -> list[Action]:
        """Launch into this plan from now on; `stageloom.shared.engine.swap` says what moves over. Also ends a
        drain.

        Queued tasks of a model that the plan lacks, or that has other inputs or outputs or smaller ranges in
        it, are refused, as are those for which its queues leave no room. The plan that was active is released
        when nothing is in flight on it any more; with `keep` it stays loaded, and bounds of queues only grow
        (the windows of a trial: no task is refused for a plan that may be gone in a moment).

        Raises:
            ValueError: the plan is not loaded.
        """
        plan = self._plans.get(key)
        if plan is None:
            raise ValueError(f"plan {key} is not loaded")
        self._begin(now)
        before = self._active
        self._active = plan
        self._draining = self._registry.closed = False
        plan.superseded = plan.kept = False
        if before is not plan:
            self._activations += 1
            plan.precedence = float(self._activations)
        if before is not None and before is not plan:
            before.superseded = True
            before.kept = keep
            self._scheduler.loosen(before)
        self._registry.follow(plan, shrink=not keep)
        self._registry.forget_unserved(self._plans.values())
        return self._end(now)

    def unload(self, key: PlanKey, now: float) -> list[Action]:
        """Give up a loaded plan that nothing is in flight on: one that is not active, or a drained one.

        A superseded one that was kept goes once nothing is in flight on it. After the active plan is unloaded
        the queues go on as they were, until another plan is activated.

        Raises:
            ValueError: the plan is not loaded, or it is in use.
        """
        plan = self._plans.get(key)
        if plan is not None and plan.kept:
            self._begin(now)
            plan.kept = False
            return self._end(now)
        if plan is None or not plan.empty or (plan is self._active and not self._draining):
            raise ValueError(f"plan {key} is not loaded, or it is in use")
        self._begin(now)
        if plan is self._active:
            self._active = None
            for launcher in self._registry.launchers.values():
                launcher.target = None
        self._release(plan)
        return self._end(now)

    def drain(self, now: float, *, refuse: bool = False) -> list[Action]:
        """Stop launching until the next `activate`; `idle` tells when nothing is in flight any more.

        With `refuse`, queued tasks and those still to come are refused (shutting down); else they wait.
        """
        self._begin(now)
        self._draining = True
        if refuse:
            self._registry.closed = True
            for launcher in self._registry.launchers.values():
                self._registry.refuse_all(launcher, Code.DRAINING, "the engine is shutting down")
        if self._active is not None:
            self._scheduler.loosen(self._active)
        return self._end(now)

    def _release(self, plan: PlanState) -> None:
        del self._plans[plan.key]
        self._scheduler.remove(plan)
        self._registry.forget_unserved(self._plans.values())

    # Programs

    def program_ready(self, program: ProgramKey, now: float) -> list[Action]:
        """The program can be used; for a plan that is gone this is ignored."""
        return self._program(program, ProgramStatus.READY, now)

    def program_failed(self, program: ProgramKey, now: float) -> list[Action]:
        """The program cannot be built: its members go on running one after another."""
        return self._program(program, ProgramStatus.FAILED, now)

    def _program(self, key: ProgramKey, status: ProgramStatus, now: float) -> list[Action]:
        self._begin(now)
        plan = self._plans.get(key.plan)
        if plan is not None:
            program = plan.combined[key.combined].programs.find(key.mask, key.buckets, key.variant)
            if program.on_demand and program.status is ProgramStatus.PREPARING:
                plan.preparing -= 1
            program.settle(status)
        return self._end(now)

    # Tasks

    def submit(self, task: Task, now: float) -> list[Action]:
        """Take in a task, or refuse it.

        Raises:
            ValueError: a task of this id has not ended yet, or it names no model or one of them twice.
        """
        if task.id in self._registry.tasks:
            raise ValueError(f"task {task.id} is here already")
        if not task.models or len(set(task.models)) != len(task.models):
            raise ValueError(f"task {task.id} names no model, or one of them twice")
        self._begin(now)
        self._registry.submit(task, now)
        return self._end(now)

    def cancel(self, task_id: TaskId, now: float) -> list[Action]:
        """End a task wherever it is; one that is unknown or has ended is ignored."""
        self._begin(now)
        task = self._registry.tasks.get(task_id)
        if task is not None:
            self._registry.finish(task, Outcome.CANCELLED, Code.CANCELLED, "cancelled by the application")
        return self._end(now)

    # Steps and time

    def step_done(
        self, step_id: StepId, now: float, error: str | None = None, compute_s: float | None = None
    ) -> list[Action]:
        """A step ended. With `error` the tasks of its members fail and what they hold is freed.

        `compute_s` is what it took; where blocks are placed, nothing is learned without it, and nowhere of a
        step that failed.

        Raises:
            ValueError: the step is not in flight, or `compute_s` is no duration.
        """
        failed = error is not None
        record = self._scheduler.retire(step_id, now, None if failed else compute_s, failed=failed)
        out = self._begin(now)
        if record.last or error is not None:
            for instance, slot in record.members:
                if instance.over:
                    continue
                if error is not None:
                    self._scheduler.bury(instance, failed=True)
                    self._end_rows(instance, slot.track, Outcome.FAILED, error)
                elif slot.last:
                    instance.over = True
                    self._end_rows(instance, slot.track, Outcome.COMPLETED, "")
        several = self._active is not None and self._active.lanes > 1  # a replica's first block may begin now
        return self._end(now, stirred=several or bool(out))

    def copy_done(self, copy: StepId, now: float) -> list[Action]:
        """A `CopySlot` ended, well or badly.

        Raises:
            ValueError: it is not in flight.
        """
        self._scheduler.copied(copy)
        self._begin(now)
        return self._end(now)

    def _end_rows(self, instance: Instance, track: Track, outcome: Outcome, reason: str) -> None:
        for row in instance.rows:
            if not row.ended:
                self._registry.end_part(row, track.model.name, outcome, reason, track.plan.key)
        instance.rows = []  # the replica remembers its newest instance, which must not keep tensors

    def tick(self, now: float) -> list[Action]:
        self._begin(now)
        return self._end(now)

    def next_wakeup(self, now: float) -> float | None:
        """When `tick` must be called at the latest if nothing else happens; None for never."""
        wakeup = self._registry.next_deadline_s if self._registry.deadlines else _NEVER
        if self._scheduler.timed:
            wakeup = min(wakeup, self._scheduler.next_wait_s)
        if self._launch_s < wakeup and self._launching:
            wakeup = self._launch_s
        return None if wakeup == _NEVER else max(wakeup, now)

    # What it says of itself

    @property
    def history(self) -> DurationHistory:
        """What is known of how long blocks take."""
        return self._scheduler.history

    @property
    def waiting(self) -> bool:
        """A task waits in some queue."""
        return any(launcher.queue for launcher in self._registry.launchers.values())

    def oldest_age_s(self, now: float) -> float:
        """Age of the oldest task that waits, 0 where none does: no step has begun with it in all its models.

        Those in a queue and those in an instance alike. A plan whose models launch as soon as an instance is
        free has empty queues, while its tasks wait in instances as long as another plan's do in queues.
        """
        tasks = self._registry.tasks.values()
        return next((now - task.arrived_s for task in tasks if not task.begun), 0.0)

    def queues(self) -> list[tuple[str, int, int]]:
        """Per model its name, the tasks that wait, and those that were launched so far."""
        return [(one.name, len(one.queue), one.launched) for one in self._registry.launchers.values()]

    def completed(self) -> dict[str, int]:
        """Tasks that completed so far, by model; a shared task counts in each of its models."""
        launchers = self._registry.launchers
        return {name: launcher.ended[Outcome.COMPLETED] for name, launcher in launchers.items()}

    @property
    def submitted(self) -> int:
        """Tasks that came so far."""
        return self._registry.submitted

    @property
    def failed(self) -> int:
        """Tasks that failed so far."""
        return self._registry.ended[Outcome.FAILED]

    @property
    def idle(self) -> bool:
        """Nothing is in flight: no instance in a slot, no step."""
        return all(plan.empty for plan in self._plans.values())

    @property
    def settled(self) -> bool:
        """Nothing is in flight but on the active plan."""
        return all(plan.empty for plan in self._plans.values() if plan is not self._active)

    def snapshot(self, now: float) -> EngineStats:
        """The engine at this instant."""
        active, scheduler, registry = self._active, self._scheduler, self._registry
        return EngineStats(
            now_s=now,
            active=None if active is None else active.key,
            loaded=tuple(self._plans),
            draining=self._draining,
            submitted=registry.submitted,
            ended=counts(registry.ended),
            open_tasks=len(registry.tasks),
            instances=sum(plan.population for plan in self._plans.values()),
            lane_loads=tuple(scheduler.lanes),
            steps=scheduler.steps,
            fallback_steps=scheduler.fallback_steps,
            models=tuple(
                model_stats(
                    launcher, () if active is None else progress_of(active, name, scheduler.in_flight), now
                )
                for name, launcher in registry.launchers.items()
            ),
            combined=() if active is None else combined_stats(active.combined),
        )

    def sample(self, now: float) -> QueueSnapshot:
        """The queues at this instant; forgets the tightest deadlines that it names."""
        active = self._active
        queues = tuple(
            model_queue(launcher, active, self._scheduler.in_flight, now)
            for launcher in self._registry.launchers.values()
            if launcher.served or launcher.queue
        )
        for queue in queues:
            self._registry.launchers[queue.name].tightest_s = _NEVER
        deadlines_s = [queue.tightest_s for queue in queues if queue.tightest_s is not None]
        return QueueSnapshot(
            now, None if active is None else active.key, min(deadlines_s, default=None), queues
        )

    # Around every event

    def _begin(self, now: float) -> list[Action]:
        """A new list of actions; what has expired ends before anything else happens."""
        out: list[Action] = []
        registry = self._registry
        registry.out = self._scheduler.out = out
        if registry.deadlines:
            registry.expire(now)
        if self._scheduler.timed:
            self._scheduler.end_waits(now)
        return out

    def _end(self, now: float, *, stirred: bool = True) -> list[Action]:
        """Settle the plans, launch and issue what can be, then hand out the actions.

        `stirred`: something may have changed in a queue or a launcher.
        """
        scheduler = self._scheduler
        active = self._active
        if self._registry.lingering:
            self._registry.forget_unserved(self._plans.values())
        alone = launching = False
        if active is not None and not active.loose:
            alone = len(self._plans) == 1
            launching = not self._draining
        while True:
            if not alone:
                self._settle()
                launching, stirred = self._launching, True
            if scheduler.touched:
                scheduler.refresh(now)
            if launching and active is not None:
                if active.by_deadline:
                    self._launch_by_deadline(active, now)
                elif stirred or active.vacated or self._launch_s <= now:
                    self._launch(active, now)
                    stirred = False
            if len(scheduler.in_flight) >= scheduler.capacity:
                return scheduler.out
            if not scheduler.issue_next(now):
                if not launching or self._launch_s == _NEVER or not self._launch_early(now):
                    return scheduler.out
                stirred = True

    def _settle(self) -> None:
        """Move instances over to the active plan, release plans that ran empty, end a plan's looseness."""
        for plan in list(self._plans.values()):
            if plan.superseded and plan.population and self._active is not None:
                self._scheduler.move_over(plan, self._active)
            if not plan.empty:
                continue
            if plan.superseded and not plan.kept:
                self._release(plan)
            elif not self._draining:
                plan.loose = False

    # Launching

    @property
    def _launching(self) -> bool:
        """Whether launches may happen. A plan that lost its rounds to a drain runs empty first."""
        return self._active is not None and not self._draining and not self._active.loose

    def _launch(self, active: PlanState, now: float) -> None:
        """Launch everything that is due and finds a free slot 0; note when the next launch will be."""
        active.vacated = False
        launchers = self._registry.launchers.values()
        launched, self._launch_s = False, _NEVER
        for launcher in launchers:
            if launcher.queue.launchable:
                due_s = self._due_s(launcher)
                while due_s <= now:
                    self._launch_one(launcher, now)
                    launched, due_s = True, self._due_s(launcher)
                if due_s < self._launch_s:
                    self._launch_s = due_s
        if launched:
            self._scheduler.refresh(now)
            # A shared task that was launched has made room in buffers that were looked at before.
            self._launch_s = min(map(self._due_s, launchers))

    def _due_s(self, launcher: Launcher, *, early: bool = False, lanes: int = -1) -> float:
        """From when on it may launch; infinity with nothing to launch, or no replica to launch into.

        `lanes`: those in which a replica is to begin, as a mask.
        """
        target = launcher.target
        if not launcher.queue.launchable or target is None or not self._next_track(target, lanes):
            return _NEVER
        return launcher.due_s(early=early)

    def _next_track(self, target: ModelState, lanes: int) -> Track | None:
        if lanes == -1 and target.apart and self._active is not None:
            lanes = self._scheduler.open_lanes(self._active)
        return target.next_track(self._scheduler.in_flight, lanes)

    def _launch_early(self, now: float) -> bool:
        """With an idle lane, launch the one task or batch that is nearest to its turn."""
        active = self._active
        assert active is not None
        if active.by_deadline or 0 not in self._scheduler.lanes[: active.lanes]:
            return False
        nearest: Launcher | None = None
        for launcher in self._registry.launchers.values():
            due_s = self._due_s(launcher, early=True)
            if due_s <= now:
                if nearest is None or launcher.next_s < nearest.next_s:
                    nearest = launcher
            elif due_s < self._launch_s:
                self._launch_s = due_s  # the lane may be idle then, too
        if nearest is None:
            return False
        self._launch_one(nearest, now)
        return True

    def _launch_by_deadline(self, active: PlanState, now: float) -> None:
        """While a lane has room, launch the task that is wanted first, if none launched goes before it.

        So queued and launched tasks compete alike: nothing is launched before it could begin. What can no
        longer end in time when its turn comes is given up, for those that can.
        """
        active.vacated = False
        self._launch_s = _NEVER
        while lanes := self._scheduler.open_lanes(active):
            idle = 0 in self._scheduler.lanes[: active.lanes]
            first: Launcher | None = None
            earliest: tuple[float, int] = (_NEVER, 0)
            for launcher in self._registry.launchers.values():
                if not launcher.queue.launchable:
                    continue
                due_s = self._due_s(launcher, early=idle, lanes=lanes)
                if due_s > now:
                    self._launch_s = min(self._launch_s, due_s)
                    continue
                task = launcher.queue.first(launcher.turn_s)
                if self._gives_up(launcher, task, active, lanes, now):
                    break
                wanted = wanted_by_s(task, launcher.turn_s), task.seq
                if first is None or wanted < earliest:
                    first, earliest = launcher, wanted
            else:
                launched = self._scheduler.chooser.first(active, lanes)
                deadlines = self._registry.deadlines
                if launched is not None and deadlines and self._buries(launched[4], active, lanes, now):
                    continue
                if first is None or (launched is not None and launched[1] <= earliest[0]):
                    return
                self._launch_one(first, now, lanes)
                self._scheduler.refresh(now)

    def _gives_up(self, launcher: Launcher, task: Task, active: PlanState, lanes: int, now: float) -> bool:
        """End a task that waits and can no longer complete in time.

        One that had too little time from the start is tried where nothing else would get the lanes' time.
        """
        target = launcher.target
        if target is None or task.tried or task.deadline_s - now > target.pace.rest_s[0]:
            return False
        if task.deadline_s - task.arrived_s <= target.pace.rest_s[0]:
            task.tried = True
            if self._is_alone(None, active, lanes, now):
                return False
            target.pace.doubt()
        self._registry.finish(task, Outcome.EXPIRED, Code.EXPIRED, _TOO_LATE)
        self._scheduler.refresh(now)  # a shared one may be launched in another model
        return True

    def _is_alone(self, launched: CombinedState | None, active: PlanState, lanes: int, now: float) -> bool:
        """Nothing but this combined block, and tasks that are tried, could begin in these lanes."""
        return all(one is launched for one in self._scheduler.chooser.runnable(active, lanes)) and not any(
            self._due_s(launcher, early=True, lanes=lanes) <= now
            and launcher.queue.launchable > launcher.queue.first(launcher.turn_s).tried
            for launcher in self._registry.launchers.values()
        )

    def _buries(self, combined: CombinedState, active: PlanState, lanes: int, now: float) -> bool:
        """End the tasks that this combined block would run and that can no longer complete in time.

        One that is tried goes on while nothing else would get the lanes' time.
        """
        mask = combined.moves & combined.ready
        buried = False
        for slot in combined.order:
            if not mask & slot.bit or slot.instance is None:
                continue
            pace = slot.track.model.pace
            rest_s = pace.rest_s[slot.block]
            for row in tuple(slot.instance.rows):
                if row.ended or row.deadline_s - now > rest_s:  # a shared one is in several members
                    continue
                if row.tried:
                    if self._is_alone(combined, active, lanes, now):
                        continue
                    pace.doubt()
                self._registry.finish(row, Outcome.EXPIRED, Code.EXPIRED, _TOO_LATE)
                buried = True
        self._scheduler.refresh(now)
        return buried

    def _launch_one(self, launcher: Launcher, now: float, lanes: int = -1) -> None:
        target = launcher.target
        track = None if target is None else self._next_track(target, lanes)
        assert track is not None
        turn_s = launcher.turn_s
        rows = launcher.take(now)
        instance = Instance(InstanceId(self._next_instance), track, rows, now, turn_s)
        if track.plan.by_deadline and any(row.deadline_s == _NEVER for row in rows):
            model = track.model
            spacing_s = model.pace.rest_s[0] / model.lanes_share
            launcher.turn_s = next_turn_s(turn_s, now, spacing_s, self._registry.patience_s)
        self._next_instance += 1
        track.newest = instance
        first = track.slots[0]
        first.occupy(instance)
        first.enter(instance, self._scheduler.touched)
        track.plan.population += 1
        left_buffer = False
        for row in rows:
            row.instances.append(instance)
            left_buffer |= row.shared
        if left_buffer:
            self._registry.line.enter(self._registry.launchers)
