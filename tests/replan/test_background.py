"""Searches for schedules behind those that somebody waits for, with a pool that does nothing by itself."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.replan.background import ScheduleSearches
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import PlanError
from stageloom.shared.schedule import StageSchedule, stage_schedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.job import BlockJob
from tests.search.graphs import union

FIRST = stage_schedule([[[0]], [[1]]])
BETTER = stage_schedule([[[0], [1]]])


def job(name: str) -> BlockJob:
    return BlockJob(
        combined_block=digest_bytes([name.encode()]),
        batch=1,
        graph=union([[], []]),
        costs=StageCosts((1.0, 1.0)),
        first=FIRST,
        budget_s=1.0,
    )


def refused() -> None:
    """What the pool does not take."""


class IdlePool:
    """Its futures end when the test says so; `begun` are those handed out, in order."""

    workers = 1
    where = "idle"

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[tuple[SearchFuture[Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if function is refused:
            raise TypeError("cannot be sent to a worker")
        future: SearchFuture[Any] = SearchFuture()
        self.begun.put((future, arguments))
        return future

    def next(self) -> tuple[SearchFuture[Any], Any]:
        future, arguments = self.begun.get(timeout=10.0)
        return future, arguments[0]

    def close(self) -> None:
        """Nothing runs."""


class Rig:
    def __init__(self) -> None:
        self.pool = IdlePool()
        self.kept: queue.SimpleQueue[tuple[str, BlockJob, StageSchedule]] = queue.SimpleQueue()
        self.searches = ScheduleSearches(self.pool, lambda *found: self.kept.put(found))
        self.searches.start()


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.searches.close()


def test_each_block_is_searched_for_once_and_what_is_found_is_kept(rig: Rig) -> None:
    rig.searches.want("class", [job("a"), job("b"), job("a")])
    rig.searches.want("class", [job("b")])
    for name in ("a", "b"):
        future, wanted = rig.pool.next()
        assert wanted == job(name)
        future.settle(BETTER)
        assert rig.kept.get(timeout=10.0) == ("class", job(name), BETTER)
    assert rig.pool.begun.empty()


@pytest.mark.promise("schedule-learned-policy-lacks")
def test_a_search_that_somebody_waits_for_comes_first_and_what_gave_way_is_begun_again(rig: Rig) -> None:
    rig.searches.want("class", [job("a")])
    behind, _ = rig.pool.next()
    waited_for = rig.searches.foreground.submit(len, "abc")
    assert behind.cancelled()
    future, said = rig.pool.next()
    assert said == "abc" and rig.pool.begun.empty()
    future.settle(3)
    assert waited_for.result() == 3
    again, wanted = rig.pool.next()
    assert wanted == job("a")
    again.settle(BETTER)
    assert rig.kept.get(timeout=10.0)[2] == BETTER


def test_a_search_that_fails_is_forgotten_and_the_next_one_runs(rig: Rig) -> None:
    rig.searches.want("class", [job("a"), job("b")])
    failing, _ = rig.pool.next()
    failing.fail(PlanError("not legal"))
    following, wanted = rig.pool.next()
    assert wanted == job("b")
    rig.searches.want("class", [job("a")])
    following.settle(BETTER)
    assert rig.pool.next()[1] == job("a"), "it may be asked for again"


def test_a_search_that_cannot_begin_leaves_the_others_going(rig: Rig) -> None:
    with pytest.raises(TypeError):
        rig.searches.foreground.submit(refused)
    rig.searches.want("class", [job("a")])
    assert rig.pool.next()[1] == job("a")


def test_closing_ends_the_search_that_runs() -> None:
    rig = Rig()
    rig.searches.want("class", [job("a")])
    running, _ = rig.pool.next()
    rig.searches.close()
    assert running.cancelled() and rig.kept.empty()
