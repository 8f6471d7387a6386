"""A plan joined with its graphs: slots and their readers by hand and by brute force, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest

from stageloom.shared.blocks import slot_readers, slot_reads, split
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.messages.base import Mask
from stageloom.shared.plan import MAX_MEMBERS, CombinedBlock, Member, ModelPlan, Plan, Wait
from stageloom.shared.schedule import StageSchedule
from tests.engine.generate import chain, digest, graph_of, members_of, random_graph, sequential
from tests.engine.plans import chains, models_of, with_models

PAIR = [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (1, 0, 1)]]


def test_slots_of_a_chain_are_read_by_their_own_block() -> None:
    graph = chain("a", 4)
    blocks = split(graph, (1, 3))
    assert slot_reads(graph, blocks) == ((0,), (1,), (2,))
    assert slot_readers(graph, blocks) == (0, 1, 2)


def test_a_skip_is_read_in_the_slot_where_it_was_made() -> None:
    graph = graph_of("a", [[0], [1], [2], [1, 3]], outputs=[4])
    blocks = split(graph, (1, 2, 3))
    assert slot_reads(graph, blocks) == ((0,), (1,), (2,), (1, 3))
    assert slot_readers(graph, blocks) == (0, 3, 2, 3)


def test_an_early_output_is_kept_for_the_last_block_to_hand_out() -> None:
    graph = graph_of("a", [[0], [1], [2]], outputs=[1, 3])
    blocks = split(graph, (1, 2))
    assert slot_reads(graph, blocks) == ((0,), (1,), (1, 2))
    assert slot_readers(graph, blocks) == (0, 2, 2)


def test_an_input_that_only_a_late_block_reads_keeps_slot_0() -> None:
    graph = graph_of("a", [[0], [2], [1, 3]], outputs=[4], inputs=2)
    blocks = split(graph, (1, 2))
    assert slot_reads(graph, blocks) == ((0,), (1,), (0, 2))
    assert slot_readers(graph, blocks) == (2, 1, 2)


def test_a_block_may_read_nothing_of_its_own_slot() -> None:
    graph = graph_of("a", [[0], [0], [1, 2]], outputs=[3])
    blocks = split(graph, (1, 2))
    assert slot_reads(graph, blocks) == ((0,), (0,), (1, 2))
    assert slot_readers(graph, blocks) == (1, 2, 2)


def _blocks_that_read(graph: Graph, cuts: tuple[int, ...]) -> list[set[int]]:
    """Per slot, by carrying every tensor along: which blocks read something that was put there."""
    blocks = split(graph, cuts)
    where = dict.fromkeys(graph.inputs, 0)
    readers: list[set[int]] = [set() for _ in blocks]
    for block in blocks:
        for op in block.operators:
            for tensor in graph.operators[op].inputs:
                if tensor in where:
                    readers[where[tensor]].add(block.index)
        for op in block.operators:
            where.update(dict.fromkeys(graph.operators[op].outputs, block.index + 1))
    for tensor in graph.outputs:
        if where[tensor] < len(blocks):
            readers[where[tensor]].add(len(blocks) - 1)
    return readers


def test_slots_agree_with_carrying_every_tensor_along() -> None:
    random = Random("slots")
    for _ in range(500):
        graph = random_graph(random, "a")
        cuts = tuple(cut for cut in graph.base_cuts if random.random() < 0.6)
        blocks = split(graph, cuts)
        wanted = _blocks_that_read(graph, cuts)
        reads = slot_reads(graph, blocks)
        assert [{b.index for b in blocks if s in reads[b.index]} for s in range(len(blocks))] == wanted
        assert list(slot_readers(graph, blocks)) == [max({s} | readers) for s, readers in enumerate(wanted)]


def test_every_tensor_that_a_block_reads_lies_in_a_slot_that_its_instance_holds() -> None:
    random = Random("holds")
    for _ in range(300):
        graph = random_graph(random, "a")
        blocks = split(graph, tuple(cut for cut in graph.base_cuts if random.random() < 0.6))
        readers = slot_readers(graph, blocks)
        for block, slots in enumerate(slot_reads(graph, blocks)):
            assert all(slot <= block <= readers[slot] for slot in slots)


@pytest.mark.parametrize(
    ("batch", "buckets"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_buckets_are_powers_of_two_and_the_batch(batch: int, buckets: tuple[int, ...]) -> None:
    model = chains(1, fields={"batch": batch}).models[0]
    assert model.buckets == buckets
    for tasks in range(1, batch + 1):
        assert model.bucket_for(tasks) == min(size for size in buckets if size >= tasks)


def test_home_finds_every_member() -> None:
    bound = chains(2, 2, groups=PAIR)
    assert {member: bound.home[member] for member in members_of(bound.plan.models)} == {
        Member(0, 0, 0): (0, 0),
        Member(1, 0, 0): (0, 1),
        Member(0, 0, 1): (1, 0),
        Member(1, 0, 1): (1, 1),
    }


def _spoil(change: Callable[[Plan], Plan]) -> None:
    models = models_of([2, 2])
    graphs = {model.artifact: chain(model.name, 2) for model in models}
    bind(change(with_models(models, PAIR).plan), graphs)


def _without_last(plan: Plan) -> Plan:
    return replace(plan, combined=plan.combined[:-1])


def _twice(plan: Plan) -> Plan:
    return replace(plan, combined=(*plan.combined, plan.combined[0]))


def _stranger(plan: Plan) -> Plan:
    extra = CombinedBlock((Member(0, 1, 0),), sequential(1))
    return replace(plan, combined=(*plan.combined, extra))


def _hollow(plan: Plan) -> Plan:
    return replace(plan, combined=(*plan.combined, CombinedBlock((), StageSchedule(()))))


def _model(plan: Plan, **fields: object) -> Plan:
    return replace(plan, models=(replace(plan.models[0], **fields), plan.models[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_last, "in no combined block"),
        (_twice, "in two combined blocks"),
        (_stranger, "which no model has"),
        (_hollow, "has no member"),
        (lambda plan: replace(plan, models=()), "at least one model"),
        (lambda plan: _model(plan, name="b"), "share a name"),
        (lambda plan: _model(plan, artifact=digest(77)), "is not here"),
        (lambda plan: _model(plan, cuts=(5,)), "not ascending base cuts"),
        (lambda plan: _model(plan, cuts=(1, 1)), "not ascending base cuts"),
        (lambda plan: _model(plan, replicas=0), "replicas"),
        (lambda plan: _model(plan, batch=0), "batch"),
        (lambda plan: _model(plan, weight=0), "weight"),
        (lambda plan: _model(plan, launch_interval_us=-1), "launch_interval_us"),
        (lambda plan: replace(plan, lanes=0), "lanes"),
        (lambda plan: replace(plan, run_ahead=0), "run_ahead"),
        (lambda plan: replace(plan, max_skips=0), "max_skips"),
    ],
)
def test_an_illegal_plan_is_refused_by_name(change: Callable[[Plan], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _spoil(change)


def test_a_plan_with_an_illegal_schedule_is_refused() -> None:
    def change(plan: Plan) -> Plan:
        first = CombinedBlock(plan.combined[0].members, sequential(1))
        return replace(plan, combined=(first, plan.combined[1]))

    with pytest.raises(PlanError, match="never runs"):
        _spoil(change)


def test_a_combined_block_of_more_members_than_a_mask_has_room_for_is_refused() -> None:
    def all_in_one(replicas: int) -> BoundPlan:
        group = [(0, replica, 0) for replica in range(replicas)]
        return chains(1, groups=[group], fields={"replicas": replicas})

    mask = all_in_one(MAX_MEMBERS).combined[0].full_mask
    assert msgspec.convert(mask, Mask) == mask
    with pytest.raises(PlanError, match="63 members, more than 62; use a smaller members_max"):
        all_in_one(MAX_MEMBERS + 1)


def test_batches_need_a_model_whose_rows_are_independent() -> None:
    graph = replace(chain("a", 1), batchable=False)
    model = ModelPlan(name="a", artifact=digest(0), batch=2)
    plan = Plan(models=(model,), combined=(CombinedBlock((Member(0, 0, 0),), sequential(1)),))
    with pytest.raises(PlanError, match="batches of 2"):
        bind(plan, {digest(0): graph})


@pytest.mark.parametrize("wait", [Wait.ALL, Wait.TIMEOUT])
def test_waiting_needs_an_order_without_a_cycle(wait: Wait) -> None:
    crossed = [[(0, 0, 0), (1, 0, 1)], [(0, 0, 1), (1, 0, 0)]]
    chains(2, 2, groups=crossed)
    with pytest.raises(PlanError, match="cycle"):
        chains(2, 2, groups=crossed, wait=wait)


def test_waiting_forbids_two_blocks_of_one_replica_together() -> None:
    with pytest.raises(PlanError, match="two blocks of one replica"):
        chains(2, groups=[[(0, 0, 0), (0, 0, 1)]], wait=Wait.ALL)


def test_waiting_allows_two_replicas_together() -> None:
    chains(1, groups=[[(0, 0, 0), (0, 1, 0)]], fields={"replicas": 2}, wait=Wait.ALL)
