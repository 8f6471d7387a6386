"""Binding a plan to its graphs: what is derived, and every reason for which it is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from stageloom.shared.blocks import combine, split
from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import (
    CombinedBlock,
    ExecutorOptions,
    Member,
    ModelPlan,
    Place,
    PlacementPolicy,
    Plan,
    Resource,
    Wait,
    decode_plan,
)
from stageloom.shared.schedule import Schedule
from stageloom.shared.stage_string import parse
from tests.shared.randoms import name_digest, random_graph, random_schedule
from tests.shared.test_graph import chain

A, B = name_digest("a"), name_digest("b")
GRAPHS: dict[Digest, Graph] = {A: chain(4), B: replace(chain(3), name="b", batchable=True)}


def combined(*members: tuple[int, int, int], schedule: str) -> CombinedBlock:
    return CombinedBlock(tuple(Member(*member) for member in members), parse(schedule))


def two_models() -> Plan:
    """Model a in two blocks of two operators, model b in one of three; a's second block runs beside b."""
    return Plan(
        models=(ModelPlan(name="a", artifact=A, cuts=(2,)), ModelPlan(name="b", artifact=B)),
        combined=(combined((0, 0, 0), schedule="0/1"), combined((0, 0, 1), (1, 0, 0), schedule="0-1|2-4")),
    )


def test_a_bound_plan_knows_its_blocks_homes_and_sizes() -> None:
    bound = bind(two_models(), GRAPHS)
    assert bound.home == {Member(0, 0, 0): (0, 0), Member(0, 0, 1): (1, 0), Member(1, 0, 0): (1, 1)}
    assert bound.model_index == {"a": 0, "b": 1}
    assert bound.models[0].input_bytes == 24
    assert [block.start for block in bound.models[0].blocks] == [0, 2]
    assert bound.models[0].slot_readers == (0, 1)
    assert [c.full_mask for c in bound.combined] == [0b1, 0b11]
    assert bound.combined[1].graph.size == 5
    assert bound.combined[1].members == (Member(0, 0, 1), Member(1, 0, 0))


