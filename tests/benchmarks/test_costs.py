"""What `benchmarks.costs` draws and reckons, on numbers known beforehand."""

import random

import pytest

from benchmarks.costs import MOST_GROUPS, drawn_schedule, lower_decile
from benchmarks.runner import rank_correlation
from stageloom.shared.blocks import combine, split
from stageloom.shared.legality import violations
from tests.search.graphs import DIAMOND, model


def test_rank_correlation_sees_order_alone_and_shares_the_ranks_of_equals() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 11.0, 1000.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == pytest.approx(-1.0)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 over sqrt(4.5 * 5).
    assert rank_correlation([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx((4.5 / 5.0) ** 0.5)


def test_a_time_is_what_a_tenth_of_the_runs_stay_below() -> None:
    assert lower_decile([float(at) for at in range(11)]) == 1.0
    assert lower_decile([3.0]) == 3.0


def test_drawn_schedules_are_legal_and_differ() -> None:
    graphs = [model("left", DIAMOND)[1], model("right", DIAMOND)[1]]
    combined = combine([(graph, split(graph, ())[0]) for graph in graphs])
    rng = random.Random(1)
    drawn = [drawn_schedule(combined, rng) for _ in range(20)]
    assert not any(violations(one, combined) for one in drawn)
    assert len(set(drawn)) > 5
    groups = {len(stage.groups) for one in drawn for stage in one.stages}
    assert {1, 2, 3} <= groups and max(groups) <= MOST_GROUPS
