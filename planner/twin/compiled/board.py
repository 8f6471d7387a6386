"""`stageloom.shared.engine.scheduler` and `stageloom.shared.engine.swap` on records: what could run, steps,
moves."""

# A record knows its fields' types only when it is compiled.
# mypy: disable-error-code="no-any-return"

from stageloom.planner.twin.compiled.jit import jit
from stageloom.planner.twin.compiled.layout import (
    MAX_PREPARING,
    MAX_PROGRAMS,
    NEVER,
    NOBODY,
    PREPARING,
    READY,
    UNASKED,
    WAIT_ALL,
    WAIT_NONE,
    Records,
    World,
)
from stageloom.planner.twin.compiled.slots import (
    access,
    admit,
    advance,
    choose,
    count_bits,
    enter,
    forget,
    lanes_of,
    leave,
    note_pace,
    occupy,
    room,
    steps_before,
    touch,
    vacate,
)


@jit
def find_moves(w: World, home: Records, present: int) -> int:
    """The members among the `present` that are active, and the empty ones that would travel with them."""
    moves = present & home.next_free
    if moves != present:
        for i in range(home.first_pair, home.first_pair + home.num_pairs):
            pair = w.pairs[i]
            if present & pair.bit and moves & pair.freer:
                moves |= pair.bit
    return moves


@jit
def refresh(w: World, now: float) -> None:
    """Work out again what the touched combined blocks would run."""
    clock = w.clock[0]
    while clock.touched:
        clock.touched -= 1
        index = w.touched[clock.touched]
        home = w.combined[index]
        home.touched = 0
        home.moves = moves = find_moves(w, home, home.ready | home.empty)
        if home.timed:
            home.timed = 0
            clock.timed -= 1
        if not moves:
            home.since_s = NEVER
        held_back = moves != home.full and must_wait(w, home, now)
        if moves & home.ready and not held_back and place(w, index, now):
            continue
        if home.runnable:  # no longer: what it was passed over for is gone
            home.runnable, home.skips, home.overdue_seq = 0, 0, 0
        if moves and not moves & home.ready and not held_back:
            shift(w, home)


@jit
def place(w: World, index: int, now: float) -> bool:
    """Let a combined block compete where members could begin; false where they could in no lane.

    See `stageloom.shared.engine.slots.CombinedState.place`.
    """
    clock = w.clock[0]
    home = w.combined[index]
    if clock.num_lanes == 1:
        admit(w, index, NOBODY)
        return True
    free = sort_by_lane(w, home)
    waits = w.plans[home.plan].waits
    mask = find_moves(w, home, free)
    if mask & home.ready and (home.lane == NOBODY or home.lanes == 1):
        if mask == home.full or not waits or not must_wait(w, home, now):
            home.moves = mask
            admit(w, index, NOBODY)
            return True
    while True:
        lane, most = NOBODY, 0
        for other in range(home.lanes):
            members = count_bits(w.behind[other])
            if members > most:
                lane, most = other, members
        if lane == NOBODY:
            return False
        own = w.behind[lane]
        w.behind[lane] = 0
        mask = find_moves(w, home, free | own)
        if mask & own and (home.lane == NOBODY or home.lane == lane):
            if mask == home.full or not waits or not must_wait(w, home, now):
                home.moves = mask
                admit(w, index, lane)
                return True


@jit
def sort_by_lane(w: World, home: Records) -> int:
    """Sort the members that would move: those that come after nothing, a mask, and in `behind` by lane."""
    for lane in range(w.clock[0].num_lanes):
        w.behind[lane] = 0
    free = home.moves & home.empty
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if not home.moves & home.ready & member.bit:
            continue
        slot = w.slots[member.slot]
        track = w.tracks[slot.track]
        made, overwritten = steps_before(w, track, slot.block)
        home.waits_for |= made | overwritten
        lanes = lanes_of(w, made | overwritten)
        if not lanes or (home.lanes == 1 and lanes == 1):
            free |= member.bit
        elif home.lanes > 1 and not lanes & (lanes - 1) and (made or track.blocks == 1):
            lane = 0
            while not lanes >> lane & 1:
                lane += 1
            if home.own >> lane & 1:
                w.behind[lane] |= member.bit
    return free


