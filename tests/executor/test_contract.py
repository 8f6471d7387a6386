"""One suite for all executors: order, borders, masks, batches, sharing of sessions."""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from edge_agent.executor.base import Executor, Rows
from edge_agent.executor.null import NullExecutor
from edge_agent.executor.onnx import OnnxExecutor
from edge_agent.executor.onnx_parts import ModelParts
from edge_agent.executor.onnx_sessions import SessionCache, SessionKey, weight_bytes
from edge_agent.executor.registry import EXECUTORS, make_executor
from shared.artifact import Artifact
from shared.bound import BoundPlan
from shared.engine.steps import InstanceId, PlanKey, Step
from shared.errors import ExecutorError, PlanError
from shared.launch_list import Barrier
from shared.plan import ExecutorOptions, Member, Plan
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.schedules import (
    StepMaker,
    bound_of,
    graph_of,
    merged,
    plan_of,
    random_stages,
    random_streams,
)

KEY = PlanKey(1)
TOLERANCE = 1e-4


@pytest.fixture(params=[name for name in EXECUTORS if name != "torch_cuda"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Every executor that any machine has; tests/executor/torch runs the one on CUDA on a simulated device."""
    made = make_executor(request.param)
    yield made
    made.close()


@pytest.fixture
def onnx() -> Iterator[OnnxExecutor]:
    """The one that computes."""
    made = OnnxExecutor()
    yield made
    made.close()


def _load(executor: Executor, plan: Plan, artifacts: Sequence[Artifact], key: PlanKey = KEY) -> BoundPlan:
    bound = bound_of(plan, artifacts)
    executor.load(key, bound, {artifact.digest: artifact for artifact in artifacts})
    return bound


def _run(executor: Executor, step: Step, feeds: Mapping[InstanceId, Rows]) -> dict[InstanceId, Rows]:
    if not step.fallback:
        executor.prepare(step.program)
    executor.issue(step, feeds)
    return dict(executor.wait(step.id).outputs)


def _halves(artifact: Artifact) -> tuple[int, ...]:
    cuts = artifact.graph.partition("paper")
    return (cuts[len(cuts) // 2],)


# Every executor


def test_outputs_leave_with_the_last_block_and_only_then(executor: Executor) -> None:
    model = artifact_of("squeezenet")
    bound = _load(
        executor, plan_of([model], [_halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model]
    )
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    first = _run(executor, steps.step(0, {0: (one, 1)}), {one: [random_inputs(model.graph, 1)]})
    assert first == {}
    (row,) = _run(executor, steps.step(1, {0: (one, 1)}), {})[one]
    assert row["logits"].shape == (1, 1000)


def test_a_step_waits_for_the_steps_it_names(executor: Executor) -> None:
    """1. Block 0 is issued on lane 0. 2. Block 1 is issued and waited for on lane 1. 3. Block 0 runs last."""
    model = artifact_of("squeezenet")
    bound = _load(
        executor, plan_of([model], [_halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model]
    )
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    first = steps.step(0, {0: (one, 1)})
    second = steps.step(1, {0: (one, 1)}, after=[first.id], lane=1)
    for step in (first, second):
        executor.prepare(step.program)
    executor.issue(first, {one: [random_inputs(model.graph, 1)]})
    executor.issue(second, {})
    ended: list[int] = []
    late = threading.Thread(target=lambda: ended.append(executor.wait(second.id).outputs != {}))
    late.start()
    late.join(0.05)
    assert not ended
    executor.wait(first.id)
    late.join(30)
    assert ended == [True]


def test_an_instance_that_is_dropped_leaves_nothing_behind(executor: Executor) -> None:
    model = artifact_of("squeezenet")
    bound = _load(
        executor, plan_of([model], [_halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model]
    )
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    _run(executor, steps.step(0, {0: (one, 1)}), {one: [random_inputs(model.graph, 1)]})
    executor.drop(one)
    with pytest.raises(ExecutorError):
        _run(executor, steps.step(1, {0: (one, 1)}), {})


def test_tracing_times_every_item_of_the_launch_list(executor: Executor) -> None:
    model = artifact_of("googlenet")
    cuts = [()]
    schedule = random_stages(graph_of([model], cuts, [Member(0, 0, 0)]), random.Random(3))
    bound = _load(executor, plan_of([model], cuts, [[Member(0, 0, 0)]], [schedule]), [model])
    executor.tracing = True
    step = StepMaker(KEY, bound).step(0, {0: (InstanceId(1), 1)})
    executor.prepare(step.program)
    executor.issue(step, {InstanceId(1): [random_inputs(model.graph, 1)]})
    result = executor.wait(step.id)
    assert sorted(group.item for group in result.groups) == list(range(len(result.groups)))
    assert {group.stream for group in result.groups} > {0}
    assert all(result.started_s <= g.started_s <= g.ended_s <= result.ended_s for g in result.groups)


def test_an_unknown_executor_names_those_there_are() -> None:
    with pytest.raises(ExecutorError, match="'tpu'; use one of null, onnx"):
        make_executor("tpu")


# What null checks


def test_null_refuses_what_a_backend_would_get_wrong() -> None:
    model = artifact_of("squeezenet")
    null = NullExecutor()
    bound = _load(null, plan_of([model], [_halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model])
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    with pytest.raises(ExecutorError, match="without its inputs"):
        null.issue(steps.step(0, {0: (one, 1)}), {})
    first, second = steps.step(0, {0: (one, 1)}), steps.step(0, {0: (one, 1)})
    null.issue(second, {one: [random_inputs(model.graph, 1)]})
    with pytest.raises(ExecutorError, match="out of order"):
        null.issue(first, {one: [random_inputs(model.graph, 1)]})
    early = steps.step(1, {0: (InstanceId(2), 1)})
    null.issue(early, {})
    with pytest.raises(ExecutorError, match="is before block 0, not 1"):
        null.wait(early.id)


def test_null_records_the_operators_in_an_order_that_obeys_the_schedule() -> None:
    model = artifact_of("googlenet")
    graph = graph_of([model], [()], [Member(0, 0, 0)])
    for seed in range(5):
        for schedule in (
            random_stages(graph, random.Random(seed)),
            random_streams(graph, random.Random(seed)),
        ):
            null = NullExecutor()
            bound = _load(null, plan_of([model], [()], [[Member(0, 0, 0)]], [schedule]), [model])
            one = InstanceId(1)
            _run(null, StepMaker(KEY, bound).step(0, {0: (one, 1)}), {one: [random_inputs(model.graph, 1)]})
            seen = 0
            for _, ops in null.history[-1].items:
                for op in ops:
                    assert not graph.predecessors[op] & ~seen
                    seen |= 1 << op
            assert seen == (1 << graph.size) - 1


# What onnx computes


def _border_check(executor: OnnxExecutor, artifacts: Sequence[Artifact], plan: Plan) -> dict[str, np.ndarray]:
    """Run every model through all its blocks under full masks and compare every border."""
    inputs = [random_inputs(artifact.graph, 10 + i) for i, artifact in enumerate(artifacts)]
    borders: dict[tuple[int, str], np.ndarray] = {}

    def tap(instance: InstanceId, member: Member, tensors: "dict[str, np.ndarray]") -> None:
        borders.update({(member.model, name): array for name, array in tensors.items()})

    executor.tap = tap  # type: ignore[assignment]
    bound = _load(executor, plan, artifacts)
    steps = StepMaker(KEY, bound)
    for index, combined in enumerate(bound.combined):
        instances = {p: (InstanceId(m.model), 1) for p, m in enumerate(combined.members)}
        feeds = {InstanceId(m.model): [inputs[m.model]] for m in combined.members if m.block == 0}
        _run(executor, steps.step(index, instances), feeds)
    for i, artifact in enumerate(artifacts):
        names = [name for model, name in borders if model == i]
        wanted = reference(artifact, inputs[i], names)
        assert len(names) >= len(artifact.graph.outputs)
        for name in names:
            assert difference(borders[i, name], wanted[name]) < TOLERANCE, (artifact.graph.name, name)
    return {f"{model}/{name}": array for (model, name), array in borders.items()}


@pytest.mark.parametrize("name", ["squeezenet", "squeezenet_bypass", "googlenet", "resnet50", "inception_v3"])
def test_sequential_blocks_equal_the_whole_model_at_every_border(name: str, onnx: OnnxExecutor) -> None:
    model = artifact_of(name)
    cuts = model.graph.partition("paper")
    _border_check(onnx, [model], plan_of([model], [cuts], [[Member(0, 0, b)] for b in range(len(cuts) + 1)]))


@pytest.mark.parametrize("barrier", Barrier)
@pytest.mark.parametrize("kind", [random_stages, random_streams])
def test_random_schedules_over_two_models_equal_the_whole_models(
    kind: "type", barrier: Barrier, onnx: OnnxExecutor
) -> None:
    models = [artifact_of("squeezenet_bypass"), artifact_of("googlenet")]
    cuts = [_halves(model) for model in models]
    groups = [[Member(0, 0, block), Member(1, 0, block)] for block in (0, 1)]
    rng = random.Random(f"{kind.__name__} {barrier}")
    schedules = [kind(graph_of(models, cuts, group), rng) for group in groups]
    _border_check(onnx, models, plan_of(models, cuts, groups, schedules, barrier=barrier))


def test_merge_stages_run_their_operators_with_equal_results(onnx: OnnxExecutor) -> None:
    model = artifact_of("googlenet")
    schedule = merged(graph_of([model], [()], [Member(0, 0, 0)]))
    _border_check(onnx, [model], plan_of([model], [()], [[Member(0, 0, 0)]], [schedule]))


def test_results_are_bit_stable_under_random_delays_in_every_group() -> None:
    model = artifact_of("googlenet")
    schedule = random_streams(graph_of([model], [()], [Member(0, 0, 0)]), random.Random(5))
    plan = plan_of([model], [()], [[Member(0, 0, 0)]], [schedule], barrier=Barrier.DATA)
    seen = []
    for seed in range(4):
        rng = random.Random(seed)
        executor = OnnxExecutor()
        executor.pause = partial(_sleep_at_random, rng)
        seen.append(_border_check(executor, [model], plan))
        executor.close()
    for other in seen[1:]:
        for name, array in seen[0].items():
            assert np.array_equal(array, other[name])


def _sleep_at_random(rng: random.Random) -> None:
    time.sleep(rng.random() * 1e-3)


def test_every_mask_equals_the_whole_models(onnx: OnnxExecutor) -> None:
    models = [artifact_of("squeezenet"), artifact_of("googlenet"), artifact_of("squeezenet_bypass")]
    cuts: list[tuple[int, ...]] = [(), (), ()]
    group = [Member(model, 0, 0) for model in range(3)]
    schedule = random_stages(graph_of(models, cuts, group), random.Random(8))
    bound = _load(onnx, plan_of(models, cuts, [group], [schedule]), models)
    steps = StepMaker(KEY, bound)
    inputs = [random_inputs(model.graph, 20 + i) for i, model in enumerate(models)]
    wanted = [reference(m, x, ["logits"])["logits"] for m, x in zip(models, inputs, strict=True)]
    instance = itertools.count(1)
    for size in (1, 2, 3):
        for active in itertools.combinations(range(3), size):
            for fallback in (False, True):
                ids = {position: InstanceId(next(instance)) for position in active}
                step = steps.step(0, {p: (i, 1) for p, i in ids.items()}, fallback=fallback)
                made = _run(onnx, step, {i: [inputs[p]] for p, i in ids.items()})
                for position, identifier in ids.items():
                    assert difference(made[identifier][0]["logits"], wanted[position]) < TOLERANCE


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("tasks", [1, 2, 3, 4])
def test_rows_of_a_padded_batch_equal_single_runs(tasks: int, fallback: bool, onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    plan = plan_of([model], [_halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]], batch=4)
    bound = _load(onnx, plan, [model])
    steps = StepMaker(KEY, bound)
    inputs = [random_inputs(model.graph, 30 + row) for row in range(tasks)]
    one = InstanceId(1)
    _run(onnx, steps.step(0, {0: (one, tasks)}, fallback=fallback), {one: inputs})
    rows = _run(onnx, steps.step(1, {0: (one, tasks)}, fallback=fallback), {})[one]
    assert len(rows) == tasks
    for row, single in zip(rows, inputs, strict=True):
        assert row["logits"].shape == (1, 1000)
        assert difference(row["logits"], reference(model, single, ["logits"])["logits"]) < TOLERANCE


def test_a_second_plan_reuses_sessions_and_states_no_bytes_for_them(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    cuts = model.graph.partition("paper")
    groups = [[Member(0, 0, block)] for block in range(len(cuts) + 1)]
    first = plan_of([model], [cuts], groups)
    twice = [[Member(0, replica, block)] for replica in (0, 1) for block in range(len(cuts) + 1)]
    second = plan_of([model], [cuts], twice, replicas=2)
    assert onnx.stated_bytes(bound_of(first, [model])) > 0
    _load(onnx, first, [model])
    count = onnx.sessions
    assert count == len(cuts) + 1
    assert onnx.stated_bytes(bound_of(second, [model])) == 0
    _load(onnx, second, [model], PlanKey(2))
    assert onnx.sessions == count
    onnx.unload(KEY)
    assert onnx.sessions == count
    onnx.unload(PlanKey(2))
    assert onnx.sessions == 0


def test_a_plan_that_comes_back_states_no_bytes_until_its_memory_is_wanted(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    bound = bound_of(plan, [model])
    alone = onnx.stated_bytes(bound)
    _load(onnx, plan, [model])
    activations = onnx.held_bytes - sum(onnx._cache._weights.values())
    onnx.unload(KEY)
    assert onnx.stated_bytes(bound) == activations
    assert onnx.held_bytes == alone - activations, "what is kept is accounted for"
    onnx.drop_idle()
    assert (onnx.stated_bytes(bound), onnx.held_bytes) == (alone, 0)


def test_kept_sessions_are_bounded_by_their_weights_and_the_longest_idle_goes_first() -> None:
    model = artifact_of("squeezenet")
    keys = [SessionKey(model.digest, (op,), 1, 1) for op in range(4)]
    weights = [weight_bytes(key, model.graph) for key in keys]
    cache = SessionCache(idle_bytes=sum(weights[1:3]))
    made = [
        cache.ensure(key, PlanKey(number), lambda: ModelParts(model)) for number, key in enumerate(keys[:3])
    ]
    for number in range(3):
        cache.release(PlanKey(number))
    assert list(cache.idle()) == keys[1:3] and len(cache) == 0
    assert cache.get(keys[0]) is None
    again = cache.ensure(keys[1], PlanKey(9), lambda: pytest.fail("it is there"))
    assert again is made[1] and list(cache.idle()) == [keys[2]]
    cache.drop_idle()
    assert cache.get(keys[1]) is made[1] and cache.get(keys[2]) is None


def test_a_plan_with_an_unknown_precision_is_refused_and_leaves_nothing(onnx: OnnxExecutor) -> None:
    model = artifact_of("squeezenet")
    plan = plan_of([model], [()], [[Member(0, 0, 0)]])
    odd = Plan(models=plan.models, combined=plan.combined, executor=ExecutorOptions(precision="fp4"))
    with pytest.raises(ExecutorError, match="does not know the precision 'fp4'"):
        _load(onnx, odd, [model])
    assert onnx.sessions == 0


def test_a_failed_step_fails_alone(onnx: OnnxExecutor) -> None:
    """1. An instance is fed an array of a wrong shape. 2. Its step fails. 3. The next instance is served."""
    model = artifact_of("squeezenet")
    bound = _load(onnx, plan_of([model], [()], [[Member(0, 0, 0)]]), [model])
    steps = StepMaker(KEY, bound)
    with pytest.raises(ExecutorError):
        wrong = {"image": np.zeros((1, 3, 8, 8), np.float32)}
        _run(onnx, steps.step(0, {0: (InstanceId(1), 1)}), {InstanceId(1): [wrong]})
    inputs = random_inputs(model.graph, 1)
    made = _run(onnx, steps.step(0, {0: (InstanceId(2), 1)}), {InstanceId(2): [inputs]})
    wanted = reference(model, inputs, ["logits"])["logits"]
    assert difference(made[InstanceId(2)][0]["logits"], wanted) < TOLERANCE


def test_operators_are_timed_only_while_idle(onnx: OnnxExecutor) -> None:
    from edge_agent.executor.base import NOT_TIMED, TimingRequest

    model = artifact_of("squeezenet")
    times = onnx.time_operators(model, TimingRequest(repeats=2), lambda: True)
    assert len(times) == len(model.graph.operators)
    assert min(time.median_us for time in times) > 0
    assert {time.runs for time in times} == {2}
    busy = onnx.time_operators(model, TimingRequest(wall_s=0.02), lambda: False)
    assert set(busy) == {NOT_TIMED}


def test_spread_of_an_operator_is_half_the_distance_of_its_16th_and_84th_percentile() -> None:
    from edge_agent.executor.onnx_timing import summary

    one = summary([at / 1e6 for at in range(101)])
    assert (one.median_us, one.spread_us) == pytest.approx((50.0, 34.0))
    assert one.runs == 101
    assert summary([1.0]).spread_us == 0.0


def test_a_schedule_of_an_illegal_order_never_reaches_an_executor() -> None:
    model = artifact_of("squeezenet")
    graph = graph_of([model], [()], [Member(0, 0, 0)])
    backwards = random_streams(graph, random.Random(1))
    broken = type(backwards)(tuple(reversed(backwards.launches)))
    with pytest.raises(PlanError, match="violations"):
        bound_of(plan_of([model], [()], [[Member(0, 0, 0)]], [broken]), [model])
