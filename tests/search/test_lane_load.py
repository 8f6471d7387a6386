"""What becomes of tasks that arrive at lanes, beside closed forms and a step-by-step search."""

import math
from dataclasses import replace
from itertools import accumulate, count, permutations
from random import Random

import pytest

from stageloom.shared.engine.patience import PATIENCE_S
from stageloom.shared.search.lane_load import ServedModel, serve


def poisson(rate_per_s: float, tasks: int, seed: int = 3) -> list[tuple[float, int]]:
    random = Random(seed)
    return [(at, 0) for at in accumulate(random.expovariate(rate_per_s) for _ in range(tasks))]


def mean_wait_s(lanes: int, load: float, by_deadline: bool = False) -> float:
    """Of tasks of one second at a load per lane."""
    arrivals = poisson(load * lanes, 200_000)
    served = serve([ServedModel(blocks_s=(1.0,))], lanes, arrivals, by_deadline=by_deadline)
    return math.fsum(end - at - 1.0 for end, (at, _) in zip(served.ends_s, arrivals, strict=True)) / len(
        arrivals
    )


@pytest.mark.more
@pytest.mark.parametrize("load", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("by_deadline", [False, True])
def test_one_lane_waits_as_pollaczek_and_khinchine_say(load: float, by_deadline: bool) -> None:
    assert mean_wait_s(1, load, by_deadline) == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.04)


@pytest.mark.more
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_two_lanes_wait_as_crommelin_says(load: float) -> None:
    """M/D/2 mean waits: Crommelin's formula, sum over i of exp(-i a) sums of Poisson terms, a = 2 load."""

    def crommelin() -> float:
        a, total = 2.0 * load, 0.0
        for i in range(1, 400):
            mean = i * a
            log = [-mean + n * math.log(mean) - math.lgamma(n + 1) for n in range(2 * i, 2 * i + 2000)]
            terms = [math.exp(one) for one in log]
            total += math.fsum(terms) - math.fsum(terms[1:]) / load
        return total

    assert mean_wait_s(2, load) == pytest.approx(crommelin(), rel=0.04)


def test_no_order_of_arrival_is_missed_and_lanes_are_never_idle_while_a_task_waits() -> None:
    """Each way to hand a few tasks to two lanes in their order ends no sooner in all."""
    random = Random(7)
    for _ in range(50):
        arrivals = sorted((round(4.0 * random.random(), 3), random.randrange(2)) for _ in range(5))
        models = [ServedModel(blocks_s=(1.0,)), ServedModel(blocks_s=(0.25,))]
        ends = serve(models, 2, arrivals, by_deadline=False).ends_s
        free = [0.0, 0.0]
        for (at, model), end in zip(arrivals, ends, strict=True):
            lane = free.index(min(free))
            free[lane] = max(free[lane], at) + models[model].total_s
            assert end == pytest.approx(free[lane])


def test_the_earliest_deadline_first_serves_all_that_any_order_can_on_one_lane() -> None:
    """Brute force: tasks that are all there at first, so no order is better than that of deadlines."""
    random = Random(11)
    for _ in range(60):
        models = [
            ServedModel(blocks_s=(random.uniform(0.1, 1.0),), deadline_s=random.uniform(0.5, 3.0))
            for _ in range(4)
        ]
        ends = serve(models, 1, [(0.0, index) for index in range(4)], begin_s=0.0).ends_s

        def in_time(order: tuple[int, ...], models: list[ServedModel] = models) -> bool:
            at = accumulate(models[index].total_s for index in order)
            return all(end < models[index].deadline_s for end, index in zip(at, order, strict=True))

        if any(in_time(order) for order in permutations(range(4))):
            assert all(end < one.deadline_s for end, one in zip(ends, models, strict=True))


def test_tasks_of_a_batch_end_together_and_take_what_a_batch_takes() -> None:
    model = ServedModel(blocks_s=(0.5, 0.5), batch=4, each_more_s=0.2)
    ends = serve([model], 1, [(0.0, 0)] + [(0.1, 0)] * 5, by_deadline=False).ends_s
    assert ends == pytest.approx([1.0, *[2.6] * 4, 3.6])


def test_replicas_bound_how_many_steps_of_a_model_run() -> None:
    model = ServedModel(blocks_s=(1.0,), at_once=1)
    assert serve([model], 2, [(0.0, 0)] * 3).ends_s == pytest.approx([1.0, 2.0, 3.0])


def test_steps_beside_others_take_longer() -> None:
    model = ServedModel(blocks_s=(1.0,))
    assert serve([model], 2, [(0.0, 0), (0.0, 0)], beside=0.5).ends_s == pytest.approx([1.0, 1.5])


def test_an_express_model_interrupts_what_runs_and_takes_its_time_from_all_lanes() -> None:
    models = [ServedModel(blocks_s=(1.0,)), ServedModel(blocks_s=(0.1,), express=True)]
    ends = serve(models, 2, [(0.0, 0), (0.0, 0), (0.5, 1), (0.5, 1), (0.5, 0)]).ends_s
    assert ends == pytest.approx([1.1, 1.1, 0.6, 0.7, 2.1])  # 0.2 s of two cores, 0.1 s for each
    without = [models[0], replace(models[1], express=False)]
    assert serve(without, 2, [(0.0, 0), (0.0, 0), (0.5, 1)]).ends_s == pytest.approx([1.0, 1.0, 1.1])


