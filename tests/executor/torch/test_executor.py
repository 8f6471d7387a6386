"""What is special to executors with static buffers: slots, staging, moves, lanes, run-ahead, memory."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from onnx import TensorProto

from stageloom.edge_agent.executor.base import Executor, Rows
from stageloom.edge_agent.executor.torch.cpu import TorchCpuExecutor
from stageloom.edge_agent.executor.torch.memory import stated_weight_bytes
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.artifact import Artifact
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member
from stageloom.shared.schedule import Schedule
from tests.executor.contract.schedules import (
    StepMaker,
    bound_of,
    graph_of,
    plan_of,
    random_stages,
    random_streams,
)
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.small_models import SHARED_BYTES, Builder, unrolled
from tests.executor.torch.conftest import TorchExecutor
from tests.executor.torch.steps import (
    KEY,
    TOLERANCE,
    answer_of,
    halves,
    load,
    members,
    run,
    thirds,
    wrong,
)

ONE = InstanceId(1)


def _border_check(executor: Executor, names: Sequence[str], kind: str, barrier: Barrier) -> None:
    """Every border and output of models scheduled together, against the whole models."""
    models = [artifact_of(name) for name in names]
    cuts = [halves(model) for model in models]
    groups = [[Member(i, 0, block) for i in range(len(models))] for block in (0, 1)]
    rng = random.Random(f"{names} {kind} {barrier}")
    make: Callable[[CombinedGraph, random.Random], Schedule]
    make = random_stages if kind == "stages" else random_streams
    schedules = [make(graph_of(models, cuts, group), rng) for group in groups]
    borders: dict[tuple[int, str], np.ndarray] = {}

    def tap(instance: InstanceId, member: Member, tensors: "dict[str, np.ndarray]") -> None:
        borders.update({(member.model, name): array for name, array in tensors.items()})

    executor.tap = tap  # type: ignore[assignment]
    bound = load(executor, plan_of(models, cuts, groups, schedules, barrier=barrier), models)
    steps = StepMaker(KEY, bound)
    inputs = [random_inputs(model.graph, 50 + i) for i, model in enumerate(models)]
    for block in (0, 1):
        instances = {i: (InstanceId(i), 1) for i in range(len(models))}
        run(executor, steps.step(block, instances), {InstanceId(i): [x] for i, x in enumerate(inputs)})
    for i, model in enumerate(models):
        wanted = reference(model, inputs[i], [name for at, name in borders if at == i])
        assert len(wanted) >= 2
        for name, array in wanted.items():
            assert difference(borders[i, name], array) < TOLERANCE, (model.graph.name, name)


@pytest.mark.parametrize("barrier", Barrier)
@pytest.mark.parametrize("kind", ["stages", "streams"])
def test_random_schedules_equal_the_whole_models(
    executor: TorchExecutor, kind: str, barrier: Barrier
) -> None:
    _border_check(executor, ["squeezenet_bypass", "googlenet"], kind, barrier)


@pytest.mark.full
@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "inception_v3"])
@pytest.mark.parametrize("kind", ["stages", "streams"])
def test_every_model_under_random_schedules(executor: TorchExecutor, name: str, kind: str) -> None:
    _border_check(executor, [name], kind, Barrier.DATA)


def test_blocks_of_one_replica_in_one_step_do_not_overwrite_what_the_other_reads(
    executor: TorchExecutor,
) -> None:
    """All three blocks are one combined block: every step runs three instances, each one block on."""
    model = artifact_of("squeezenet")
    cuts = [thirds(model)]
    schedule = random_stages(graph_of([model], cuts, members(3)), random.Random(4))
    bound = load(executor, plan_of([model], cuts, [members(3)], [schedule]), [model])
    steps = StepMaker(KEY, bound)
    inputs = {InstanceId(i): random_inputs(model.graph, i) for i in range(1, 6)}
    for at in range(1, 8):
        active = {block: InstanceId(at - block) for block in range(3) if 1 <= at - block <= 5}
        step = steps.step(0, {block: (instance, 1) for block, instance in active.items()})
        # downstream first, as the core has it
        step = structs.replace(
            step, members=tuple(reversed(step.members))
        )  # downstream first, as the core has it
        feeds: dict[InstanceId, Rows] = {i: [inputs[i]] for block, i in active.items() if block == 0}
        made = run(executor, step, feeds)
        for instance, rows in made.items():
            assert not wrong(model, inputs[instance], rows), (at, instance)
        assert set(made) == {i for block, i in active.items() if block == 2}


def test_steps_issued_ahead_keep_their_order(executor: TorchExecutor) -> None:
    """Two blocks, two instances, all four steps issued before any is waited for."""
    model = artifact_of("squeezenet")
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model])
    steps = StepMaker(KEY, bound)
    inputs = {InstanceId(i): random_inputs(model.graph, i) for i in (1, 2)}
    issued: list[Step] = []
    for instance in inputs:
        for block in (0, 1):
            after = [issued[-1].id] if issued else []
            step = steps.step(block, {0: (instance, 1)}, after=after)
            executor.prepare(step.program)
            issued.append(step)
    for step in issued:
        executor.issue(step, {i: [x] for i, x in inputs.items()})
    for step in issued:
        for instance, rows in executor.wait(step.id).outputs.items():
            assert not wrong(model, inputs[instance], rows)


def test_lanes_overlap_and_share_no_memory(executor: TorchExecutor) -> None:
    models = [artifact_of("squeezenet"), artifact_of("googlenet")]
    cuts: list[tuple[int, ...]] = [(), ()]
    schedules = [
        random_streams(graph_of(models, cuts, [Member(i, 0, 0)]), random.Random(i)) for i in range(2)
    ]
    groups = [[Member(0, 0, 0)], [Member(1, 0, 0)]]
    bound = load(executor, plan_of(models, cuts, groups, schedules, lanes=2), models)
    steps = StepMaker(KEY, bound)
    wrongs: list[int] = []

    pairs = []
    for number in range(4):
        for lane in (0, 1):
            step = steps.step(lane, {0: (InstanceId(10 * number + lane), 1)}, lane=lane)
            executor.prepare(step.program)
            inputs = random_inputs(models[lane].graph, number)
            pairs.append((lane, step, inputs))

    def lane_thread(lane: int) -> None:
        for own, step, inputs in pairs:
            if own != lane:
                continue
            rows = executor.wait(step.id).outputs[step.members[0].instance]
            wrongs.extend([lane] * wrong(models[lane], inputs, rows))

    for _, step, inputs in pairs:
        executor.issue(step, {step.members[0].instance: [inputs]})
    threads = [threading.Thread(target=lane_thread, args=(lane,)) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrongs == []


def test_an_instance_goes_on_in_another_plan_after_a_move(executor: TorchExecutor) -> None:
    """1. Block 0 is in flight in the old plan when the move comes. 2. The old plan's slot is filled again.
    3. Block 1 runs in the new plan. 4. The old plan is unloaded."""
    model = artifact_of("squeezenet")
    plan = plan_of([model], [halves(model)], [[m] for m in members(2)])
    old, new = PlanKey(1), PlanKey(2)
    bound = load(executor, plan, [model], old)
    other = load(executor, plan_of([model], [halves(model)], [members(2)]), [model], new)
    steps, later = StepMaker(old, bound), StepMaker(new, other)
    later._next = 100
    one, two = InstanceId(1), InstanceId(2)
    inputs = {one: random_inputs(model.graph, 1), two: random_inputs(model.graph, 2)}
    first = steps.step(0, {0: (one, 1)})
    again = steps.step(0, {0: (two, 1)}, after=[first.id])
    on = later.step(0, {1: (one, 1)}, after=[first.id])
    for step in (first, on):
        executor.prepare(step.program)
    executor.issue(first, {one: [inputs[one]]})
    executor.move(MoveInstance(one, (old, Member(0, 0, 1)), (new, Member(0, 0, 1)), (first.id,)))
    executor.issue(again, {two: [inputs[two]]})
    executor.issue(on, {})
    executor.wait(first.id)
    executor.wait(again.id)
    rows = executor.wait(on.id).outputs[one]
    executor.unload(old)
    assert not wrong(model, inputs[one], rows)


def test_every_mask_of_a_combined_block_and_every_bucket(executor: TorchExecutor) -> None:
    models = [artifact_of("squeezenet"), artifact_of("squeezenet_bypass")]
    cuts: list[tuple[int, ...]] = [(), ()]
    group = [Member(0, 0, 0), Member(1, 0, 0)]
    schedule = random_streams(graph_of(models, cuts, group), random.Random(8))
    bound = load(executor, plan_of(models, cuts, [group], [schedule], batch=3), models)
    steps = StepMaker(KEY, bound)
    number = 0
    for tasks in ({0: 1}, {1: 2}, {0: 3, 1: 1}, {0: 2, 1: 3}):
        for fallback in (False, True):
            number += 10
            instances = {p: (InstanceId(number + p), count) for p, count in tasks.items()}
            feeds = {
                instances[p][0]: [random_inputs(models[p].graph, number + row) for row in range(count)]
                for p, count in tasks.items()
            }
            made = run(executor, steps.step(0, instances, fallback=fallback), feeds)
            for p, count in tasks.items():
                rows = made[instances[p][0]]
                assert len(rows) == count
                for row, inputs in zip(rows, feeds[instances[p][0]], strict=True):
                    assert difference(row["logits"], answer_of(models[p], inputs)) < TOLERANCE


def test_a_failed_step_breaks_its_instance_and_nothing_else(executor: TorchExecutor) -> None:
    model = artifact_of("squeezenet")
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model])
    steps = StepMaker(KEY, bound)
    bad = {"image": np.zeros((1, 3, 8, 8), np.float32)}
    with pytest.raises(ExecutorError, match="input 'image' is float32 1x3x8x8, not float32"):
        run(executor, steps.step(0, {0: (InstanceId(1), 1)}), {InstanceId(1): [bad]})
    with pytest.raises(ExecutorError, match="lost its tensors"):
        run(executor, steps.step(1, {0: (InstanceId(1), 1)}))
    inputs = random_inputs(model.graph, 2)
    run(executor, steps.step(0, {0: (InstanceId(2), 1)}), {InstanceId(2): [inputs]})
    assert not wrong(model, inputs, run(executor, steps.step(1, {0: (InstanceId(2), 1)}))[InstanceId(2)])


def test_outputs_are_not_overwritten_by_the_next_step(executor: TorchExecutor) -> None:
    model = artifact_of("squeezenet")
    bound = load(executor, plan_of([model], [()], [members(1)]), [model])
    steps = StepMaker(KEY, bound)
    inputs = [random_inputs(model.graph, seed) for seed in (1, 2)]
    kept = [
        run(executor, steps.step(0, {0: (InstanceId(i), 1)}), {InstanceId(i): [x]})[InstanceId(i)]
        for i, x in enumerate(inputs)
    ]
    for rows, x in zip(kept, inputs, strict=True):
        assert not wrong(model, x, rows)


ODD_VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "turned round": lambda image: np.ascontiguousarray(image[..., ::-1])[..., ::-1],
    "of another byte order": lambda image: image.astype(image.dtype.newbyteorder()),
    "between other fields": lambda image: _beside_a_byte(image),
    "read only": lambda image: np.frombuffer(image.tobytes(), image.dtype).reshape(image.shape),
}
"""The same values as numpy may hold them."""


def _beside_a_byte(image: np.ndarray) -> np.ndarray:
    pixels = np.zeros(image.shape, np.dtype([("value", image.dtype), ("mark", np.uint8)]))
    pixels["value"] = image
    return pixels["value"]


@pytest.mark.parametrize("view", ODD_VIEWS)
def test_inputs_are_read_however_numpy_holds_them(executor: TorchExecutor, view: str) -> None:
    model = artifact_of("squeezenet")
    steps = StepMaker(KEY, load(executor, plan_of([model], [()], [members(1)]), [model]))
    inputs = random_inputs(model.graph, 1)
    held = {name: ODD_VIEWS[view](array) for name, array in inputs.items()}
    assert not wrong(model, inputs, run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [held]})[ONE])


@pytest.mark.promise("device-refuses-costs-plan")
def test_what_a_plan_holds_is_no_more_than_it_stated(executor: TorchExecutor) -> None:
    models = [artifact_of("googlenet"), artifact_of("squeezenet")]
    cuts = [halves(model) for model in models]
    groups = [[Member(0, 0, b), Member(1, 0, b)] for b in (0, 1)]
    plan = plan_of(models, cuts, groups, batch=2)
    bound = bound_of(replace(plan, executor=ExecutorOptions(name=executor.name)), models)
    stated = executor.stated_bytes(bound)
    assert executor.held_bytes == 0
    load(executor, plan, models)
    buffers = executor.held_bytes
    assert 0.5 * stated < buffers <= 1.02 * stated
    second = executor.stated_bytes(bound)
    assert second < stated and executor.stated_bytes(bound, alone=True) == stated
    executor.unload(KEY)
    assert executor.held_bytes == 0


def test_weights_that_many_operators_read_are_stated_as_often_as_they_are_held(
    executor: TorchExecutor,
) -> None:
    model = unrolled()
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    bound = bound_of(replace(plan, executor=ExecutorOptions(name=executor.name)), [model])
    stated = executor.stated_bytes(bound)
    load(executor, plan, [model])
    assert SHARED_BYTES < executor.held_bytes <= stated < 1.5 * SHARED_BYTES


def _from_a_table(table: np.ndarray) -> Artifact:
    """Picks rows of a table by an input's values."""
    b = Builder()
    rows = b.node("Cast", "x", to=TensorProto.INT64)
    made = b.node("Cast", b.node("Gather", b.constant(table), rows), to=TensorProto.FLOAT)
    return b.artifact({"x": (1, 2)}, {made: (1, 2, table.shape[1])})


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.int64, np.float32])
def test_weights_that_half_precision_does_not_halve_are_stated_whole(
    executor: TorchExecutor, dtype: type[np.generic]
) -> None:
    model = _from_a_table(np.ones((512, 64), dtype))
    plan = plan_of([model], [()], [members(1)])
    bound = load(executor, replace(plan, executor=ExecutorOptions(precision="fp16")), [model])
    table_bytes = 512 * 64 * (2 if dtype is np.float32 else np.dtype(dtype).itemsize)
    assert table_bytes <= executor.held_bytes <= executor.stated_bytes(bound, alone=True)


