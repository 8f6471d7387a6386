"""The re-planner's own threads: what they survive."""

import logging
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.replan.service import Replanner, plans_found
from stageloom.planner.store.replans import OVERTAKEN, end_overdue, end_replan, unfinished_replans
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import ExtensionError, StorageError
from stageloom.shared.ids import DeviceId
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.job import SearchJob
from tests.planner.processes import until
from tests.search.graphs import DIAMOND, model

SHOP = DeviceId("shop-7")


class AwayStore:
    """A store whose database is away for the first calls; nothing can be read from it."""

    def __init__(self, away: int) -> None:
        self._away = away
        self.ended: list[int] = []
        self.reasons: list[str] = []

    def read(self, function: Callable[..., Any], *_: Any) -> list[tuple[DeviceId, int]]:
        assert function is unfinished_replans
        return []

    def snapshot(self) -> Any:
        raise StorageError("the database is away", remedy="start it")

    def write(self, function: Callable[..., Any], *given: Any) -> None:
        if function is end_overdue:
            return
        assert function is end_replan
        replan, reason, _ = given
        self._away -= 1
        if self._away >= 0:
            raise StorageError("the database is away", remedy="start it")
        self.ended.append(replan)
        self.reasons.append(reason)


def test_a_replan_waits_for_a_store_that_is_away_and_others_go_on_after_it() -> None:
    store = AwayStore(away=2)
    due: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()
    pool = SimpleNamespace(workers=1, where="processes")
    replanner = Replanner(store, SimpleNamespace(), pool, ManualClock(), due, store_again_s=0.0)  # type: ignore[arg-type]
    replanner.start()
    for number in (1, 2):
        due.put((SHOP, number))
    until(lambda: sorted(store.ended) == [1, 2])
    replanner.close()


def test_a_replan_that_waited_for_its_store_does_not_take_the_place_of_a_newer_one() -> None:
    """What searches for the newer one would take itself to be overtaken, and leave it pending."""
    store = AwayStore(away=0)
    due: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()
    pool = SimpleNamespace(workers=1, where="processes")
    replanner = Replanner(store, SimpleNamespace(), pool, ManualClock(), due)  # type: ignore[arg-type]
    replanner.start()
    for number in (2, 1, 3):
        due.put((SHOP, number))
    until(lambda: store.ended == [2, 1, 3])
    replanner.close()
    assert [reason == OVERTAKEN for reason in store.reasons] == [False, True, False]


def test_a_replan_that_is_named_again_while_it_is_in_hand_is_carried_out_once() -> None:
    store = AwayStore(away=0)
    due: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()
    pool = SimpleNamespace(workers=1, where="processes")
    replanner = Replanner(store, SimpleNamespace(), pool, ManualClock(), due)  # type: ignore[arg-type]
    for number in (1, 1, 2, 2):
        due.put((SHOP, number))
    replanner.start()
    until(lambda: len(store.ended) >= 2)
    replanner.close()
    assert store.ended == [1, 2]


class PlayedPool:
    """A pool in which the searches of one scheduler never end, and those of another fail."""

    workers = 1
    where = "processes"

    def submit(self, function: Callable[..., Any], job: SearchJob) -> SearchFuture[Any]:
        future: SearchFuture[Any] = SearchFuture()
        if job.scheduler == "broken":
            future.fail(ExtensionError("broken of a-package 1.0 failed"))
        elif job.scheduler != "endless":
            future.settle(function(job))
        return future

    def close(self) -> None:
        pass


def test_a_search_that_never_ends_is_ended_and_what_the_others_found_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    digest, graph = model("diamond", DIAMOND)
    models = (ModelChoice(name="diamond", artifact=digest, graph=graph),)
    jobs = [SearchJob(models=models, scheduler=name) for name in ("endless", "greedy", "broken")]
    asked: list[str] = []

    def goes_on(job: SearchJob) -> bool:
        asked.append(job.scheduler)
        return len(asked) < 3

    caplog.set_level(logging.INFO)
    ((job, plan),) = plans_found(PlayedPool(), jobs, goes_on)
    assert job.scheduler == "greedy" and plan == compose(models, scheduler="greedy")
    assert asked == ["endless"] * 3
    assert "by the scheduler endless has not ended" in caplog.text
