"""Where a ready task runs: equations by hand and by definition, orders, and a simulation."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.history import DurationHistory, Footprint, HistoryRule
from stageloom.shared.engine.placement import (
    WINDOW,
    Placed,
    PlacementPolicy,
    Placer,
    ReadyTask,
    Worker,
    WorkerSpec,
    upward_ranks_s,
)
from stageloom.shared.engine.residency import Bus, NodeId, Residency
from tests.engine.placed import (
    CUTS,
    Scene,
    SlotName,
    World,
    evenly,
    highest_rate,
    keeps_up,
    known_rate,
    poisson,
    two_resources,
)

PUSHING = [PlacementPolicy.DM, PlacementPolicy.DMDA, PlacementPolicy.HEFT]
EVERY = pytest.mark.parametrize("policy", PlacementPolicy)
WORK = Footprint("work")


def placer_of(
    policy: PlacementPolicy,
    durations_s: list[float | None],
    *,
    transfer_s: float = 0.0,
    specs: list[WorkerSpec] | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Placer[str]:
    """Resources on nodes of their own; what a task reads lies on node 0, a copy takes `transfer_s`."""
    residency: Residency[str] = Residency(Bus(latency_s=transfer_s))
    residency.write("in", NodeId(0), [1])
    history = DurationHistory()
    for kind, seconds in enumerate(durations_s):
        for _ in range(3 if seconds is not None else 0):
            history.add(WORK, str(kind), seconds or 0.0)
    return Placer(
        policy,
        specs or [WorkerSpec(kind=str(k), node=NodeId(k)) for k in range(len(durations_s))],
        history=history,
        residency=residency,
        alpha=alpha,
        beta=beta,
    )


def task(
    number: int, *, reads: str = "", allowed: tuple[int, ...] = (0, 1), **order: float
) -> ReadyTask[str]:
    return ReadyTask(number, WORK, allowed, (reads,) if reads else (), **order)  # type: ignore[arg-type]


def place(placer: Placer[str], *tasks: ReadyTask[str], now: float = 0.0) -> list[Placed[str]]:
    for one in tasks:
        placer.ready(one)
    return placer.place(now)


# Equations


@pytest.mark.parametrize("policy", PUSHING)
def test_the_queue_is_weighed_against_the_speed(policy: PlacementPolicy) -> None:
    """1 s here against 3 s there: the first two stay, the third ends at 3 s on both, and the first wins."""
    placer = placer_of(policy, [1.0, 3.0])
    assert [one.resource for one in place(placer, *map(task, range(4)))] == [0, 0, 0, 1]
    assert [worker.exp_end_s(0.0) for worker in placer.workers] == [3.0, 3.0]


@pytest.mark.parametrize(("beta", "resource"), [(1.0, 0), (0.0, 1), (0.3, 1), (0.4, 0)])
def test_beta_counts_a_transfer_that_the_start_has_counted_once_more(beta: float, resource: int) -> None:
    """It ends after 6 s where its input lies, after 4 + 0.5 s elsewhere: fitness 1.5 against 4 beta."""
    placer = placer_of(PlacementPolicy.DMDA, [6.0, 0.5], transfer_s=4.0, beta=beta)
    assert place(placer, task(0, reads="in"))[0].resource == resource


def test_alpha_weighs_lateness_against_transfers() -> None:
    for alpha, resource in [(1.0, 0), (3.0, 1)]:
        placer = placer_of(PlacementPolicy.DMDA, [6.0, 0.5], transfer_s=4.0, alpha=alpha)
        assert place(placer, task(0, reads="in"))[0].resource == resource


def test_dm_does_not_see_transfers_but_asks_for_the_copies() -> None:
    placer = placer_of(PlacementPolicy.DM, [6.0, 0.5], transfer_s=100.0)
    (placed,) = place(placer, task(0, reads="in"))
    assert (placed.resource, placed.compute_s, placed.transfer_s) == (1, 0.5, 0.0)
    assert placed.copies == ("in",)


def test_only_what_of_a_transfer_outlasts_the_queue_is_booked() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [100.0, 1.0], transfer_s=2.5)
    first, second = place(placer, task(0), task(1, reads="in"))
    assert (first.resource, first.transfer_s) == (1, 0.0)
    assert (second.resource, second.transfer_s) == (1, 1.5)
    assert placer.workers[1].exp_end_s(0.0) == 1.0 + 1.5 + 1.0


def test_what_was_copied_once_is_not_copied_again() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [100.0, 1.0], transfer_s=2.0)
    assert [one.copies for one in place(placer, task(0, reads="in"), task(1, reads="in"))] == [("in",), ()]


class _ByDefinition:
    """StarPU's equations told once more, over lists, for one decision."""

    def __init__(self, now: float, queues: list[list[float]], running_until: list[float | None]) -> None:
        self.now = now
        self.ends = []
        for queue, until in zip(queues, running_until, strict=True):
            start = now if until is None or until < now else until
            self.ends.append(start + math.fsum(queue))

    def choose(self, compute_s: list[float], transfer_s: list[float], alpha: float, beta: float) -> int:
        ends = [
            max(end, self.now + t) + c for end, t, c in zip(self.ends, transfer_s, compute_s, strict=True)
        ]
        fitness = [alpha * (end - min(ends)) + beta * t for end, t in zip(ends, transfer_s, strict=True)]
        return fitness.index(min(fitness))