@jit
def must_wait(w: World, home: Records, now: float) -> bool:
    """Under `wait: all` always, under `timeout` until it is over."""
    plan = w.plans[home.plan]
    if not plan.waits or not home.moves:
        return False
    if plan.wait == WAIT_ALL:
        return True
    if home.since_s == NEVER:
        home.since_s = now
    if now >= home.since_s + plan.wait_timeout_s:
        return False
    home.timed = 1
    w.clock[0].timed += 1
    return True


@jit
def shift(w: World, home: Records) -> None:
    """Only dead instances would move: they travel on without a step."""
    moves = home.moves
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if moves & member.bit:
            index = w.slots[member.slot].held
            advance(w, index)
            forget(w, index)
    home.since_s = NEVER


@jit
def loosen(w: World, index: int) -> None:
    """The plan is superseded: from now on it waits for no member, until it is empty."""
    plan = w.plans[index]
    if not plan.waits:
        return
    plan.waits = 0
    for c in range(plan.first_combined, plan.first_combined + plan.num_combined):
        home = w.combined[c]
        home.since_s = NEVER
        touch(w, c)
        for i in range(home.first_member, home.first_member + home.num_members):
            held = w.slots[w.members[i].slot].held
            if held != NOBODY and not w.instances[held].live:
                vacate(w, held)


@jit
def issue_next(w: World, now: float) -> bool:
    """Issue one step into the least loaded lane that can take one."""
    for load in range(w.clock[0].max_load):
        for lane in range(w.clock[0].num_lanes):
            if w.lanes[lane].load == load:
                index = choose(w, lane, load, now)
                if index != NOBODY:
                    issue(w, index, lane, now)
                    return True
    return False


@jit
def issue(w: World, index: int, lane: int, now: float) -> None:
    """Move all members of a step on, downstream first; the dead ones travel along."""
    clock = w.clock[0]
    home = w.combined[index]
    at = 0
    while w.steps[at].used:
        at += 1
    step = w.steps[at]
    step.used, step.id, step.combined, step.lane = 1, clock.next_step, index, lane
    step.holds, step.after, step.num_riders = 1 << home.plan, 0, 0
    step.issued_s = now
    step.time = step.tally = home.first_time
    clock.next_step += 1
    moves = home.moves
    active = moves & home.ready
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if moves & member.bit:
            held = w.slots[member.slot].held
            if active & member.bit:
                step.after |= board_member(w, at, member.slot, held, now)
            advance(w, held)
            forget(w, held)
    choose_program(w, step, w.plans[home.plan])
    w.plans[home.plan].steps += 1
    home.lane = lane
    home.in_flight += 1
    home.since_s = NEVER
    w.lanes[lane].load += 1
    touch(w, index)
    w.handed[clock.handed] = at
    clock.handed += 1
    if clock.traces:
        note(w, at, active, now)


@jit
def board_member(w: World, at: int, place: int, held: int, now: float) -> int:
    """An active member takes part in a step; the steps that it must wait for, as a mask."""
    step, slot, instance = w.steps[at], w.slots[place], w.instances[held]
    step.time += slot.stride * (instance.level + 1)
    step.tally += slot.stride
    instance.started = 1
    instance.steps += 1
    instance.ready_s = now
    rider = w.riders[at, step.num_riders]
    rider.instance, rider.track, rider.block = held, slot.track, slot.block
    step.num_riders += 1
    after: int = access(w, w.tracks[slot.track], slot.block, at)
    return after


