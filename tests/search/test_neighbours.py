"""Neighbours of a plan, listed from the definition: each legal single change is there, and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, Plan, Resource, Wait
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.compose import Combination, Rules, compose
from stageloom.shared.search.neighbours import BATCH_MAX, SPLITS_MAX, Move, PlanShape, neighbours, shape_of
from tests.search.graphs import CHAIN, DIAMOND, model
from tests.search.test_rivals import choice

LEFT, RIGHT = model("left", DIAMOND, cuts=[1, 3]), model("right", CHAIN, cuts=[1])
GRAPHS = dict((LEFT, RIGHT))
REGROUPED = {Move.MOVE, Move.SPLIT, Move.MERGE, Move.SWAP}


def plan(
    combination: Combination = Combination.ALONE,
    *,
    replicas: tuple[int, int] = (1, 1),
    wait: Wait = Wait.NONE,
    lanes: int = 1,
) -> Plan:
    """Three blocks and two."""
    return compose(
        [
            choice(LEFT, partition="base", replicas=replicas[0]),
            choice(RIGHT, partition="base", replicas=replicas[1]),
        ],
        combination=combination,
        rules=Rules(wait=wait),
        lanes=lanes,
    )


def drawn(made: Plan, members_max: int = 2, seed: int = 0) -> list[tuple[Move, PlanShape]]:
    shape = shape_of(made)
    assert shape is not None
    return list(neighbours(shape, GRAPHS, members_max=members_max, wait=made.wait, rng=Random(seed)))


def scheduled(shape: PlanShape, like: Plan) -> Plan:
    """One operator after another."""
    models = shape.models
    blocks = []
    for members in shape.combined:
        sizes = []
        for member in members:
            graph = GRAPHS[models[member.model].artifact]
            borders = (0, *models[member.model].cuts, len(graph.operators))
            sizes.append(borders[member.block + 1] - borders[member.block])
        stages = tuple(Stage(((op,),)) for op in range(sum(sizes)))
        blocks.append(CombinedBlock(members, StageSchedule(stages)))
    return replace(like, models=models, combined=tuple(blocks), lanes=shape.lanes)


Rows = frozenset[frozenset[Member]]


def rows(shape: PlanShape) -> Rows:
    return frozenset(frozenset(members) for members in shape.combined)


def partitions(members: Sequence[Member]) -> Iterator[list[set[Member]]]:
    """Every way to put members into sets."""
    if not members:
        yield []
        return
    first, *others = members
    for found in partitions(others):
        yield [{first}, *found]
        for index, one in enumerate(found):
            yield [*found[:index], {first, *one}, *found[index + 1 :]]


def one_move_away(before: Rows, after: Rows, members_max: int) -> bool:
    """By what differs: at most two sets on each side, and what the moves may do with these."""
    gone, made = sorted(before - after, key=len), sorted(after - before, key=len)
    grew = sorted(map(len, gone)) != sorted(map(len, made))  # a swap leaves as many in each
    if (len(gone), len(made)) == (1, 2):
        return True
    if grew and len(made[-1]) > members_max:
        return False
    if (len(gone), len(made)) == (2, 1):
        return True
    if (len(gone), len(made)) != (2, 2):
        return False
    pairings = (made, made[::-1])  # one left at most: a move, or a swap if one left both
    return any(
        all(len(old - new) <= 1 for old, new in zip(gone, pairing, strict=True)) for pairing in pairings
    )


@pytest.mark.parametrize("members_max", [1, 2, 3])
@pytest.mark.parametrize(
    "combination", [Combination.ALONE, Combination.ALIGNED, Combination.ABREAST, Combination.PIPELINED]
)
def test_every_other_grouping_that_one_move_makes_is_drawn_and_no_other(
    combination: Combination, members_max: int
) -> None:
    """All 52 ways to group five blocks are looked at."""
    made = plan(combination)
    before = rows(shape_of(made))  # type: ignore[arg-type]
    every = [member for block in made.combined for member in block.members]
    expected = {
        after
        for after in (frozenset(map(frozenset, found)) for found in partitions(every))
        if after != before and one_move_away(before, after, members_max)
    }
    found = [rows(shape) for move, shape in drawn(made, members_max) if move in REGROUPED]
    assert set(found) == expected
    assert len(found) == len(expected), "one was drawn twice"


def all_in_one(replicas: int) -> PlanShape:
    """Five blocks of each instance, in one combined block."""
    shape = shape_of(plan(replicas=(replicas, replicas)))
    assert shape is not None
    return shape._replace(combined=(tuple(member for (member,) in shape.combined),))


def test_a_combined_block_of_forty_members_has_its_first_neighbours_at_once() -> None:
    """It could be split in 2 ** 39 ways."""
    shape = all_in_one(8)
    found = list(neighbours(shape, GRAPHS, members_max=40, wait=Wait.NONE, rng=Random(0)))
    splits = [made.combined for move, made in found if move is Move.SPLIT]
    assert SPLITS_MAX / 2 < len(splits) == len(set(splits)) <= SPLITS_MAX
    assert all(sorted((*one, *other)) == list(shape.combined[0]) for one, other in splits)
    assert len({len(one) for one, _ in splits}) > 20, "parts of every size come up"


def test_other_seeds_draw_other_splits_of_a_large_combined_block() -> None:
    drawn_by = [
        {made.combined for move, made in found if move is Move.SPLIT}
        for found in (
            neighbours(all_in_one(2), GRAPHS, members_max=10, wait=Wait.NONE, rng=Random(seed))
            for seed in (0, 0, 1)
        )
    ]
    assert drawn_by[0] == drawn_by[1] != drawn_by[2]


def test_cuts_are_those_of_another_partition_or_differ_in_one_base_cut() -> None:
    found = {
        (shape.models[0].cuts, shape.models[1].cuts) for move, shape in drawn(plan()) if move is Move.CUTS
    }
    assert found == {((), (1,)), ((1,), (1,)), ((3,), (1,)), ((1, 3), ())}


def test_a_block_that_begins_where_one_did_keeps_its_place_and_a_new_one_is_alone() -> None:
    made = plan(Combination.ALIGNED)  # 0.0 with 1.0, 0.1 with 1.1, 0.2
    by_cuts = {shape.models[0].cuts: shape for move, shape in drawn(made) if move is Move.CUTS}
    without_3 = {
        frozenset({Member(0, 0, 0), Member(1, 0, 0)}),
        frozenset({Member(0, 0, 1), Member(1, 0, 1)}),
    }
    without_1 = {
        frozenset({Member(0, 0, 0), Member(1, 0, 0)}),
        frozenset({Member(1, 0, 1)}),
        frozenset({Member(0, 0, 1)}),
    }
    assert rows(by_cuts[1,]) == without_3
    assert rows(by_cuts[3,]) == without_1
    once_more = neighbours(by_cuts[1,], GRAPHS, members_max=2, wait=Wait.NONE, rng=Random(1))
    again = {rows(shape) for move, shape in once_more if move is Move.CUTS}
    assert frozenset(without_3 | {frozenset({Member(0, 0, 2)})}) in again, "the cut at 3 is back"


def test_instances_change_by_one_where_there_are_several_and_lanes_follow() -> None:
    made = plan(Combination.PIPELINED, replicas=(2, 1), lanes=3)
    found = {
        (*(model.replicas for model in shape.models), shape.lanes): rows(shape)
        for move, shape in drawn(made)
        if move is Move.REPLICAS
    }
    assert set(found) == {(1, 1, 2), (3, 1, 4), (2, 2, 4)}
    last = {
        frozenset(one._replace(replica=2) for one in row) for row in found[1, 1, 2] if Member(0, 0, 0) in row
    }
    assert last <= found[3, 1, 4], "a further instance is combined as the last one is"
    assert {move for move, _ in drawn(plan())} == set(Move) - {
        Move.REPLICAS,
        Move.MOVE,
        Move.SPLIT,
        Move.SWAP,
    }


def test_batches_are_doubled_and_halved_up_to_the_bound_and_one_task_waits_for_none() -> None:
    made = plan()
    delayed = replace(made.models[0], batch=2, batch_max_delay_us=700)
    most = replace(made.models[1], batch=BATCH_MAX)
    found = {
        tuple((model.batch, model.batch_max_delay_us) for model in shape.models)
        for move, shape in drawn(replace(made, models=(delayed, most)))
        if move is Move.BATCH
    }
    bound = BATCH_MAX, 0
    assert found == {((1, 0), bound), ((4, 700), bound), ((2, 700), (BATCH_MAX // 2, 0))}


def test_a_model_that_cannot_run_in_batches_gets_none() -> None:
    made, (digest, graph) = plan(), LEFT
    shape = shape_of(made)
    assert shape is not None
    graphs = {**GRAPHS, digest: replace(graph, batchable=False)}
    found = neighbours(shape, graphs, members_max=2, wait=Wait.NONE, rng=Random(0))
    assert {tuple(model.batch for model in one.models) for move, one in found if move is Move.BATCH} == {
        (1, 2)
    }


def test_lanes_that_are_not_one_per_instance_stay() -> None:
    made = plan(replicas=(2, 2), lanes=2)
    assert {shape.lanes for _, shape in drawn(made)} == {2}


@pytest.mark.parametrize(("wait", "seed"), list(product([Wait.NONE, Wait.ALL], range(3))))
def test_every_neighbour_is_legal_and_another_plan(wait: Wait, seed: int) -> None:
    """A walk of eight steps: `bind` takes every neighbour of every plan on the way."""
    rng, made = Random(seed), plan(Combination.ALIGNED, replicas=(2, 1), wait=wait)
    for _ in range(8):
        found = drawn(made, 3, seed)
        plans = [scheduled(shape, made) for _, shape in found]
        for one in plans:
            bind(one, GRAPHS)
        digests = {one.digest for one in plans}
        assert len(digests) == len(plans) and made.digest not in digests
        made = rng.choice(plans)


def test_what_cannot_wait_for_all_is_left_out_and_nothing_else_is() -> None:
    made = plan(Combination.ALIGNED, wait=Wait.ALL)
    free = replace(made, wait=Wait.NONE)
    legal = set()
    for _, shape in drawn(free, 3):
        try:
            bind(scheduled(shape, made), GRAPHS)
        except PlanError:
            continue
        legal.add(shape)
    found = {shape for _, shape in drawn(made, 3)}
    assert found == legal
    assert len(found) < len(drawn(free, 3))


def test_equal_seeds_draw_the_same_order_and_others_another() -> None:
    made = plan(Combination.ALIGNED, replicas=(2, 2))
    assert drawn(made, seed=3) == drawn(made, seed=3)
    assert drawn(made, seed=3) != drawn(made, seed=4)
    orders = [[shape for _, shape in drawn(made, seed=seed)] for seed in (3, 4)]
    assert set(orders[0]) == set(orders[1])


def test_few_cuts_come_as_early_as_many_swaps() -> None:
    """Kinds are equally likely: cuts are among the first draws more often than among all."""
    made = plan(Combination.ALIGNED, replicas=(3, 3))
    kinds = [move for move, _ in drawn(made, 3)]
    early = sum(move is Move.CUTS for seed in range(20) for move, _ in drawn(made, 3, seed)[:10])
    share = kinds.count(Move.CUTS) / len(kinds)
    assert early > 2 * share * 200


def test_plans_on_resources_or_with_several_executors_have_no_shape() -> None:
    made = plan()
    assert shape_of(replace(made, resources=(Resource(cores=(0,)),), lane_resources=(0,))) is None
    assert shape_of(replace(made, further_executors=(ExecutorOptions(name="null"),))) is None
