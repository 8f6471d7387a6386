"""The graph executor on the simulated device: what must hold however the device orders what is left open."""

import gc
import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.cuda.device import PREPARING, PROFILING
from stageloom.edge_agent.executor.torch.builder import ProgramBuilder
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from stageloom.edge_agent.lowering.batch import LoweredModel
from stageloom.edge_agent.lowering.dtypes import allows_tf32, use_tf32, without_tf32
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey
from stageloom.shared.errors import BackendUnavailable, ExecutorError
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, IssueOrder, Member
from tests.executor.contract.schedules import StepMaker, bound_of, graph_of, plan_of, random_streams
from tests.executor.models import artifact_of, random_inputs
from tests.executor.torch.conftest import QUICK, simulated
from tests.executor.torch.simulated import SimulatedGraphDevice
from tests.executor.torch.steps import KEY, halves, load, members, run, wrong

ONE = InstanceId(1)


@pytest.fixture
def model() -> Artifact:
    """A model with branches."""
    return artifact_of("squeezenet_bypass")


@pytest.fixture
def executor() -> Iterator[TorchCudaExecutor]:
    """On a fresh simulated device."""
    made = simulated()
    yield made
    made.close()


def device_of(executor: TorchCudaExecutor) -> SimulatedGraphDevice:
    """The simulated device behind an executor."""
    device = executor._on
    assert isinstance(device, SimulatedGraphDevice)
    return device


def streamed(executor: TorchCudaExecutor, model: Artifact, seed: int = 1) -> BoundPlan:
    """The model as one block under a random stream schedule, loaded."""
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(seed))
    return load(executor, plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA), [model])


def answer(executor: TorchCudaExecutor, steps: StepMaker, model: Artifact, number: int) -> bool:
    """Run one task; whether its answer is right."""
    inputs = random_inputs(model.graph, number)
    instance = InstanceId(number)
    rows = run(executor, steps.step(0, {0: (instance, 1)}), {instance: [inputs]})[instance]
    return not wrong(model, inputs, rows)


# Order


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_p1_answers_are_right_whatever_order_the_device_chooses(seed: int, model: Artifact) -> None:
    executor = simulated(seed)
    steps = StepMaker(KEY, streamed(executor, model, seed))
    assert all(answer(executor, steps, model, number) for number in range(1, 5))
    executor.close()


@pytest.mark.promise("memory-shared-where-waits")
def test_a_wait_that_is_left_out_inside_a_graph_is_caught(model: Artifact) -> None:
    """The simulation is not blind: without every fifth wait answers are wrong, or a capture does not join."""
    caught = 0
    for seed in range(3):
        executor = TorchCudaExecutor(SimulatedGraphDevice(seed, ignore_captured=5), effort=QUICK)
        try:
            steps = StepMaker(KEY, streamed(executor, model, seed))
            caught += not all(answer(executor, steps, model, number) for number in range(1, 4))
        except AssertionError:
            caught += 1
        executor.close()
    assert caught >= 2


def _across_lanes(device: SimulatedGraphDevice, model: Artifact) -> bool:
    """Block 0 on lane 0, block 1 on lane 1, four instances issued ahead; whether all answers are right."""
    executor = TorchCudaExecutor(device, effort=QUICK)
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)], lanes=2), [model])
    steps = StepMaker(KEY, bound)
    inputs = {InstanceId(i): random_inputs(model.graph, i) for i in range(1, 5)}
    before: list = []  # type: ignore[type-arg]
    issued = []
    for instance in inputs:
        first = steps.step(0, {0: (instance, 1)}, after=[step.id for step in before], lane=0)
        second = steps.step(1, {0: (instance, 1)}, after=[first.id], lane=1)
        before = [second]
        issued += [first, second]
    for step in issued[:2]:
        executor.prepare(step.program)
    for step in issued:
        executor.issue(step, {i: [x] for i, x in inputs.items()})
    right = True
    for step in issued:
        for instance, rows in executor.wait(step.id).outputs.items():
            right = right and not wrong(model, inputs[instance], rows)
    executor.close()
    return right


def test_steps_of_two_lanes_are_ordered_by_events_alone(model: Artifact) -> None:
    assert all(_across_lanes(SimulatedGraphDevice(seed), model) for seed in range(2))


@pytest.mark.promise("memory-shared-where-waits")
def test_a_wait_between_lanes_that_is_left_out_is_caught(model: Artifact) -> None:
    assert not all(_across_lanes(SimulatedGraphDevice(seed, ignore_waits=2), model) for seed in range(2))


