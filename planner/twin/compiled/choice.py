"""`stageloom.shared.engine.choice` on records: which combined block runs next in a lane."""

# A record knows its fields' types only when it is compiled.
# mypy: disable-error-code="no-any-return"

from stageloom.planner.twin.compiled.jit import jit
from stageloom.planner.twin.compiled.layout import (
    BY_DEADLINE,
    NEVER,
    NOBODY,
    RATIO,
    ROUND_ROBIN,
    Records,
    World,
)


@jit
def count_bits(mask: int) -> int:
    """Members in a mask."""
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
def earliest_deadline_s(w: World, home: Records) -> float:
    """The earliest deadline among the members that would move."""
    mask = home.moves & home.ready
    earliest_s = NEVER
    for i in range(home.first_member, home.first_member + home.num_members):
        member = w.members[i]
        if mask & member.bit:
            earliest_s = min(earliest_s, w.instances[w.slots[member.slot].held].deadline_s)
    return earliest_s


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
        home.rank = earliest_deadline_s(w, home)
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
            if not (home.runnable and here and home.run_ahead > load and home.lanes > lane):
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
