"""`onnx_cuda` on a simulated device: right whatever order streams and events leave open."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import NO_GROUP
from stageloom.edge_agent.executor.cuda.executor import launched_step
from stageloom.edge_agent.executor.cuda.memory_plan import launches_before
from stageloom.edge_agent.executor.cuda.recipe import BufferRole, MemberTensor
from stageloom.edge_agent.executor.cuda.streams import MAX_STREAMS
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxCudaExecutor
from stageloom.edge_agent.executor.onnx_cuda.recipe import PlanRecipes, session_keys
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member, Plan
from tests.executor.contract.schedules import StepMaker, bound_of, graph_of, plan_of, random_streams
from tests.executor.models import artifact_of, random_inputs
from tests.executor.onnx_cuda.simulated import SimulatedSessionDevice, device_of, simulated
from tests.executor.simulated_streams import SimulatedEvent
from tests.executor.torch.steps import KEY, halves, load, members, run, wrong

ONE = InstanceId(1)


@pytest.fixture
def model() -> Artifact:
    """A model with branches."""
    return artifact_of("squeezenet_bypass")


@pytest.fixture
def executor() -> Iterator[OnnxCudaExecutor]:
    """On a fresh simulated device."""
    made = simulated()
    yield made
    made.close()


def streamed_plan(model: Artifact, seed: int = 1, precision: str = "fp32") -> Plan:
    """The model as one block under a random stream schedule."""
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(seed))
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA)
    return replace(plan, executor=ExecutorOptions(name="onnx_cuda", precision=precision))


def two_lanes(model: Artifact) -> Plan:
    """Both halves as combined blocks of their own, which two lanes may run at once."""
    return plan_of([model], [halves(model)], [[m] for m in members(2)], lanes=2)


def answers(executor: OnnxCudaExecutor, steps: StepMaker, model: Artifact, count: int = 3) -> bool:
    """Run tasks one after another; whether all answers are right."""
    right = True
    for number in range(1, count + 1):
        inputs = random_inputs(model.graph, number)
        instance = InstanceId(number)
        rows = run(executor, steps.step(0, {0: (instance, 1)}), {instance: [inputs]})[instance]
        right = right and not wrong(model, inputs, rows)
    return right


# Order


@pytest.mark.promise("sessions-several-streams-give")
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_answers_are_right_whatever_order_the_device_chooses(seed: int, model: Artifact) -> None:
    executor = simulated(seed)
    steps = StepMaker(KEY, load(executor, streamed_plan(model, seed), [model]))
    assert answers(executor, steps, model)
    assert len(device_of(executor).used) > 2
    executor.close()


@pytest.mark.promise("sessions-several-streams-give")
def test_a_wait_between_streams_that_is_left_out_is_caught(model: Artifact) -> None:
    """The simulation is not blind: without every third wait answers are wrong."""
    caught = 0
    for seed in range(3):
        executor = simulated(seed, ignore_waits=3)
        steps = StepMaker(KEY, load(executor, streamed_plan(model, seed), [model]))
        caught += not answers(executor, steps, model)
        executor.close()
    assert caught >= 2


def _across_lanes(model: Artifact, seed: int, ignore_waits: int = 0) -> bool:
    """Block 0 on lane 0, block 1 on lane 1, four instances issued ahead; whether all answers are right."""
    executor = simulated(seed, ignore_waits=ignore_waits)
    steps = StepMaker(KEY, load(executor, two_lanes(model), [model]))
    inputs = {InstanceId(i): random_inputs(model.graph, i) for i in range(1, 5)}
    issued: list[Step] = []
    for instance in inputs:
        before = [issued[-1].id] if issued else []
        first = steps.step(0, {0: (instance, 1)}, after=before, lane=0)
        issued += [first, steps.step(1, {0: (instance, 1)}, after=[first.id], lane=1)]
    for step in issued:
        executor.prepare(step.program)
        executor.issue(step, {i: [x] for i, x in inputs.items()})
    for step in issued:
        launched_step(executor._launched[step.id])  # so that the order depends on the seed alone
    right = True
    for step in issued:
        for instance, rows in executor.wait(step.id).outputs.items():
            right = right and not wrong(model, inputs[instance], rows)
    executor.close()
    return right


def test_steps_of_two_lanes_are_ordered_by_events_alone(model: Artifact) -> None:
    assert all(_across_lanes(model, seed) for seed in range(2))


@pytest.mark.promise("sessions-several-streams-give")
def test_a_wait_between_lanes_that_is_left_out_is_caught(model: Artifact) -> None:
    assert not all(_across_lanes(model, seed, ignore_waits=2) for seed in range(2))


def test_a_plan_whose_host_memory_cannot_be_pinned_leaves_nothing(
    executor: OnnxCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(nbytes: int) -> None:
        raise ExecutorError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(executor._host, "_make", broken)
        with pytest.raises(ExecutorError, match="out of memory"):
            load(executor, streamed_plan(model), [model])
    executor.drop_idle()
    assert executor.held_bytes == device_of(executor).held == 0
    assert load(executor, streamed_plan(model), [model])


@pytest.mark.promise("host-waits-device-once")
def test_the_host_waits_for_the_device_once_a_step_and_only_when_asked(
    executor: OnnxCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of many groups are issued and launched before the host waits for anything."""
    steps = StepMaker(KEY, load(executor, streamed_plan(model), [model]))
    device = device_of(executor)
    waited: list[int] = []
    synchronize = device.synchronize

    def noted(event: SimulatedEvent) -> None:
        waited.append(threading.get_ident())
        synchronize(event)

    monkeypatch.setattr(device, "synchronize", noted)
    issued = [steps.step(0, {0: (InstanceId(i), 1)}) for i in (1, 2)]
    executor.prepare(issued[0].program)
    for i, step in enumerate(issued, start=1):
        executor.issue(step, {InstanceId(i): [random_inputs(model.graph, i)]})
    for step in issued:
        launched_step(executor._launched[step.id])
    assert waited == []
    for step in issued:
        executor.wait(step.id)
    assert waited == [threading.get_ident()] * 2


