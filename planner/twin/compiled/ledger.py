"""`stageloom.shared.engine.registry` and `queues` on records: tasks come, are launched, expire and end."""

# A record knows its fields' types only when it is compiled.
# mypy: disable-error-code="no-any-return"

from stageloom.planner.twin.compiled.board import bury, loosen, refresh
from stageloom.planner.twin.compiled.jit import jit
from stageloom.planner.twin.compiled.layout import (
    ANY_LANE,
    COMPLETED,
    EXPIRED,
    NEVER,
    NOBODY,
    REFUSED,
    Records,
    World,
)
from stageloom.planner.twin.compiled.slots import (
    doubt_pace,
    enter,
    next_track,
    occupy,
    open_lanes,
    rest_s,
    touch,
)


@jit
def log_end(w: World, model: int, row: Records, outcome: int, key: int, now: float) -> None:
    """A task ended. `key` is that of the plan whose step completed it, else `NOBODY`."""
    launcher = w.models[model]
    clock = w.clock[0]
    if outcome == COMPLETED:
        launcher.completed += 1
    elif outcome == REFUSED:
        launcher.refused += 1
    else:
        launcher.expired += 1
    end = w.ends[clock.ends]
    end.at_s, end.arrived_s, end.key = now, row.arrived_s, key
    end.model, end.task, end.outcome = model, row.task, outcome
    clock.ends += 1
    clock.open -= 1


@jit
def drop_first(w: World, model: int) -> None:
    """Forget the oldest task of a queue."""
    launcher = w.models[model]
    launcher.head = (launcher.head + 1) % w.queues.shape[1]
    launcher.queued -= 1


@jit
def submit(w: World, model: int, task: int, now: float) -> None:
    """Queue a task, or refuse it; the ring has a place beyond the queue's bound."""
    clock = w.clock[0]
    launcher = w.models[model]
    row = w.queues[model, (launcher.head + launcher.queued) % w.queues.shape[1]]
    row.arrived_s, row.task = now, task
    clock.open += 1
    launcher.arrived += 1
    if launcher.queued >= launcher.max_tasks:
        if not launcher.drop_oldest or not launcher.max_tasks:
            log_end(w, model, row, REFUSED, NOBODY, now)
            return
        log_end(w, model, w.queues[model, launcher.head], REFUSED, NOBODY, now)
        drop_first(w, model)
    launcher.queued += 1
    if launcher.deadline_s != NEVER:
        launcher.tightest_s = min(launcher.tightest_s, now + launcher.deadline_s - now)


@jit
def due_s(w: World, model: int, early: bool) -> float:
    """From when on a launch is allowed, slots aside; with `early` the spacing may not count."""
    launcher = w.models[model]
    if not launcher.queued:
        return NEVER
    spaced = -NEVER if early and launcher.work_conserving else launcher.next_s
    if launcher.queued >= launcher.batch:
        return spaced
    return max(spaced, w.queues[model, launcher.head].arrived_s + launcher.delay_s)


@jit
def launch(w: World, now: float) -> None:
    """Launch everything that is due and finds a replica."""
    if w.plans[w.clock[0].active].by_deadline:
        launch_by_deadline(w, now)
        return
    for model in range(w.clock[0].num_models):
        while ready_s(w, model, False, ANY_LANE) <= now:
            launch_one(w, model, now, ANY_LANE)


@jit
def ready_s(w: World, model: int, early: bool, lanes: int) -> float:
    """From when on a model may launch; infinity with nothing to launch, or no replica to launch into.

    `lanes`: those in which a replica is to begin, as a mask.
    """
    launcher = w.models[model]
    if not launcher.queued or next_track(w, w.targets[launcher.target], lanes) == NOBODY:
        return NEVER
    return due_s(w, model, early)


@jit
def lane_idle(w: World) -> bool:
    """Whether nothing is in flight in some lane of the active plan."""
    for lane in range(w.plans[w.clock[0].active].lanes):
        if not w.lanes[lane].load:
            return True
    return False


@jit
def launch_by_deadline(w: World, now: float) -> None:
    """While a lane has room, launch the task that is wanted first, if none launched goes before it."""
    plan = w.plans[w.clock[0].active]
    while True:
        lanes = open_lanes(w, plan)
        if not lanes:
            return
        idle = lane_idle(w)
        first, earliest_s, earliest_task, gave_up = NOBODY, NEVER, 0, False
        for model in range(w.clock[0].num_models):
            if ready_s(w, model, idle, lanes) > now:
                continue
            if gives_up(w, plan, model, lanes, now):
                gave_up = True
                break
            launcher = w.models[model]
            row = w.queues[model, launcher.head]
            wanted_s = wanted_by_s(w, model, row, launcher.turn_s)
            sooner = wanted_s < earliest_s or (wanted_s == earliest_s and row.task < earliest_task)
            if first == NOBODY or sooner:
                first, earliest_s, earliest_task = model, wanted_s, row.task
        if gave_up:
            continue
        launched = first_launched(w, plan, lanes, NOBODY)
        if launched != NOBODY and buries(w, plan, launched, lanes, now):
            continue
        if first == NOBODY or (launched != NOBODY and w.combined[launched].rank <= earliest_s):
            return
        launch_one(w, first, now, lanes)
        refresh(w, now)