def test_p13_steps_are_issued_before_the_last_has_ended(executor: TorchCudaExecutor, model: Artifact) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    issued = [steps.step(0, {0: (InstanceId(i), 1)}) for i in (1, 2)]
    executor.prepare(issued[0].program)
    for i, step in enumerate(issued, start=1):
        executor.issue(step, {InstanceId(i): [random_inputs(model.graph, i)]})
    assert device_of(executor).most_ahead == 2
    for step in issued:
        executor.wait(step.id)


# Memory


@pytest.mark.parametrize("lanes", [1, 2])
def test_p2_programs_that_may_run_at_once_have_pools_and_arenas_of_their_own(
    lanes: int, executor: TorchCudaExecutor, model: Artifact
) -> None:
    groups = [[m] for m in members(2)]
    bound = load(executor, plan_of([model], [halves(model)], groups, lanes=lanes), [model])
    steps = StepMaker(KEY, bound)
    for block in (0, 1):
        executor.prepare(steps.step(block, {0: (ONE, 1)}).program)
    graphs = [executor._built[key].graph for key in executor._built]
    assert len({id(graph.pool) for graph in graphs if graph is not None}) == lanes
    arenas = executor._plans[KEY].buffers._arenas
    assert len({arena.data_ptr() for arena in arenas}) == lanes


def test_p14_a_program_built_while_its_plan_serves_leaves_the_slots_alone(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    """1. An instance stands before block 1. 2. A program for both blocks is built. 3. Block 1 runs."""
    bound = load(executor, plan_of([model], [halves(model)], [members(2)]), [model])
    steps = StepMaker(KEY, bound)
    inputs = random_inputs(model.graph, 1)
    run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [inputs]})
    replays = device_of(executor).replays
    executor.prepare(steps.step(0, {0: (InstanceId(2), 1), 1: (ONE, 1)}).program)
    assert device_of(executor).replays > replays, "kernels were measured"
    assert not wrong(model, inputs, run(executor, steps.step(0, {1: (ONE, 1)}))[ONE])


def test_p11_a_program_is_replayed_once_before_its_plan_serves(model: Artifact) -> None:
    executor = simulated()
    steps = StepMaker(KEY, streamed(executor, model))
    program = steps.step(0, {0: (ONE, 1)}).program
    executor.prepare(program)
    built = executor._built[program]
    assert built.graph is not None and built.graph.replays == 1
    assert answer(executor, steps, model, 1)
    assert built.graph.replays == 2
    executor.close()


def test_a_plan_that_does_not_fit_on_the_device_is_refused(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    device_of(executor).free_now = 1 << 16
    with pytest.raises(ExecutorError, match="MiB of device memory"):
        streamed(executor, model)
    assert executor.held_bytes == 0


def test_what_graphs_hold_is_no_room_for_another_plan(executor: TorchCudaExecutor, model: Artifact) -> None:
    """torch tells it as free, since no tensor lies there between two replays."""
    steps = StepMaker(KEY, streamed(executor, model))
    executor.prepare(steps.step(0, {0: (ONE, 1)}).program)
    plan, other = plan_of([model], [halves(model)], [members(2)]), PlanKey(2)
    device, held = device_of(executor), executor._cache.nbytes
    bound = bound_of(replace(plan, executor=ExecutorOptions(name="torch_cuda")), [model])
    device.free_now = executor.stated_bytes(bound) + held - 1
    with pytest.raises(BackendUnavailable, match="MiB of device memory"):
        load(executor, plan, [model], other)
    device.free_now += 1
    load(executor, plan, [model], other)


def test_memory_of_plans_that_are_gone_goes_back_to_the_device_when_room_is_wanted_and_at_the_end(
    model: Artifact,
) -> None:
    """Not when a plan is unloaded: the device waits for that, and the next plan may take what there is."""
    executor = simulated()
    device = device_of(executor)
    assert answer(executor, StepMaker(KEY, streamed(executor, model)), model, 1)
    executor.unload(KEY)
    assert device.given_back == 0
    executor.drop_idle()
    assert device.given_back == 1
    executor.close()
    assert device.given_back == 2


def test_graphs_beyond_the_bound_are_given_up_and_their_launches_issued_one_by_one(
    model: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=QUICK, graph_bytes=1 << 20)
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)], lanes=2), [model])
    steps = StepMaker(KEY, bound)
    inputs = random_inputs(model.graph, 1)
    first, second = steps.step(0, {0: (ONE, 1)}), steps.step(1, {0: (ONE, 1)}, after=[])
    executor.prepare(first.program)
    with caplog.at_level(logging.WARNING):
        executor.prepare(second.program)
    assert "the graph of combined block 0, mask 1, is given up" in caplog.text
    assert executor._built[first.program].graph is None
    executor.issue(first, {ONE: [inputs]})
    executor.wait(first.id)
    executor.issue(second, {})
    assert not wrong(model, inputs, executor.wait(second.id).outputs[ONE])
    executor.prepare(first.program)
    assert executor._built[first.program].graph is not None
    executor.close()