@pytest.mark.parametrize(
    ("batch", "buckets"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_buckets_are_powers_of_two_and_the_batch_itself(batch: int, buckets: tuple[int, ...]) -> None:
    plan = Plan(
        models=(ModelPlan(name="b", artifact=B, batch=batch),),
        combined=(combined((0, 0, 0), schedule="0..2"),),
    )
    model = bind(plan, GRAPHS).models[0]
    assert model.buckets == buckets
    for tasks in range(1, batch + 1):
        assert model.bucket_for(tasks) == min(size for size in buckets if size >= tasks)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_of_random_graphs_with_legal_schedules_binds_and_still_binds_after_the_wire(seed: int) -> None:
    random = Random(seed)
    graphs = {name_digest(str(i)): random_graph(random, random.randint(2, 8)) for i in range(2)}
    models = tuple(
        ModelPlan(name=str(i), artifact=digest, cuts=graph.base_cuts, replicas=random.randint(1, 2))
        for i, (digest, graph) in enumerate(graphs.items())
    )
    members = [
        Member(m, k, b)
        for m, model in enumerate(models)
        for k, b in product(range(model.replicas), range(model.num_blocks))
    ]
    random.shuffle(members)
    blocks = []
    while members:
        size = random.randint(1, 3)
        part, members = tuple(members[:size]), members[size:]
        blocks.append(CombinedBlock(part, _legal(random, models, graphs, part)))
    plan = Plan(models=models, combined=tuple(blocks))
    assert bind(plan, graphs).plan == bind(decode_plan(plan.wire), graphs).plan


def _legal(
    random: Random, models: tuple[ModelPlan, ...], graphs: dict[Digest, Graph], part: tuple[Member, ...]
) -> Schedule:
    pairs = []
    for member in part:
        graph = graphs[models[member.model].artifact]
        pairs.append((graph, split(graph, models[member.model].cuts)[member.block]))
    return random_schedule(random, combine(pairs))


def change_model(plan: Plan, **change: object) -> Plan:
    return replace(plan, models=(replace(plan.models[0], **change), *plan.models[1:]))  # type: ignore[arg-type]


def change_combined(plan: Plan, *blocks: CombinedBlock) -> Plan:
    return replace(plan, combined=blocks)


FIRST, SECOND = two_models().combined


def placed(plan: Plan, block: dict[str, object] | None = None, **change: object) -> Plan:
    """On two lanes and resources, each block allowed on both; `block` changes the second block."""
    both = {"resources": (0,), "further_places": (Place(1),)}
    first = replace(FIRST, **both)  # type: ignore[arg-type]
    second = replace(SECOND, **{**both, **(block or {})})  # type: ignore[arg-type]
    rules = {"placement": PlacementPolicy.DMDA, "lanes": 2, "lane_resources": (0, 1)}
    resources = (Resource(), Resource(memory=1))
    return replace(plan, combined=(first, second), resources=resources, **{**rules, **change})  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "no model": (lambda plan: replace(plan, models=(), combined=()), "at least one model"),
    "absent artifact": (lambda plan: change_model(plan, artifact=name_digest("c")), "is not here"),
    "shared name": (lambda plan: change_model(plan, name="b"), "share a name"),
    "cut off the base cuts": (lambda plan: change_model(plan, cuts=(4,)), "base cuts"),
    "repeated cut": (lambda plan: change_model(plan, cuts=(2, 2)), "base cuts"),
    "descending cuts": (lambda plan: change_model(plan, cuts=(3, 2)), "base cuts"),
    "batch of dependent rows": (lambda plan: change_model(plan, batch=2), "batches of 2"),
    "block in none": (lambda plan: change_combined(plan, FIRST), "in no combined block"),
    "block in two": (lambda plan: change_combined(plan, FIRST, FIRST, SECOND), "in two combined blocks"),
    "replica in none": (lambda plan: change_model(plan, replicas=2), "in no combined block"),
    "unknown block": (
        lambda plan: change_combined(plan, FIRST, SECOND, combined((0, 0, 2), schedule="0")),
        "no model has",
    ),
    "no member": (
        lambda plan: change_combined(plan, FIRST, SECOND, CombinedBlock((), parse("0"))),
        "no member",
    ),
    "unknown executor": (
        lambda plan: change_combined(plan, FIRST, replace(SECOND, executor=1)),
        "names executor 1 of a plan with 1",
    ),
    "lane without a resource": (
        lambda plan: replace(plan, lanes=2, resources=(Resource(),), lane_resources=(0,)),
        "1 of 2 lanes name a resource; name all",
    ),
    "unknown resource": (
        lambda plan: replace(plan, resources=(Resource(),), lane_resources=(1,)),
        "a lane names resource 1 of a plan with 1",
    ),
    "core named twice": (
        lambda plan: replace(plan, resources=(Resource(cores=(1, 1)),), lane_resources=(0,)),
        "cores of resource 0 are not ascending",
    ),
    "overlapping cores": (
        lambda plan: replace(
            plan,
            lanes=2,
            resources=(Resource(cores=(0, 1)), Resource(cores=(1,))),
            lane_resources=(0, 1),
        ),
        "core 1 belongs to two resources; give each core to one",
    ),
    "more threads than cores": (
        lambda plan: replace(
            plan,
            executor=ExecutorOptions(intra_op_threads=2),
            lanes=2,
            resources=(Resource(cores=(0, 1, 2)),),
            lane_resources=(0, 0),
        ),
        "resource 0 has 3 cores for 2 lanes of 2 threads; use fewer",
    ),
    "places in a fixed plan": (
        lambda plan: placed(plan, placement=PlacementPolicy.FIXED),
        "combined block 0 has several places in a plan whose placement is fixed; name a placement",
    ),
    "no place": (
        lambda plan: placed(plan, {"resources": (), "further_places": ()}),
        "placement 'dmda' needs the resources of combined block 1, each once",
    ),
    "place named twice": (lambda plan: placed(plan, {"further_places": (Place(0),)}), "block 1, each once"),
    "place without a lane": (
        lambda plan: placed(plan, lane_resources=(0, 0)),
        "names resource 1, which has no lane",
    ),
    "place with an unknown executor": (
        lambda plan: placed(plan, {"further_places": (Place(1, 1),)}),
        "names executor 1 of a plan with 1",
    ),
    "illegal schedule in a further place": (
        lambda plan: placed(plan, {"further_places": (Place(1, 0, parse("0")),)}),
        "combined block 1: ",
    ),
    "places of two precisions": (
        lambda plan: placed(
            plan,
            {"further_places": (Place(1, 1),)},
            further_executors=(ExecutorOptions(precision="fp16"),),
        ),
        "would run as fp16 or fp32, as it is placed; give",
    ),
    "placement that waits": (
        lambda plan: placed(plan, wait=Wait.ALL),
        "placement 'dmda' and wait 'all' exclude each other",
    ),
    "illegal schedule": (
        lambda plan: change_combined(plan, combined((0, 0, 0), schedule="1/0"), SECOND),
        "combined block 0: .*before one it depends on",
    ),
    "schedule of another size": (
        lambda plan: change_combined(plan, combined((0, 0, 0), schedule="0"), SECOND),
        "operator 1 never runs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_fit_its_graphs_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    assert bind(two_models(), GRAPHS)
    with pytest.raises(PlanError, match=message):
        bind(change(two_models()), GRAPHS)


def test_a_block_may_run_in_the_lanes_of_all_its_places_each_with_its_own_way() -> None:
    bound = bind(placed(two_models(), {"further_places": (Place(1, 0, SECOND.schedule),)}), GRAPHS)
    assert bound.lanes_of(0) == 0b11 and bound.lanes_on(1) == 0b10
    assert bound.variants == ((0, 0), (0, 1), (1, 0), (1, 1)) == bound.run_by("onnx")
    assert bound.combined[1].plan.variant_on == {0: 0, 1: 1}
    assert bound.launches(1, 1, 1) == bound.launches(1, 1)


def test_a_resource_has_cores_for_the_executors_that_run_there() -> None:
    """The wide executor runs on the resource of two cores alone."""
    wide = (ExecutorOptions(intra_op_threads=2),)
    cores = (Resource(cores=(0,)), Resource(cores=(1, 2)))
    plan = placed(two_models(), {"further_places": (Place(1, 1),)}, further_executors=wide)
    assert bind(replace(plan, resources=cores), GRAPHS)
    swapped = replace(plan, resources=(Resource(cores=(1, 2)), Resource(cores=(0,))))
    with pytest.raises(PlanError, match="resource 1 has 1 cores for 1 lanes of 2 threads"):
        bind(swapped, GRAPHS)


CROSSED = Plan(
    models=(ModelPlan(name="a", artifact=A, cuts=(2,)), ModelPlan(name="b", artifact=B, cuts=(2,))),
    combined=(
        combined((0, 0, 0), (1, 0, 1), schedule="0-1|2"),
        combined((0, 0, 1), (1, 0, 0), schedule="0-1|2-3"),
    ),
)
ONE_REPLICA_TWICE = Plan(
    models=(ModelPlan(name="a", artifact=A, cuts=(2,)),),
    combined=(combined((0, 0, 0), (0, 0, 1), schedule="0-1|2-3"),),
)


@pytest.mark.parametrize(
    ("plan", "message"), [(CROSSED, "impose a cycle"), (ONE_REPLICA_TWICE, "two blocks of one replica")]
)
def test_waiting_for_all_is_refused_where_it_could_never_end(plan: Plan, message: str) -> None:
    assert bind(plan, GRAPHS)
    for wait in (Wait.ALL, Wait.TIMEOUT):
        with pytest.raises(PlanError, match=message):
            bind(replace(plan, wait=wait), GRAPHS)
        assert bind(replace(two_models(), wait=wait), GRAPHS)


def test_two_replicas_of_a_block_may_wait_for_each_other() -> None:
    plan = Plan(
        models=(ModelPlan(name="a", artifact=A, replicas=2),),
        combined=(combined((0, 0, 0), (0, 1, 0), schedule="0-3|4-7"),),
        wait=Wait.ALL,
    )
    assert bind(plan, GRAPHS)
