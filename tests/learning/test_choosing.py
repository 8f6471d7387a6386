"""From an action to a schedule: legal, repeatable, refined by moves that only help."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.planner.learning.gpg.model import GpgModel
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.legality import violations
from stageloom.shared.policy.gpg.choose import (
    LookAhead,
    acted,
    drawn,
    looked_ahead,
    ranked,
    sampled,
    schedule_s,
)
from stageloom.shared.policy.gpg.network import EncodedBlock, Floats
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import Endings
from stageloom.shared.search.gpg import (
    gpg,
    network_of,
    packaged_checkpoint,
    policy_alone,
    policy_stages,
    refined,
)
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import cheapest_by_state
from stageloom.shared.search.ranking import RankedEndings
from tests.learning.cases import block, network
from tests.search.graphs import union, unions

LIMITS = Limits(r=3, s=8)


@pytest.mark.promise("scheduler-gpg-legal-above")
@settings(max_examples=15, deadline=None)
@given(
    graph=unions(max_ops=5),
    r=st.none() | st.integers(1, 4),
    s=st.none() | st.integers(1, 4),
    data=st.data(),
)
def test_the_policy_is_legal_and_the_scheduler_never_above_sequential(
    graph: CombinedGraph, r: int | None, s: int | None, data: st.DataObject
) -> None:
    seconds = data.draw(st.lists(st.floats(0.0, 1.0), min_size=graph.size, max_size=graph.size))
    costs = StageCosts(tuple(seconds), data.draw(st.floats(0.0, 1.2)), barrier_s=0.01)
    limits = Limits(r=r, s=s)
    alone = policy_alone(graph, costs, limits, network_of())
    assert violations(alone, graph, r=r, s=s) == []
    budget = Budget(expansions=200)
    found = gpg(graph, costs, limits, budget)
    assert violations(found, graph, r=r, s=s) == []
    least_s = min(costs.schedule_s(alone), costs.schedule_s(sequential(graph, costs, limits, budget)))
    assert costs.schedule_s(found) <= least_s


@pytest.mark.parametrize("members", [1, 2])
def test_every_way_to_choose_covers_the_block_and_repeats_for_a_seed(members: int) -> None:
    torch.manual_seed(0)
    plain = network(GpgModel())
    graph, costs = block(members)
    encoded = EncodedBlock(plain, graph, costs)
    stages = policy_stages(graph, costs, LIMITS)
    ways: tuple[Callable[[], list[int]], ...] = (
        lambda: acted(encoded, stages),
        lambda: sampled(encoded, stages, count=3, noise=0.2, random=Random(1)),
        lambda: looked_ahead(encoded, stages, LookAhead(), Random(1)),
        lambda: looked_ahead(encoded, stages, LookAhead(width=3), Random(1)),
        lambda: drawn(stages, Random(1)),
    )
    for way in ways:
        endings = way()
        assert endings == way()
        assert sum(endings) == (1 << graph.size) - 1
        assert violations(stages.schedule(endings), graph, r=3, s=8) == []


def test_a_look_ahead_that_knows_every_value_finds_the_optimum() -> None:
    """With exact values the best ending of every state is optimal, if the look-ahead sees it."""
    graph, costs = block(1, seed=2)
    stages = policy_stages(graph, costs, LIMITS)
    cheapest_s = cheapest_by_state(stages)

    class Known(EncodedBlock):
        def values(self, masks: Sequence[int]) -> Floats:
            return np.array([cheapest_s[mask] / self.total_s for mask in masks], np.float32)

    encoded = Known(network_of(), graph, costs)
    everything = LookAhead(around=1, spread=2000)
    found = looked_ahead(encoded, stages, everything, Random(0))
    assert schedule_s(stages, found) == pytest.approx(cheapest_s[(1 << graph.size) - 1])


def test_the_packaged_policy_comes_closer_to_the_optimum_than_drawn_endings() -> None:
    ours, unaided, chance, best = 0.0, 0.0, 0.0, 0.0
    for seed in range(4):
        graph, costs = block(2, seed)
        stages = policy_stages(graph, costs, LIMITS)
        encoded = EncodedBlock(network_of(), graph, costs)
        best_s = cheapest_by_state(stages)[(1 << graph.size) - 1]
        alone = looked_ahead(encoded, stages, LookAhead(), Random(0))
        ours += schedule_s(stages, refined(stages, alone)) / best_s
        unaided += schedule_s(stages, alone) / best_s
        chance += schedule_s(stages, drawn(stages, Random(seed))) / best_s
        best += 1.0
    assert best <= ours < 1.1 * best
    assert unaided < chance
    assert len(packaged_checkpoint()) < 1 << 20


@settings(max_examples=25, deadline=None)
@given(graph=unions(max_ops=5), seed=st.integers(0, 99))
def test_the_local_search_keeps_schedules_legal_and_never_makes_them_dearer(
    graph: CombinedGraph, seed: int
) -> None:
    random = Random(seed)
    costs = StageCosts(tuple(random.random() for _ in range(graph.size)), 0.2, barrier_s=0.02)
    stages = policy_stages(graph, costs, LIMITS)
    before = drawn(stages, random)
    after = refined(stages, before)
    assert violations(stages.schedule(after), graph, r=3, s=8) == []
    assert schedule_s(stages, after) <= schedule_s(stages, before) + 1e-12
    assert schedule_s(stages, refined(stages, after)) == pytest.approx(schedule_s(stages, after))


def test_the_local_search_finds_what_single_moves_reach() -> None:
    graph = union([[], [], []])
    costs = StageCosts((1.0, 1.0, 1.0), contention=0.0, barrier_s=0.1)
    stages = policy_stages(graph, costs, LIMITS)
    assert refined(stages, [0b001, 0b010, 0b100]) == [0b111]


@settings(max_examples=25, deadline=None)
@given(graph=unions(max_ops=5), r=st.integers(1, 3), s=st.integers(1, 4))
def test_changes_of_one_part_are_all_endings_that_differ_in_it_alone(
    graph: CombinedGraph, r: int, s: int
) -> None:
    endings = Endings(graph, r=r, s=s)
    everything = (1 << graph.size) - 1
    space = RankedEndings(endings, everything)
    ending = space.unrank(space.count // 2)
    found = [space.changed(ending, part) for part in range(space.parts)]
    flat = [one for part in found for one in part]
    assert len(set(flat)) == len(flat) and ending not in flat
    assert all(space.holds(one) for one in flat)
    others = {one for one in endings.endings(everything) if one != ending}
    owner = [0] * space.parts
    for one in endings.groups(everything):
        for part in range(space.parts):
            if any((other ^ ending) & one for other in found[part]):
                owner[part] |= one
    alone = {one for one in others if any(not (one ^ ending) & ~mask for mask in owner)}
    assert alone <= set(flat)


def test_endings_too_many_to_count_are_counted_with_smaller_stages() -> None:
    wide = union([[], *[[0]] * 24, list(range(1, 25)), *[[25]] * 24])
    costs = StageCosts((1.0,) * wide.size, 0.1)
    stages = policy_stages(wide, costs, LIMITS)
    space = ranked(stages, (1 << wide.size) - 1)
    assert space.count > 0
    assert sum(drawn(stages, Random(0))) == (1 << wide.size) - 1