def test_graphs_that_share_a_pool_are_given_up_together_and_count_until_then(model: Artifact) -> None:
    """1. Two programs of one lane share a pool. 2. Another plan's takes its room. 3. One comes back."""
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=QUICK, graph_bytes=2 << 20)
    shared, other = PlanKey(1), PlanKey(2)
    halved = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model], shared)
    whole = load(executor, plan_of([model], [()], [members(1)]), [model], other)
    first, second = (StepMaker(shared, halved).step(block, {0: (ONE, 1)}).program for block in (0, 1))
    third = StepMaker(other, whole).step(0, {0: (ONE, 1)}).program
    pools, live = set(), []
    for program in (first, second, third, first):
        executor.prepare(program)
        pools.add(executor._built[program].pool)
        live.append([key for key, built in executor._built.items() if built.graph is not None])
        assert executor._cache.nbytes == device_of(executor).bytes_of(pools)
    assert live == [[first], [first, second], [third], [first, third]]
    executor.close()


@pytest.mark.promise("device-refuses-costs-plan")
def test_a_program_whose_pool_lost_its_last_graph_is_captured_again_in_another(model: Artifact) -> None:
    """With two lanes each combined block has a pool of its own; torch captures into none without a graph."""
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=QUICK, graph_bytes=1 << 20)
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)], lanes=2), [model])
    steps = StepMaker(KEY, bound)
    programs = [steps.step(block, {0: (ONE, 1)}, after=[]).program for block in (0, 1, 0)]
    for program in programs:
        executor.prepare(program)
        assert executor._built[program].graph is not None
    assert executor._built[programs[1]].graph is None
    executor.close()


@pytest.mark.promise("device-refuses-costs-plan")
def test_after_a_capture_that_failed_the_next_one_has_another_pool(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[object] = []
    capture = SimulatedGraphDevice.capture

    def first_fails(self: SimulatedGraphDevice, pool: object, *arguments: Any) -> Any:
        if pool in executor._pools.values():  # not one of those in which kernels are measured
            pools.append(pool)
        if len(pools) == 1:
            raise RuntimeError("operation failed due to a previous error during capture")
        return capture(self, pool, *arguments)

    monkeypatch.setattr(SimulatedGraphDevice, "capture", first_fails)
    steps = StepMaker(KEY, streamed(executor, model))
    program = steps.step(0, {0: (ONE, 1)}).program
    with pytest.raises(ExecutorError, match=r"cannot be built: .* during capture"):
        executor.prepare(program)
    executor.prepare(program)
    assert len(pools) == 2 and pools[0] is not pools[1]
    assert answer(executor, steps, model, 1)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_plan_that_serves_gets_its_graph_back_once_another_that_took_its_room_is_gone(
    fallback: bool, model: Artifact
) -> None:
    """1. A plan serves by a graph. 2. Another one, that is profiled, takes the room. 3. It is unloaded."""
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=QUICK, graph_bytes=1 << 20)
    device, plan = device_of(executor), plan_of([model], [()], [members(1)])
    serving, other = (StepMaker(key, load(executor, plan, [model], key)) for key in (PlanKey(1), PlanKey(2)))
    executor.prepare(serving.step(0, {0: (ONE, 1)}).program)
    executor.prepare(other.step(0, {0: (ONE, 1)}).program)
    served = []
    for number, lane in ((1, 0), (2, 0), (3, MAX_LANES), (4, 0), (5, 0)):
        if number == 3:
            executor.unload(PlanKey(2))
        inputs, instance, replays = random_inputs(model.graph, number), InstanceId(number), device.replays
        step = serving.step(0, {0: (instance, 1)}, lane=lane, fallback=fallback)
        executor.issue(step, {instance: [inputs]})
        served.append(device.replays - replays)
        assert not wrong(model, inputs, executor.wait(step.id).outputs[instance])
        _settled(executor)
    assert served == [0, 0, 0, 0, 1], "the last but one has it captured"
    executor.close()


