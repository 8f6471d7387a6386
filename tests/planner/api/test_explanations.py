"""Why plans are as they are, and how a trial's plans compare, with a planner and without one."""

import json

import pytest

from stageloom.planner.api import routes
from stageloom.planner.schema.explanation import CostSource, PlanExplainRequest
from stageloom.planner.schema.replan import RegimeListRequest, ReplanListRequest
from stageloom.planner.schema.trial import TrialCompareRequest
from stageloom.planner.service import Planner
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.link import LinkStore
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, ModelLoad, Origin
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.plan import Plan
from tests.planner.api.conftest import Callers
from tests.planner.processes import ok
from tests.planner.world import World
from tests.store.helpers import NANO, enrol

IDLE = DeviceId("idle")


@pytest.fixture(scope="module")
def plans(api_planner: Planner, world: World) -> tuple[Plan, Plan]:
    """Control and candidate of a trial that the device ended."""
    control, candidate = world.kept("sequential"), world.kept("greedy")
    world.profiled()
    enrol(api_planner.store, IDLE, number=2)
    world.store.write(push, Push(device=NANO, plan="sequential", decided_by="operator"))
    desired = world.store.write(push, Push(device=NANO, plan="greedy", decided_by="operator"))
    world.tells(
        TrialEnded(
            epoch=desired.epoch,
            generation=desired.generation,
            origin=Origin.PLANNER,
            how="trial",
            verdict="reject",
            candidate=candidate.digest,
            control=control.digest,
            ratio=0.9,
            ratio_low=0.85,
            ratio_high=0.95,
            pairs=9,
            began_us=1,
            decided_us=2,
            reason="slower",
        ),
    )
    return control, candidate


def test_a_plan_is_explained_by_its_name_and_by_its_digest(
    callers: Callers, plans: tuple[Plan, Plan]
) -> None:
    said = callers.call(routes.PLAN_EXPLAIN, PlanExplainRequest(plan="greedy"))
    assert said.digest == plans[1].digest and said.device == NANO
    assert {line.source for line in said.blocks[0].lines} == {CostSource.OPERATORS}
    assert said.decided is not None and said.decided.trial is not None
    assert {plan.name for plan in said.others} == {"greedy", "sequential"}
    again = callers.call(routes.PLAN_EXPLAIN, PlanExplainRequest(plan=plans[1].digest[:8], device=NANO))
    assert again == said


def test_the_plans_of_a_trial_stand_side_by_side(
    callers: Callers, world: World, plans: tuple[Plan, Plan]
) -> None:
    comparison = callers.call(routes.TRIAL_COMPARE, TrialCompareRequest(device=NANO))
    assert (comparison.trial.control, comparison.trial.candidate) == tuple(plan.digest for plan in plans)
    (block,) = comparison.blocks
    assert not block.same and block.members == "diamond#0.0"
    assert comparison.predicted_ratio is not None and comparison.predicted_ratio > 0.0
    assert [stage.stage for stage in comparison.drift] == [0, 1, 2]
    assert all(stage.measured_s is None and stage.drift is None for stage in comparison.drift)
    text = ok(world.home, "plan", "compare", NANO)
    assert "verdict   reject by trial: slower" in text
    assert f"- diamond#0.0  {block.control}\n+ diamond#0.0  {block.candidate}" in text
    generation = comparison.trial.generation
    by_number = callers.call(routes.TRIAL_COMPARE, TrialCompareRequest(device=NANO, generation=generation))
    assert by_number == comparison


def test_what_is_not_there_is_refused_with_the_reason(callers: Callers, plans: tuple[Plan, Plan]) -> None:
    for caller in (callers.client, callers.store_client):
        for request, why in (
            (PlanExplainRequest(plan="nothing"), "there is no plan 'nothing'"),
            (PlanExplainRequest(plan="greedy", device=DeviceId("nobody")), "there is no device 'nobody'"),
        ):
            with pytest.raises(StageloomError, match=why):
                caller.call(routes.PLAN_EXPLAIN, request)
        for wanted, why in (
            (TrialCompareRequest(device=DeviceId("nobody")), "there is no device 'nobody'"),
            (TrialCompareRequest(device=IDLE), "no plan tried on idle"),
            (TrialCompareRequest(device=NANO, generation=9), "generation 9 was not tried on nano"),
        ):
            with pytest.raises(StageloomError, match=why):
                caller.call(routes.TRIAL_COMPARE, wanted)


def test_replans_are_listed_in_pages_newest_first(callers: Callers, world: World) -> None:
    first, second = DeviceId("first"), DeviceId("second")
    for number, device in enumerate((first, second), 3):
        enrol(world.store, device, number)
        loads = (ModelLoad("diamond", 10.0, 400.0, 3, 1),)
        alarm = Alarm(
            boot=7,
            number=1,
            at_us=1,
            cause="variance",
            value=0.5,
            threshold=0.1,
            plan=None,
            loads=loads,
            samples=(),
        )
        assert LinkStore(world.store).record_alarm(device, alarm) is not None
    page = callers.call(routes.REPLAN_LIST, ReplanListRequest(limit=1))
    assert [info.device for info in page.items] == [second]
    page = callers.call(routes.REPLAN_LIST, ReplanListRequest(limit=1, after=page.next))
    assert [info.device for info in page.items] == [first] and page.next == ""
    found = json.loads(ok(world.home, "replan", "list", "--json"))
    assert [info["device"] for info in found] == [second, first]
    found = json.loads(ok(world.home, "replan", "list", first, "--json"))
    assert [(info["device"], info["cause"]) for info in found] == [(first, "variance")]


def test_what_a_device_is_known_to_be_best_with_is_listed(callers: Callers, world: World) -> None:
    """Of a device that was never tried anything on: nothing. What is known, the store's tests say."""
    assert callers.call(routes.REGIME_LIST, RegimeListRequest(device=NANO)).items == ()
    assert json.loads(ok(world.home, "replan", "regimes", NANO, "--json")) == []
    with pytest.raises(StageloomError, match="there is no device 'nobody'"):
        callers.call(routes.REGIME_LIST, RegimeListRequest(device=DeviceId("nobody")))