@pytest.mark.promise("host-waits-device-once")
def test_all_steps_are_launched_on_one_thread(executor: OnnxCudaExecutor, model: Artifact) -> None:
    """A session whose runs come from ever new threads takes ever more memory (onnxruntime issue 29351)."""
    steps = StepMaker(KEY, load(executor, streamed_plan(model), [model]))
    device, threads = device_of(executor), set()
    launch = device.launch

    def noted(stream: object, work: object) -> None:
        threads.add(threading.get_ident())
        launch(stream, work)  # type: ignore[arg-type]

    device.launch = noted  # type: ignore[method-assign]
    step = steps.step(0, {0: (ONE, 1)})
    executor.prepare(step.program)
    issuer = threading.Thread(target=lambda: executor.issue(step, {ONE: [random_inputs(model.graph, 1)]}))
    issuer.start()
    issuer.join(30)
    executor.wait(step.id)
    run(executor, steps.step(0, {0: (InstanceId(2), 1)}), {InstanceId(2): [random_inputs(model.graph, 2)]})
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_delays_hold_up_streams_and_change_nothing(executor: OnnxCudaExecutor, model: Artifact) -> None:
    steps = StepMaker(KEY, load(executor, streamed_plan(model), [model]))
    executor.pause = lambda: None
    assert answers(executor, steps, model, 2)
    assert device_of(executor).sleeps > 2


# Recipes


def _recipes(model: Artifact, lanes: int = 1) -> PlanRecipes:
    plan = replace(streamed_plan(model), lanes=lanes)
    return PlanRecipes(bound_of(plan, [model]))


def test_an_operator_keeps_its_stream_under_every_mask() -> None:
    """So that no mask needs a second session, and weights are there once."""
    models = [artifact_of("squeezenet_bypass"), artifact_of("googlenet")]
    cuts: list[tuple[int, ...]] = [(), ()]
    group = [Member(0, 0, 0), Member(1, 0, 0)]
    schedule = random_streams(graph_of(models, cuts, group), random.Random(4))
    recipes = PlanRecipes(bound_of(plan_of(models, cuts, [group], [schedule]), models))
    (full,) = recipes.full
    home = {(key.artifact, op): key.stream for key in session_keys(full) for op in key.ops}
    for buckets in ({0: 1}, {1: 1}, {0: 1, 1: 1}):
        recipe = recipes.recipe(0, buckets)
        keys = session_keys(recipe)
        assert keys <= recipes.keys
        assert all(home[key.artifact, key.ops[0]] == key.stream for key in keys)


