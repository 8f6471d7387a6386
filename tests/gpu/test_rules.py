"""One test per trap of the CUDA executor, P1 to P15; docs/executors.md has the table."""

import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.cuda.device import CAPTURING, MOVING, PREPARING, PROFILING, streams_from
from stageloom.edge_agent.executor.cuda.executor import launched_step
from stageloom.edge_agent.executor.cuda.recipe import issue_program
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS, MAX_STREAMS
from stageloom.edge_agent.executor.torch.builder import BuiltProgram, Effort, ProgramBuilder
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member
from tests.executor.contract.schedules import StepMaker, graph_of, merged, plan_of, random_streams
from tests.executor.models import artifact_of, difference, random_inputs
from tests.executor.torch.steps import KEY, answer_of, halves, load, members, run, wrong
from tests.lowering.test_operators import OUTSIDE, OUTSIDE_IDS, run_alone

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ONE = InstanceId(1)
REPLAYS = 100


@pytest.fixture
def model() -> Artifact:
    """A model with branches, of full width."""
    return artifact_of("googlenet", width=1.0, side=224)


def streamed(
    executor: TorchCudaExecutor,
    model: Artifact,
    key: PlanKey = KEY,
    *,
    seed: int = 1,
    precision: str = "fp32",
    lanes: int = 1,
) -> BoundPlan:
    """The model as one block under a random stream schedule, loaded."""
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(seed))
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA, lanes=lanes)
    return load(executor, replace(plan, executor=ExecutorOptions(precision=precision)), [model], key)