@jit
def wanted_by_s(w: World, model: int, row: Records, turn_s: float) -> float:
    """By when a task is wanted; see `stageloom.shared.engine.patience`."""
    launcher = w.models[model]
    if launcher.deadline_s != NEVER:
        return row.arrived_s + launcher.deadline_s
    return max(row.arrived_s + launcher.patience_s, turn_s)


@jit
def next_turn_s(turn_s: float, now: float, spacing_s: float, patience_s: float) -> float:
    """A model's turn after a launch."""
    return max(now + spacing_s, min(turn_s + spacing_s, now + patience_s))


@jit
def first_launched(w: World, plan: Records, lanes: int, but: int) -> int:
    """The combined block other than `but` that is wanted first of those that could begin in an idle lane."""
    best = NOBODY
    for c in range(plan.first_combined, plan.first_combined + plan.num_combined):
        home = w.combined[c]
        stands = home.lanes == 1 or home.stand == NOBODY
        if c == but or not (home.runnable and stands and home.own & lanes):
            continue
        found = w.combined[best]
        if best == NOBODY or home.rank < found.rank or (home.rank == found.rank and home.tie < found.tie):
            best = c
    return best


@jit
def is_alone(w: World, plan: Records, model: int, launched: int, lanes: int, now: float) -> bool:
    """Nothing but this combined block, or the oldest task of this model, could begin in these lanes."""
    for other in range(w.clock[0].num_models):
        own = 1 if other == model else 0
        if w.models[other].queued > own and ready_s(w, other, True, lanes) <= now:
            return False
    return first_launched(w, plan, lanes, launched) == NOBODY


@jit
def gives_up(w: World, plan: Records, model: int, lanes: int, now: float) -> bool:
    """End the oldest task of a queue if it can no longer complete in time.

    One that had too little time from the start is tried where nothing else would get the lanes' time.
    """
    launcher = w.models[model]
    target = w.targets[launcher.target]
    row = w.queues[model, launcher.head]
    deadline_s = row.arrived_s + launcher.deadline_s
    least_s = rest_s(w, target, 0)
    if deadline_s - now > least_s:
        return False
    if deadline_s - row.arrived_s <= least_s:
        if is_alone(w, plan, model, NOBODY, lanes, now):
            return False
        doubt_pace(w, target)
    log_end(w, model, row, EXPIRED, NOBODY, now)
    drop_first(w, model)
    return True


@jit
def buries(w: World, plan: Records, launched: int, lanes: int, now: float) -> bool:
    """End the tasks that a combined block would run and that can no longer complete in time.

    One that is tried goes on while nothing else would get the lanes' time.
    """
    home = w.combined[launched]
    mask = home.moves & home.ready
    late = False
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if not mask & member.bit:
            continue
        slot = w.slots[member.slot]
        index = slot.held
        instance = w.instances[index]
        target = w.targets[w.tracks[slot.track].target]
        least_s = rest_s(w, target, slot.block)
        deadline_s = w.models[instance.model].deadline_s
        while instance.used and not instance.over and instance.live:
            oldest = w.rows[index, instance.begin + instance.count - instance.live]
            if oldest.arrived_s + deadline_s - now > least_s:
                break
            if instance.tried:
                if is_alone(w, plan, NOBODY, launched, lanes, now):
                    break
                doubt_pace(w, target)
            drop_row(w, index, now)
            late = True
    refresh(w, now)
    return late


@jit
def launch_early(w: World, now: float) -> bool:
    """With an idle lane, launch the one task or batch that is nearest to its turn."""
    if w.plans[w.clock[0].active].by_deadline or not lane_idle(w):
        return False
    nearest = NOBODY
    for model in range(w.clock[0].num_models):
        launcher = w.models[model]
        if ready_s(w, model, True, ANY_LANE) > now:
            continue
        if nearest == NOBODY or launcher.next_s < w.models[nearest].next_s:
            nearest = model
    if nearest == NOBODY:
        return False
    launch_one(w, nearest, now, ANY_LANE)
    return True