@given(seed=st.integers(0, 10_000))
def test_dmda_is_its_definition(seed: int) -> None:
    """Whole numbers of eighths, so that sums are exact and ties are ties."""
    random = Random(seed)

    def eighths(most: int) -> float:
        return random.randint(0, most) / 8

    count = random.randint(1, 4)
    compute_s = [eighths(24) for _ in range(count)]
    latency_s, alpha, beta = eighths(16), random.choice([0.5, 1.0, 2.0]), random.choice([0.0, 0.5, 1.0])
    placer = placer_of(PlacementPolicy.DMDA, [*compute_s], transfer_s=latency_s, alpha=alpha, beta=beta)
    queues: list[list[float]] = [[] for _ in range(count)]
    until: list[float | None] = [None] * count
    now = 0.0
    for number in range(12):
        now += eighths(8)
        there = random.randrange(count)
        if random.random() < 0.5:
            placer.residency.write("in", NodeId(there), [1])
        transfer_s = [0.0 if placer.residency.valid("in", NodeId(k)) else latency_s for k in range(count)]
        wanted = _ByDefinition(now, queues, until)
        expected = wanted.choose(compute_s, transfer_s, alpha, beta)
        (placed,) = place(placer, task(number, reads="in", allowed=tuple(range(count))), now=now)
        assert placed.resource == expected
        exposed_s = max(0.0, now + transfer_s[expected] - wanted.ends[expected])
        assert (placed.compute_s, placed.transfer_s) == (compute_s[expected], exposed_s)
        queues[expected].append(placed.compute_s + placed.transfer_s)
        if until[expected] is None and random.random() < 0.5:
            placer.begin(number, now)
            queues[expected].pop()
            until[expected] = now + placed.compute_s


# Workers


def test_a_prediction_is_taken_back_to_the_last_bit() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [0.1, 0.3])
    for number in range(1000):
        (placed,) = place(placer, task(number), now=number * 0.01)
        if number % 3:
            placer.begin(number, number * 0.01)
        placer.end(number, placed.compute_s) if number % 2 else placer.withdraw(number)
    assert [worker.exp_len_s for worker in placer.workers] == [0.0, 0.0]
    assert [worker.exp_end_s(77.0) for worker in placer.workers] == [77.0, 77.0]


def test_an_overdue_worker_is_free_now_at_the_earliest() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [1.0, 2.5])
    place(placer, task(0))
    placer.begin(0, 0.0)
    assert placer.workers[0].exp_start_s(0.5) == 1.0
    assert placer.workers[0].exp_start_s(9.0) == 9.0
    assert place(placer, task(1), now=9.0)[0].resource == 0


def test_lanes_of_one_resource_share_its_queue() -> None:
    worker = Worker(WorkerSpec(kind="cpu", node=NodeId(0), lanes=2))
    for number in range(4):
        worker.book(number, 1.0, 0.0)
    assert worker.exp_end_s(10.0) == 12.0
    worker.begin(0, 10.0)
    assert (worker.exp_start_s(10.0), worker.exp_end_s(10.0)) == (10.0, 11.5)
    worker.begin(1, 10.5)
    assert (worker.exp_start_s(10.5), worker.exp_end_s(10.5)) == (11.0, 12.0)


