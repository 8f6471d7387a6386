"""The paced executor: results are right, and what it waits for is told by the clock it is given."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import Executors, make_executor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.slot_store import SlotStore
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared.blocks import split
from stageloom.shared.engine.residency import Bus
from stageloom.shared.plan import ExecutorOptions, Plan, Resource
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.paced import PacedExecutor, PacedTransfer

TIMEOUT_S = 60.0
BUS = Bus(latency_s=0.5, bytes_per_s=1000.0)
SLOW = 3.0


class Time:
    """A clock on which all that is asked for takes a second, and what was slept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def engine(time: Time) -> Iterator[InProcessEngine]:
    paced = PacedExecutor(OnnxExecutor(), slow=SLOW, clock=time.clock, sleep=time.sleep)

    def make(name: str) -> Executor:
        return paced if name == "paced" else make_executor(name)

    with InProcessEngine(Executors(make, SlotStore(PacedTransfer(BUS, time.sleep)))) as made:
        yield made


def in_parts(*executors: int) -> Plan:
    """SqueezeNet in its paper's first blocks and the rest, each run by `onnx` (0) or `paced` (1), which has a
    lane and a memory of its own."""
    model = artifact_of("squeezenet")
    choice = ModelChoice(name="a", artifact=model.digest, graph=model.graph, partition="paper")
    plan = compose([choice])
    assert len(plan.combined) >= len(executors)
    where = [executors[min(one.members[0].block, len(executors) - 1)] for one in plan.combined]
    return replace(
        plan,
        further_executors=(ExecutorOptions(name="paced"),),
        combined=tuple(
            replace(one, executor=place, resources=(place,))
            for one, place in zip(plan.combined, where, strict=True)
        ),
        lanes=2,
        resources=(Resource(), Resource(memory=1)),
        lane_resources=(0, 1),
    )


def serve(engine: InProcessEngine, plan: Plan, seed: int = 1) -> None:
    """One task; its outputs are the whole model's."""
    model = artifact_of("squeezenet")
    engine.activate(engine.load(plan, {model.digest: model}))
    inputs = random_inputs(model.graph, seed)
    got = engine.submit("a", inputs).result(TIMEOUT_S)
    wanted = reference(model, inputs, list(got))
    assert all(difference(got[name], wanted[name]) <= 1e-4 for name in got)


def border_bytes(plan: Plan, block: int) -> list[int]:
    """Of the tensors that cross into a block."""
    graph = artifact_of("squeezenet").graph
    blocks = split(graph, plan.models[0].cuts)
    return [graph.tensors[tensor].nbytes for tensor in blocks[block].live_in]


def test_every_session_waits_twice_what_it_computed_and_inputs_wait_for_the_bus(
    engine: InProcessEngine, time: Time
) -> None:
    plan = in_parts(1)
    serve(engine, plan)
    graph = artifact_of("squeezenet").graph
    assert time.slept[0] == BUS.copy_s([graph.tensors[t].nbytes for t in graph.inputs])
    assert time.slept[1:] == [SLOW - 1] * len(plan.combined)


def test_a_plan_on_the_fast_one_alone_waits_for_nothing(engine: InProcessEngine, time: Time) -> None:
    serve(engine, in_parts(0))
    assert time.slept == []


def test_what_crosses_the_border_waits_for_the_bus_once_each_way(engine: InProcessEngine, time: Time) -> None:
    plan = in_parts(0, 1, 0)
    serve(engine, plan)
    copies = [seconds for seconds in time.slept if seconds != SLOW - 1]
    reads = [BUS.copy_s([nbytes]) for block in (1, 2) for nbytes in border_bytes(plan, block)]
    assert copies == pytest.approx(reads)
