"""Small random graphs and plans over them, from a seeded generator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from stageloom.shared.blocks import combine, split
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.graph import Graph, Operator, Tensor, graph_problem
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.plan import (
    CombinedBlock,
    ExecutorOptions,
    Member,
    ModelPlan,
    Place,
    PlacementPolicy,
    Plan,
    QueuePlan,
    QueueRule,
    Resource,
    StepChoice,
    Wait,
)
from stageloom.shared.schedule import StageSchedule, stage_schedule


def digest(number: int) -> Digest:
    """A digest that only a test could have."""
    return Digest(f"{number:064x}")


def chain(name: str, operators: int) -> Graph:
    """Operators one after another; every position between two of them is a base cut."""
    return graph_of(name, [[op] for op in range(operators)], outputs=[operators])


def graph_of(name: str, reads: Sequence[Sequence[int]], outputs: Sequence[int], inputs: int = 1) -> Graph:
    """Operator i reads the tensors `reads[i]` and makes tensor `inputs + i`; the first tensors are inputs."""
    graph = Graph(
        name=name,
        tensors=tuple(Tensor(f"t{i}", "float32", (2,)) for i in range(inputs + len(reads))),
        operators=tuple(
            Operator(
                "Conv",
                f"op{i}",
                (i,),
                tuple(map(TensorId, read)),
                (TensorId(inputs + i),),
                1,
                1,
                fused_unit=i,
            )
            for i, read in enumerate(reads)
        ),
        inputs=tuple(TensorId(i) for i in range(inputs)),
        outputs=tuple(map(TensorId, outputs)),
        base_cuts=tuple(range(1, len(reads))),
        batchable=True,
    )
    assert not graph_problem(graph)
    return graph


def random_graph(random: Random, name: str) -> Graph:
    """A graph of a few operators with skips of any length."""
    count = random.randint(1, 8)
    inputs = random.randint(1, 2)
    reads = []
    for op in range(count):
        known = inputs + op
        latest = known - 1
        extra = random.sample(range(known), k=min(known, random.choice([0, 0, 1, 2])))
        reads.append(sorted({latest, *extra}))
    read = {tensor for row in reads for tensor in row}
    made = range(inputs, inputs + count)
    outputs = [tensor for tensor in made if tensor not in read or random.random() < 0.1]
    return graph_of(name, reads, outputs, inputs)


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


def sequential(size: int) -> StageSchedule:
    """Operators one after another."""
    return stage_schedule([[[op]] for op in range(size)])


def plan_of(
    models: Sequence[ModelPlan],
    groups: Sequence[Sequence[Member]],
    graphs: dict[Digest, Graph],
    **rules: object,
) -> BoundPlan:
    """A bound plan with sequential schedules."""
    blocks = [split(graphs[model.artifact], model.cuts) for model in models]
    combined = []
    for members in groups:
        size = combine([(graphs[models[m.model].artifact], blocks[m.model][m.block]) for m in members]).size
        combined.append(CombinedBlock(tuple(members), sequential(size)))
    return bind(Plan(models=tuple(models), combined=tuple(combined), **rules), graphs)  # type: ignore[arg-type]


def on_resources(random: Random, bound: BoundPlan) -> BoundPlan:
    """The plan with its lanes on two resources or three, and some of its blocks bound to some of them."""
    plan = bound.plan
    owners = [random.randrange(3) for _ in range(plan.lanes)]
    used = sorted(set(owners))
    combined = [
        replace(one, resources=tuple(sorted(random.sample(used, random.randint(1, len(used))))))
        if random.random() < 0.6
        else one
        for one in plan.combined
    ]
    changed = replace(
        plan, combined=tuple(combined), resources=(Resource(),) * 3, lane_resources=tuple(owners)
    )
    return bind(changed, {model.plan.artifact: model.graph for model in bound.models})


def placed(random: Random, bound: BoundPlan) -> BoundPlan:
    """The plan with its blocks placed on up to three resources of up to two memory nodes; none waits."""
    plan = bound.plan
    lanes = random.randint(1, 4)
    owners = [random.randrange(3) for _ in range(lanes)]
    used = sorted(set(owners))
    combined = []
    for block in plan.combined:
        own, *further = random.sample(used, random.randint(1, len(used)))
        same = further and random.random() < 0.3  # the first of them as the block's own, too
        resources = tuple(sorted([own, further.pop()] if same else [own]))
        places = tuple(Place(one, random.randrange(2), block.schedule) for one in further)
        combined.append(replace(block, resources=resources, further_places=places))
    changed = replace(
        plan,
        combined=tuple(combined),
        lanes=lanes,
        wait=Wait.NONE,
        resources=tuple(Resource(memory=random.choice([0, 0, 1])) for _ in range(3)),
        lane_resources=tuple(owners),
        further_executors=(ExecutorOptions(name="other"),),
        placement=random.choice([one for one in PlacementPolicy if one is not PlacementPolicy.FIXED]),
    )
    return bind(changed, {model.plan.artifact: model.graph for model in bound.models})


@dataclass(frozen=True)
class Library:
    """The models that a scenario's plans choose from."""

    graphs: dict[Digest, Graph]
    names: dict[Digest, str]