def test_a_failed_or_withdrawn_task_teaches_nothing() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [1.0, 3.0])
    place(placer, task(0), task(1))
    placer.withdraw(0)
    placer.end(1)
    assert [row.numbers for row in placer.history.rows()] == [(1.0,) * 3, (3.0,) * 3]
    placer.ready(task(2))
    placer.withdraw(2)
    assert placer.place(0.0) == []


def test_what_tasks_take_changes_where_they_go() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [1.0, 3.0])
    for number in range(4):
        (placed,) = place(placer, task(number))
        assert placed.resource == 0
        placer.end(number, 4.0)
    assert place(placer, task(9))[0].resource == 1


@EVERY
def test_misuse_is_refused(policy: PlacementPolicy) -> None:
    placer = placer_of(policy, [1.0, 3.0])
    with pytest.raises(ValueError, match="may run on no resource"):
        placer.ready(task(0, allowed=()))
    place(placer, task(0))
    with pytest.raises(ValueError, match="is there already"):
        placer.ready(task(0))
    placer.begin(0, 0.0)
    with pytest.raises(KeyError):
        placer.begin(0, 0.0)
    placer.end(0)
    for call in (placer.end, placer.withdraw):
        with pytest.raises(KeyError):
            call(0)


# Calibration


@pytest.mark.parametrize("policy", PUSHING)
def test_a_resource_that_is_not_calibrated_is_forced_and_nothing_is_booked(policy: PlacementPolicy) -> None:
    placer = placer_of(policy, [1.0, None])
    placed = place(placer, *map(task, range(3)))
    assert [(one.resource, one.known, one.compute_s) for one in placed] == [(1, False, 0.0)] * 3
    for number in range(3):
        placer.end(number, 9.0)
    assert place(placer, task(4))[0] == Placed(task(4), 0, 1.0, 0.0, ())


def test_of_several_the_one_with_the_fewest_tasks_for_its_speed_is_forced() -> None:
    specs = [
        WorkerSpec(kind="0", node=NodeId(0)),
        WorkerSpec(kind="1", node=NodeId(0)),
        WorkerSpec(kind="2", node=NodeId(0), relative_speedup=2.0),
        WorkerSpec(kind="3", node=NodeId(0)),
    ]
    placer = placer_of(PlacementPolicy.DMDA, [1.0, None, None, None], specs=specs)
    placed = place(placer, *(task(number, allowed=(0, 1, 2, 3)) for number in range(8)))
    assert [one.resource for one in placed] == [1, 2, 3, 2, 1, 2, 3, 2]


def test_a_task_with_one_allowed_resource_needs_no_calibration_elsewhere() -> None:
    placer = placer_of(PlacementPolicy.DMDA, [1.0, None])
    (placed,) = place(placer, task(0, allowed=(0,)))
    assert (placed.resource, placed.known) == (0, True)


# Orders


def test_heft_takes_older_batches_first_and_the_largest_rank_within_one() -> None:
    placer = placer_of(PlacementPolicy.HEFT, [1.0, 3.0])
    tasks = [task(0, batch=2, rank_s=9.0), task(1, batch=1, rank_s=1.0), task(2, batch=1, rank_s=2.0)]
    assert [one.task.id for one in place(placer, *tasks)] == [2, 1, 0]


def test_heft_of_equal_tasks_takes_the_one_that_ends_first_within_a_window_of_five() -> None:
    placer = placer_of(PlacementPolicy.HEFT, [10.0, 30.0])
    short = Footprint("short")
    for kind, seconds in ("0", 1.0), ("1", 3.0):
        for _ in range(3):
            placer.history.add(short, kind, seconds)
    equals: list[ReadyTask[str]] = [
        ReadyTask(n, short if n >= 4 else WORK, (0, 1), ()) for n in range(WINDOW + 1)
    ]
    order = [one.task.id for one in place(placer, *equals)]
    assert order[0] == 4, "5 ends as early, and is not looked at yet"
    assert order[1] == 5


