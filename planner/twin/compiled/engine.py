"""The order of events of `stageloom.planner.twin.reference`, with `stageloom.shared.engine.core` and
`stageloom.planner.twin.lanes` on records: which steps run, when each ends, and what each event entails.

At one instant steps end first, then tasks arrive, then time-outs pass, then the queues are sampled.
"""

# A record knows its fields' types only when it is compiled.
# mypy: disable-error-code="no-any-return"

from collections.abc import Sequence

from stageloom.planner.twin.compiled.board import (
    issue_next,
    refresh,
    retire,
    settle,
)
from stageloom.planner.twin.compiled.jit import jit, jit_entry
from stageloom.planner.twin.compiled.layout import (
    ANY_LANE,
    COMPLETED,
    DONE,
    ENDS_FULL,
    LACKS_DURATION,
    NEVER,
    NOBODY,
    READY,
    TRACE_FULL,
    Records,
    World,
)
from stageloom.planner.twin.compiled.ledger import (
    activate,
    expire,
    lane_idle,
    launch,
    launch_early,
    log_end,
    next_deadline_s,
    ready_s,
    submit,
)
from stageloom.planner.twin.compiled.slots import forget, open_lanes, touch


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
    time = w.times[step.time]
    crowded = clock.running >= clock.crowded
    items = time.items
    if step.fallback:
        items = time.apart_items
        step.left_s, step.share = time.apart_s, time.apart_share
        if crowded:
            step.left_s, step.share = time.apart_crowded_s, time.apart_crowded_share
    elif crowded:
        step.left_s, step.share = time.crowded_s, time.crowded_share
    else:
        step.left_s, step.share = time.alone_s, time.share
    factor = 1.0
    if clock.num_noise:
        factor = w.noise[step.id % clock.num_noise]
    beside_s = clock.beside_s + clock.item_beside_s * (items - 1)
    step.left_s = step.left_s * factor + beside_s * clock.running
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


@jit_entry
def run(memory: Sequence[World], arrivals: Records, samples: Records, end_s: float, deploy: int) -> int:
    """Let things happen before `end_s`; why it stopped. It goes on where it stopped when called again.

    `arrivals`: ascending [num_arrivals]; `samples`: when to look, what was seen [num_samples, num_models].
    With a plan in `deploy`, and not `NOBODY`, new launches go to that first; its records are filled.
    """
    w = memory[0]
    clock = w.clock[0]
    if deploy != NOBODY:
        tick(w, clock.now_s)
        activate(w, deploy, clock.now_s)
        end_event(w, clock.now_s)
    while True:
        if not hand_over(w, clock.now_s):
            return LACKS_DURATION
        if clock.open + 1 > len(w.ends) - clock.ends:
            return ENDS_FULL
        if clock.traces and len(w.trace) - clock.traced < w.riders.size:
            return TRACE_FULL
        if not next_event(w, arrivals, samples, end_s):
            break
    pass_time(w, end_s)
    clock.now_s = end_s
    while clock.sample < len(samples) and samples[clock.sample, 0].at_s <= end_s:
        look(w, samples)
    return DONE


@jit
def next_event(w: World, arrivals: Records, samples: Records, end_s: float) -> bool:
    """Let the next thing happen; false if that is not before `end_s`."""
    clock = w.clock[0]
    arrival_s = wakeup_s = sample_s = NEVER
    if clock.arrival < len(arrivals):
        arrival_s = arrivals[clock.arrival].at_s
    wakeup_s = next_wakeup_s(w, clock.now_s)
    if clock.sample < len(samples):
        sample_s = samples[clock.sample, 0].at_s
    at_s = min(clock.next_end_s, arrival_s, wakeup_s, sample_s)
    if at_s >= end_s:
        return False
    clock.now_s = at_s
    if at_s == clock.next_end_s:
        step_done(w, end_next(w), at_s)
    elif at_s == arrival_s:
        begin_event(w, at_s)
        submit(w, arrivals[clock.arrival].model, clock.next_task, at_s)
        clock.next_task += 1
        clock.arrival += 1
        end_event(w, at_s)
    elif at_s == wakeup_s:
        tick(w, at_s)
    else:
        look(w, samples)
    return True


