"""Blocks, slots and combined graphs against direct simulation."""

from random import Random

import pytest

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import combine, slot_readers, split
from tests.shared.randoms import random_graph
from tests.shared.test_graph import chain

SEEDS = range(80)


def test_a_chain_cut_in_two_passes_one_tensor() -> None:
    first, second = split(chain(4), (2,))
    assert (first.start, first.stop, second.start, second.stop) == (0, 2, 2, 4)
    assert (first.live_in, first.live_out, first.makes, first.reads) == ((0,), (2,), (2,), (0,))
    assert (second.live_in, second.live_out, second.makes, second.reads) == ((2,), (4,), (4,), (2,))
    assert slot_readers(chain(4), (first, second)) == (0, 1)


def test_a_model_without_cuts_is_one_block() -> None:
    (block,) = split(chain(3), ())
    assert list(block.operators) == [0, 1, 2]
    assert block.live_out == chain(3).outputs


@pytest.mark.parametrize("seed", SEEDS)
def test_running_block_by_block_needs_only_what_each_slot_holds(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random, 10, all_cuts=True)
    cuts = sorted(random.sample(graph.base_cuts, k=random.randint(0, 6)))
    blocks = split(graph, cuts)
    assert [op for block in blocks for op in block.operators] == list(range(10))
    slot = set(graph.inputs)
    for block in blocks:
        assert set(block.live_in) == slot
        known = set(slot)
        read_from_slot = set()
        for op in block.operators:
            assert set(graph.operators[op].inputs) <= known
            read_from_slot |= set(graph.operators[op].inputs) & slot
            known |= set(graph.operators[op].outputs)
        assert set(block.reads) == read_from_slot
        assert set(block.live_out) <= known
        assert set(block.makes) == set(block.live_out) - slot
        slot = set(block.live_out)
    assert blocks[-1].live_out == graph.outputs


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_is_free_exactly_after_the_last_block_that_reads_a_tensor_lying_in_it(seed: int) -> None:
    """Run one instance: note where every tensor was put down and which block picked it up last."""
    random = Random(seed)
    graph = random_graph(random, 10, all_cuts=True)
    blocks = split(graph, sorted(random.sample(graph.base_cuts, k=random.randint(0, 6))))
    lies_in = dict.fromkeys(graph.inputs, 0)
    freed_after = [block.index for block in blocks]
    for block in blocks:
        picked_up = {t for op in block.operators for t in graph.operators[op].inputs}
        if block is blocks[-1]:
            picked_up |= set(graph.outputs)
        for tensor in picked_up & lies_in.keys():
            freed_after[lies_in[tensor]] = block.index
        lies_in.update(dict.fromkeys(block.makes, block.index + 1))
    assert slot_readers(graph, blocks) == tuple(freed_after)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_combined_graph_is_the_disjoint_union_of_its_members(seed: int) -> None:
    random = Random(seed)
    members = []
    for size in (7, 1, 5):
        graph = random_graph(random, size, all_cuts=True)
        blocks = split(graph, sorted(random.sample(graph.base_cuts, k=min(2, size - 1))))
        members.append((graph, random.choice(blocks)))
    members.append(members[0])  # another replica of the first
    union = combine(members)
    edges = set()
    for op in range(union.size):
        edges |= {(before, op) for before in bits(union.predecessors[op])}
        assert all(before < op for before in bits(union.predecessors[op]))
        assert set(bits(union.successors[op])) == {
            after for after in range(union.size) if union.predecessors[after] >> op & 1
        }
    wanted = set()
    for member, (graph, block) in enumerate(members):
        shift = union.offsets[member] - block.start
        for op in block.operators:
            assert union.member_of[op + shift] == member
            assert union.model_op(op + shift) == op
            before = {graph.producer[t] for t in graph.operators[op].inputs}
            wanted |= {(b + shift, op + shift) for b in before if block.start <= b}
    assert edges == wanted
    assert union.num_members == len(members)
    for mask in range(1 << len(members)):
        active = {op for op in range(union.size) if mask >> union.member_of[op] & 1}
        assert set(bits(union.active_ops(mask))) == active