def test_eager_gives_a_free_lane_the_first_task_that_it_may_run() -> None:
    placer = placer_of(PlacementPolicy.EAGER, [None, None])
    tasks = [task(0, allowed=(1,)), task(1), task(2, allowed=(1,)), task(3)]
    assert [(one.task.id, one.resource) for one in place(placer, *tasks)] == [(1, 0), (0, 1)]
    assert placer.place(0.0) == []
    placer.end(1, 1.0)
    assert [(one.task.id, one.resource) for one in placer.place(1.0)] == [(3, 0)]


def test_fixed_goes_where_the_plan_says_whatever_is_known() -> None:
    placer = placer_of(PlacementPolicy.FIXED, [1.0, None])
    tasks = [task(0, allowed=(1,)), task(1, allowed=(0, 1)), task(2, allowed=(0, 1))]
    assert [one.resource for one in place(placer, *tasks)] == [1, 0, 0]


@given(st.integers(0, 10_000))
def test_upward_ranks_are_the_longest_way_down(seed: int) -> None:
    random = Random(seed)
    count = random.randint(1, 7)
    mean_s = [float(random.randint(0, 9)) for _ in range(count)]
    successors = [
        [(j, float(random.randint(0, 3))) for j in range(i + 1, count) if random.random() < 0.4]
        for i in range(count)
    ]

    def longest(i: int) -> float:
        return mean_s[i] + max((t + longest(j) for j, t in successors[i]), default=0.0)

    assert upward_ranks_s(mean_s, successors) == tuple(longest(i) for i in range(count))


# Simulated


def random_scene(seed: int) -> tuple[Scene, list[float]]:
    """Up to four parts on up to three resources, with bytes at the borders, noise, and a replica or more."""
    random = Random(seed)
    resources, parts = random.randint(1, 3), random.randint(1, 4)
    durations = [[random.uniform(0.1, 3.0) for _ in range(resources)] for _ in range(parts)]
    scene = Scene(
        parts_s=durations,
        border_bytes=[random.choice([0, 100, 1000]) for _ in range(parts)],
        nodes=[random.randrange(resources) for _ in range(resources)],
        bus=Bus(latency_s=random.choice([0.0, 0.2]), bytes_per_s=random.choice([1e3, 1e9])),
        replicas=random.randint(1, 5),
        policy=random.choice(list(PlacementPolicy)),
        rule=random.choice(list(HistoryRule)),
        beta=random.choice([0.0, 1.0]),
        spread=random.choice([0.0, 0.5]),
        calibrated=random.random() < 0.7,
        prefetch=random.random() < 0.8,
    )
    rate = random.uniform(0.2, 1.5) / sum(min(one) for one in durations)
    return scene, poisson(rate, 40, seed)


@pytest.mark.parametrize("seed", range(60))
def test_every_part_runs_once_on_data_that_is_valid_and_leaves_nothing_booked(seed: int) -> None:
    scene, arrivals_s = random_scene(seed)
    World(scene, arrivals_s, seed).run()


def _keep_begun(self: Worker, task: object) -> None:
    self._placed.pop(task, None)


def _never_renewed(self: Worker, now: float) -> float:
    return min(self._begun.values()) if len(self._begun) >= self.spec.lanes else now


def _still_in_the_queue(self: Worker, task: object, now: float) -> None:
    self._begun[task] = now + self._placed[task][0]


def _nothing_missing(self: Residency[SlotName], slots: object, node: NodeId) -> tuple[SlotName, ...]:
    return ()


def _remembers(self: Residency[SlotName], slot: SlotName) -> None:
    """What lay in the slot once is thought to lie there still; `write` then only adds a node."""


def _adds(self: Residency[SlotName], slot: SlotName, node: NodeId, tensor_bytes: list[int]) -> None:
    nodes = self._slots[slot].nodes if slot in self._slots else 0
    _WRITE(self, slot, node, tensor_bytes)
    self._slots[slot].nodes |= nodes


_WRITE = Residency.write