def test_half_precision_states_half_of_what_float32_weights_take() -> None:
    model = artifact_of("squeezenet")
    bound = bind(plan_of([model], [()], [members(1)]), {model.digest: model.graph})
    whole, half = (
        sum(stated_weight_bytes(bound, one, [0]).values()) for one in (Precision.FP32, Precision.FP16)
    )
    assert whole == sum(operator.weight_bytes for operator in model.graph.operators)
    assert half == whole / 2


def test_memory_of_an_unloaded_plan_is_free_before_python_looks_for_garbage(executor: TorchExecutor) -> None:
    """Which it may do minutes later, while another plan is refused for want of that memory."""
    model = artifact_of("squeezenet")

    def left() -> list[object]:
        steps = StepMaker(KEY, load(executor, plan_of([model], [()], [members(1)]), [model]))
        run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [random_inputs(model.graph, 1)]})
        plan = executor._plans[KEY]
        held = [weakref.ref(one) for one in (*plan.buffers._arenas, plan.lowering(0).weights)]
        del plan
        executor.unload(KEY)
        return [one() for one in held if one() is not None]

    left()  # with its first model torch imports more of itself, and remembers who made it do so
    gc.collect()
    gc.disable()
    try:
        assert left() == []
    finally:
        gc.enable()


def test_plans_share_weights(executor: TorchExecutor) -> None:
    model = artifact_of("squeezenet")
    load(executor, plan_of([model], [()], [members(1)]), [model], PlanKey(1))
    once = executor.weight_bytes
    load(executor, plan_of([model], [halves(model)], [members(2)]), [model], PlanKey(2))
    assert executor.weight_bytes == once > 0
    executor.unload(PlanKey(1))
    assert executor.weight_bytes == once
    executor.unload(PlanKey(2))
    assert executor.weight_bytes == 0