def logits(executor: TorchCudaExecutor, steps: StepMaker, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Run one task."""
    rows = run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [inputs]})[ONE]
    return np.array(rows[0]["logits"])


def test_p1_results_are_bit_stable_with_random_delays_on_every_stream(
    executor: TorchCudaExecutor, device: CudaGraphDevice, model: Artifact
) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    inputs = random_inputs(model.graph, 1)
    first = logits(executor, steps, inputs)
    assert difference(first, answer_of(model, inputs)) < 1e-4
    (built,) = executor._built.values()
    rng = random.Random(1)
    streams = streams_from(device, PREPARING, 8)
    device.sleep(streams[0], 1e-6)  # measures the clock, which no capture may

    def delayed() -> Any:
        """Captured where the program was: cudnn remembers per thread which kernels it found."""
        with torch.inference_mode(), device.searching():
            return device.capture(
                device.new_pool(),
                streams,
                lambda: issue_program(
                    built.program,
                    device,
                    streams,
                    before_group=lambda stream: device.sleep(stream, rng.random() * 2e-4),
                ),
            )

    answers = set()
    for _ in range(10):
        graph = executor._on_thread(delayed)
        for _ in range(REPLAYS // 10):
            device.replay(streams[0], graph)
            device.synchronize(device.record(streams[0]))
            answers.add(_answer_bits(executor))
    assert answers == {first.tobytes()}


def _answer_bits(executor: TorchCudaExecutor) -> bytes:
    from stageloom.edge_agent.executor.cuda.recipe import BufferRole

    plan = executor._plans[KEY]
    graph = plan.bound.models[0].graph
    return plan.buffers.at(BufferRole.ANSWER, Member(0, 0, 0), graph.outputs[0], 1).cpu().numpy().tobytes()


def test_p2_programs_on_two_lanes_give_what_they_give_alone(executor: TorchCudaExecutor) -> None:
    models = [artifact_of("googlenet"), artifact_of("inception_v3")]
    cuts: list[tuple[int, ...]] = [(), ()]
    groups = [[Member(i, 0, 0)] for i in (0, 1)]
    schedules = [random_streams(graph_of(models, cuts, group), random.Random(7)) for group in groups]
    bound = load(executor, plan_of(models, cuts, groups, schedules, lanes=2), models)
    steps = StepMaker(KEY, bound)
    inputs = [random_inputs(model.graph, i) for i, model in enumerate(models)]
    alone: list[bytes] = []
    for lane in (0, 1):
        instance = InstanceId(lane)
        rows = run(executor, steps.step(lane, {0: (instance, 1)}, lane=lane), {instance: [inputs[lane]]})
        alone.append(rows[instance][0]["logits"].tobytes())
    for number in range(REPLAYS):
        issued = []
        for lane in (0, 1):
            step = steps.step(lane, {0: (InstanceId(10 + 2 * number + lane), 1)}, lane=lane)
            executor.issue(step, {step.members[0].instance: [inputs[lane]]})
            issued.append(step)
        for lane, step in enumerate(issued):
            made = executor.wait(step.id).outputs[step.members[0].instance]
            assert made[0]["logits"].tobytes() == alone[lane]


def test_p3_p15_the_streams_for_running_are_32_different_ones(device: CudaGraphDevice) -> None:
    own = streams_from(device, 0, MAX_STREAMS)
    assert len({stream.cuda_stream for stream in own}) == 32
    others = [
        *streams_from(device, PREPARING, device.most_streams),
        *streams_from(device, PROFILING, 8),
        *streams_from(device, CAPTURING, device.most_streams),
        device.stream(MOVING),
    ]
    assert len({stream.cuda_stream for stream in (*own, *others)}) == 32 + 9 + 2 * device.most_streams
    another = torch.cuda.Stream(priority=own[0].priority)  # type: ignore[no-untyped-call]
    assert another.cuda_stream in {stream.cuda_stream for stream in own}, "the 33rd is the first again"


def test_p4_connections_are_set_before_cuda_starts(device: CudaGraphDevice) -> None:
    assert int(os.environ[CONNECTIONS]) >= 8
    late = """
import torch
torch.cuda.init()
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice
CudaGraphDevice()
"""
    environment = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    done = subprocess.run(
        [sys.executable, "-c", late], env=environment, capture_output=True, text=True, check=False
    )
    assert f"CUDA has started without {CONNECTIONS}" in done.stderr


def test_p5_a_graph_survives_the_end_of_another_with_matrix_products(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    """Both graphs hold a classifier's product, captured on the same streams."""
    other = artifact_of("squeezenet")
    steps = StepMaker(PlanKey(1), streamed(executor, model, PlanKey(1)))
    inputs = random_inputs(model.graph, 1)
    first = logits(executor, steps, inputs)
    streamed(executor, other, PlanKey(2), seed=2)
    second = StepMaker(PlanKey(3), streamed(executor, model, PlanKey(3)))
    second._next = 1000
    logits(executor, second, inputs)
    executor.unload(PlanKey(3))
    executor.unload(PlanKey(2))
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    for _ in range(10):
        assert logits(executor, steps, inputs).tobytes() == first.tobytes()
    del junk


def test_p6_p7_every_kernel_is_measured_and_the_fastest_is_taken_and_logged(
    executor: TorchCudaExecutor, model: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="stageloom.edge_agent.executor.torch.kernels"):
        steps = StepMaker(KEY, streamed(executor, model))
        logits(executor, steps, random_inputs(model.graph, 1))
    chosen = set(executor.choices.all_choices())
    assert len(chosen) >= 30
    for choice in chosen:
        assert dict(choice.seconds)[choice.name] == min(took for _, took in choice.seconds)
    assert sum("kernel artifact=" in record.getMessage() for record in caplog.records) == len(chosen)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("tf32", 2e-2), ("fp16", 5e-2)])
def test_p8_each_precision_is_as_exact_as_torch_is(
    precision: str, bound: float, executor: TorchCudaExecutor, model: Artifact
) -> None:
    """Seeded weights make rounding grow from layer to layer: it is judged by how far off torch's own kernels
    are, one for each node, which is bounded as well."""
    steps = StepMaker(KEY, streamed(executor, model, precision=precision))
    inputs, wanted = random_inputs(model.graph, 1), answer_of(model, random_inputs(model.graph, 1))
    plain = run(executor, steps.step(0, {0: (ONE, 1)}, fallback=True), {ONE: [inputs]})[ONE][0]["logits"]
    own = difference(plain, wanted)
    assert own < bound
    assert difference(logits(executor, steps, inputs), wanted) < max(1e-4, 1.5 * own)


