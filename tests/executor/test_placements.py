"""Every placement computes the same: fixed ones, all of them; and random cuts under every policy."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import Executors, make_executor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.plan import ExecutorOptions, Member, Place, PlacementPolicy, Plan, Resource
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.models import artifact_of, difference, random_inputs, reference

TIMEOUT_S = 60.0
MODEL = "squeezenet"
BLOCKS = 3
RANDOM_PLACEMENTS = 100
POLICIES = [one for one in PlacementPolicy if one is not PlacementPolicy.FIXED]


class Other(OnnxExecutor):
    """onnxruntime under another name: a second executor of a plan."""

    name = "other"


class Served:
    """An engine with two executors, and every tensor that crossed a border."""

    def __init__(self) -> None:
        self.borders: dict[tuple[InstanceId, str], np.ndarray] = {}
        self._made: list[Executor] = []
        self.engine = InProcessEngine(Executors(self._make))

    def _make(self, name: str) -> Executor:
        made = Other() if name == Other.name else make_executor(name)
        made.tap = self._tap
        return made

    def _tap(self, instance: InstanceId, member: Member, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self.borders[instance, name] = array.copy()

    def serve(self, plan: Plan, seeds: range) -> list[dict[str, np.ndarray]]:
        """Tasks one after another; per task every tensor at a border, and the outputs."""
        model = artifact_of(MODEL)
        key = self.engine.load(plan, {model.digest: model})
        self.engine.activate(key)
        found = []
        for seed in seeds:
            self.borders.clear()
            outputs = self.engine.submit("a", random_inputs(model.graph, seed)).result(TIMEOUT_S)
            crossed = {name: array for (_, name), array in self.borders.items()}
            found.append({**crossed, **outputs})
        return found


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    with made.engine:
        yield made


def agree(tensors: dict[str, np.ndarray], seed: int) -> None:
    """All are within 1e-4 of the whole model's."""
    model = artifact_of(MODEL)
    wanted = reference(model, random_inputs(model.graph, seed), list(tensors))
    for name, array in tensors.items():
        assert difference(array, wanted[name]) <= 1e-4, name


def cut_plan(cuts: tuple[int, ...], **rules: object) -> Plan:
    """SqueezeNet in blocks, on a lane of the host and one with a memory of its own."""
    model = artifact_of(MODEL)
    choice = ModelChoice(name="a", artifact=model.digest, graph=model.graph, partition=cuts, replicas=2)
    return replace(
        compose([choice], lanes=2),
        further_executors=(ExecutorOptions(name=Other.name),),
        resources=(Resource(), Resource(memory=1)),
        lane_resources=(0, 1),
        **rules,  # type: ignore[arg-type]
    )


def base_cuts() -> tuple[int, ...]:
    return artifact_of(MODEL).graph.base_cuts


@pytest.mark.parametrize("where", list(product((0, 1), repeat=BLOCKS)), ids=str)
def test_every_fixed_placement_agrees_and_repeats_bit_by_bit(served: Served, where: tuple[int, ...]) -> None:
    cuts = base_cuts()
    plan = cut_plan((cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]))
    fixed = [
        replace(one, resources=(where[one.members[0].block],), executor=where[one.members[0].block])
        for one in plan.combined
    ]
    plan = replace(plan, combined=tuple(fixed))
    first, again = (served.serve(plan, range(2)) for _ in range(2))
    for seed, (one, other) in enumerate(zip(first, again, strict=True)):
        assert len(one) > BLOCKS - 1
        agree(one, seed)
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", range(RANDOM_PLACEMENTS))
def test_a_random_placement_agrees_and_repeats_bit_by_bit(served: Served, seed: int) -> None:
    """Random cuts, places, memory nodes and policies; both executors compute alike, so the bits stay."""
    random = Random(seed)
    cuts = tuple(sorted(random.sample(base_cuts(), random.randint(1, min(4, len(base_cuts()))))))
    plan = cut_plan(cuts, placement=random.choice(POLICIES))
    combined = []
    for block in plan.combined:
        own, other = random.sample((0, 1), 2)
        further = (Place(other, random.randrange(2)),) if random.random() < 0.7 else ()
        combined.append(
            replace(block, resources=(own,), executor=random.randrange(2), further_places=further)
        )
    resources = (Resource(memory=random.randrange(2)), Resource(memory=random.randrange(3)))
    plan = replace(plan, combined=tuple(combined), resources=resources)
    first, again = (served.serve(plan, range(2)) for _ in range(2))
    for task, (one, repeated) in enumerate(zip(first, again, strict=True)):
        agree(one, task)
        assert all(np.array_equal(one[name], repeated[name]) for name in one)
