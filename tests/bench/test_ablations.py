"""A plan without one of its parts, of tiny models."""

import pytest

from stageloom.edge_agent.bench import stageloom_contestant
from stageloom.edge_agent.bench.ablations import ablations
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.edge_agent.bench.stageloom_contestant import own_plan
from stageloom.shared.plan import ExecutorOptions, Plan, StepChoice
from stageloom.shared.search.arrangements import Times
from tests.agent.models import write_tiny

ONNX = ExecutorOptions(name="onnx")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ModelUnderTest]:
    folder = tmp_path_factory.mktemp("models")
    return [prepare(f"tiny{n}", write_tiny(folder / f"source{n}.onnx", n), {}, folder) for n in range(2)]


@pytest.fixture
def plan(models: list[ModelUnderTest]) -> Plan:
    openvino = ExecutorOptions(name="openvino")
    return own_plan(models, {"tiny0": {openvino: 1e-3}, "tiny1": {ONNX: 1e-3}})


def test_an_ablation_takes_one_part_away(plan: Plan) -> None:
    found = ablations(plan)
    assert not found["unpinned"].resources
    assert found["unpinned"].combined == plan.combined
    assert [one.name for one in found["without_openvino"].executors] == ["onnx"]
    assert found["arrival_order"].step_choice is StepChoice.RATIO
    assert found["arrival_order"].resources == plan.resources


def test_a_plan_without_openvino_keeps_the_threads_of_its_wide_lane(
    models: list[ModelUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores OpenVINO is fast with two threads alone, and one lane has both of them."""
    monkeypatch.setattr(stageloom_contestant, "usable_cores", lambda: (0, 1))
    wide = ExecutorOptions(name="openvino", intra_op_threads=2)
    plan = own_plan(models, {name: {ONNX: 0.080, wide: 0.020} for name in ("tiny0", "tiny1")}, whole=True)
    assert plan.lanes == 1 and plan.executors == (wide,)
    found = ablations(plan)["without_openvino"]
    assert found.executors == (ExecutorOptions(name="onnx", intra_op_threads=2),)
    assert found.resources == plan.resources and found.combined == plan.combined


def test_a_plan_without_its_express_lane_is_the_one_with_a_lane_for_each_core(
    models: list[ModelUnderTest],
) -> None:
    times: dict[str, Times] = {"tiny0": {ONNX: 0.080}, "tiny1": {ONNX: 1e-4}}
    alike: dict[str, Times] = {name: {ONNX: 0.080} for name in times}
    plan = own_plan(models, times, whole=True)
    found = ablations(plan)
    assert found["without_express"] == own_plan(models, alike, whole=True)
    assert [one.cores for one in found["unpinned"].resources] == [()] * plan.lanes
    assert "without_express" not in ablations(found["without_express"])
    kept_apart = ablations(found["unpinned"])
    assert "unpinned" not in kept_apart and not any(
        one.cores for one in kept_apart["without_express"].resources
    )


def test_what_a_plan_does_not_have_is_no_ablation_of_it(plan: Plan) -> None:
    assert "without_openvino" not in ablations(ablations(plan)["without_openvino"])
    assert "unpinned" not in ablations(ablations(plan)["unpinned"])
