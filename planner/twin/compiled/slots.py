"""`stageloom.shared.engine.slots` and `.choice` on records: how instances enter, hold and leave slots in
logical time, and which combined block runs next in a lane.
"""

# A record knows its fields' types only when it is compiled.
# mypy: disable-error-code="no-any-return"

from stageloom.planner.twin.compiled.jit import jit
from stageloom.planner.twin.compiled.layout import (
    ANY_LANE,
    BY_DEADLINE,
    NEVER,
    NOBODY,
    RATIO,
    ROUND_ROBIN,
    Records,
    World,
)
from stageloom.shared.engine.pace import DOUBT, UPWARDS


@jit
def touch(w: World, combined: int) -> None:
    """The moves of a combined block must be worked out again."""
    home = w.combined[combined]
    if not home.touched:
        home.touched = 1
        clock = w.clock[0]
        w.touched[clock.touched] = combined
        clock.touched += 1


@jit
def occupy(w: World, at: int, instance: int) -> None:
    """Give a free slot to an instance: the block before it can no longer run another one."""
    slot = w.slots[at]
    slot.holder = instance
    if slot.block:
        before = w.slots[at - 1]
        w.combined[before.home].next_free &= ~before.bit
    else:
        track = w.tracks[slot.track]
        w.targets[track.target].free &= ~(1 << track.replica)


@jit
def release(w: World, at: int) -> None:
    """Free a slot in logical time."""
    slot = w.slots[at]
    slot.holder = NOBODY
    if slot.block:
        before = w.slots[at - 1]
        w.combined[before.home].next_free |= before.bit
        touch(w, before.home)
    else:
        track = w.tracks[slot.track]
        w.targets[track.target].free |= 1 << track.replica


@jit
def enter(w: World, at: int, instance: int) -> None:
    """The instance's input for the slot's block is ready."""
    slot = w.slots[at]
    home = w.combined[slot.home]
    slot.held = instance
    if w.instances[instance].live:
        home.ready |= slot.bit
    else:
        home.empty |= slot.bit
    touch(w, slot.home)


@jit
def leave(w: World, at: int) -> None:
    """No instance is at the slot's block any longer."""
    slot = w.slots[at]
    home = w.combined[slot.home]
    slot.held = NOBODY
    home.ready &= ~slot.bit
    home.empty &= ~slot.bit
    touch(w, slot.home)


@jit
def advance(w: World, index: int) -> None:
    """Move an instance one block on in logical time."""
    instance = w.instances[index]
    track = w.tracks[instance.track]
    at = track.first_slot + instance.block
    slot = w.slots[at]
    leave(w, at)
    for i in range(slot.first_freed, slot.first_freed + slot.num_freed):
        release(w, track.first_slot + w.links[i].block)
    instance.block += 1
    if instance.block == track.blocks:
        instance.on_board = 0
        w.plans[track.plan].population -= 1
        return
    occupy(w, at + 1, index)
    enter(w, at + 1, index)


@jit
def vacate(w: World, index: int) -> None:
    """Take an instance out of its block and free all that it holds."""
    instance = w.instances[index]
    track = w.tracks[instance.track]
    at = track.first_slot + instance.block
    slot = w.slots[at]
    leave(w, at)
    for i in range(slot.first_held, slot.first_held + slot.num_held):
        release(w, track.first_slot + w.links[i].block)
    instance.on_board = 0
    w.plans[track.plan].population -= 1
    forget(w, index)


@jit
def forget(w: World, index: int) -> None:
    """Give an instance's record back once it is over, in no block, and no step runs it."""
    instance = w.instances[index]
    if instance.over and not instance.on_board and not instance.steps:
        instance.used = 0


@jit
def steps_before(w: World, track: Records, block: int) -> tuple[int, int]:
    """The steps in flight, as masks, that make what a block reads, and that read what it overwrites."""
    made, overwritten = 0, 0
    if block == 0:
        slot = w.slots[track.first_slot]
        overwritten |= slot.readers or slot.writers
    else:
        slot = w.slots[track.first_slot + block]
        for i in range(slot.first_read, slot.first_read + slot.num_read):
            made |= w.slots[track.first_slot + w.links[i].block].writers
    if block + 1 < track.blocks:
        slot = w.slots[track.first_slot + block + 1]
        overwritten |= slot.readers or slot.writers
    return made, overwritten


