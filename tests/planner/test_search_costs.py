"""What a search for a device takes blocks to cost: what their own executor took there, else an estimate."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.planner.plan_search import search_job
from stageloom.planner.schema.plan import FurtherExecutor, ModelOptions, PlanCreateRequest
from stageloom.planner.store.profiles import request_profile
from stageloom.shared.ids import OpId
from stageloom.shared.messages.telemetry import OperatorTiming, ProfileResult
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.costs import CostTable
from tests.planner.test_auto_plan import CLASS, FACTS, Rig
from tests.store.helpers import NANO

OPENVINO = ExecutorOptions(name="openvino")
ON_BOTH = PlanCreateRequest(
    models=(ModelOptions(model="long", executors=(1,)),),
    device=NANO,
    further_executors=(FurtherExecutor(name="openvino"),),
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    made.tells(FACTS)
    yield made
    made.store.close()


def measured(rig: Rig, executor: str, us: float) -> None:
    """The device measured each operator of `long` on an executor."""
    (request,), _ = rig.store.write(request_profile, NANO, ["long"], executor=ExecutorOptions(name=executor))
    times = tuple(OperatorTiming(op, us, 1.0, 9) for op in range(40))
    rig.tells(ProfileResult(request, rig.artifacts["long"], 1, CLASS, times, True))


def operators_s(rig: Rig, table: CostTable) -> set[float]:
    artifact = rig.artifacts["long"]
    return {table.operator_s(artifact, rig.store.graph(artifact), OpId(op)) for op in range(40)}


def test_a_block_of_a_further_executor_is_searched_with_that_ones_times(rig: Rig) -> None:
    measured(rig, "onnx", 1000.0)
    measured(rig, "openvino", 250.0)
    job = search_job(rig.store, ON_BOTH)
    assert operators_s(rig, job.costs.under(job.executor)) == {1e-3}
    assert operators_s(rig, job.costs.under(OPENVINO)) == {0.25e-3}


def test_an_executor_that_was_not_measured_is_estimated_and_not_taken_for_the_first(rig: Rig) -> None:
    measured(rig, "onnx", 1000.0)
    estimates = operators_s(rig, CostTable())
    assert operators_s(rig, search_job(rig.store, ON_BOTH).costs.under(OPENVINO)) == estimates
    one_executor = PlanCreateRequest(models=ON_BOTH.models, device=NANO)
    assert operators_s(rig, search_job(rig.store, one_executor).costs.under(OPENVINO)) == estimates


@pytest.mark.parametrize("executor", ["onnx", "openvino"])
def test_what_is_unsure_costs_the_least_that_it_may_on_every_executor(rig: Rig, executor: str) -> None:
    costs = search_job(rig.store, ON_BOTH, optimistic=True).costs
    assert costs.under(ExecutorOptions(name=executor)).optimism == 1.0