@jit
def launch_one(w: World, model: int, now: float, lanes: int) -> None:
    """Take the tasks of one launch out of the queue, into slot 0 of a replica that may begin in `lanes`."""
    clock = w.clock[0]
    launcher = w.models[model]
    target = w.targets[launcher.target]
    at_track = next_track(w, target, lanes)
    index = 0
    while w.instances[index].used:
        index += 1
    instance = w.instances[index]
    count = min(launcher.batch, launcher.queued)
    for i in range(count):
        source, row = w.queues[model, launcher.head], w.rows[index, i]
        row.arrived_s, row.task = source.arrived_s, source.task
        drop_first(w, model)
    launcher.last_s, launcher.last_count = now, count
    launcher.next_s = now + launcher.interval_s * count
    launcher.launched += count
    instance.used, instance.on_board, instance.over, instance.started = 1, 1, 0, 0
    instance.id, instance.model, instance.steps = clock.next_instance, model, 0
    instance.track, instance.block, instance.passed = at_track, 0, 0
    instance.ready_s, instance.begin, instance.count, instance.live = now, 0, count, count
    instance.turn_s = launcher.turn_s
    instance.tried = 0
    if w.plans[target.plan].by_deadline:
        least_s = rest_s(w, target, 0)
        if launcher.deadline_s == NEVER:
            spacing_s = least_s / target.lanes_share
            launcher.turn_s = next_turn_s(launcher.turn_s, now, spacing_s, launcher.patience_s)
        elif w.rows[index, 0].arrived_s + launcher.deadline_s - now <= least_s:
            # `gives_up` let it pass, so nothing else waits in its queue: the instance is this one task, and
            # marked as the engine marks the task.
            instance.tried = 1
    clock.next_instance += 1
    fit(w, index, target.batch)
    track = w.tracks[at_track]
    track.newest, track.newest_id = index, instance.id
    at = track.first_slot
    occupy(w, at, index)
    enter(w, at, index)
    w.plans[target.plan].population += 1


@jit
def fit(w: World, index: int, batch: int) -> None:
    """Work out what follows from the rows: the bucket, its level, and the deadlines."""
    instance = w.instances[index]
    level, size = 0, 1
    while size < instance.count:
        size *= 2
        level += 1
    instance.level = level
    instance.bucket = min(size, batch)
    rank(w, index, w.rows[index, instance.begin])


@jit
def rank(w: World, index: int, oldest: Records) -> None:
    """By when an instance is wanted whose oldest task that has not ended is this one."""
    instance = w.instances[index]
    instance.deadline_s = instance.expires_s = oldest.arrived_s + w.models[instance.model].deadline_s
    instance.wanted_by_s = wanted_by_s(w, instance.model, oldest, instance.turn_s)


@jit
def expire(w: World, now: float) -> None:
    """End every task whose deadline has come."""
    for model in range(w.clock[0].num_models):
        launcher = w.models[model]
        while launcher.queued and w.queues[model, launcher.head].arrived_s + launcher.deadline_s <= now:
            log_end(w, model, w.queues[model, launcher.head], EXPIRED, NOBODY, now)
            drop_first(w, model)
    for index in range(w.clock[0].num_instances):
        instance = w.instances[index]
        while instance.used and not instance.over and instance.expires_s <= now:
            drop_row(w, index, now)


@jit
def drop_row(w: World, index: int, now: float) -> None:
    """The oldest task of an instance ends before its result; all of a model live equally long."""
    instance = w.instances[index]
    first = instance.begin + instance.count - instance.live
    log_end(w, instance.model, w.rows[index, first], EXPIRED, NOBODY, now)
    instance.live -= 1
    if not instance.live:
        bury(w, index)
    elif instance.started:
        rank(w, index, w.rows[index, first + 1])
        if instance.on_board:
            touch(w, w.slots[w.tracks[instance.track].first_slot + instance.block].home)
    else:
        instance.begin += 1
        instance.count -= 1
        track = w.tracks[instance.track]
        fit(w, index, w.targets[track.target].batch)
        touch(w, w.slots[track.first_slot + instance.block].home)


@jit
def next_deadline_s(w: World) -> float:
    """The earliest deadline of a task that has not ended."""
    earliest = NEVER
    for model in range(w.clock[0].num_models):
        launcher = w.models[model]
        if launcher.queued:
            earliest = min(earliest, w.queues[model, launcher.head].arrived_s + launcher.deadline_s)
    for index in range(w.clock[0].num_instances):
        instance = w.instances[index]
        if instance.used and not instance.over:
            earliest = min(earliest, instance.expires_s)
    return earliest


@jit
def activate(w: World, index: int, now: float) -> None:
    """Launch into this plan from now on; what waits follows its rules and bounds."""
    clock = w.clock[0]
    before = clock.active
    clock.active = index
    if before != NOBODY:
        w.plans[before].superseded = 1
        loosen(w, before)
    for model in range(w.clock[0].num_models):
        launcher = w.models[model]
        launcher.target = w.plans[index].first_target + model
        target = w.targets[launcher.target]
        launcher.batch, launcher.work_conserving = target.batch, target.work_conserving
        launcher.interval_s, launcher.delay_s = target.interval_s, target.delay_s
        launcher.next_s = launcher.last_s + launcher.interval_s * launcher.last_count
        launcher.max_tasks, launcher.drop_oldest = target.max_tasks, target.drop_oldest
        while launcher.queued > launcher.max_tasks:
            if launcher.drop_oldest:
                log_end(w, model, w.queues[model, launcher.head], REFUSED, NOBODY, now)
                drop_first(w, model)
            else:
                log_end(
                    w,
                    model,
                    w.queues[model, (launcher.head + launcher.queued - 1) % w.queues.shape[1]],
                    REFUSED,
                    NOBODY,
                    now,
                )
                launcher.queued -= 1
