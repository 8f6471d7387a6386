"""Nothing shares memory unless the launch list itself proves that one is used up before the other begins."""

import random

import pytest

from stageloom.edge_agent.executor.cuda.memory_plan import (
    ALIGNMENT_BYTES,
    Lifetime,
    MemoryPlan,
    launches_before,
    masks_to_hold,
    plan_memory,
    shared_wrongly,
)
from stageloom.shared.bitmask import bits
from stageloom.shared.launch_list import Item
from tests.executor.torch.lists import all_runs, random_items, random_run

K = 1024


def _random_pieces(rng: random.Random, launches: int, count: int) -> list[Lifetime]:
    pieces = []
    for _ in range(count):
        uses = 0
        for _ in range(rng.randint(1, 3)):
            uses |= 1 << rng.randrange(launches)
        pieces.append(Lifetime(rng.randint(1, 5000), uses))
    return pieces


def _overlapping(plan: MemoryPlan, pieces: list[Lifetime]) -> list[tuple[int, int]]:
    return [
        (one, other)
        for one in range(len(pieces))
        for other in range(one)
        if plan.offsets[one] < plan.offsets[other] + pieces[other].nbytes
        and plan.offsets[other] < plan.offsets[one] + pieces[one].nbytes
    ]


@pytest.mark.parametrize("seed", range(40))
def test_what_has_ended_before_a_launch_is_what_every_run_has_before_it(seed: int) -> None:
    rng = random.Random(seed)
    items = random_items(rng, 4, 3)
    counts = [rng.randint(1, 2) for _ in items]
    always = [-1] * sum(counts)
    for run in all_runs(items, counts):
        seen = 0
        for launch in run:
            always[launch] &= seen
            seen |= 1 << launch
    assert list(launches_before(items, counts)) == always


@pytest.mark.parametrize("seed", range(60))
def test_pieces_that_share_bytes_are_never_alive_together_in_any_run(seed: int) -> None:
    rng = random.Random(seed)
    items = random_items(rng, 12, 4)
    counts = [len(item.ops) for item in items]
    pieces = _random_pieces(rng, sum(counts), 15)
    before = launches_before(items, counts)
    plan = plan_memory(pieces, before)
    assert shared_wrongly(plan, pieces, before) is None
    sharing = _overlapping(plan, pieces)
    for _ in range(50):
        place = {launch: at for at, launch in enumerate(random_run(items, counts, rng))}
        for one, other in sharing:
            first, second = ([place[use] for use in bits(pieces[p].uses)] for p in (one, other))
            assert max(first) < min(second) or max(second) < min(first)


def test_random_plans_do_share() -> None:
    """Else the test above would say nothing."""
    rng = random.Random(1)
    items = random_items(rng, 30, 2)
    counts = [len(item.ops) for item in items]
    pieces = _random_pieces(rng, sum(counts), 40)
    plan = plan_memory(pieces, launches_before(items, counts))
    assert _overlapping(plan, pieces)
    assert plan.nbytes < sum(piece.nbytes for piece in pieces)


def test_a_chain_on_one_stream_needs_two_buffers() -> None:
    """Launch i reads what launch i-1 wrote."""
    before = launches_before([Item(0, tuple(range(6)), 0, (), 0)], [6])
    pieces = [Lifetime(K, 0b11 << i) for i in range(5)]
    plan = plan_memory(pieces, before)
    assert plan.nbytes == 2 * K
    assert [offset for offset in plan.offsets] == [0, K, 0, K, 0]


def test_streams_that_do_not_wait_share_nothing() -> None:
    """P1: while one stream's tensor is dead early, the other stream may not have begun."""
    items = [Item(0, (0, 1, 2), 0, (), 0), Item(0, (3, 4), 1, (), 0)]
    before = launches_before(items, [3, 2])
    pieces = [Lifetime(K, 0b00011), Lifetime(K, 0b00110), Lifetime(K, 0b11000)]
    plan = plan_memory(pieces, before)
    assert len(set(plan.offsets)) == 3


def test_a_wait_in_between_lets_streams_share() -> None:
    items = [Item(0, (0, 1), 0, (), 0), Item(0, (2, 3), 1, (0,), 1)]
    pieces = [Lifetime(K, 0b0011), Lifetime(K, 0b1100)]
    assert plan_memory(pieces, launches_before(items, [2, 2])).nbytes == K


def test_a_wait_for_an_earlier_item_of_a_stream_says_nothing_of_its_later_ones() -> None:
    items = [Item(0, (0,), 0, (), 0), Item(0, (1,), 0, (), 1), Item(0, (2,), 1, (0,), 1)]
    pieces = [Lifetime(K, 0b010), Lifetime(K, 0b100)]
    assert plan_memory(pieces, launches_before(items, [1, 1, 1])).nbytes == 2 * K


@pytest.mark.promise("memory-shared-where-waits")
@pytest.mark.parametrize("seed", range(40))
def test_a_broken_plan_is_caught(seed: int) -> None:
    """Move one piece onto another that may be alive at the same time; the checker must name the pair."""
    rng = random.Random(seed)
    items = random_items(rng, 12, 4)
    counts = [len(item.ops) for item in items]
    pieces = _random_pieces(rng, sum(counts), 15)
    before = launches_before(items, counts)
    plan = plan_memory(pieces, before)
    one, other = next(
        (a, b)
        for a in range(15)
        for b in range(a)
        if any(
            not before[y] >> x & 1 and not before[x] >> y & 1
            for x in bits(pieces[a].uses)
            for y in bits(pieces[b].uses)
        )
    )
    offsets = list(plan.offsets)
    offsets[one] = offsets[other]
    assert shared_wrongly(MemoryPlan(tuple(offsets), plan.nbytes), pieces, before) is not None


@pytest.mark.promise("memory-shared-where-waits")
def test_a_dropped_wait_makes_a_plan_wrong() -> None:
    items = [Item(0, (0, 1), 0, (), 0), Item(0, (2, 3), 1, (0,), 1)]
    pieces = [Lifetime(K, 0b0011), Lifetime(K, 0b1100)]
    plan = plan_memory(pieces, launches_before(items, [2, 2]))
    without = [items[0], Item(0, (2, 3), 1, (), 1)]
    assert shared_wrongly(plan, pieces, launches_before(without, [2, 2])) == (0, 1)


def test_offsets_are_aligned_and_bounded() -> None:
    rng = random.Random(3)
    pieces = [Lifetime(rng.randint(0, 3000), 1) for _ in range(20)]
    plan = plan_memory(pieces, [0])
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in plan.offsets)
    assert max(o + p.nbytes for o, p in zip(plan.offsets, pieces, strict=True)) <= plan.nbytes
    assert _overlapping(plan, pieces) == []


def test_an_arena_has_room_for_every_mask_of_up_to_four_members() -> None:
    assert masks_to_hold(1) == (0b1,)
    assert masks_to_hold(2) == (0b11,)
    assert masks_to_hold(3) == (0b111, 0b110, 0b101, 0b011)
    assert len(masks_to_hold(4)) == 11
    assert masks_to_hold(5) == (0b11111,)
