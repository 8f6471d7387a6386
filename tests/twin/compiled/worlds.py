"""Small random worlds for two twins: models, plans over them, arrivals, and when plans are swapped."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from stageloom.planner.twin.arrivals import Periodic, Poisson, Process
from stageloom.planner.twin.device_file import DeviceFile, load_device
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import PlanTimes, StepTime, StepTimes
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.patience import PATIENCE_S
from stageloom.shared.engine.steps import Action, FinishTask, PrepareProgram, ProgramKey, Step
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Member, ModelPlan, QueuePlan, QueueRule, StepChoice, Wait
from tests.engine.generate import digest, members_of, on_resources, plan_of, random_graph

_TICKS_PER_S = 1 << 14
_LARGEST = 4  # members of a combined block: its times are a dense table


@dataclass(frozen=True)
class World:
    """What a twin is made of, and the plans that it runs one after another for so many seconds each."""

    device: DeviceFile
    arrivals: dict[str, Process]
    deadlines_s: dict[str, float]
    plans: tuple[tuple[BoundPlan, float], ...]
    seed: int
    patience_s: float = PATIENCE_S

    @property
    def times(self) -> StepTimes:
        """Fresh ones, in every other world whole ticks long."""
        return (_WholeTicks if self.seed % 2 else StepTimes).derived(self.device)


class _WholeTicks(StepTimes):
    """Times that are multiples of a power of two, so that steps end just when tasks arrive."""

    def of_plan(self, bound: BoundPlan) -> PlanTimes:
        return _TickTimes(super().of_plan(bound).blocks, bound)


class _TickTimes(PlanTimes):
    def step(self, combined: int, mask: int, buckets: tuple[int, ...], *, fallback: bool = False) -> StepTime:
        found = super().step(combined, mask, buckets, fallback=fallback)
        ticks = math.ceil(found.seconds * _TICKS_PER_S), math.ceil(found.crowded_s * _TICKS_PER_S)
        return found._replace(seconds=ticks[0] / _TICKS_PER_S, crowded_s=ticks[1] / _TICKS_PER_S)


@dataclass(frozen=True)
class UnevenWorld(World):
    """Steps of the i-th combined block take a tenth of the device more than those of the one before."""

    @property
    def times(self) -> StepTimes:
        return _UnevenShares.derived(self.device)


class _UnevenShares(StepTimes):
    def of_plan(self, bound: BoundPlan) -> PlanTimes:
        return _UnevenTimes(super().of_plan(bound).blocks, bound)


class _UnevenTimes(PlanTimes):
    def step(self, combined: int, mask: int, buckets: tuple[int, ...], *, fallback: bool = False) -> StepTime:
        found = super().step(combined, mask, buckets, fallback=fallback)
        return found._replace(share=(combined + 1) / 10, crowded_share=(combined + 2) / 10)


def random_world(seed: int) -> World:
    """A world by its number."""
    random = Random(seed)
    graphs = {digest(index): random_graph(random, f"m{index}") for index in range(random.randint(1, 3))}
    names = [graph.name for graph in graphs.values()]
    device = replace(
        load_device("nano"),
        lanes_interference=random.choice([0.0, 0.13, 1.0]),
        beside_s=Random(f"beside {seed}").choice([0.0, 2.0**-14]),  # the planted defects know their seeds
        item_beside_s=Random(f"items {seed}").choice([0.0, 2.0**-15]),
        cores=Random(f"cores {seed}").choice([0, 0, 2, 4]),
        task_s=random.choice([0.0, 1e-4]),
        noise=random.choice([(), ((0.0, 0.8), (0.5, 1.0), (0.9, 1.1), (1.0, 3.0))]),
    )
    load_per_s = 2.0 ** random.randint(9, 13)
    processes = (
        Poisson(rate_per_s=load_per_s),
        Periodic(rate_per_s=load_per_s),
        Periodic(rate_per_s=2 * load_per_s),
        Periodic(rate_per_s=load_per_s, jitter_s=0.3 / load_per_s),
    )
    return World(
        device=device,
        arrivals={name: random.choice(processes) for name in random.sample(names, k=len(names))},
        deadlines_s={name: 2.0 ** -random.randint(9, 11) for name in names if random.random() < 0.25},
        plans=tuple(
            (_random_plan(random, graphs), random.randint(8, 64) * 2.0**-13)
            for _ in range(random.randint(1, 4))
        ),
        seed=seed,
        patience_s=Random(f"patience {seed}").choice([PATIENCE_S, 0.0, 2.0**-11, 2.0**-9]),
    )


def lengthened(world: World, factor: float) -> World:
    """The same world with each plan running longer."""
    return replace(world, plans=tuple((bound, factor * seconds) for bound, seconds in world.plans))


def _random_plan(random: Random, graphs: dict[Digest, Graph]) -> BoundPlan:
    models = [_random_model(random, artifact, graph) for artifact, graph in graphs.items()]
    wait = random.choice([Wait.NONE, Wait.NONE, Wait.NONE, Wait.ALL, Wait.TIMEOUT])
    members = members_of(models)
    if wait is Wait.NONE:
        groups = _random_groups(random, members)
    else:
        groups = []  # blocks of one depth together: no cycle, and never two blocks of one replica
        for depth in range(max(model.num_blocks for model in models)):
            groups += _random_groups(random, [member for member in members if member.block == depth])
    bound = plan_of(
        models,
        groups,
        graphs,
        lanes=random.choice([1, 1, 2, 3]),
        run_ahead=random.choice([1, 2, 2, 3]),
        step_choice=random.choice([StepChoice.RATIO, *StepChoice]),
        wait=wait,
        wait_timeout_us=random.choice([0, 100, 800]),
        max_skips=random.randint(1, 4),
    )
    return on_resources(random, bound) if random.random() < 0.3 else bound


def _random_model(random: Random, artifact: Digest, graph: Graph) -> ModelPlan:
    batch = random.choice([1, 1, 1, 2, 3, 4])
    return ModelPlan(
        name=graph.name,
        artifact=artifact,
        cuts=tuple(cut for cut in graph.base_cuts if random.random() < 0.7),
        replicas=random.choice([1, 1, 2, 3]),
        batch=batch,
        batch_max_delay_us=random.choice([0, 300]) if batch > 1 else 0,
        launch_interval_us=random.choice([0, 0, 200, 900]),
        work_conserving=random.random() < 0.5,
        weight=random.randint(1, 4),
        queue=QueuePlan(
            rule=random.choice(list(QueueRule)),
            max_tasks=random.choice([1, 3, 8, 100]),
            max_bytes=random.choice([60, 1 << 20]),
        ),
    )


def _random_groups(random: Random, members: list[Member]) -> list[list[Member]]:
    groups: list[list[Member]] = [[] for _ in range(random.randint(1, len(members)))]
    for member in random.sample(members, k=len(members)):
        group = random.choice(groups)
        if len(group) == _LARGEST:
            groups.append(group := [])
        group.append(member)
    return [group for group in groups if group]


class TracedTwin(Twin):
    """The reference, with what it issued and what ended."""

    def __init__(self, world: World, *, prepared: bool = False) -> None:
        super().__init__(
            world.times,
            world.arrivals,
            seed=world.seed,
            deadlines_s=world.deadlines_s,
            patience_s=world.patience_s,
        )
        self.prepared = prepared
        self.issued: list[tuple[float, Step]] = []
        self.ended: list[tuple[float, FinishTask]] = []

    def _issue(self, step: Step) -> None:
        self.issued.append((self.now_s, step))
        super()._issue(step)

    def _act(self, actions: Sequence[Action]) -> None:
        self.ended += [(self.now_s, one) for one in actions if isinstance(one, FinishTask)]
        if self.prepared and any(isinstance(one, PrepareProgram) for one in actions):
            self._prepare_all()
        super()._act(actions)

    def _prepare_all(self) -> None:
        """Every mask with every choice of buckets."""
        key = max(self._plans)
        bound = self._plans[key].bound
        for index, combined in enumerate(bound.combined):
            ways = [(0, *bound.models[member.model].buckets) for member in combined.members]
            for chosen in itertools.product(*ways):
                mask = sum(1 << position for position, bucket in enumerate(chosen) if bucket)
                program = ProgramKey(key, index, mask, tuple(filter(None, chosen)))
                self._core.program_ready(program, self.now_s)