def test_an_express_model_interrupts_nobody_while_a_core_is_idle_and_keeps_to_its_lane() -> None:
    models = [ServedModel(blocks_s=(1.0,)), ServedModel(blocks_s=(0.1,), express=True)]
    assert serve(models, 2, [(0.0, 0), (0.5, 1), (0.5, 1)]).ends_s == pytest.approx([1.0, 0.6, 0.7])


def test_with_an_express_lane_no_more_is_computed_than_the_cores_can() -> None:
    """All work that there is, done without a pause: the last end is the work over the lanes."""
    models = [ServedModel(blocks_s=(0.05,)), ServedModel(blocks_s=(0.002,), express=True)]
    random = Random(5)
    arrivals = [*((0.0, 0) for _ in range(400)), *((10.0 * random.random(), 1) for _ in range(1000))]
    arrivals.sort()
    served = serve(models, 2, arrivals, by_deadline=False)
    assert max(served.ends_s) == pytest.approx((400 * 0.05 + 1000 * 0.002) / 2, rel=0.01)
    waits = [end - at for end, (at, one) in zip(served.ends_s, arrivals, strict=True) if one]
    assert sorted(waits)[len(waits) // 2] == pytest.approx(0.002, rel=0.1)  # no step is waited for


def test_a_full_queue_refuses_the_newest_and_what_waited_before_goes_first() -> None:
    model = ServedModel(blocks_s=(1.0,), room=2)
    served = serve([model], 1, [(-2.0, 0), (-1.0, 0), (-0.5, 0), (0.5, 0)], begin_s=0.0)
    assert served.ends_s == pytest.approx([1.0, 2.0, math.inf, 3.0])
    assert served.oldest_age_s == pytest.approx(2.0)


def test_a_task_without_a_deadline_is_due_after_its_patience_as_in_the_engine() -> None:
    """One lane, four tasks at once: the first runs, then 2 (due at 0.9), 1 (at 0 + 1) and 3 (at 1.1)."""
    step = (0.1,)
    models = [
        ServedModel(blocks_s=step),
        *(ServedModel(blocks_s=step, deadline_s=s) for s in (0.5, 0.9, 1.1)),
    ]
    assert PATIENCE_S == 1.0
    ends = serve(models, 1, [(0.0, 1), (0.0, 0), (0.0, 2), (0.0, 3)], begin_s=0.0).ends_s
    assert ends == pytest.approx([0.1, 0.3, 0.2, 0.4])


def test_a_task_that_began_keeps_the_rank_that_it_was_launched_with() -> None:
    """Of two blocks: between them goes what is due sooner than its patience, and not what is due later."""
    models = [ServedModel(blocks_s=(0.25, 0.25)), ServedModel(blocks_s=(0.25,), deadline_s=0.75)]
    assert serve(models, 1, [(0.0, 0), (0.125, 1)]).ends_s == pytest.approx([0.75, 0.5])
    later = [models[0], replace(models[1], deadline_s=0.9)]
    assert serve(later, 1, [(0.0, 0), (0.125, 1)]).ends_s == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_backlog_without_deadlines_takes_its_share_and_no_more(lanes: int) -> None:
    """Its tasks are all older than their patience, and would go before any urgent one."""
    models = [ServedModel(blocks_s=(0.020,)), ServedModel(blocks_s=(0.010,), deadline_s=0.05)]
    arrivals = [
        *((0.010 / lanes * at, 0) for at in range(2000 * lanes)),
        *((0.007 / lanes * at, 1) for at in range(2857 * lanes)),
    ]
    arrivals.sort()
    ends = serve(models, lanes, arrivals).ends_s
    done = [
        sum(end <= 20.0 for end, (_, one) in zip(ends, arrivals, strict=True) if one == m) for m in (0, 1)
    ]
    assert 0.45 < 0.020 * done[0] / (20.0 * lanes) < 0.55
    assert 0.45 < 0.010 * done[1] / (20.0 * lanes) < 0.55
    alone = [one for one in arrivals if one[1] == 0]
    assert serve(models, lanes, alone).ends_s[-1] == pytest.approx(0.020 * 2000, rel=0.01), (
        "unused lanes are its"
    )


def test_every_task_has_one_end_and_lanes_do_no_more_than_they_can() -> None:
    for seed, lanes in zip(range(20), count(1), strict=False):
        random = Random(seed)
        models = [
            ServedModel(
                blocks_s=tuple(random.uniform(0.01, 0.2) for _ in range(random.randint(1, 4))),
                deadline_s=random.choice([0.3, 1.0, math.inf]),
                at_once=random.randint(1, 4),
                batch=random.choice([1, 1, 3]),
            )
            for _ in range(3)
        ]
        instants = accumulate(random.expovariate(10.0) for _ in range(400))
        arrivals = [(at, random.randrange(3)) for at in instants]
        served = serve(models, lanes, arrivals, by_deadline=bool(seed % 2))
        busy = 0.0
        for end, (at, model) in zip(served.ends_s, arrivals, strict=True):
            assert end == math.inf or end >= at + models[model].total_s - 1e-9
            busy += models[model].total_s * (end < math.inf) / models[model].batch
        last = max((end for end in served.ends_s if end < math.inf), default=0.0)
        assert busy <= lanes * last + 1e-9