def test_options_that_are_not_known_are_refused_and_leave_nothing(executor: TorchExecutor) -> None:
    model = artifact_of("squeezenet")
    plan = plan_of([model], [()], [members(1)])
    named = ExecutorOptions(name=executor.name)
    odd = replace(plan, executor=replace(named, precision="fp4"))
    with pytest.raises(ExecutorError, match="does not know the precision 'fp4'"):
        load(executor, odd, [model])
    with pytest.raises(ExecutorError, match="is not here"):
        executor.load(KEY, bound_of(replace(odd, executor=named), [model]), {})
    assert executor.held_bytes == 0


def test_options_that_differ_between_blocks_are_refused_and_not_taken_from_the_first(
    executor: TorchExecutor,
) -> None:
    models = [artifact_of("squeezenet"), artifact_of("squeezenet_bypass")]
    plan = plan_of(models, [(), ()], [[Member(0, 0, 0)], [Member(1, 0, 0)]])
    plan = replace(plan, combined=(plan.combined[0], replace(plan.combined[1], executor=1)))
    same = ExecutorOptions(name=executor.name)
    for other, differing in (
        (replace(same, precision="fp16"), "precision"),
        (replace(same, intra_op_threads=2), "intra_op_threads"),
    ):
        with pytest.raises(ExecutorError, match=f"the plan has several of {differing}; give all of its"):
            load(executor, replace(plan, further_executors=(other,)), models)
    assert executor.held_bytes == 0
    load(executor, replace(plan, further_executors=(same,)), models)


