"""One learner, rollout actors in processes of a pool: killed ones lose nothing but what they were doing."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.cluster.processes import ProcessPool
from stageloom.planner.learning.maddpg.course import TrainingCourse
from stageloom.planner.learning.maddpg.problem import SEARCHED_AFTER
from stageloom.planner.learning.maddpg.train import LOST_MOST, PooledWorkers, train
from stageloom.planner.learning.maddpg.work import Collect, Evaluate, rollout, run, task_of
from stageloom.shared.errors import UnavailableError
from stageloom.shared.policy.maddpg.checkpoint import decode
from tests.learning.maddpg.deadly import EPISODE, FRESH, VALIDATION, deaths
from tests.learning.maddpg.toy import SMALL, problem

PROBLEM = problem()
QUICK = replace(SMALL, transitions=40, validate_every=20)


@pytest.fixture(scope="module")
def one() -> Iterator[ProcessPool]:
    """A pool of one."""
    pool = ProcessPool(1, idle_s=None)
    yield pool
    pool.close()


@pytest.mark.promise("worker-trains-this-process")
def test_one_worker_trains_the_policy_that_this_process_would_train(one: ProcessPool) -> None:
    """And it takes along the schedules that the worker needed, of which this process was never asked."""
    here = train(PROBLEM, QUICK, 4, clock=lambda: 0.0)
    there = train(PROBLEM, QUICK, 4, clock=lambda: 0.0, pool=one)
    assert there.history == here.history
    assert (there.plan, there.plan_worth, there.policy_worth) == (
        here.plan,
        here.plan_worth,
        here.policy_worth,
    )
    assert there.checkpoint == here.checkpoint
    assert len(decode(there.checkpoint).book) > len(there.plan.combined)


@pytest.mark.more
@pytest.mark.promise("worker-trains-this-process")
@pytest.mark.parametrize(
    "kinds", [(EPISODE,), pytest.param((EPISODE, VALIDATION, FRESH), marks=pytest.mark.full)]
)
def test_killed_workers_lose_nothing_but_what_they_were_doing(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """One dies in an episode, one in a validation, one in the last look; all of it is done by others."""
    devices = deaths(tmp_path / "deaths", *kinds)
    pool = ProcessPool(2, idle_s=None)
    try:
        found = train(replace(PROBLEM, make_device=devices), QUICK, 0, clock=lambda: 0.0, pool=pool)
    finally:
        pool.close()
    assert not list(devices.deaths.iterdir()), "they were killed"
    assert found.ended == "done" and found.transitions == QUICK.transitions
    assert found.plan_worth.throughput_per_s > 0.0


class DeadPool:
    """Its workers die of whatever they are given; `given` is that."""

    workers, where = 1, "nowhere"

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        self.given.append(arguments)
        future: Future[Any] = Future()
        future.set_exception(UnavailableError("a search process ended with code -9"))
        return future

    def close(self) -> None:
        """Nothing is left."""


def test_workers_that_die_again_and_again_end_the_training_with_a_remedy() -> None:
    pool = DeadPool()
    with pytest.raises(UnavailableError, match=r"end again and again.*code -9.*ask for the training again"):
        train(PROBLEM, QUICK, 0, clock=lambda: 0.0, pool=pool)
    assert len(pool.given) == LOST_MOST + 1
    assert len({work.number for _, work, _ in pool.given}) == 1, "the same work each time"


def test_an_actor_keeps_its_schedules_and_tells_of_each_once() -> None:
    task = task_of(PROBLEM, SMALL, PROBLEM.table())
    row = (0.0, 0.0, 0.1, 0.4, 0.1, 0.4)
    work = Collect(number=0, seed=0, steps=1, rows=(row,))
    first, again = rollout(task, work, {}), rollout(bytes(bytearray(task)), work, {})
    assert first.schedules and not again.schedules
    assert first.asked == again.asked and set(first.asked.values()) == {1}


def test_an_actor_that_worked_for_another_run_tells_this_one_of_its_schedules_again() -> None:
    row = (0.0, 0.0, 0.1, 0.4, 0.1, 0.4)
    work = Collect(number=0, seed=0, steps=1, rows=(row,))
    one, other = (rollout(task_of(PROBLEM, SMALL, PROBLEM.table(), run_id), work, {}) for run_id in "ab")
    assert one.schedules and one.schedules.keys() == other.schedules.keys()


def test_an_actor_of_a_run_that_goes_on_begins_with_the_runs_schedules_and_counts() -> None:
    """Asked for twice before the interruption, a block is searched for when it is asked for once more."""
    row = (0.0, 0.0, 0.1, 0.4, 0.1, 0.4)
    work = Collect(number=0, seed=0, steps=1, rows=(row,))
    table = PROBLEM.table()
    for _ in range(SEARCHED_AFTER - 2):
        run(PROBLEM, table, SMALL, work)
    assert not rollout(task_of(PROBLEM, SMALL, table), work, {}).schedules
    run(PROBLEM, table, SMALL, work)
    found = rollout(task_of(PROBLEM, SMALL, table), work, {})
    assert found.schedules and all(entry.searched for entry in found.schedules.values())
    assert set(found.asked.values()) == {1}, "the learner has counted the others"


def test_a_plan_is_evaluated_with_the_schedules_that_the_learner_has() -> None:
    """Those that it searched longer for at the end above all."""
    course = TrainingCourse(PROBLEM, SMALL, seed=0)
    work = course.next_work()
    assert isinstance(work, Evaluate)
    course.take(work, run(PROBLEM, PROBLEM.table(), SMALL, work))
    pool = DeadPool()
    PooledWorkers(course, pool).give(replace(work, number=99))
    assert pool.given[0][2] == course.table.entries