@jit
def lanes_of(w: World, steps: int) -> int:
    """The lanes of some steps in flight, as a mask."""
    lanes = 0
    for at in range(w.clock[0].num_steps):
        if steps >> at & 1:
            lanes |= 1 << w.steps[at].lane
    return lanes


@jit
def room(w: World, track: Records, index: int) -> int:
    """Blocks that the instance that came last has behind it; all of them where none is on its way."""
    if track.newest == NOBODY:
        return track.blocks
    newest = w.instances[track.newest]
    same = newest.used and newest.id == track.newest_id and newest.track == index
    if not same or newest.over:
        return track.blocks
    return newest.passed


@jit
def open_lanes(w: World, plan: Records) -> int:
    """The plan's lanes that could begin a step now, as a mask; its only one, that could take the next."""
    limit = plan.run_ahead if plan.lanes == 1 else 1
    lanes = 0
    for lane in range(plan.lanes):
        if w.lanes[lane].load < limit:
            lanes |= 1 << lane
    return lanes


@jit
def may_begin(w: World, track: Records, lanes: int) -> bool:
    """Whether an instance that is launched into the free slot 0 could run its first block in such a lane."""
    first = w.slots[track.first_slot]
    if not w.combined[first.home].own & lanes:
        return False
    if track.blocks > 1 and w.slots[track.first_slot + 1].holder != NOBODY:
        return False
    made, overwritten = steps_before(w, track, 0)
    if w.plans[track.plan].lanes == 1:
        return lanes_of(w, made | overwritten) <= 1
    return w.combined[first.home].lane == NOBODY and made | overwritten == 0


@jit
def next_track(w: World, target: Records, lanes: int) -> int:
    """The track that the next launch goes into, or `NOBODY`; see
    `stageloom.shared.engine.slots.ModelState`."""
    free = target.free
    if not free:
        return NOBODY
    if lanes == ANY_LANE and target.apart:
        lanes = open_lanes(w, w.plans[w.clock[0].active])
    first = 0
    while not free >> first & 1:
        first += 1
    if target.in_order:
        return target.first_track + first
    best, best_room = NOBODY, 0
    for replica in range(target.replicas):
        index = target.first_track + replica
        track = w.tracks[index]
        if free >> replica & 1 and may_begin(w, track, lanes):
            found = room(w, track, index)
            if best == NOBODY or found > best_room:
                best, best_room = index, found
    if best == NOBODY and target.at_once:
        return target.first_track + first
    return best


@jit
def access(w: World, track: Records, block: int, step: int) -> int:
    """Note what running `block` reads and overwrites; the steps that it must wait for, as a mask.

    What is overwritten waits for the readers of the old content, or for its writers where nothing reads it.
    Only steps in flight are in the masks: `retire` takes them out.
    """
    bit = 1 << step
    after = 0
    if block == 0:
        slot = w.slots[track.first_slot]
        after |= slot.readers or slot.writers
        slot.writers, slot.readers = bit, 0
    slot = w.slots[track.first_slot + block]
    for i in range(slot.first_read, slot.first_read + slot.num_read):
        read = w.slots[track.first_slot + w.links[i].block]
        after |= read.writers
        read.readers |= bit
    if block + 1 < track.blocks:
        slot = w.slots[track.first_slot + block + 1]
        after |= slot.readers or slot.writers
        slot.writers, slot.readers = bit, 0
    return after & ~bit


@jit
def count_bits(mask: int) -> int:
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


@jit
def oldest(w: World, home: Records) -> int:
    """The oldest instance among the members that would move; dead ones only where all are."""
    mask = home.moves & home.ready
    if not mask:
        mask = home.moves
    best = NOBODY
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if mask & member.bit:
            held = w.slots[member.slot].held
            if best == NOBODY or w.instances[held].id < w.instances[best].id:
                best = held
    return best


@jit
def earliest_wanted_s(w: World, home: Records) -> float:
    """By when the first of the members that would move is wanted."""
    mask = home.moves & home.ready
    earliest_s = NEVER
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if mask & member.bit:
            earliest_s = min(earliest_s, w.instances[w.slots[member.slot].held].wanted_by_s)
    return earliest_s


