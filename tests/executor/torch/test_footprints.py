"""Opara's runtime half: what kernels need of a multiprocessor is measured, and orders their launches."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.edge_agent.executor.cuda.device import BlockNeeds, Launch, Multiprocessor
from stageloom.edge_agent.executor.torch.builder import Effort, ProgramBuilder
from stageloom.edge_agent.executor.torch.cuda import block_needs
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from stageloom.edge_agent.executor.torch.kernels import USUAL_FLOP_PER_BYTE, KernelChoices
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.launch_list import Barrier
from tests.executor.contract.schedules import StepMaker, graph_of, plan_of, random_streams
from tests.executor.models import artifact_of, random_inputs
from tests.executor.torch.conftest import QUICK
from tests.executor.torch.simulated import SimulatedGraphDevice
from tests.executor.torch.steps import KEY, load, members, run, wrong

KERNEL, COPY = 0, 1


class _Driver:
    """As much of cuda-bindings as is asked: a graph of two kernels, one not loaded yet, and a copy."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=KERNEL)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_NUM_REGS="registers", CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static"
    )
    functions = {7: {"registers": 40, "static": 1024}, 8: {"registers": 255, "static": 0}}  # noqa: RUF012

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def CUgraph(self, handle: int) -> int:
        return handle

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        assert graph == 4711
        return (1, None, 0) if self._fails == "nodes" else (0, ["first", "copy", "lazy"][:count], 3)

    def cuGraphNodeGetType(self, node: str) -> tuple[int, int]:
        return 0, COPY if node == "copy" else KERNEL

    def cuGraphKernelNodeGetParams(self, node: str) -> tuple[int, Any]:
        loaded = node == "first"
        return 0, SimpleNamespace(
            func=7 if loaded else 0, kern=0 if loaded else 80, blockDimX=32, blockDimY=4, blockDimZ=2,
            sharedMemBytes=2048,
        )  # fmt: skip

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, int]:
        return 0, kernel // 10

    def cuFuncGetAttribute(self, which: str, function: int) -> tuple[int, int]:
        return 0, self.functions[function][which]


def test_a_captured_graph_says_what_its_kernels_need() -> None:
    assert block_needs(_Driver(), 4711) == (BlockNeeds(40, 3072, 256), BlockNeeds(255, 2048, 256))


def test_a_call_of_the_driver_that_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="reading a captured graph failed: 1"):
        block_needs(_Driver("nodes"), 4711)


def test_a_block_demands_the_largest_of_its_shares() -> None:
    of = Multiprocessor(registers=65_536, shared_bytes=102_400, threads=2048)
    found = BlockNeeds(64, 50_176, 256).shares(of)
    assert (found.shared_memory, found.threads, found.registers) == (0.5, 0.125, 0.25)
    assert found.demand == 0.5
    assert BlockNeeds(128, 0, 512).shares(of).demand == 1.0
    assert BlockNeeds(0, 0, 0).shares(of).demand == 0.0


def _measured_order(seed: int, needs: Any) -> tuple[list[float], TorchCudaExecutor]:
    """The measured demands of a program's launches in the order in which they are issued."""
    device = SimulatedGraphDevice(seed)
    device.needs = needs
    executor = TorchCudaExecutor(device, effort=QUICK)
    model = artifact_of("squeezenet_bypass")
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(1))
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA)
    bound = load(executor, plan, [model])
    step = StepMaker(KEY, bound).step(0, {0: (InstanceId(1), 1)})
    inputs = random_inputs(model.graph, 1)
    assert not wrong(model, inputs, run(executor, step, {InstanceId(1): [inputs]})[InstanceId(1)])
    recipe = executor._built[step.program].program.recipe
    natures = executor.choices.natures(executor._plans[KEY].lowering(0), 1)
    order = [
        natures[unit.ops[0]].demand
        for _, call in recipe.script
        if call is not None and (unit := recipe.kernels[call]) is not None and unit.ops[0] in natures
    ]
    return order, executor


@pytest.mark.promise("launches-ordered-measured-demands")
def test_measured_demands_decide_in_which_order_launches_are_issued() -> None:
    """The same plan on the same device, but every kernel's needs drawn anew: another order, all right."""
    orders = []
    for draw in range(3):
        rng = random.Random(draw)

        def needs(work: Launch, rng: random.Random = rng) -> list[BlockNeeds]:
            return [BlockNeeds(32, 0, 128), BlockNeeds(rng.randrange(16, 256), 0, 256)]

        _, executor = _measured_order(0, needs)
        demands = {round(nature.demand, 6) for nature in _natures(executor)}
        assert len(demands) > 10 and all(0.0 < one <= 1.0 for one in demands)
        orders.append(_issued(executor))
        executor.close()
    assert len({tuple(one) for one in orders}) == 3
    assert len({frozenset(one) for one in orders}) == 1, "the same launches"


def _natures(executor: TorchCudaExecutor) -> list[Any]:
    return list(executor.choices.natures(executor._plans[KEY].lowering(0), 1).values())


def _issued(executor: TorchCudaExecutor) -> list[int]:
    """The launches of the only program, by number, in issue order."""
    (built,) = executor._built.values()
    return [call for _, call in built.program.recipe.script if call is not None]


def test_a_device_that_cannot_say_leaves_the_demand_open() -> None:
    order, executor = _measured_order(0, lambda work: ())
    assert set(order) == {0.0}
    executor.close()


def test_a_driver_that_fails_costs_the_order_and_not_the_program(caplog: pytest.LogCaptureFixture) -> None:
    def needs(work: Launch) -> list[BlockNeeds]:
        raise RuntimeError("reading a captured graph failed: 1")

    order, executor = _measured_order(0, needs)
    assert set(order) == {0.0} and "demand stays unknown: reading" in caplog.text
    executor.close()


def test_the_devices_balance_is_measured_once_for_each_precision() -> None:
    device = SimulatedGraphDevice(0)
    quick = Effort(warm_runs=1, laps=1, launches_per_lap=1, form_rounds=0, product_side=16)
    builder = ProgramBuilder(device, KernelChoices(), quick)
    first = builder._flop_per_byte(Precision.FP32)
    launches = device.launches
    assert first > 0 and builder._flop_per_byte(Precision.FP32) == first
    assert device.launches == launches, "asked again, nothing is launched"
    builder._flop_per_byte(Precision.FP16)
    assert device.launches > launches
    assert (
        ProgramBuilder(device, KernelChoices(), QUICK)._flop_per_byte(Precision.FP32) == USUAL_FLOP_PER_BYTE
    )


@pytest.mark.parametrize("memory", [True, False])
def test_a_balance_that_found_no_memory_is_the_usual_one_on_a_jetson_too(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch fails an assertion about NVML where it should say that memory is short."""
    text = (
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED" if memory else "an illegal memory access was encountered"
    )

    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(ProgramBuilder, "_measured_balance", fails)
    quick = Effort(warm_runs=1, laps=1, launches_per_lap=1, form_rounds=0, product_side=16)
    builder = ProgramBuilder(SimulatedGraphDevice(0), KernelChoices(), quick)
    if memory:
        assert builder._flop_per_byte(Precision.FP32) == USUAL_FLOP_PER_BYTE
    else:
        with pytest.raises(RuntimeError, match="illegal"):
            builder._flop_per_byte(Precision.FP32)
