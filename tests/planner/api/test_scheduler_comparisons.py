"""Schedulers over the API: listed, compared in the pool and in the client's process, measured by a device."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.context import ApiContext
from stageloom.planner.api.handlers import schedulers as handlers
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.offline import StoreClient
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.schema.device import DeviceProfileReply, DeviceProfileRequest
from stageloom.planner.schema.plan import ModelOptions
from stageloom.planner.schema.scheduler import (
    ComparedScheduler,
    SchedulerCompareReply,
    SchedulerCompareRequest,
    SchedulerKind,
    SchedulerListRequest,
)
from stageloom.planner.store.plans import plan_infos
from stageloom.planner.store.predictions import searches_of
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import UnavailableError
from stageloom.shared.messages.telemetry import StageTiming
from stageloom.shared.search.eop import splitters
from stageloom.shared.search.registry import schedulers
from stageloom.shared.search.rivals import policies
from tests.learning.pools import InlinePool
from tests.planner.api.conftest import Callers
from tests.planner.api.context import answer_of, planner_context
from tests.planner.world import World
from tests.store.helpers import NANO


def wanted(*names: str, **changes: object) -> SchedulerCompareRequest:
    fields: dict[str, object] = {"models": (ModelOptions(model="diamond"),), "schedulers": names}
    return SchedulerCompareRequest(**{**fields, **changes})  # type: ignore[arg-type]


def by_name(reply: SchedulerCompareReply) -> dict[str, ComparedScheduler]:
    return {row.scheduler: row for row in reply.compared}


def test_all_that_a_plan_may_ask_for_is_listed(callers: Callers) -> None:
    infos = callers.call(routes.SCHEDULER_LIST, SchedulerListRequest()).items
    named = [(info.kind, info.name) for info in infos]
    assert [name for kind, name in named if kind is SchedulerKind.SCHEDULER] == [
        *schedulers(),
        *splitters(),
    ]
    assert [name for kind, name in named if kind is SchedulerKind.POLICY] == list(policies())
    assert all(info.help for info in infos)


def test_the_pool_finds_what_the_clients_own_process_does(
    world: World, client: PlannerClient, store_client: StoreClient
) -> None:
    request = wanted("ios", "sequential", "nimble")
    there = by_name(client.call(routes.SCHEDULER_COMPARE, request))
    here = by_name(store_client.call(routes.SCHEDULER_COMPARE, request))
    assert there.keys() == {"ios", "sequential", "nimble"}
    assert all(row.plan == here[name].plan for name, row in there.items())
    assert all(row.predicted_ms == here[name].predicted_ms for name, row in there.items())


@pytest.mark.promise("scheduler-compared-gaps-measured")
def test_measure_has_every_plan_measured_once_and_costs_what_was_measured_since(
    world: World, client: PlannerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is played: each plan takes 700 us."""
    world.profiled()
    asked: list[str] = []

    def measured(api: ApiContext, request: DeviceProfileRequest, job: Job) -> DeviceProfileReply:
        assert request.plan is not None and request.budget_s == 5.0
        asked.append(request.plan)
        plan = world.plan("sequential")
        joint = 4 if request.plan == plan.digest[:12] else 1  # its stages of one group run as one
        world.measured(request.plan, (StageTiming(0, 350.0, 1.0, 5, joint),), 700.0)
        return DeviceProfileReply(requests=(1,), epoch=1, generation=1, reasons=("it was busy",))

    monkeypatch.setattr(handlers, "measured", measured)
    request = wanted("sequential", "greedy", "wavefront", "nimble", device=NANO, measure_s=5.0)
    reply = client.call(routes.SCHEDULER_COMPARE, request)
    found = by_name(reply)
    assert len(asked) == len({row.plan for row in found.values()}) < 5
    assert all(row.measured_ms == pytest.approx(0.7) for row in found.values())
    assert found["sequential"].predicted_ms == pytest.approx(0.35), "as measured"
    assert reply.reasons == ("it was busy",)


class BusyPool(InlinePool):
    """Every search waits a minute for a worker."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        self._clock.advance(60.0)
        return super().submit(function, *arguments)


def test_what_is_measured_of_a_search_is_the_search_and_not_the_wait_for_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is kept as one that is asked for, with the same time."""
    world = World(tmp_path / "home")
    quiet = planner_context(world.store, world.clock)
    assert quiet.running is not None
    api = replace(quiet, running=replace(quiet.running, pool=BusyPool(world.clock)))
    monkeypatch.setattr(
        handlers, "measured", lambda *_: DeviceProfileReply(requests=(), epoch=1, generation=1)
    )
    reply = answer_of(api, routes.SCHEDULER_COMPARE, wanted("ios", device=NANO, measure_s=1.0))
    (row,) = reply.compared
    assert row.search_ms < 30_000.0 and world.clock.monotonic_s() >= 60.0
    (kept,) = world.store.read(plan_infos)
    assert (kept.digest, kept.scheduler) == (row.plan, "ios")
    (looked_at,) = world.store.read(searches_of, kept.digest)
    assert looked_at.search_s == pytest.approx(1e-3 * row.search_ms)
    world.store.close()


def test_what_cannot_be_compared_is_refused_before_a_job_begins(
    world: World, client: PlannerClient, store_client: StoreClient
) -> None:
    for request, why in (
        (wanted("best"), "there is no scheduler 'best'"),
        (wanted("ios", measure_s=1.0), "measuring needs a device"),
        (wanted("ios", models=(ModelOptions(model="missing"),)), "missing"),
        (wanted("ios", combination="odd"), "there is no combination 'odd'"),
    ):
        with pytest.raises(ApiRefused, match=why):
            client.start(routes.SCHEDULER_COMPARE, request)
    with pytest.raises(UnavailableError, match="no planner runs"):
        store_client.start(routes.SCHEDULER_COMPARE, wanted("ios", device=NANO, measure_s=1.0))
