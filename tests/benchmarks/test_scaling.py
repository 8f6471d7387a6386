"""The simulated task graph of a search on many workers, and the pool that times tasks."""

from itertools import permutations
from random import Random

import pytest

from benchmarks.scaling.task_graph import makespan_s, speed_up
from benchmarks.scaling.timed_pool import TimedPool, nothing
from stageloom.planner.cluster.processes import ProcessPool


def test_one_worker_takes_all_tasks_and_all_hand_overs() -> None:
    assert makespan_s([[1.0, 2.0, 3.0]], 1, 0.5) == pytest.approx(7.5)


def test_equal_tasks_take_as_many_rounds_as_workers_leave() -> None:
    assert makespan_s([[2.0] * 10], 4, 0.0) == pytest.approx(3 * 2.0)


def test_more_workers_than_the_driver_can_serve_gain_nothing() -> None:
    tasks = [0.1] * 1000
    assert makespan_s([tasks], 1600, 0.01) == pytest.approx(1000 * 0.01 + 0.1)
    assert speed_up([tasks], 1600, 0.01) == pytest.approx(speed_up([tasks], 11, 0.01), rel=0.01)


def test_a_group_begins_when_the_one_before_has_ended() -> None:
    assert makespan_s([[1.0, 3.0], [2.0, 2.0]], 2, 0.0) == pytest.approx(5.0)
    assert makespan_s([[1.0], [], [2.0]], 2, 0.0) == pytest.approx(3.0)
    assert makespan_s([], 2, 0.0) == 0.0


def test_it_lies_between_the_bounds_of_list_scheduling() -> None:
    """Graham 1969: at most 2 - 1/m of the shortest, which is found by trying every order."""
    random = Random(1)
    for _ in range(20):
        tasks, workers = [random.uniform(0.1, 2.0) for _ in range(6)], random.randint(1, 4)
        shortest_s = min(makespan_s([order], workers, 0.0) for order in permutations(tasks))
        found_s = makespan_s([tasks], workers, 0.0)
        assert max(sum(tasks) / workers, max(tasks)) <= shortest_s + 1e-9
        assert shortest_s <= found_s <= (2.0 - 1.0 / workers) * shortest_s + 1e-9


def fails() -> None:
    raise ValueError("on a worker")


def test_results_and_failures_come_through_the_timed_pool_and_each_result_has_its_times() -> None:
    pool = ProcessPool(2)
    try:
        timed = TimedPool(pool)
        assert [timed.submit(nothing, number).result(60) for number in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="on a worker"):
            timed.submit(fails).result(60)
        assert len(timed.taken) == 3 and all(one.wall_s >= 0.0 for one in timed.taken)
    finally:
        pool.close()
