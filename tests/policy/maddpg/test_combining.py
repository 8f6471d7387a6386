"""Actions of the model scheduler: intervals, superblocks, and back from combined blocks to actions."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import actions_of, bin_of, centre, combine_blocks
from stageloom.shared.policy.maddpg.space import Space
from tests.policy.maddpg.cases import space


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    blocks = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    return space(*blocks, members_max=draw(st.integers(1, 4)), replicas=draw(st.integers(1, 2)))


@st.composite
def asked(draw: st.DrawFn) -> tuple[Space, list[float]]:
    where = draw(spaces())
    number = st.floats(0.0, 1.0, width=32)
    return where, draw(st.lists(number, min_size=where.bins, max_size=where.bins))


def largest(where: Space, actions: Sequence[float]) -> int:
    """Blocks in the fullest interval."""
    return max(Counter(bin_of(action, where.bins) for action in actions).values())


def test_blocks_whose_actions_fall_into_one_interval_are_combined() -> None:
    """TOP's figure 10 in small: two models of 2 blocks, so 4 intervals of 0.25."""
    found = combine_blocks(space(2, 2), [0.1, 0.6, 0.2, 0.9])
    assert found.combined == (
        (Member(0, 0, 0), Member(1, 0, 0)),
        (Member(0, 0, 1),),
        (Member(1, 0, 1),),
    )
    assert found.executed == (0.1, 0.6, 0.2, 0.9)
    assert found.excess == 0


@pytest.mark.parametrize(("action", "number"), [(0.0, 0), (0.2499, 0), (0.25, 1), (1.0, 3), (-3.0, 0)])
def test_intervals_are_uniform_and_hold_their_lower_end(action: float, number: int) -> None:
    assert bin_of(action, 4) == number


def test_a_superblock_is_split_in_the_order_of_its_actions_into_the_nearest_free_intervals() -> None:
    """Five of six blocks in interval 2; H = 2. In order 3 1 | 0 4 | 2; interval 3 is taken by block 5."""
    where = space(3, 3)
    found = combine_blocks(where, [0.42, 0.36, 0.49, 0.34, 0.45, 0.55])
    parts = [[where.members.index(member) for member in row] for row in found.combined]
    assert parts == [[0, 4], [1, 3], [5], [2]]  # by interval: 1, 2, 3, 4
    assert found.excess == 3
    assert found.executed == pytest.approx((1.5 / 6, 0.36, 4.5 / 6, 0.34, 1.5 / 6, 0.55))


@pytest.mark.promise("untrained-actors-still-give")
def test_untrained_actors_that_put_all_thirty_blocks_into_one_interval_still_give_a_plan() -> None:
    """What TOP's algorithm meets first: the reward would be 0 for ever."""
    where = space(13, 5, 12, members_max=4)
    found = combine_blocks(where, [0.5] * 30)
    assert largest(where, [0.5] * 30) == 30
    assert sorted(map(len, found.combined)) == [2] + [4] * 7
    assert found.excess == 26


@pytest.mark.promise("untrained-actors-still-give")
@settings(max_examples=40)
@given(asked())
def test_what_was_executed_reads_the_same_again_and_needs_no_split(one: tuple[Space, list[float]]) -> None:
    where, actions = one
    found = combine_blocks(where, actions)
    in_single = np.array(found.executed, np.float32).tolist()  # as the replay keeps it
    again = combine_blocks(where, in_single)
    assert again.combined == found.combined
    assert again.excess == 0


@settings(max_examples=40)
@given(asked())
def test_every_block_is_in_one_combined_block_of_at_most_h(one: tuple[Space, list[float]]) -> None:
    where, actions = one
    found = combine_blocks(where, actions)
    assert sorted(member for row in found.combined for member in row) == sorted(where.members)
    assert max(map(len, found.combined)) <= where.members_max
    assert (found.excess == 0) == (largest(where, actions) <= where.members_max)


@settings(max_examples=40)
@given(asked())
def test_actions_of_combined_blocks_stand_for_them(one: tuple[Space, list[float]]) -> None:
    where, actions = one
    wanted = combine_blocks(where, actions).combined
    found = combine_blocks(where, actions_of(where, wanted))
    assert sorted(found.combined) == sorted(wanted)


def test_blocks_start_alone_in_the_order_of_their_progress() -> None:
    """Middles of the blocks: a third of the way, 1/2; 1/6, 3/6, 5/6 -> bins by 1/6 1/4 1/2 3/4 5/6."""
    where = space(2, 3)
    assert where.bin_of_start == (1, 3, 0, 2, 4)
    alone = actions_of(where, [(member,) for member in where.members])
    assert alone == tuple(centre(number, 5) for number in where.bin_of_start)