@jit
def choose_program(w: World, step: Records, plan: Records) -> None:
    """Without a ready program the members run one after another; request it, within the bounds."""
    time = w.times[step.time]
    step.fallback = time.status != READY
    if time.status == UNASKED and plan.preparing < MAX_PREPARING and plan.programs < MAX_PROGRAMS:
        clock = w.clock[0]
        time.status = PREPARING
        plan.preparing += 1
        plan.programs += 1
        w.asked[clock.asked] = step.time
        clock.asked += 1


@jit
def note(w: World, at: int, active: int, now: float) -> None:
    """Trace a step that was issued, one row per active member."""
    clock = w.clock[0]
    step = w.steps[at]
    home = w.combined[step.combined]
    after = 0
    for other in range(w.clock[0].num_steps):
        if step.after >> other & 1:
            after += 1
    for i in range(step.num_riders):
        rider = w.riders[at, i]
        instance = w.instances[rider.instance]
        row = w.trace[clock.traced]
        row.at_s, row.key, row.step, row.lane = now, w.plans[home.plan].key, step.id, step.lane
        row.combined, row.active, row.after = home.index, active, after
        row.instance, row.track, row.block = instance.id, w.tracks[rider.track].replica, rider.block
        row.task, row.tasks = w.rows[rider.instance, instance.begin].task, instance.count
        clock.traced += 1


@jit
def retire(w: World, at: int, now: float) -> None:
    """Release a step that ended: nothing waits for it any more. Its riders stay readable."""
    step = w.steps[at]
    home = w.combined[step.combined]
    home.in_flight -= 1
    if not home.in_flight:
        home.lane = NOBODY
        if home.moves:  # it could run in any lane now
            touch(w, step.combined)
    lane = w.lanes[step.lane]
    lane.load -= 1
    seconds = now - max(step.issued_s, lane.free_s)
    lane.free_s = now
    others = ~(1 << at)
    for p in range(w.clock[0].num_plans):
        plan = w.plans[p]
        if step.holds >> p & 1:
            plan.steps -= 1
        if plan.loaded:
            for c in range(plan.first_combined, plan.first_combined + plan.num_combined):
                if w.combined[c].waits_for >> at & 1:
                    w.combined[c].waits_for &= others
                    touch(w, c)
            for s in range(plan.first_slot, plan.first_slot + plan.num_slots):
                slot = w.slots[s]
                slot.writers &= others
                slot.readers &= others
    for i in range(step.num_riders):
        rider = w.riders[at, i]
        instance = w.instances[rider.instance]
        instance.steps -= 1
        if instance.track == rider.track and instance.passed <= rider.block:
            instance.passed = rider.block + 1
        if w.plans[home.plan].by_deadline:
            note_pace(w, w.targets[w.tracks[rider.track].target], rider.block, seconds)
    step.used = 0


@jit
def bury(w: World, index: int) -> None:
    """No task of the instance is left: it goes no further, or travels on empty where others wait."""
    instance = w.instances[index]
    instance.over = 1
    instance.live = 0
    if not instance.on_board:
        forget(w, index)
        return
    track = w.tracks[instance.track]
    if w.plans[track.plan].waits:
        leave(w, track.first_slot + instance.block)
        enter(w, track.first_slot + instance.block, index)
    else:
        vacate(w, index)


@jit
def settle(w: World) -> None:
    """Move instances over to the active plan, release superseded plans that ran empty; the oldest first."""
    clock = w.clock[0]
    last = NOBODY
    while True:
        oldest_plan = NOBODY  # that comes after the last one; areas are in no order
        for p in range(clock.num_plans):
            key = w.plans[p].key
            if w.plans[p].loaded and key > last and (oldest_plan == NOBODY or key < w.plans[oldest_plan].key):
                oldest_plan = p
        if oldest_plan == NOBODY:
            return
        plan = w.plans[oldest_plan]
        last = plan.key
        if plan.superseded and plan.population:
            move_over(w, oldest_plan)
        if plan.superseded and not plan.population and not plan.steps:
            plan.loaded = 0
            clock.loaded -= 1