def random_library(random: Random) -> Library:
    """A few models; one name may have two artifacts, of which a plan takes one."""
    graphs: dict[Digest, Graph] = {}
    names: dict[Digest, str] = {}
    for number in range(random.randint(1, 3)):
        graphs[digest(number)] = random_graph(random, f"m{number}")
        names[digest(number)] = f"m{number}"
    if random.random() < 0.3:
        graphs[digest(9)] = random_graph(random, "m0")
        names[digest(9)] = "m0"
    return Library(graphs, names)


def _random_model(random: Random, artifact: Digest, library: Library) -> ModelPlan:
    graph = library.graphs[artifact]
    cuts = tuple(cut for cut in graph.base_cuts if random.random() < 0.7)
    batch = random.choice([1, 1, 2, 3, 4])
    return ModelPlan(
        name=library.names[artifact],
        artifact=artifact,
        cuts=cuts,
        replicas=random.choice([1, 1, 2, 3]),
        batch=batch,
        batch_max_delay_us=random.choice([0, 2_000]) if batch > 1 else 0,
        launch_interval_us=random.choice([0, 0, 1_000, 5_000]),
        work_conserving=random.random() < 0.5,
        weight=random.randint(1, 4),
        queue=QueuePlan(
            rule=random.choice(list(QueueRule)),
            max_tasks=random.choice([1, 3, 8, 100]),
            max_bytes=random.choice([60, 1 << 20]),
        ),
    )


def random_plan(random: Random, library: Library) -> BoundPlan:
    """A legal plan over some of the library's models."""
    by_name: dict[str, Digest] = {}
    for artifact in random.sample(list(library.graphs), k=len(library.graphs)):
        if not by_name or random.random() < 0.8:
            by_name.setdefault(library.names[artifact], artifact)
    models = [_random_model(random, artifact, library) for artifact in by_name.values()]
    wait = random.choice([Wait.NONE, Wait.NONE, Wait.NONE, Wait.ALL, Wait.TIMEOUT])
    members = members_of(models)
    if wait is Wait.NONE:
        groups = random_groups(random, members)
    else:
        # Blocks of one depth together: no cycle, and never two blocks of one replica.
        groups = []
        for depth in range(max(model.num_blocks for model in models)):
            level = [member for member in members if member.block == depth]
            groups.extend(random_groups(random, level))
    bound = plan_of(
        models,
        groups,
        library.graphs,
        lanes=random.choice([1, 1, 2, 3]),
        run_ahead=random.choice([1, 1, 2, 3]),
        step_choice=random.choice(list(StepChoice)),
        wait=wait,
        wait_timeout_us=random.choice([0, 500, 4_000]),
        max_skips=random.randint(1, 4),
    )
    kind = random.random()
    if kind < 0.2:
        return placed(random, bound)
    return on_resources(random, bound) if kind < 0.45 else bound
