"""`stageloom.planner.twin.lanes` and `stageloom.planner.twin.overlap` on records: which steps run, and when
each ends."""

# A record knows its fields' types only when it is compiled.
# mypy: disable-error-code="no-any-return"

from stageloom.planner.twin.compiled.jit import jit
from stageloom.planner.twin.compiled.layout import NEVER, NOBODY, Records, World


@jit
def pass_time(w: World, now: float) -> None:
    """Count the seconds up to `now`."""
    clock = w.clock[0]
    passed_s = now - clock.counted_s
    if passed_s > 0.0:
        if clock.running:
            clock.busy_s += passed_s
            clock.used_s += passed_s * clock.used_rate
        clock.counted_s = now


@jit
def hand_over(w: World, now: float) -> bool:
    """Hand issued steps to their lanes; false where one was met whose time is not known (`CLOCK.lacking`)."""
    clock = w.clock[0]
    while clock.handed_first < clock.handed:
        at = w.handed[clock.handed_first]
        step = w.steps[at]
        time = w.times[step.time]
        if not time.alone_s >= 0.0:
            clock.lacking = at
            return False
        clock.handed_first += 1
        pass_time(w, now)
        seconds, step.share = time.alone_s, time.share
        if step.fallback:
            seconds, step.share = time.apart_s, time.apart_share
        step.left_s = seconds
        if clock.num_noise:
            step.left_s = seconds * w.noise[step.id % clock.num_noise]
        lane = w.lanes[step.lane]
        step.following = NOBODY
        if lane.pending == NOBODY:
            lane.pending = at
        else:
            w.steps[lane.last].following = at
        lane.last = at
        if lane.pending == at and lane.running == NOBODY and not step.after:
            settle_work(w, now)
            begin(w, lane, now)
            share_out(w)
    clock.handed_first = clock.handed = 0
    return True


@jit
def begin(w: World, lane: Records, now: float) -> None:
    """The first step that the lane has begins."""
    clock = w.clock[0]
    at = lane.pending
    step = w.steps[at]
    lane.pending = step.following
    lane.running = at
    step.began_s = now
    step.left_s += clock.beside_s * clock.running
    w.running[clock.running] = at
    clock.running += 1


@jit
def end_next(w: World) -> int:
    """End the step whose turn it is, and let those begin that waited for it."""
    clock = w.clock[0]
    now, ended = clock.next_end_s, clock.next_ending
    pass_time(w, now)
    settle_work(w, now)
    kept = 0
    for i in range(clock.running):
        if w.running[i] != ended:
            w.running[kept] = w.running[i]
            kept += 1
    clock.running = kept
    w.lanes[w.steps[ended].lane].running = NOBODY
    for i in range(w.clock[0].num_steps):
        w.steps[i].after &= ~(1 << ended)
    for i in range(w.clock[0].num_lanes):
        lane = w.lanes[i]
        if lane.running == NOBODY and lane.pending != NOBODY and not w.steps[lane.pending].after:
            begin(w, lane, now)
    share_out(w)
    return ended


@jit
def settle_work(w: World, now: float) -> None:
    """Bring what is left of the running steps up to date; their set is about to change."""
    clock = w.clock[0]
    passed_s = now - clock.changed_s
    if passed_s > 0.0:
        done_s = passed_s / clock.slow
        for i in range(clock.running):
            step = w.steps[w.running[i]]
            step.left_s = max(step.left_s - done_s, 0.0)
    clock.changed_s = now


@jit
def share_out(w: World) -> None:
    """Work out anew how fast the running steps are, and which ends first: the oldest of equals."""
    clock = w.clock[0]
    shares = 0.0
    for i in range(clock.running):
        shares += w.steps[w.running[i]].share
    clock.slow = 1.0
    if clock.running > 1:
        least = max(shares, 1.0)
        clock.slow = least + clock.interference * (clock.running - least)
    clock.used_rate = min(shares, 1.0)
    clock.next_end_s, clock.next_ending = NEVER, NOBODY
    for i in range(clock.running):
        step = w.steps[w.running[i]]
        end_s = clock.changed_s + step.left_s * clock.slow
        sooner = end_s < clock.next_end_s
        if sooner or (end_s == clock.next_end_s and step.id < w.steps[clock.next_ending].id):
            clock.next_end_s, clock.next_ending = end_s, w.running[i]
