"""Where a ready task runs: equations by hand and by definition, calibration, orders; see `test_placed`."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.history import DurationHistory, Footprint
from stageloom.shared.engine.placement import (
    WINDOW,
    Placed,
    Placer,
    ReadyTask,
    Worker,
    WorkerSpec,
    upward_ranks_s,
)
from stageloom.shared.engine.residency import Bus, NodeId, Residency
from stageloom.shared.plan import PlacementPolicy

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
