"""Few streams: at most 8 a lane and 32 in all, and nothing that a schedule orders is lost by sharing."""

import random

import pytest

from stageloom.edge_agent.executor.cuda.memory_plan import items_before
from stageloom.edge_agent.executor.cuda.streams import MAX_STREAMS, fold_streams, streams_per_lane
from stageloom.shared.launch_list import Item
from stageloom.shared.plan import MAX_LANES
from tests.executor.torch.lists import random_items


@pytest.mark.parametrize("lanes", range(1, MAX_LANES + 1))
def test_p15_no_two_lanes_share_a_stream(lanes: int) -> None:
    assert 1 <= streams_per_lane(lanes) <= 8
    assert lanes * streams_per_lane(lanes) <= MAX_STREAMS


def test_one_lane_has_eight_group_streams() -> None:
    assert [streams_per_lane(lanes) for lanes in (1, 4, 5, 16)] == [8, 8, 6, 2]


@pytest.mark.parametrize("limit", [1, 2, 8])
@pytest.mark.parametrize("seed", range(20))
def test_folding_keeps_every_order_of_the_schedule(seed: int, limit: int) -> None:
    items = random_items(random.Random(seed), 40, 28)
    folded = fold_streams(items, limit)
    assert {item.stream for item in folded} <= set(range(limit))
    assert [item.ops for item in folded] == [item.ops for item in items]
    for was, now in zip(items_before(items), items_before(folded), strict=True):
        assert was & ~now == 0
    for index, item in enumerate(folded):
        assert all(before < index and folded[before].stream != item.stream for before in item.waits)


@pytest.mark.parametrize("seed", range(10))
def test_streams_that_fit_are_ordered_no_more_than_the_schedule_does(seed: int) -> None:
    items = random_items(random.Random(seed), 30, 8)
    assert items_before(fold_streams(items, 8)) == items_before(items)


def test_a_stream_that_has_ended_lends_its_place_and_one_that_may_still_run_does_not() -> None:
    wide = [Item(0, (i,), i, (), 0) for i in range(3)]
    apart = [*wide, *[Item(0, (3 + i,), 3 + i, (), 0) for i in range(3)]]
    assert [item.stream for item in fold_streams(apart, 8)] == [0, 1, 2, 3, 4, 5]
    after = [*wide, *[Item(0, (3 + i,), 3 + i, (0, 1, 2), 1) for i in range(3)]]
    assert [item.stream for item in fold_streams(after, 8)] == [0, 1, 2, 0, 1, 2]


def test_a_stream_too_many_joins_the_one_with_the_least_to_come() -> None:
    items = [
        Item(0, (0,), 0, (), 0),
        Item(0, (1,), 1, (), 0),
        Item(0, (2,), 2, (), 0),
        Item(0, (3, 4, 5), 0, (), 1),
        Item(0, (6,), 1, (), 1),
    ]
    assert [item.stream for item in fold_streams(items, 2)] == [0, 1, 1, 0, 1]
