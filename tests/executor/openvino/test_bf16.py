"""bfloat16 on `openvino`: near the model, the same every time, beside float32 whose bits stay, or refused.

It is no member of the contract of all executors, whose results are the model's within 1e-4. The tolerance
here is three times what rounding weights and inputs to bfloat16 does in float32, and at least one step of
bfloat16, 2^-8: networks of the contract differed by 1.3 to 1.6 times that rounding.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import zoo
from stageloom.edge_agent.executor.openvino import executor as module
from stageloom.edge_agent.executor.openvino.executor import OpenvinoExecutor
from stageloom.edge_agent.verify.check import verify_artifact
from stageloom.edge_agent.verify.reduced import to_bfloat16
from stageloom.edge_agent.verify.standards import BFLOAT16
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.errors import ExecutorError, PlanError
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.plan import ExecutorOptions, Member, Plan
from tests.executor.contract.schedules import StepMaker, bound_of, plan_of
from tests.executor.drive import KEY, halves, load, run
from tests.executor.models import artifact_of, random_inputs
from tests.scratch import scratch

FLOAT32 = ExecutorOptions(name="openvino")
BF16 = ExecutorOptions(name="openvino", precision="bf16")

bf16 = pytest.mark.skipif(
    not module.computes_bf16(), reason="this processor has no units for bfloat16: nothing of it is tested"
)


@pytest.fixture
def openvino() -> Iterator[OpenvinoExecutor]:
    """A new one."""
    made = OpenvinoExecutor()
    yield made
    made.close()


def plan_with(model: Artifact, options: ExecutorOptions) -> Plan:
    """The model in two blocks."""
    plan = plan_of([model], [halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]])
    return replace(plan, executor=options)


def computed(openvino: OpenvinoExecutor, key: PlanKey, plan: Plan, model: Artifact) -> np.ndarray:
    """The logits of a loaded plan."""
    steps = StepMaker(key, bound_of(plan, [model]))
    one = InstanceId(1)
    run(openvino, steps.step(0, {0: (one, 1)}), {one: [random_inputs(model.graph, 1)]})
    (row,) = run(openvino, steps.step(1, {0: (one, 1)}), {})[one]
    return row["logits"].copy()


@bf16
@pytest.mark.promise("openvino-bf16-near")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("squeezenet_bypass", "greedy"),
        pytest.param("googlenet", "ios", marks=pytest.mark.full),
        pytest.param("resnet50", "nimble", marks=pytest.mark.full),
        pytest.param("inception_v3", "ios", marks=pytest.mark.full),
    ],
)
def test_networks_of_the_contract_are_near_and_the_same_every_time(
    name: str, schedule: str, openvino: OpenvinoExecutor
) -> None:
    folder = scratch() / f"bf16-{name}"
    folder.mkdir(exist_ok=True)
    zoo.write(name, folder / "model.onnx", width=0.25, size=75)
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    report = verify_artifact(
        open_artifact(folder / ARTIFACT_NAME), schedule, openvino, precision="bf16", repeats=2
    )
    assert report.agrees and report.stable and not report.exit_code, report.to_text()
    assert report.largest_agree is not None and report.largest_agree > 0.0
    moved = [one.difference / one.noise for one in report.compared if one.noise > BFLOAT16.least]
    assert max(moved) < 2.0 and report.difference > 1e-4, "it is no float32, and nothing but bfloat16"


@bf16
@pytest.mark.promise("openvino-bf16-near")
def test_float32_keeps_its_bits_beside_bfloat16_of_the_same_model(openvino: OpenvinoExecutor) -> None:
    model = artifact_of("squeezenet")
    exact, near = PlanKey(1), PlanKey(2)
    load(openvino, plan_with(model, FLOAT32), [model], exact)
    before = computed(openvino, exact, plan_with(model, FLOAT32), model)
    load(openvino, plan_with(model, BF16), [model], near)
    assert openvino.sessions == 4, "sessions of the two are apart"
    rounded = [computed(openvino, near, plan_with(model, BF16), model) for _ in range(2)]
    after = computed(openvino, exact, plan_with(model, FLOAT32), model)
    assert before.tobytes() == after.tobytes()
    assert rounded[0].dtype == np.float32 and rounded[0].tobytes() == rounded[1].tobytes()
    assert 1e-4 < np.linalg.norm(rounded[0] - before) / np.linalg.norm(before) < 0.1


@bf16
def test_models_of_one_plan_may_differ_in_precision(openvino: OpenvinoExecutor) -> None:
    model = artifact_of("squeezenet")
    groups = [[Member(0, 0, 0)], [Member(1, 0, 0)]]
    plan = replace(plan_of([model, model], [(), ()], groups), executor=FLOAT32, further_executors=(BF16,))
    first, second = plan.combined
    plan = replace(plan, combined=(first, replace(second, executor=1)))
    assert bound_of(plan, [model]).precisions == ("fp32", "bf16")
    bound = load(openvino, plan, [model])
    steps, made = StepMaker(KEY, bound), []
    inputs = random_inputs(model.graph, 1)
    for index in (0, 1):
        one = InstanceId(index + 1)
        (row,) = run(openvino, steps.step(index, {0: (one, 1)}), {one: [inputs]})[one]
        made.append(row["logits"].copy())
    assert 1e-4 < np.linalg.norm(made[1] - made[0]) / np.linalg.norm(made[0]) < 0.1


@pytest.mark.promise("openvino-bf16-near")
def test_blocks_of_one_model_in_two_precisions_are_no_plan() -> None:
    model = artifact_of("squeezenet")
    plan = replace(plan_with(model, FLOAT32), further_executors=(BF16,))
    first, second = plan.combined
    with pytest.raises(PlanError, match="has blocks in fp32 and in bf16") as raised:
        bound_of(replace(plan, combined=(first, replace(second, executor=1))), [model])
    assert raised.value.remedy == "give all blocks of a model executors of one precision"


@pytest.mark.promise("openvino-bf16-near")
def test_a_processor_without_units_for_it_refuses_the_plan(
    openvino: OpenvinoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "computes_bf16", lambda: False)
    model = artifact_of("squeezenet")
    with pytest.raises(ExecutorError, match="no units for bfloat16") as raised:
        load(openvino, plan_with(model, BF16), [model])
    assert raised.value.remedy == "use the precision fp32" and openvino.sessions == 0
    load(openvino, plan_with(model, FLOAT32), [model])


def test_sessions_are_weighed_as_in_float32(openvino: OpenvinoExecutor) -> None:
    """bfloat16 weights take half; what has no kernel in it keeps float32, so the larger figure is stated."""
    model = artifact_of("squeezenet")
    stated = [openvino.stated_bytes(bound_of(plan_with(model, one), [model])) for one in (FLOAT32, BF16)]
    assert stated[0] == stated[1] > 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (1.0, 1.0),
        (1.0 + 2.0**-8, 1.0),  # half a step: to the even one
        (1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6),
        (1.0 + 2.0**-8 + 2.0**-20, 1.0 + 2.0**-7),
        (-3.3, -3.296875),
        (float("inf"), float("inf")),
    ],
)
def test_rounding_to_bfloat16_is_to_the_nearest_and_then_to_even(given: float, wanted: float) -> None:
    assert to_bfloat16(np.array([given], np.float32))[0] == np.float32(wanted)


def test_rounding_leaves_integers_and_what_is_no_number() -> None:
    integers = np.array([257, 3])
    assert to_bfloat16(integers) is integers
    assert np.isnan(to_bfloat16(np.array([[np.nan]], np.float32))).all()
