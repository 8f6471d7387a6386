"""`onnx_cuda` in half precision on a simulated device: near, in half the room, apart from float32."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxCudaExecutor
from stageloom.edge_agent.executor.onnx_cuda.recipe import PlanRecipes
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey
from stageloom.shared.errors import ExecutorError
from stageloom.shared.plan import ExecutorOptions, Member, Plan
from tests.executor.contract.schedules import StepMaker, bound_of, plan_of
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.onnx_cuda.simulated import device_of, simulated
from tests.executor.onnx_cuda.test_executor import streamed_plan
from tests.executor.torch.steps import KEY, halves, load, members, run

ONE = InstanceId(1)


@pytest.fixture
def executor() -> Iterator[OnnxCudaExecutor]:
    """On a fresh simulated device."""
    made = simulated()
    yield made
    made.close()


@pytest.fixture
def model() -> Artifact:
    """A model with branches."""
    return artifact_of("squeezenet_bypass")


def _in(plan: Plan, precision: str) -> Plan:
    return replace(plan, executor=ExecutorOptions(name="onnx_cuda", precision=precision))


def _error(model: Artifact, number: int, row: dict[str, np.ndarray]) -> float:
    return difference(
        row["logits"], reference(model, random_inputs(model.graph, number), ["logits"])["logits"]
    )


def test_answers_are_near_and_float32_and_blocks_hand_over_half_tensors(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    plan = _in(plan_of([model], [halves(model)], [[m] for m in members(2)]), "fp16")
    steps = StepMaker(KEY, load(executor, plan, [model]))
    inputs = random_inputs(model.graph, 1)
    shown = []
    executor.tap = lambda instance, member, tensors: shown.append((member.block, dict(tensors)))
    run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [inputs]})
    (row,) = run(executor, steps.step(1, {0: (ONE, 1)}))[ONE]
    assert row["logits"].dtype == np.float32 and 1e-6 < _error(model, 1, dict(row)) < 2e-2
    (crossing,) = [tensors for block, tensors in shown if block == 0]
    names = [name for name in crossing if name not in inputs]
    wanted = reference(model, inputs, names)
    for name in names:
        assert crossing[name].dtype == np.float32, "it is shown in the model's own type"
        assert np.array_equal(crossing[name], crossing[name].astype(np.float16))
        assert 1e-6 < difference(crossing[name], wanted[name]) < 2e-2


def test_a_streamed_schedule_and_padded_batches_keep_to_their_rows(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    steps = StepMaker(KEY, load(executor, _in(streamed_plan(model), "fp16"), [model]))
    (row,) = run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [random_inputs(model.graph, 1)]})[ONE]
    assert _error(model, 1, dict(row)) < 2e-2
    batched = _in(plan_of([model], [()], [members(1)], batch=3), "fp16")
    steps = StepMaker(PlanKey(2), load(executor, batched, [model], PlanKey(2)))
    rows = [random_inputs(model.graph, number) for number in (1, 2)]
    two = InstanceId(2)
    for number, made in enumerate(run(executor, steps.step(0, {0: (two, 2)}), {two: rows})[two], 1):
        assert _error(model, number, dict(made)) < 2e-2


def test_a_plan_states_half_the_room_for_what_lies_between_and_holds_what_it_states(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    plan = plan_of([model], [halves(model)], [[m] for m in members(2)])
    whole, half = (bound_of(_in(plan, precision), [model]) for precision in ("fp32", "fp16"))
    slots = [dict(PlanRecipes(bound).slots()) for bound in (whole, half)]
    inner = [place for place in slots[0] if place[2] not in model.graph.inputs]
    assert inner and all(2 * slots[1][place] == slots[0][place] for place in inner)
    stated = executor.stated_bytes(half)
    load(executor, _in(plan, "fp16"), [model])
    assert executor.held_bytes == stated < executor.stated_bytes(whole, alone=True)
    assert device_of(executor).held == PlanRecipes(half).memory_bytes


def test_every_session_counts_the_handles_that_the_libraries_keep_for_it(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    """80 sessions are 80 handles of cuBLAS, cuBLASLt and cuDNN each, hundreds of MiB."""
    bound = bound_of(streamed_plan(model), [model])
    sessions = len(PlanRecipes(bound).keys)
    stated = executor.stated_bytes(bound)
    without = simulated()
    device_of(without).handle_bytes = 0
    bare = OnnxCudaExecutor(device_of(without))
    assert sessions > 10 and stated - bare.stated_bytes(bound) == sessions * device_of(executor).handle_bytes
    bare.close()
    without.close()


def test_plans_of_two_precisions_share_nothing_and_no_instance_moves_between_them(
    executor: OnnxCudaExecutor, model: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    """Their slots hold other types: a move would hand over bytes that mean something else."""
    plan = plan_of([model], [halves(model)], [[m] for m in members(2)])
    first = StepMaker(KEY, load(executor, _in(plan, "fp32"), [model]))
    second = StepMaker(PlanKey(2), load(executor, _in(plan, "fp16"), [model], PlanKey(2)))
    inputs = random_inputs(model.graph, 1)
    run(executor, first.step(0, {0: (ONE, 1)}), {ONE: [inputs]})
    assert len({key.precision for key in executor._cache._values}) == 2
    member = Member(0, 0, 1)
    executor.move(MoveInstance(ONE, (KEY, member), (PlanKey(2), member), ()))
    with pytest.raises(ExecutorError, match="lost its tensors"):
        run(executor, second.step(1, {0: (ONE, 1)}))
    assert "another precision" in caplog.text