@jit
def note_pace(w: World, target: Records, block: int, seconds: float) -> None:
    """A step that ran the block took so long; see `stageloom.shared.engine.pace`."""
    slot = w.slots[w.tracks[target.first_track].first_slot + block]
    known_s = slot.least_s
    if 0.0 < known_s and known_s < seconds:
        seconds = known_s + UPWARDS * (seconds - known_s)
    slot.least_s = seconds


@jit
def doubt_pace(w: World, target: Records) -> None:
    """A task was given up that had too little time from the start."""
    track = w.tracks[target.first_track]
    for s in range(track.first_slot, track.first_slot + track.blocks):
        w.slots[s].least_s *= DOUBT


@jit
def rest_s(w: World, target: Records, block: int) -> float:
    """What a model's blocks take from one of them on, at the least."""
    track = w.tracks[target.first_track]
    rest = 0.0
    for s in range(track.first_slot + track.blocks - 1, track.first_slot + block - 1, -1):
        rest = w.slots[s].least_s + rest
    return rest


@jit
def admit(w: World, index: int, stand: int) -> None:
    """It can run behind a lane's steps, or in any idle lane (`NOBODY`): work out its rank."""
    home = w.combined[index]
    home.stand = stand
    first = w.instances[oldest(w, home)]
    choice = w.plans[home.plan].step_choice
    if not home.overdue_seq:
        home.urgent_s = NEVER
        if first.deadline_s != NEVER and choice != BY_DEADLINE:
            home.urgent_s = (first.ready_s + first.deadline_s) * 0.5
    if choice == RATIO:
        home.rank = -count_bits(home.moves & home.ready) / home.num_members
        home.tie = first.id
    elif choice == BY_DEADLINE:
        home.rank = earliest_wanted_s(w, home)
        home.tie = first.id
    elif choice == ROUND_ROBIN:
        home.rank = home.last_choice
        home.tie = home.index
    else:
        if not home.runnable:
            # An idle combined block does not save up its share.
            home.passes = max(home.passes, w.clock[0].passes)
        home.rank = home.passes
        home.tie = first.id
    home.runnable = 1


@jit
def goes_before(w: World, one: int, other: int, urgent: bool) -> bool:
    """Whether one combined block goes before another; `urgent`: both are overdue, or past half their time."""
    ours, theirs = w.combined[one], w.combined[other]
    if urgent and ours.overdue_seq != theirs.overdue_seq:
        if ours.overdue_seq and theirs.overdue_seq:
            return ours.overdue_seq < theirs.overdue_seq
        return ours.overdue_seq > 0
    if urgent and ours.skips != theirs.skips:
        return ours.skips > theirs.skips
    our_key, their_key = w.plans[ours.plan].key, w.plans[theirs.plan].key
    if our_key != their_key:
        return our_key < their_key
    if ours.rank != theirs.rank:
        return ours.rank < theirs.rank
    return ours.tie < theirs.tie


@jit
def choose(w: World, lane: int, load: int, now: float) -> int:
    """The next combined block for a lane with `load` steps in flight, or `NOBODY`; counts it as chosen."""
    clock = w.clock[0]
    count = 0
    best, urgent = NOBODY, NOBODY
    for p in range(clock.num_plans):
        plan = w.plans[p]
        if not plan.loaded or not plan.population:
            continue
        for c in range(plan.first_combined, plan.first_combined + plan.num_combined):
            home = w.combined[c]
            here = home.lanes == 1 or home.stand == (lane if load else NOBODY)
            if not (home.runnable and here and home.run_ahead > load and home.own >> lane & 1):
                continue
            w.candidates[count] = c
            count += 1
            if home.urgent_s <= now and (urgent == NOBODY or goes_before(w, c, urgent, True)):
                urgent = c
            if best == NOBODY or goes_before(w, c, best, False):
                best = c
    if not count:
        return NOBODY
    if urgent != NOBODY:
        best = urgent
    clock.choices += 1
    for i in range(count):
        home = w.combined[w.candidates[i]]
        if w.candidates[i] != best:
            home.skips += 1
            if home.skips == home.max_skips:
                home.overdue_seq = clock.choices
                home.urgent_s = -NEVER
    chosen = w.combined[best]
    chosen.skips = 0
    chosen.overdue_seq = 0
    chosen.last_choice = clock.choices
    clock.passes = chosen.passes
    chosen.passes += chosen.stride
    return best