@jit
def move_over(w: World, old: int) -> None:
    """Let every instance of a superseded plan that can go over do so, the oldest first."""
    after = NOBODY
    while True:
        best = NOBODY
        for i in range(w.clock[0].num_instances):
            instance = w.instances[i]
            if not instance.used or not instance.on_board or w.tracks[instance.track].plan != old:
                continue
            if instance.id > after and (best == NOBODY or instance.id < w.instances[best].id):
                best = i
        if best == NOBODY:
            return
        after = w.instances[best].id
        place = find_place(w, best)
        if place != NOBODY:
            move_to(w, best, place)


@jit
def find_place(w: World, index: int) -> int:
    """The slot of the active plan at which the instance can go on, or `NOBODY`."""
    instance = w.instances[index]
    plan = w.plans[w.clock[0].active]
    track = w.tracks[instance.track]
    target = w.targets[plan.first_target + instance.model]
    if not instance.live or plan.wait != WAIT_NONE or target.executor != w.targets[track.target].executor:
        return NOBODY
    whole = instance.bucket == target.batch
    if not whole and (instance.bucket > target.batch or count_bits(instance.bucket) != 1):
        return NOBODY
    start = w.slots[track.first_slot + instance.block].start
    for t in range(target.first_track, target.first_track + target.replicas):
        place = w.tracks[t]
        for at in range(place.first_slot, place.first_slot + place.blocks):
            slot = w.slots[at]
            if slot.start != start:
                continue
            taken = 0
            for i in range(slot.first_held, slot.first_held + slot.num_held):
                taken += w.slots[place.first_slot + w.links[i].block].holder != NOBODY
            if not taken:
                return at
    return NOBODY


@jit
def move_to(w: World, index: int, at: int) -> None:
    """Move an instance in logical time.

    The move counts as a reader of the slots that it leaves and as the writer of those it enters. It happens
    when the steps that it waits for have ended, so those stand for it in the slots' books.
    """
    instance = w.instances[index]
    new, old = w.slots[at], w.slots[w.tracks[instance.track].first_slot + instance.block]
    first_new, first_old = w.tracks[new.track].first_slot, w.tracks[old.track].first_slot
    stand_ins = 0
    if instance.started:
        for i in range(old.first_held, old.first_held + old.num_held):
            stand_ins |= w.slots[first_old + w.links[i].block].writers
        for i in range(new.first_held, new.first_held + new.num_held):
            taken = w.slots[first_new + w.links[i].block]
            stand_ins |= taken.readers or taken.writers
    vacate(w, index)
    instance.on_board = 1
    track = w.tracks[new.track]
    if room(w, track, new.track) >= new.block:
        track.newest, track.newest_id = index, instance.id
    instance.track, instance.block, instance.passed = new.track, new.block, new.block
    plan, old_plan = w.tracks[new.track].plan, w.tracks[old.track].plan
    w.plans[plan].population += 1
    for i in range(new.first_held, new.first_held + new.num_held):
        taken = first_new + w.links[i].block
        occupy(w, taken, index)
        if w.links[i].block:
            touch(w, w.slots[taken - 1].home)
    enter(w, at, index)
    if not instance.started:
        return
    for i in range(old.first_held, old.first_held + old.num_held):
        w.slots[first_old + w.links[i].block].readers |= stand_ins
    for i in range(new.first_held, new.first_held + new.num_held):
        taken_slot = w.slots[first_new + w.links[i].block]
        taken_slot.writers = stand_ins
        taken_slot.readers = 0
    for s in range(w.clock[0].num_steps):  # both plans must outlive them
        step = w.steps[s]
        for p in (plan, old_plan):
            if stand_ins >> s & 1 and not step.holds >> p & 1:
                step.holds |= 1 << p
                w.plans[p].steps += 1
