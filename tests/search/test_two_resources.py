"""Plans for a fast and a slow resource: what is cut, what may run where, and that they are legal."""

from collections.abc import Callable

import pytest

from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError, SettingError
from stageloom.shared.plan import ExecutorOptions, Place, PlacementPolicy, Plan, Resource
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.halves import MeasureParts, PartTimes
from stageloom.shared.search.two_resources import REPLICAS, FastAndSlow, placed_rival, placed_rivals
from tests.engine.generate import chain, digest

OPERATORS = 40
MODEL = ModelChoice(name="a", artifact=digest(0), graph=chain("a", OPERATORS))
ONNX, OTHER = ExecutorOptions(name="onnx"), ExecutorOptions(name="openvino")


def where(slow: ExecutorOptions = OTHER) -> FastAndSlow:
    return FastAndSlow(
        fast=Resource(cores=(0,)), slow=Resource(cores=(1,), memory=1), fast_executor=ONNX, slow_executor=slow
    )


def slower(factor: float) -> Callable[[ModelChoice], MeasureParts]:
    """A model whose operators all take a second."""

    def parts(cut: int) -> PartTimes:
        tail_s = float(OPERATORS - cut)
        return PartTimes(head_s=float(cut), tail_s=tail_s, slow_tail_s=factor * tail_s)

    return lambda choice: parts


def made(name: str, factor: float = 3.0, slow: ExecutorOptions = OTHER) -> Plan:
    plan = placed_rival(name).plan([MODEL], where(slow), slower(factor))
    assert bind(plan, {MODEL.artifact: MODEL.graph})
    return plan


def test_the_fast_resource_alone_has_one_lane_and_places_nothing() -> None:
    plan = made("fast_only")
    assert (plan.lanes, plan.placement, plan.resources) == (1, PlacementPolicy.FIXED, (where().fast,))
    assert plan.models[0].cuts == () and plan.models[0].replicas == 1


def test_whole_models_may_run_on_both() -> None:
    plan = made("whole_both")
    assert plan.models[0].cuts == () and plan.placement is PlacementPolicy.DMDA
    assert all(block.resources == (0,) and block.further_places == (Place(1, 1),) for block in plan.combined)
    assert len(plan.combined) == plan.models[0].replicas == REPLICAS


@pytest.mark.parametrize("name", ["staronnx", "staronnx_balanced"])
def test_heads_stay_on_the_fast_resource_and_tails_may_go(name: str) -> None:
    plan = made(name)
    for block in plan.combined:
        head = block.members[0].block == 0
        assert block.resources == (0,)
        assert block.further_places == (() if head else (Place(1, 1),))
    assert plan.further_executors == (OTHER,)


def test_the_papers_tail_is_5_to_15_percent_and_the_balanced_one_what_the_slow_resource_can_take() -> None:
    """At three times slower that is a quarter; the cut of lower latency within 6 % of its rate is taken."""
    (paper,), (balanced,) = made("staronnx").models[0].cuts, made("staronnx_balanced").models[0].cuts
    assert 0.05 <= (OPERATORS - paper) / OPERATORS <= 0.15
    assert 0.2 <= (OPERATORS - balanced) / OPERATORS <= 0.25


def test_one_executor_on_both_resources_is_one_way_to_run_a_block() -> None:
    plan = made("whole_both", slow=ONNX)
    assert plan.further_executors == ()
    assert all(block.resources == (0, 1) and not block.further_places for block in plan.combined)


def test_a_model_without_such_a_cut_is_refused_by_name() -> None:
    short = ModelChoice(name="short", artifact=digest(0), graph=chain("a", 2))
    with pytest.raises(PlanError, match="model 'short' has no base cut with such a tail; use whole_both"):
        placed_rival("staronnx").plan([short], where(), slower(3.0))


def test_an_unknown_rival_is_refused_with_the_names() -> None:
    assert set(placed_rivals()) == {"fast_only", "whole_both", "staronnx", "staronnx_balanced"}
    with pytest.raises(SettingError, match="no rival 'best'; choose one of fast_only, staronnx"):
        placed_rival("best")