def test_a_graph_that_was_given_up_is_tried_once_more_and_not_with_every_step(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=QUICK, graph_bytes=1 << 20)
    plan = plan_of([model], [()], [members(1)])
    steps, other = (StepMaker(key, load(executor, plan, [model], key)) for key in (PlanKey(1), PlanKey(2)))
    for each in (steps, other):
        executor.prepare(each.step(0, {0: (ONE, 1)}).program)
    executor.unload(PlanKey(2))
    tried: list[object] = []

    def broken(*arguments: object) -> None:
        tried.append(arguments)
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(executor._builder, "build", broken)
    for number in range(3):
        instance, inputs = InstanceId(number), random_inputs(model.graph, number)
        step = steps.step(0, {0: (instance, 1)})
        executor.issue(step, {instance: [inputs]})
        assert not wrong(model, inputs, executor.wait(step.id).outputs[instance])
        _settled(executor)
    assert len(tried) == 1
    executor.close()


def test_a_program_is_built_while_another_plan_whose_graph_it_displaces_is_unloaded(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A graph is to be given up for another. 2. Before it is, its plan is unloaded by another thread."""
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=QUICK, graph_bytes=1 << 20)
    plan = plan_of([model], [()], [members(1)])
    keys = PlanKey(1), PlanKey(2)
    steps = [StepMaker(key, load(executor, plan, [model], key)) for key in keys]
    executor.prepare(steps[0].step(0, {0: (ONE, 1)}).program)
    put = executor._cache.put

    def unloaded_meanwhile(*arguments: Any, **options: Any) -> dict[ProgramKey, int]:
        given_up = put(*arguments, **options)
        thread = threading.Thread(target=executor.unload, args=(keys[0],))
        thread.start()
        thread.join()
        return given_up

    monkeypatch.setattr(executor._cache, "put", unloaded_meanwhile)
    assert answer(executor, steps[1], model, 1)
    assert {key.plan for key in executor._built} == {keys[1]}
    executor.close()


@pytest.mark.parametrize("of, fails", [("_on", "settle"), ("_host", "_make")])
def test_a_plan_that_fails_while_it_is_loaded_leaves_nothing(
    of: str, fails: str, executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(getattr(executor, of), fails, broken)
        with pytest.raises(ExecutorError, match="cannot be loaded: RuntimeError: CUDA error: out of memory"):
            streamed(executor, model)
    assert executor.held_bytes == 0 and not executor._plans
    assert answer(executor, StepMaker(KEY, streamed(executor, model)), model, 1)


@pytest.mark.promise("device-refuses-costs-plan")
def test_no_host_memory_is_pinned_while_steps_are_issued(model: Artifact) -> None:
    """Three models whose inputs are of one size, two steps of all of them in flight."""
    executor = simulated()
    models = [model, artifact_of("squeezenet"), artifact_of("googlenet")]
    group = [Member(index, 0, 0) for index in range(3)]
    bound = load(executor, plan_of(models, [()] * 3, [group]), models)
    steps, pinned = StepMaker(KEY, bound), device_of(executor).pinned
    issued = [steps.step(0, {p: (InstanceId(10 * n + p), 1) for p in range(3)}, after=[]) for n in (1, 2)]
    executor.prepare(issued[0].program)
    for step in issued:
        feeds = {one.instance: [random_inputs(models[one.member.model].graph, 1)] for one in step.members}
        executor.issue(step, feeds)
    assert device_of(executor).pinned == pinned
    for step in issued:
        executor.wait(step.id)
    executor.close()


# Capture


def test_what_waits_for_the_host_is_not_captured(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_batch = ModelLowering.at_batch

    def foreign(lowering: ModelLowering, batch: int) -> LoweredModel:
        lowered = at_batch(lowering, batch)
        units = (replace(lowered.units[0], foreign="a test says so"), *lowered.units[1:])
        return replace(lowered, units=units)

    monkeypatch.setattr(ModelLowering, "at_batch", foreign)
    steps = StepMaker(KEY, streamed(executor, model))
    assert answer(executor, steps, model, 1)
    assert device_of(executor).captures == 0


@pytest.mark.parametrize("in_turn", [False, True])
def test_p12_the_faster_form_is_kept(in_turn: bool, model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramBuilder, "_compare", lambda self, graphs: [1.0, 0.9 if in_turn else 1.1])
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=replace(QUICK, form_rounds=1))
    steps = StepMaker(KEY, streamed(executor, model))
    assert answer(executor, steps, model, 1)
    (built,) = executor._built.values()
    assert built.in_turn == in_turn
    assert (built.program.recipe.streams == 1) == in_turn
    executor.close()


def test_the_two_forms_are_measured_on_memory_of_their_own(model: Artifact) -> None:
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=replace(QUICK, form_rounds=2))
    steps = StepMaker(KEY, streamed(executor, model))
    assert answer(executor, steps, model, 1)
    executor.close()


def test_p8_plans_with_and_without_tf32_are_not_loaded_at_once(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    plan = plan_of([model], [()], [members(1)])
    load(executor, replace(plan, executor=ExecutorOptions(precision="tf32")), [model], PlanKey(1))
    assert device_of(executor).tf32 is True
    with pytest.raises(ExecutorError, match="with and without tf32"):
        load(executor, plan, [model], PlanKey(2))
    executor.unload(PlanKey(1))
    load(executor, plan, [model], PlanKey(2))
    assert device_of(executor).tf32 is False


def _during_laps(
    executor: TorchCudaExecutor, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]
) -> None:
    """Let the device have torch's own setting, and something happen while an operator is timed."""
    for setting in (use_tf32, without_tf32):
        monkeypatch.setattr(device_of(executor), setting.__name__, setting)
    lap = executor._builder.lap

    def noted(*arguments: Any) -> float:
        happens()
        return lap(*arguments)

    monkeypatch.setattr(executor._builder, "lap", noted)


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    before = allows_tf32()
    yield
    use_tf32(before)


@pytest.mark.usefixtures("tf32_as_before")
def test_p8_a_tf32_plan_serves_with_tf32_in_the_pauses_of_operators_that_are_timed_in_fp32(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, laps = list[bool](), list[bool]()
    _during_laps(executor, monkeypatch, lambda: laps.append(allows_tf32()))
    plan = plan_of([model], [()], [members(1)])
    load(executor, replace(plan, executor=ExecutorOptions(precision="tf32")), [model])

    def idle() -> bool:
        pauses.append(allows_tf32())
        return True

    executor.time_operators(model, TimingRequest(repeats=1), idle)
    assert all(pauses) and pauses and not any(laps) and laps
    assert allows_tf32()


@pytest.mark.usefixtures("tf32_as_before")
def test_p8_operators_that_are_timed_leave_the_setting_of_the_plan_that_is_loaded_meanwhile(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of([model], [()], [members(1)])
    load(executor, replace(plan, executor=ExecutorOptions(precision="tf32")), [model], PlanKey(1))

    def another_plan() -> None:
        if PlanKey(1) in executor._plans:
            executor.unload(PlanKey(1))
            load(executor, plan, [model], PlanKey(2))

    _during_laps(executor, monkeypatch, another_plan)
    executor.time_operators(model, TimingRequest(repeats=1), lambda: True)
    assert PlanKey(2) in executor._plans and not allows_tf32()


@pytest.mark.usefixtures("tf32_as_before")
def test_p8_an_executor_without_plans_that_times_operators_leaves_the_setting_of_the_one_that_serves(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for a profile has an executor of its own."""
    profiling = simulated()
    for each in (executor, profiling):
        _during_laps(each, monkeypatch, lambda: None)
    plan = plan_of([model], [()], [members(1)])
    load(executor, replace(plan, executor=ExecutorOptions(precision="tf32")), [model])
    profiling.time_operators(model, TimingRequest(repeats=1), lambda: True)
    profiling.close()
    assert allows_tf32()


def test_threads_inside_an_operator_are_refused(executor: TorchCudaExecutor, model: Artifact) -> None:
    plan = plan_of([model], [()], [members(1)])
    with pytest.raises(ExecutorError, match="no threads inside an operator"):
        load(executor, replace(plan, executor=ExecutorOptions(intra_op_threads=2)), [model])


# Observation


def test_groups_are_timed_by_a_graph_of_their_own_once_tracing_was_seen(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    executor.tracing = True
    device = device_of(executor)
    traced = []
    for number in (1, 2):
        step = steps.step(0, {0: (InstanceId(number), 1)})
        executor.prepare(step.program)
        launches = device.launches
        executor.issue(step, {InstanceId(number): [random_inputs(model.graph, number)]})
        traced.append(device.launches - launches)
        result = executor.wait(step.id)
        assert [group.item for group in result.groups] == list(range(len(result.groups)))
        assert {group.stream for group in result.groups} > {0}
        assert all(result.started_s <= g.started_s <= g.ended_s <= result.ended_s for g in result.groups)
    assert traced[1] < 5 < traced[0]


def test_where_graphs_hold_no_events_every_traced_step_is_issued_launch_by_launch(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    """As with torch before 2.8; an untraced step still replays its graph."""
    device = device_of(executor)
    device.events_in_graphs = False
    steps = StepMaker(KEY, streamed(executor, model))
    replayed = []
    for number, executor.tracing in ((1, True), (2, True), (3, False)):
        step = steps.step(0, {0: (InstanceId(number), 1)})
        executor.prepare(step.program)
        replays = device.replays
        executor.issue(step, {InstanceId(number): [random_inputs(model.graph, number)]})
        replayed.append(device.replays - replays)
        assert bool(executor.wait(step.id).groups) == executor.tracing
    assert replayed == [0, 0, 1]


def test_traced_steps_issued_ahead_do_not_share_events(executor: TorchCudaExecutor, model: Artifact) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    executor.tracing = True
    for _ in range(2):  # the second time the traced graph is there
        issued = [steps.step(0, {0: (InstanceId(i), 1)}) for i in (1, 2)]
        executor.prepare(issued[0].program)
        for i, step in enumerate(issued, start=1):
            executor.issue(step, {InstanceId(i): [random_inputs(model.graph, i)]})
        ends = [executor.wait(step.id) for step in issued]
        for result in ends:
            assert result.groups
            assert min(g.started_s for g in result.groups) >= result.started_s


def test_a_lanes_last_traced_step_keeps_nothing_of_a_plan_that_is_unloaded(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    executor.tracing = True
    for number in (1, 2):  # the second time it is the traced graph that runs
        assert answer(executor, steps, model, number)
    (built,) = executor._built.values()
    assert built.traced is not None and not built.tracing
    program = weakref.ref(built.program)
    del built
    executor.unload(KEY)
    gc.collect()
    assert program() is None


def test_delays_hold_up_streams_and_change_nothing(executor: TorchCudaExecutor, model: Artifact) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    inputs = random_inputs(model.graph, 1)
    rng = random.Random(1)
    seen = set()
    for number in range(4):
        instance = InstanceId(number)
        rows = run(executor, steps.step(0, {0: (instance, 1)}), {instance: [inputs]})[instance]
        seen.add(rows[0]["logits"].tobytes())
        executor.pause = lambda: time.sleep(rng.random() * 1e-4)
    assert len(seen) == 1
    assert device_of(executor).sleeps > 0


def test_an_instance_of_a_step_that_failed_on_the_device_is_lost(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two blocks are issued ahead. 2. The device fails in the first. 3. Neither gives a result."""
    bound = load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model])
    steps = StepMaker(KEY, bound)
    first = steps.step(0, {0: (ONE, 1)})
    second = steps.step(1, {0: (ONE, 1)}, after=[first.id])
    for step in (first, second):
        executor.prepare(step.program)
    for step in (first, second):
        executor.issue(step, {ONE: [random_inputs(model.graph, 1)]})
    synchronize = executor._on.synchronize

    def fail(event: object) -> None:
        monkeypatch.setattr(executor._on, "synchronize", synchronize)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(executor._on, "synchronize", fail)
    with pytest.raises(ExecutorError, match="illegal memory access"):
        executor.wait(first.id)
    with pytest.raises(ExecutorError, match="lost its tensors"):
        executor.wait(second.id)
    executor.drop(ONE)


def test_a_device_that_refuses_everything_after_a_step_failed_is_lost_and_one_that_goes_on_is_not(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    step = steps.step(0, {0: (ONE, 1)})
    executor.prepare(step.program)
    executor.issue(step, {ONE: [random_inputs(model.graph, 1)]})

    def fail(event: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(executor._on, "synchronize", fail)
        with pytest.raises(ExecutorError, match="illegal memory access"):
            executor.wait(step.id)
        assert executor.lost()
    assert not executor.lost()
    assert answer(executor, steps, model, 2)


def test_programs_are_built_on_one_thread(executor: TorchCudaExecutor, model: Artifact) -> None:
    """P6: cudnn remembers what it found per thread."""
    bound = load(executor, plan_of([model], [halves(model)], [[Member(0, 0, b)] for b in (0, 1)]), [model])
    steps = StepMaker(KEY, bound)
    for block in (0, 1):
        executor.prepare(steps.step(block, {0: (ONE, 1)}).program)
    assert len(device_of(executor).capturers) == 1


def test_a_program_is_prepared_once(executor: TorchCudaExecutor, model: Artifact) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    program: ProgramKey = steps.step(0, {0: (ONE, 1)}).program
    executor.prepare(program)
    count = device_of(executor).captures
    executor.prepare(program)
    assert device_of(executor).captures == count


# Members by themselves


def _settled(executor: TorchCudaExecutor) -> None:
    """Wait until nothing is left to build."""
    while any(executor._ahead.values()):
        executor._thread.submit(lambda: None).result()
    executor._thread.submit(lambda: None).result()


def test_members_that_run_one_after_another_run_as_graphs_once_those_are_built(model: Artifact) -> None:
    """1. Steps beside those that serve build nothing. 2. One that serves falls back before anything is built.
    3. The same step later replays a graph per member."""
    device = SimulatedGraphDevice(0)
    executor = TorchCudaExecutor(device, effort=replace(QUICK, alone=True))
    models = [model, artifact_of("squeezenet")]
    groups = [[Member(0, 0, 0), Member(1, 0, 0)]]
    schedules = [random_streams(graph_of(models, [(), ()], groups[0]), random.Random(1))]
    plan = plan_of(models, [(), ()], groups, schedules, barrier=Barrier.DATA)
    steps = StepMaker(KEY, load(executor, plan, models))
    for number, graphs, lane in ((1, 0, MAX_LANES), (3, None, 0), (5, 2, 0)):
        if graphs:
            _settled(executor)
        instances = [InstanceId(number), InstanceId(number + 1)]
        inputs = [random_inputs(one.graph, number) for one in models]
        before = device.replays
        step = steps.step(0, {0: (instances[0], 1), 1: (instances[1], 1)}, fallback=True, lane=lane)
        made = run(executor, step, {i: [x] for i, x in zip(instances, inputs, strict=True)})
        for one, instance, fed in zip(models, instances, inputs, strict=True):
            assert not wrong(one, fed, made[instance])
        assert graphs is None or device.replays - before == graphs
        assert bool(executor._building) == (number > 1)
    executor.close()


def test_a_plan_that_is_unloaded_while_graphs_are_built_ahead_leaves_none(model: Artifact) -> None:
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=replace(QUICK, alone=True))
    bound = plan_of([model], [halves(model)], [[m] for m in members(2)])
    for number in range(3):
        load(executor, bound, [model], PlanKey(number))
        executor._build_ahead(PlanKey(number))
        executor.unload(PlanKey(number))
    executor._thread.submit(lambda: None).result()
    assert not executor._built and not executor._ahead and not executor._building
    executor.close()


def test_a_plan_is_unloaded_after_what_is_built_ahead_of_it_however_fast_that_began(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The first build ends before it is noted. 2. The next one waits. 3. The plan is unloaded."""
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=replace(QUICK, alone=True))
    submit, second, unloaded = executor._thread.submit, threading.Event(), threading.Event()
    order: list[str] = []

    def submitted(work: Callable[..., Any], *arguments: Any) -> Any:
        future = submit(work, *arguments)
        if threading.current_thread() is threading.main_thread():
            wait([future], timeout=0.2)
        return future

    def built(program: ProgramKey, *, wanted: bool = True) -> None:
        order.append("built")
        if len(order) == 1:
            raise ExecutorError("too large")
        second.set()
        unloaded.wait(0.2)  # in vain, as unloading waits for this
        order.append("built")

    monkeypatch.setattr(executor._thread, "submit", submitted)
    monkeypatch.setattr(executor, "_prepare", built)
    load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model])
    executor._build_ahead(KEY)
    assert second.wait(60)
    executor.unload(KEY)
    order.append("unloaded")
    unloaded.set()
    assert order == ["built", "built", "built", "unloaded"]
    executor.close()


def test_what_is_built_ahead_takes_no_room_from_graphs_that_were_asked_for(model: Artifact) -> None:
    """1. One graph fits, and serves. 2. Of another plan four are built ahead: the first finds no room."""
    device = SimulatedGraphDevice(0)
    effort = replace(QUICK, alone=True)
    executor = TorchCudaExecutor(device, effort=effort, graph_bytes=1 << 20)
    plan = plan_of([model], [halves(model)], [members(2)])
    executor.builds_ahead = False
    program = StepMaker(KEY, load(executor, plan, [model])).step(0, {0: (ONE, 1)}).program
    executor.prepare(program)
    executor.builds_ahead = True
    steps = StepMaker(PlanKey(2), load(executor, plan, [model], PlanKey(2)))
    executor._build_ahead(PlanKey(2))
    _settled(executor)
    assert executor._built[program].graph is not None
    assert [built.graph for key, built in executor._built.items() if key.plan == 2] == [None]
    wanted = steps.step(0, {1: (ONE, 1)}).program
    executor.prepare(wanted)
    assert executor._built[wanted].graph is not None and executor._built[program].graph is None
    executor.close()


def test_an_error_of_a_library_ends_one_build_ahead_and_no_other(
    model: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=replace(QUICK, alone=True))
    build, calls = ProgramBuilder.build, itertools.count()

    def first_fails(self: ProgramBuilder, *arguments: Any) -> Any:
        if not next(calls):
            raise ValueError("a kind of error that torch never raises")
        return build(self, *arguments)

    monkeypatch.setattr(ProgramBuilder, "build", first_fails)
    load(executor, plan_of([model], [halves(model)], [[m] for m in members(2)]), [model])
    executor._build_ahead(KEY)
    _settled(executor)
    assert len(executor._built) == 1 and "is not built" in caplog.text
    executor.close()


def test_an_instance_goes_over_to_a_plan_that_is_no_longer_rehearsed(
    executor: TorchCudaExecutor, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is replayed to try it would write over the slot that the instance has come to."""
    old, new = PlanKey(1), PlanKey(2)
    plan = plan_of([model], [halves(model)], [members(2)])
    steps = StepMaker(old, load(executor, plan, [model], old))
    load(executor, plan, [model], new)
    run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [random_inputs(model.graph, 1)]})
    copied = executor._copy_slot
    in_use: list[bool] = []

    def noted(*arguments: Any) -> None:
        in_use.append(new in executor._used)
        copied(*arguments)

    monkeypatch.setattr(executor, "_copy_slot", noted)
    executor.move(MoveInstance(ONE, (old, Member(0, 0, 1)), (new, Member(0, 0, 1)), ()))
    assert in_use and all(in_use)


def test_profiling_a_plan_on_many_streams_leaves_those_for_building_alone(
    executor: TorchCudaExecutor,
) -> None:
    model = artifact_of("inception_v3")
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(3), 20)
    options = ExecutorOptions(name="torch_cuda", issue=IssueOrder.SCHEDULE)
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA)
    steps = StepMaker(KEY, load(executor, replace(plan, executor=options), [model]))
    step = steps.step(0, {0: (ONE, 1)}, lane=MAX_LANES)
    device = device_of(executor)
    beside = [device.every_stream().index(stream) for stream in executor._streams(step)]
    assert set(beside) == set(range(PROFILING, PREPARING)) and len(beside) == 32
    executor.tracing = True  # as while profiling: issued launch by launch until a traced graph is there
    inputs = random_inputs(model.graph, 1)
    assert not wrong(model, inputs, run(executor, step, {ONE: [inputs]})[ONE])