@pytest.mark.promise("host-waits-device-once")
def test_what_shares_the_arena_is_used_up_before_the_other_begins(model: Artifact) -> None:
    (recipe,) = _recipes(model).full
    before = launches_before(recipe.items, [1] * len(recipe.items))
    graph = model.graph
    uses: dict[MemberTensor, set[int]] = {}
    for call in recipe.calls:
        for value in (*call.reads, *call.makes):
            if value.role is BufferRole.INNER:
                uses.setdefault(value, set()).add(call.item)
    offsets = {value: recipe.layout.offsets[value] for value in uses}
    spans = {
        value: range(offset, offset + graph.tensors[value.tensor].nbytes) for value, offset in offsets.items()
    }
    shared = 0
    for one, first in spans.items():
        for other, second in spans.items():
            if one < other and first.start < second.stop and second.start < first.stop:
                shared += 1
                apart = [
                    all(before[late] >> early & 1 for early in uses[a] for late in uses[b])
                    for a, b in ((one, other), (other, one))
                ]
                assert any(apart), (one, other)
    assert shared > 0


def test_combined_blocks_that_lanes_may_run_at_once_have_streams_of_their_own(model: Artifact) -> None:
    bound = bound_of(two_lanes(model), [model])
    recipes = PlanRecipes(bound)
    first, second = ({key.stream for key in session_keys(recipe)} for recipe in recipes.full)
    assert not first & second
    begins = [recipes.first_stream(combined) for combined in (0, 1)]
    assert begins[0] in first and abs(begins[1] - begins[0]) >= recipes.width
    assert max(begins) + recipes.width <= MAX_STREAMS


def test_every_launch_is_ordered_after_what_it_reads(model: Artifact) -> None:
    for lanes in (1, 4):
        (recipe,) = _recipes(model, lanes).full
        before = launches_before(recipe.items, [1] * len(recipe.items))
        made = {value: call.item for call in recipe.calls for value in call.makes}
        for call in recipe.calls:
            assert all(before[call.item] >> made[value] & 1 for value in call.reads if value in made)
        assert all(mask & 1 for mask in before[1:])
        assert before[-1] == (1 << len(recipe.items) - 1) - 1
        assert sum(group != NO_GROUP for group in recipe.groups) == len(recipe.items) - 2


# Memory


def test_a_plan_holds_what_it_stated_and_gives_its_memory_back(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    device = device_of(executor)
    plan = streamed_plan(model)
    bound = bound_of(plan, [model])
    stated = executor.stated_bytes(bound)
    load(executor, plan, [model])
    assert executor.held_bytes == stated
    memory = device.held
    assert 0 < memory == PlanRecipes(bound).memory_bytes
    assert executor.stated_bytes(bound) == memory, "its sessions are there already"
    assert executor.stated_bytes(bound, alone=True) == stated
    load(executor, plan, [model], PlanKey(2))
    assert executor.held_bytes == stated + memory
    executor.unload(KEY)
    executor.unload(PlanKey(2))
    assert device.held == 0
    assert executor.held_bytes == stated - memory, "sessions are kept for a plan that comes back"
    executor.drop_idle()
    assert executor.held_bytes == 0


def test_a_plan_that_does_not_fit_on_the_device_is_refused(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    device_of(executor).free_now = 1 << 16
    with pytest.raises(ExecutorError, match="MiB of device memory"):
        load(executor, streamed_plan(model), [model])
    assert device_of(executor).held == 0


def test_a_session_that_cannot_be_made_leaves_no_memory_behind(
    executor: OnnxCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SimulatedSessionDevice, "provider", lambda self, stream, tf32: ("NoSuchExecutionProvider", {})
    )
    with pytest.raises(ExecutorError, match="squeezenet"):
        load(executor, streamed_plan(model), [model])
    assert (device_of(executor).held, executor.held_bytes) == (0, 0)


# Nothing else takes the device's place


@pytest.mark.promise("nothing-takes-place-onnxruntime")
def test_a_session_that_landed_on_the_processor_is_refused(
    executor: OnnxCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime replaces a provider that it cannot make by the processor, and only its log says so."""

    class Landed:
        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(
        SimulatedSessionDevice, "provider", lambda self, stream, tf32: ("CUDAExecutionProvider", {})
    )
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *args, **kwargs: Landed())
    with pytest.raises(ExecutorError, match="on CPUExecutionProvider instead of CUDAExecutionProvider"):
        load(executor, streamed_plan(model), [model])


def test_operators_that_only_the_processor_can_run_are_refused(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As onnxruntime says it when told not to share a session among providers."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("nodes ... but fallback to CPU EP has been explicitly disabled by the user.")

    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    executor = simulated()
    with pytest.raises(ExecutorError, match=r"operators of model 'squeezenet_bypass' on the processor"):
        load(executor, streamed_plan(model), [model])
    executor.close()


@pytest.mark.promise("nothing-takes-place-onnxruntime")
def test_where_onnxruntime_has_no_cuda_the_executor_names_cause_and_remedy() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(ExecutorError, match=r"without CUDAExecutionProvider.*onnx-gpu"):
        make_executor("onnx_cuda")


def test_tf32_is_used_only_where_the_plan_says_so(model: Artifact) -> None:
    """onnxruntime's own default is TF32."""
    executor = simulated()
    load(executor, streamed_plan(model), [model])
    assert device_of(executor).tf32 == {False}
    load(executor, streamed_plan(model, precision="tf32"), [model], PlanKey(2))
    assert device_of(executor).tf32 == {False, True}
    executor.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ExecutorOptions(name="onnx_cuda", precision="bf16"), "does not know the precision 'bf16'"),
        (ExecutorOptions(intra_op_threads=2), "no threads inside an operator"),
    ],
)
def test_options_that_are_not_known_are_refused(
    options: ExecutorOptions, said: str, executor: OnnxCudaExecutor, model: Artifact
) -> None:
    with pytest.raises(ExecutorError, match=said):
        load(executor, replace(streamed_plan(model), executor=options), [model])
    assert executor.held_bytes == 0