def test_a_plan_that_has_no_block_for_the_executor_is_refused(executor: TorchExecutor) -> None:
    """As one that only has groups for it."""
    model = artifact_of("squeezenet")
    bound = bound_of(plan_of([model], [()], [members(1)]), [model])
    with pytest.raises(ExecutorError, match="the plan has only groups for it; use onnx or openvino"):
        executor.stated_bytes(bound)


def test_operators_are_timed_one_by_one(executor: TorchExecutor) -> None:
    from stageloom.edge_agent.executor.base import NOT_TIMED, TimingRequest

    model = artifact_of("squeezenet")
    times = executor.time_operators(model, TimingRequest(repeats=2), lambda: True)
    assert len(times) == len(model.graph.operators)
    assert {time.runs for time in times} == {2}
    assert set(executor.time_operators(model, TimingRequest(wall_s=0.02), lambda: False)) == {NOT_TIMED}


def test_results_are_bit_stable_under_random_delays() -> None:
    model = artifact_of("googlenet")
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(5))
    executor = TorchCpuExecutor()
    bound = load(executor, plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA), [model])
    steps = StepMaker(KEY, bound)
    inputs = random_inputs(model.graph, 1)
    rng = random.Random(3)
    executor.pause = lambda: time.sleep(rng.random() * 1e-3)
    seen = {
        run(executor, steps.step(0, {0: (InstanceId(i), 1)}), {InstanceId(i): [inputs]})[InstanceId(i)][0][
            "logits"
        ].tobytes()
        for i in range(6)
    }
    executor.close()
    assert len(seen) == 1
