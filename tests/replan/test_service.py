"""The re-planner's own threads: what they survive."""

import logging
import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.replan import service
from stageloom.planner.replan.service import Replanner, plans_found
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.generations import set_states
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.replans import OVERTAKEN, end_overdue, end_replan, unfinished_replans
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import ExtensionError, StorageError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, DeviceState, ModelLoad, Report
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.job import SearchJob
from tests.planner.processes import until
from tests.replan.drifting import BOOT
from tests.replan.test_recalibration import SLOW, World
from tests.search.graphs import DIAMOND, model
from tests.store.helpers import NANO

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

    def write(self, function: Callable[..., Any], *given: Any, **_: Any) -> None:
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


class HeldThreads:
    """In the place of a pool of threads: runs what it was given when a test says so, the oldest first."""

    def __init__(self) -> None:
        self.held: list[Callable[[], object]] = []

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        self.held.append(partial(function, *arguments))

    def shutdown(self, **_: object) -> None:
        pass

    def run(self) -> None:
        self.held.pop(0)()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    held = HeldThreads()
    monkeypatch.setattr(service, "ThreadPoolExecutor", lambda *_, **__: held)
    return held


def waits(world: World, threads: HeldThreads, alarm: Alarm) -> None:
    """A re-plan begins, and waits for a thread that searches."""
    replan = LinkStore(world.store).record_alarm(NANO, alarm)
    assert replan is not None
    before = len(threads.held)
    world.due.put((NANO, replan))
    until(lambda: len(threads.held) > before)


def queues_diverge(world: World, number: int, per_s: float = 20.0) -> Alarm:
    load = ModelLoad("branches", per_s, 1500.0, 0, 0)
    return Alarm(
        boot=BOOT, number=number, at_us=1, cause="variance", value=4.0, threshold=2.0,
        plan=world.first.digest, loads=(load,), samples=(),
    )  # fmt: skip


def unmeasured(folder: Path) -> World:
    """A device that is busy, in a power mode in which nothing was measured."""
    world = World(folder, idle=False)
    LinkStore(world.store).record_reports([ReportRecord(NANO, BOOT, Report(), device_class=SLOW)])
    return world


def test_a_re_plan_that_was_overtaken_while_it_waited_has_nothing_measured(
    tmp_path: Path, threads: HeldThreads
) -> None:
    world = unmeasured(tmp_path)
    alarm = queues_diverge(world, 1)
    waits(world, threads, alarm)
    waits(world, threads, structs.replace(alarm, number=2, cause="regime"))
    threads.run()
    assert world.device.asked == []
    threads.run()
    assert world.device.asked
    world.close()


def test_a_drift_that_was_overtaken_while_it_waited_still_renews_costs(
    tmp_path: Path, threads: HeldThreads
) -> None:
    world = World(tmp_path)
    world.device.serve(60)
    world.device.clock = 0.5
    alarm = world.device.serve(60)
    assert alarm is not None and alarm.cause == "drift"
    waits(world, threads, alarm)
    waits(world, threads, structs.replace(alarm, number=alarm.number + 1, cause="regime"))
    threads.run()
    assert world.store.read(calibration_of, NANO).own
    world.close()


def test_a_drift_that_was_overtaken_while_it_waited_for_a_trial_still_renews_costs(
    tmp_path: Path, threads: HeldThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An operator's plan is on trial. 2. The device drifts. 3. Arrivals move before the trial ends."""
    monkeypatch.setattr(service, "_REPORTED_S", 0.0)
    world = World(tmp_path)
    world.device.serve(60)
    tried = world.store.write(push, Push(device=NANO, plan="wide", decided_by="operator"))
    told = (NANO, tried.epoch, tried.generation, DeviceState.TRIAL, "", 1)
    world.store.write(set_states, [told])
    world.device.clock = 0.5
    alarm = world.device.serve(60)
    assert alarm is not None and alarm.cause == "drift"
    waits(world, threads, alarm)
    waits(world, threads, structs.replace(alarm, number=alarm.number + 1, cause="regime"))
    threads.run()
    assert world.store.read(calibration_of, NANO).own
    world.close()


def test_what_a_device_has_still_to_measure_is_not_asked_for_again(tmp_path: Path) -> None:
    world = unmeasured(tmp_path)
    world.answered(queues_diverge(world, 1))
    world.answered(structs.replace(queues_diverge(world, 2, per_s=400.0), cause="regime"))
    world.close()
    assert len({one.request for one in world.device.asked}) == 1


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