def test_threads_inside_an_operator_are_refused_for_any_block(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    plan = plan_of([model], [halves(model)], [[m] for m in members(2)])
    threaded = ExecutorOptions(name="onnx_cuda", intra_op_threads=2)
    combined = (plan.combined[0], replace(plan.combined[1], executor=1))
    with pytest.raises(ExecutorError, match="no threads inside an operator"):
        load(executor, replace(plan, combined=combined, further_executors=(threaded,)), [model])


# Failures and tracing


def test_a_launch_that_fails_breaks_its_instance_and_nothing_else(
    executor: OnnxCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model])
    steps = StepMaker(KEY, bound)
    first = steps.step(0, {0: (ONE, 1)})
    executor.prepare(first.program)
    with monkeypatch.context() as broken:
        broken.setattr(device_of(executor), "launch", lambda stream, work: 1 / 0)
        with pytest.raises(ExecutorError, match=r"step 1 failed: ZeroDivisionError: division by zero"):
            executor.issue(first, {ONE: [random_inputs(model.graph, 1)]})
            executor.wait(first.id)
    with pytest.raises(ExecutorError, match="lost its tensors"):
        run(executor, steps.step(1, {0: (ONE, 1)}))
    pinned = len(device_of(executor)._pinned)
    two, inputs = InstanceId(2), random_inputs(model.graph, 2)
    run(executor, steps.step(0, {0: (two, 1)}), {two: [inputs]})
    assert not wrong(model, inputs, run(executor, steps.step(1, {0: (two, 1)}))[two])
    assert len(device_of(executor)._pinned) == pinned, "what the failed step had lent came back"


def test_a_program_larger_than_its_plans_memory_is_refused(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    load(executor, streamed_plan(model), [model])
    executor._plans[KEY].memory._room[0] = 0
    with pytest.raises(ExecutorError, match="its members run one after another"):
        executor.prepare(ProgramKey(KEY, 0, 1, (1,)))


def test_every_item_is_timed_on_its_stream_while_tracing_is_on(
    executor: OnnxCudaExecutor, model: Artifact
) -> None:
    bound: BoundPlan = load(executor, streamed_plan(model), [model])
    executor.tracing = True
    step = StepMaker(KEY, bound).step(0, {0: (ONE, 1)})
    executor.prepare(step.program)
    executor.issue(step, {ONE: [random_inputs(model.graph, 1)]})
    result = executor.wait(step.id)
    groups = set(executor._programs[step.program].recipe.groups) - {NO_GROUP}
    assert [group.item for group in result.groups] == sorted(groups)
    assert {group.stream for group in result.groups} > {0}
    assert all(result.started_s <= g.started_s <= g.ended_s <= result.ended_s for g in result.groups)


def test_outputs_that_a_bucket_leaves_out_never_leave(executor: OnnxCudaExecutor) -> None:
    """Two tasks in a bucket of three: the padding's row is computed and stays behind."""
    model = artifact_of("squeezenet")
    steps = StepMaker(KEY, load(executor, plan_of([model], [()], [members(1)], batch=3), [model]))
    inputs = [random_inputs(model.graph, i) for i in (1, 2)]
    rows = run(executor, steps.step(0, {0: (ONE, 2)}), {ONE: inputs})[ONE]
    assert len(rows) == 2
    assert not any(wrong(model, own, [row]) for own, row in zip(inputs, rows, strict=True))
    assert not np.array_equal(rows[0]["logits"], rows[1]["logits"])
