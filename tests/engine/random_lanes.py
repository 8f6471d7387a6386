"""Random plans under random loads on `benchmarks.lanes`' device: whether a lane idled that need not have."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.lanes.device import LaneUse, VirtualDevice
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import Step
from stageloom.shared.graph import Graph
from stageloom.shared.plan import ModelPlan, Plan, QueuePlan, QueueRule, StepChoice, Wait
from tests.engine.generate import digest, graph_of, members_of, on_resources, plan_of, random_groups

_LOADS = (0.05, 0.2, 1.0)  # tasks/s; a block takes about a second


@dataclass(frozen=True)
class RandomUse:
    """What one random plan's lanes did."""

    plan: Plan
    use: LaneUse


def random_plan(random: Random) -> BoundPlan:
    """Up to three models with skips over blocks, combined at random, under any rule that is legal."""
    graphs = [_random_graph(random, index) for index in range(random.randint(1, 3))]
    models = [_random_model(random, index, graph) for index, graph in enumerate(graphs)]
    wait = random.choice([Wait.NONE, Wait.NONE, Wait.NONE, Wait.ALL, Wait.TIMEOUT])
    members = members_of(models)
    if wait is Wait.NONE:
        groups = random_groups(random, members)
    else:  # blocks of one depth together: no cycle, and never two blocks of one replica
        depths = range(max(model.num_blocks for model in models))
        groups = [
            group
            for depth in depths
            for group in random_groups(random, [member for member in members if member.block == depth])
        ]
    bound = plan_of(
        models,
        groups,
        {model.artifact: graph for model, graph in zip(models, graphs, strict=True)},
        lanes=random.randint(1, 4),
        run_ahead=random.randint(1, 2),
        step_choice=random.choice(list(StepChoice)),
        wait=wait,
        wait_timeout_us=random.choice([0, 500_000, 2_000_000]) if wait is Wait.TIMEOUT else 0,
        max_skips=random.randint(1, 8),
    )
    return on_resources(random, bound) if random.random() < 0.3 else bound


def _random_graph(random: Random, index: int) -> Graph:
    reads = []
    for op in range(random.randint(1, 12)):
        skips = random.sample(range(op + 1), k=min(op + 1, random.choice([0, 0, 0, 1])))
        reads.append(sorted({op, *skips}))
    return graph_of(f"m{index}", reads, outputs=[len(reads)])


def _random_model(random: Random, index: int, graph: Graph) -> ModelPlan:
    replicas, cut_share = random.randint(1, 4), random.random() * 0.7 + 0.3
    cuts = tuple(cut for cut in graph.base_cuts if random.random() < cut_share)
    queue = QueuePlan(rule=random.choice(list(QueueRule)), max_tasks=10_000)
    return ModelPlan(name=f"m{index}", artifact=digest(index), cuts=cuts, replicas=replicas, queue=queue)


def random_seconds(random: Random) -> Callable[[Step], float]:
    """Equal times, or random ones; members of a step take theirs one after another."""
    if random.random() < 0.5:
        return lambda step: float(len(step.members))
    drawn = Random(random.random())
    return lambda step: sum(0.2 + drawn.expovariate(1.25) for _ in step.members)


def random_use(seed: int, completions: int) -> RandomUse:
    """One random plan under a random load."""
    random = Random(seed)
    bound = random_plan(random)
    seconds = random_seconds(random)
    plan = bound.plan
    deadlines_s = (5.0, 100.0) if plan.wait is Wait.NONE and random.random() < 0.5 else None
    if plan.wait is not Wait.ALL and random.random() < 0.6:  # `all` may wait for a task that never comes
        tasks, rate = random.choice((plan.lanes, 3 * plan.lanes, 40)), 0.0
    else:
        tasks, rate = 0, random.choice(_LOADS)
    device = VirtualDevice(bound, seconds, seed=seed, tasks=tasks, rate=rate, deadlines_s=deadlines_s)
    return RandomUse(plan, device.run(completions))