@jit
def tick(w: World, now: float) -> None:
    begin_event(w, now)
    end_event(w, now)


@jit
def step_done(w: World, at: int, now: float) -> None:
    """A step ended, and with their last block the tasks of its members."""
    step = w.steps[at]
    taken_s = now - step.began_s
    tally = w.tallies[step.tally]
    tally.count += 1
    tally.sum_s += taken_s
    tally.max_s = max(tally.max_s, taken_s)
    for i in range(step.num_riders):
        w.models[w.tracks[w.riders[at, i].track].model].busy_s += taken_s / step.num_riders
    retire(w, at, now)
    begin_event(w, now)
    key = w.plans[w.combined[step.combined].plan].key
    for i in range(step.num_riders):
        rider = w.riders[at, i]
        instance = w.instances[rider.instance]
        if not instance.over and rider.block + 1 == w.tracks[rider.track].blocks:
            instance.over = 1
            last = instance.begin + instance.count
            for row in range(last - instance.live, last):
                log_end(w, instance.model, w.rows[rider.instance, row], COMPLETED, key, now)
        forget(w, rider.instance)
    end_event(w, now)


@jit
def begin_event(w: World, now: float) -> None:
    """What has expired ends before anything else happens."""
    clock = w.clock[0]
    if clock.deadlines:
        expire(w, now)
    if clock.timed:
        for c in range(clock.num_combined):
            home = w.combined[c]
            if home.timed and now >= home.since_s + w.plans[home.plan].wait_timeout_s:
                touch(w, c)


@jit
def end_event(w: World, now: float) -> None:
    """Settle the plans, launch and issue what can be; programs that were asked for are ready after it."""
    clock = w.clock[0]
    alone = clock.loaded == 1
    while True:
        if not alone:
            settle(w)
        refresh(w, now)
        if clock.active == NOBODY:
            return
        launch(w, now)
        refresh(w, now)
        if not issue_next(w, now) and not launch_early(w, now):
            break
    if clock.asked:
        while clock.asked:
            clock.asked -= 1
            w.times[w.asked[clock.asked]].status = READY
        for p in range(w.clock[0].num_plans):
            w.plans[p].preparing = 0


@jit
def next_wakeup_s(w: World, now: float) -> float:
    """When a tick is due at the latest if nothing else happens."""
    clock = w.clock[0]
    wakeup = NEVER
    if clock.deadlines:
        wakeup = next_deadline_s(w)
    if clock.timed:
        for c in range(clock.num_combined):
            home = w.combined[c]
            if home.timed:
                wakeup = min(wakeup, home.since_s + w.plans[home.plan].wait_timeout_s)
    return max(min(wakeup, next_launch_s(w, now)), now)


@jit
def next_launch_s(w: World, now: float) -> float:
    """When the next launch is allowed; infinity where something else has to happen first."""
    launch_s = NEVER
    by_deadline = idle = False
    lanes = ANY_LANE
    if w.clock[0].active != NOBODY:
        plan = w.plans[w.clock[0].active]
        by_deadline, idle = plan.by_deadline != 0, lane_idle(w)
        if by_deadline:
            lanes = open_lanes(w, plan)
            if not lanes:
                return NEVER
    for model in range(w.clock[0].num_models):
        due_s = ready_s(w, model, idle, lanes)
        if due_s > now or not by_deadline:  # else one of an earlier deadline goes before it
            launch_s = min(launch_s, due_s)
    return launch_s


@jit
def look(w: World, samples: Records) -> None:
    """Note the queues, and in which blocks instances physically are."""
    clock = w.clock[0]
    for model in range(w.clock[0].num_models):
        launcher = w.models[model]
        sample = samples[clock.sample, model]
        sample.queued, sample.arrived, sample.progress = launcher.queued, launcher.arrived, 0
        sample.tightest_s, launcher.tightest_s = launcher.tightest_s, NEVER
        sample.oldest_age_s = 0.0
        if launcher.queued:
            sample.oldest_age_s = sample.at_s - w.queues[model, launcher.head].arrived_s
    for i in range(w.clock[0].num_instances):
        instance = w.instances[i]
        if instance.used and not instance.over and w.tracks[instance.track].plan == clock.active:
            samples[clock.sample, instance.model].progress |= 1 << instance.passed
    clock.sample += 1