DEFECTS: dict[str, tuple[type, dict[str, Callable[..., object]], str]] = {
    "prediction not subtracted": (Worker, {"take_back": _keep_begun}, "not taken back"),
    "prediction counted twice": (Worker, {"begin": _still_in_the_queue}, "not taken back"),
    "exp_start not renewed": (Worker, {"exp_start_s": _never_renewed}, "exp_start lies in the past"),
    "missing copy": (Residency, {"missing": _nothing_missing}, "where it is not valid"),
    "stale residency": (Residency, {"release": _remembers, "write": _adds}, "where it is not valid"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_simulation_finds_what_is_planted(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, methods, message = DEFECTS[defect]
    scene = Scene(
        parts_s=[[1.0, 3.0], [0.5, 1.0]],
        border_bytes=[100, 100],
        nodes=[0, 1],
        bus=Bus(bytes_per_s=1e3),
        replicas=3,
        spread=0.3,
    )
    arrivals_s = evenly(0.9, 60)
    World(scene, arrivals_s).run()
    for name, method in methods.items():
        monkeypatch.setattr(owner, name, method)
    with pytest.raises(AssertionError, match=message):
        World(scene, arrivals_s).run()


@pytest.mark.parametrize("policy", PUSHING)
@pytest.mark.parametrize(("slow", "tail"), CUTS)
def test_evenly_spaced_batches_reach_the_known_rate(
    policy: PlacementPolicy, slow: float, tail: float
) -> None:
    reached = highest_rate(two_resources(slow, tail, policy, heads=(0,)), known_rate(slow, tail))
    assert 0.975 <= reached <= 1.0
    if (slow, tail) == (3.0, 0.25):
        assert reached >= 0.99


@pytest.mark.parametrize("policy", PUSHING)
def test_below_the_fast_ones_own_rate_nothing_goes_to_the_slow_one(policy: PlacementPolicy) -> None:
    played = World(two_resources(3.0, 0.25, policy), evenly(0.7, 300)).run()
    assert not any(played.away)
    assert max(played.latencies_s) == pytest.approx(1.0)


@pytest.mark.parametrize("policy", PUSHING)
def test_no_rate_above_the_known_one_is_kept_while_heads_stay(policy: PlacementPolicy) -> None:
    scene = two_resources(3.0, 0.1, policy, heads=(0,))
    assert not keeps_up(World(scene, evenly(1.02 * known_rate(3.0, 0.1), 600)).run())


def test_ranks_across_batches_would_starve_the_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads alone are more than the resource can carry, and have the larger rank: no tail's turn comes."""
    scene = Scene(parts_s=[[0.75], [0.25]], policy=PlacementPolicy.HEFT, replicas=64)
    fair = World(scene, evenly(1.5, 60)).run()
    monkeypatch.setattr(ReadyTask, "order", property(lambda self: (0, -self.rank_s)))
    starved = World(scene, evenly(1.5, 60)).run()
    assert fair.latencies_s[5] < 4.0
    assert starved.latencies_s[5] > 40.0


@pytest.mark.parametrize("policy", PUSHING)
def test_a_slow_resource_that_becomes_slower_gets_the_share_it_can_carry(policy: PlacementPolicy) -> None:
    """From k = 3 to k = 9, at the highest rate of k = 9: f* = 1 / (0.25 + 2.25).

    Five tails are there before the first has told; what they take shows for some 40 batches.
    """
    before = two_resources(3.0, 0.25, policy, heads=(0,))
    scene = Scene(parts_s=before.parts_s, policy=policy, allowed=before.allowed, slows_at=100, slower=3.0)
    played = World(scene, evenly(0.995 * known_rate(9.0, 0.25), 400)).run()
    settled = played.away[160:380]
    assert sum(settled) / len(settled) == pytest.approx(0.4, rel=0.1)
    assert played.most_waiting <= 6


def test_copies_shorter_than_the_queue_cost_nothing_if_prefetched_and_show_if_not() -> None:
    """Saturated: batches come faster than they are served, so that there always is a queue."""
    scene = Scene(
        parts_s=[[1.0, 100.0], [100.0, 1.0]],
        border_bytes=[0, 500],
        nodes=[0, 1],
        bus=Bus(bytes_per_s=1e3),
        policy=PlacementPolicy.DMDA,
    )
    ahead = World(scene, [0.0] * 50).run()
    late = World(Scene(**{**vars(scene), "prefetch": False}), [0.0] * 50).run()
    assert max(ahead.latencies_s) == pytest.approx(51.5)
    assert max(late.latencies_s) >= max(ahead.latencies_s) + 20
    assert late.idle_for_copies_s > 20