def test_all_that_is_captured_to_be_measured_shares_one_pool(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool for each kernel would take 2 or 20 MiB, which only a wait of the whole device gives back."""
    executor = TorchCudaExecutor(SimulatedGraphDevice(0), effort=replace(QUICK, form_rounds=1))
    device = device_of(executor)
    pools: list[object] = []
    real = device.capture

    def noted(pool: object, streams: Any, body: Callable[[], None]) -> Any:
        pools.append(pool)
        return real(pool, streams, body)

    monkeypatch.setattr(device, "capture", noted)
    steps = StepMaker(KEY, streamed(executor, model))
    executor.prepare(steps.step(0, {0: (ONE, 1)}).program)
    (built,) = executor._built.values()
    measured = [pool for pool in pools if pool is not built.pool]
    assert len(measured) > 20 and len(set(map(id, measured))) == 1
    executor.close()


def test_a_capture_that_fails_costs_its_own_measurement_and_no_other(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may break a capture; the pool that it was in takes no other, and the next try works."""
    executor = simulated()
    device = device_of(executor)
    steps = StepMaker(KEY, streamed(executor, model))
    program = steps.step(0, {0: (ONE, 1)}).program
    real, calls = device.capture, itertools.count()

    def failing(pool: object, streams: Any, body: Callable[[], None]) -> Any:
        def broken() -> None:
            body()
            raise RuntimeError("operation failed due to a previous error during capture")

        return real(pool, streams, broken if next(calls) == 5 else body)

    monkeypatch.setattr(device, "capture", failing)
    with pytest.raises(ExecutorError, match="previous error during capture"):
        executor.prepare(program)
    executor.prepare(program)
    assert answer(executor, steps, model, 1)
