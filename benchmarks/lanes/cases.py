"""The plans, loads and step times of `benchmarks.lanes`: a full sweep over chains, and random plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from benchmarks.lanes.device import StepSeconds
from stageloom.shared.blocks import combine, split
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.plan import (
    CombinedBlock,
    Member,
    ModelPlan,
    Plan,
    QueuePlan,
    QueueRule,
    StepChoice,
    Wait,
)
from stageloom.shared.schedule import stage_schedule

_QUEUE = QueuePlan(max_tasks=10_000)


@dataclass(frozen=True)
class Chains:
    """Models that are chains of equal blocks, every block for itself; no member ever waits for another."""

    lanes: int
    replicas: int
    blocks: int
    run_ahead: int
    models: int
    tasks: int  # in the system at any time
    random_times: bool

    def plan(self) -> BoundPlan:
        graphs = [_chain(index, self.blocks) for index in range(self.models)]
        models = [_model(index, graph, self.replicas) for index, graph in enumerate(graphs)]
        groups = [[member] for member in members_of(models)]
        return _bind(models, groups, graphs, lanes=self.lanes, run_ahead=self.run_ahead)

    def seconds(self) -> StepSeconds:
        """1 s a block, or drawn with a mean of 1 s and a spread from a fifth of that."""
        if not self.random_times:
            return lambda step: 1.0
        random = Random(self.blocks)
        return lambda step: 0.2 + random.expovariate(1.25)

    @property
    def bound_tasks_per_s(self) -> float:
        """What equal times allow: min(L / W, R / max(t_b + t_{b+1})), as adjacent blocks never overlap."""
        adjacent_s = min(self.blocks, 2)
        return min(self.lanes / self.blocks, self.models * self.replicas / adjacent_s)


def sweep(
    *, lanes: Sequence[int], replicas: Sequence[int], blocks: Sequence[int], models: Sequence[int]
) -> Iterator[Chains]:
    """All combinations, under few and under many tasks, run-ahead 1 and 2, equal and random times."""
    for of_lanes, of_replicas, of_blocks, of_models, run_ahead, random_times in product(
        lanes, replicas, blocks, models, (1, 2), (False, True)
    ):
        for tasks in dict.fromkeys((of_lanes, 2 * of_lanes, 2 * of_replicas * of_models * of_blocks)):
            if tasks >= of_lanes:
                yield Chains(of_lanes, of_replicas, of_blocks, run_ahead, of_models, tasks, random_times)


def random_plan(random: Random) -> BoundPlan:
    """Up to three models with skips over blocks, combined at random, under any rule that is legal."""
    graphs = [_random_graph(random, index) for index in range(random.randint(1, 3))]
    models = [
        _model(index, graph, random.randint(1, 4), random.random() * 0.7 + 0.3, random)
        for index, graph in enumerate(graphs)
    ]
    wait = random.choice([Wait.NONE, Wait.NONE, Wait.NONE, Wait.ALL, Wait.TIMEOUT])
    members = members_of(models)
    if wait is Wait.NONE:
        groups = random_groups(random, members)
    else:  # blocks of one depth together: no cycle, and never two blocks of one replica
        depths = range(max(model.num_blocks for model in models))
        groups = [
            group
            for depth in depths
            for group in random_groups(random, [one for one in members if one.block == depth])
        ]
    return _bind(
        models,
        groups,
        graphs,
        lanes=random.randint(1, 4),
        run_ahead=random.randint(1, 2),
        step_choice=random.choice(list(StepChoice)),
        wait=wait,
        wait_timeout_us=random.choice([0, 500_000, 2_000_000]) if wait is Wait.TIMEOUT else 0,
        max_skips=random.randint(1, 8),
    )


def random_seconds(random: Random) -> StepSeconds:
    """Equal times, or random ones; members of a step take theirs one after another."""
    if random.random() < 0.5:
        return lambda step: float(len(step.members))
    drawn = Random(random.random())
    return lambda step: sum(0.2 + drawn.expovariate(1.25) for _ in step.members)


def _bind(
    models: Sequence[ModelPlan], groups: Sequence[Sequence[Member]], graphs: Sequence[Graph], **rules: object
) -> BoundPlan:
    blocks = [split(graph, model.cuts) for graph, model in zip(graphs, models, strict=True)]
    combined = []
    for group in groups:
        size = combine([(graphs[m.model], blocks[m.model][m.block]) for m in group]).size
        combined.append(CombinedBlock(tuple(group), stage_schedule([[[op]] for op in range(size)])))
    plan = Plan(models=tuple(models), combined=tuple(combined), **rules)  # type: ignore[arg-type]
    return bind(plan, {model.artifact: graph for model, graph in zip(models, graphs, strict=True)})


def _model(
    index: int, graph: Graph, replicas: int, cut_share: float = 1.0, random: Random | None = None
) -> ModelPlan:
    cuts = tuple(cut for cut in graph.base_cuts if random is None or random.random() < cut_share)
    rule = random.choice(list(QueueRule)) if random else QueueRule.REFUSE_NEWEST
    queue = QueuePlan(rule=rule, max_tasks=_QUEUE.max_tasks)
    return ModelPlan(name=f"m{index}", artifact=_digest(index), cuts=cuts, replicas=replicas, queue=queue)


def members_of(models: Sequence[ModelPlan]) -> list[Member]:
    """All sub-blocks of a plan."""
    return [
        Member(index, replica, block)
        for index, model in enumerate(models)
        for replica in range(model.replicas)
        for block in range(model.num_blocks)
    ]


def random_groups(random: Random, members: Sequence[Member]) -> list[list[Member]]:
    """Each member in one group, none of them empty."""
    groups: list[list[Member]] = [[] for _ in range(random.randint(1, len(members)))]
    for member in random.sample(members, k=len(members)):
        random.choice(groups).append(member)
    return [group for group in groups if group]


def _digest(index: int) -> Digest:
    return Digest(f"{index:064x}")


def _chain(index: int, blocks: int) -> Graph:
    return _graph(index, [[op] for op in range(blocks)])


def _random_graph(random: Random, index: int) -> Graph:
    reads = []
    for op in range(random.randint(1, 12)):
        skips = random.sample(range(op + 1), k=min(op + 1, random.choice([0, 0, 0, 1])))
        reads.append(sorted({op, *skips}))
    return _graph(index, reads)


def _graph(index: int, reads: Sequence[Sequence[int]]) -> Graph:
    """Operator i reads the tensors `reads[i]` and makes tensor i + 1; every position is a base cut."""
    return Graph(
        name=f"m{index}",
        tensors=tuple(Tensor(f"t{i}", "float32", (2,)) for i in range(len(reads) + 1)),
        operators=tuple(
            Operator(
                "Conv", f"op{i}", (i,), tuple(map(TensorId, read)), (TensorId(i + 1),), 1, 1, fused_unit=i
            )
            for i, read in enumerate(reads)
        ),
        inputs=(TensorId(0),),
        outputs=(TensorId(len(reads)),),
        base_cuts=tuple(range(1, len(reads))),
        batchable=True,
    )