def test_p9_p14_a_plan_serves_rightly_while_programs_are_built(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    """Another thread allocates, launches and synchronises all the while, which a global capture forbids."""
    steps = StepMaker(KEY, streamed(executor, model))
    inputs = random_inputs(model.graph, 1)
    first = logits(executor, steps, inputs)
    built = threading.Event()
    other = artifact_of("inception_v3")

    def build() -> None:
        try:
            for number in range(3):
                bound = streamed(executor, other, PlanKey(10 + number), seed=number)
                step = StepMaker(PlanKey(10 + number), bound).step(0, {0: (ONE, 1)})
                executor.prepare(step.program)
        finally:
            built.set()

    thread = threading.Thread(target=build)
    thread.start()
    runs = 0
    while not built.is_set() or runs < 10:
        step = steps.step(0, {0: (ONE, 1)})
        executor.issue(step, {ONE: [inputs]})
        assert executor.wait(step.id).outputs[ONE][0]["logits"].tobytes() == first.tobytes()
        torch.empty(1 << 20, device="cuda").fill_(1.0).sum().item()
        runs += 1
    thread.join()
    assert all(executor._plans[PlanKey(10 + number)] for number in range(3))


def test_p10_the_issue_order_changes_no_bit(executor: TorchCudaExecutor, model: Artifact) -> None:
    """Before kernels are measured the order knows nothing of them, afterwards it does."""
    steps = StepMaker(PlanKey(1), streamed(executor, model, PlanKey(1)))
    inputs = random_inputs(model.graph, 1)
    before = executor._plans[PlanKey(1)].recipe(0, {0: 1}).script
    first = logits(executor, steps, inputs)
    after = executor._plans[PlanKey(1)].recipe(0, {0: 1}).script
    assert before != after and sorted(before, key=str) == sorted(after, key=str)
    again = StepMaker(PlanKey(2), streamed(executor, model, PlanKey(2)))
    again._next = 1000
    assert logits(executor, again, inputs).tobytes() == first.tobytes()


def test_p10_kernels_say_what_they_need_of_a_multiprocessor(device: CudaGraphDevice) -> None:
    pytest.importorskip("cuda.bindings.driver")
    left, made = (torch.ones(512, 512, device="cuda") for _ in range(2))
    stream = device.stream(PREPARING)
    device.launch(stream, lambda: torch.mm(left, left, out=made))  # loads what a capture must not
    device.synchronize(device.record(stream))
    made.zero_()
    device.settle()
    of = device.multiprocessor()
    for work in (lambda: torch.mm(left, left, out=made), lambda: made.add_(1.0)):
        needs = device.block_needs(device.new_pool(), stream, work)
        assert needs and all(0.0 < one.shares(of).demand <= 1.0 for one in needs)
        assert all(one.registers > 0 and one.threads >= 32 for one in needs)
    assert not made.any(), "nothing ran"


def test_p11_the_current_stream_is_restored_and_a_graph_replayed_before_use(
    executor: TorchCudaExecutor, device: CudaGraphDevice, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = torch.cuda.current_stream()

    def fail() -> None:
        raise KeyError("a launch")

    with pytest.raises(KeyError):
        device.launch(device.stream(PREPARING), fail)
    with pytest.raises(KeyError):
        device.capture(device.new_pool(), [device.stream(PREPARING)], fail)
    assert torch.cuda.current_stream() == current
    rehearsed: list[BuiltProgram] = []
    rehearse = ProgramBuilder.rehearse

    def noted(builder: ProgramBuilder, built: BuiltProgram) -> None:
        rehearsed.append(built)
        rehearse(builder, built)

    monkeypatch.setattr(ProgramBuilder, "rehearse", noted)
    steps = StepMaker(KEY, streamed(executor, model))
    executor.prepare(steps.step(0, {0: (ONE, 1)}).program)
    assert len(rehearsed) == 1


def test_operators_are_timed_one_by_one_also_once_a_program_is_captured(
    executor: TorchCudaExecutor, model: Artifact
) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    executor.prepare(steps.step(0, {0: (ONE, 1)}).program)
    times = executor.time_operators(model, TimingRequest(repeats=3), lambda: True)
    assert len(times) == len(model.graph.operators)
    assert all(one.runs == 3 and one.median_us > 0.0 for one in times)


def test_p12_the_form_that_is_kept_gives_the_same_answer(device: CudaGraphDevice, model: Artifact) -> None:
    executor = TorchCudaExecutor(device, effort=Effort(alone=False))
    steps = StepMaker(KEY, streamed(executor, model))
    inputs = random_inputs(model.graph, 1)
    assert difference(logits(executor, steps, inputs), answer_of(model, inputs)) < 1e-4
    executor.close()


def test_p13_issue_returns_while_the_device_is_busy(
    executor: TorchCudaExecutor, device: CudaGraphDevice, model: Artifact
) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    inputs = random_inputs(model.graph, 1)
    first = logits(executor, steps, inputs)
    device.sleep(device.stream(0), 1.0)
    issued = [steps.step(0, {0: (InstanceId(i), 1)}) for i in (1, 2)]
    for i, step in enumerate(issued, start=1):
        executor.issue(step, {InstanceId(i): [inputs]})
    assert not any(launched_step(executor._launched[step.id]).ended.query() for step in issued)
    for i, step in enumerate(issued, start=1):
        rows = executor.wait(step.id).outputs[InstanceId(i)]
        assert rows[0]["logits"].tobytes() == first.tobytes()


def test_merge_stages_run_as_one_convolution(executor: TorchCudaExecutor, model: Artifact) -> None:
    schedule = merged(graph_of([model], [()], members(1)))
    bound = load(executor, plan_of([model], [()], [members(1)], [schedule]), [model])
    inputs = random_inputs(model.graph, 1)
    answer = logits(executor, StepMaker(KEY, bound), inputs)
    assert difference(answer, answer_of(model, inputs)) < 1e-4


def test_traced_graphs_time_every_group(executor: TorchCudaExecutor, model: Artifact) -> None:
    steps = StepMaker(KEY, streamed(executor, model))
    executor.tracing = True
    for _ in range(3):
        step = steps.step(0, {0: (ONE, 1)})
        executor.prepare(step.program)
        executor.issue(step, {ONE: [random_inputs(model.graph, 1)]})
        result = executor.wait(step.id)
        assert [group.item for group in result.groups] == list(range(len(result.groups)))
        assert all(result.started_s <= g.started_s <= g.ended_s <= result.ended_s for g in result.groups)
    (built,) = executor._built.values()
    assert built.traced is not None


def test_two_halves_and_a_move_on_the_device(executor: TorchCudaExecutor, model: Artifact) -> None:
    bound = load(executor, plan_of([model], [halves(model)], [members(2)]), [model])
    steps = StepMaker(KEY, bound)
    inputs = random_inputs(model.graph, 1)
    run(executor, steps.step(0, {0: (ONE, 1)}), {ONE: [inputs]})
    assert not wrong(model, inputs, run(executor, steps.step(0, {1: (ONE, 1)}))[ONE])


@pytest.mark.parametrize(
    ("kind", "opset", "inputs", "which", "taken", "attributes"), OUTSIDE, ids=OUTSIDE_IDS
)
def test_a_place_that_is_not_there_is_the_nearest_one_and_ends_nothing(
    kind: str,
    opset: int,
    inputs: Sequence[np.ndarray],
    which: int,
    taken: np.ndarray,
    attributes: Mapping[str, object],
) -> None:
    """A failed assertion on the device would end all work of the process, whoever's task it was."""
    found = run_alone(kind, opset, inputs, attributes, "cuda")
    wanted = run_alone(kind, opset, [*inputs[:which], taken, *inputs[which + 1 :]], attributes, "cpu")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
