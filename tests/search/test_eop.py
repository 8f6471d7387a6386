"""EOP: against all ways listed, and what its objective leaves to gain."""

import math
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.errors import SettingError
from stageloom.shared.partition import Axis, Split
from stageloom.shared.search.eop import (
    SPAN,
    apart_cost_s,
    best_split,
    eop,
    eop_at_most,
    eop_paper,
    equal,
    fixed,
    grid,
    key_operators,
    pair_apart_s,
    pair_coupled_s,
    separate,
    splitter,
    splitters,
    tune,
    tuned,
)
from stageloom.shared.search.patterns import Pattern
from stageloom.shared.search.split_problem import (
    AxisTimes,
    BorderJoins,
    ConstantJoins,
    Halves,
    OperatorBytes,
    Reads,
    SplitProblem,
    SplittableOperator,
    Whole,
    apart_s,
    coupled_s,
)
from tests.search.split_problems import TableJoins, least_by_listing, problem

HOME = Whole(0)
SEEDS = st.integers(0, 1_000_000)


# The dynamic programming


@pytest.mark.promise("splits-equal-all-ways")
@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_the_dynamic_programming_is_the_best_of_all_ways(seed: int, size: int) -> None:
    of = problem(seed, size=size)
    assert eop(of).seconds == pytest.approx(least_by_listing(of))


@pytest.mark.promise("splits-equal-all-ways")
@pytest.mark.parametrize("seed", range(3))
def test_the_dynamic_programming_is_the_best_of_all_ways_of_six_operators(seed: int) -> None:
    operators = problem(seed, size=6).operators
    few = [replace(one, axes=one.axes[:1]) for one in operators]
    of = replace(problem(seed, size=6), operators=few, chains=[range(6)])
    assert eop(of).seconds == pytest.approx(least_by_listing(of))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_it_is_under_joins_that_follow_no_law(seed: int, size: int) -> None:
    of = replace(problem(seed, size=size), joins=TableJoins(seed))
    assert eop(of).seconds == pytest.approx(least_by_listing(of))


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 4), st.booleans())
def test_it_is_with_tensors_at_home_on_the_other_resource(seed: int, size: int, table: bool) -> None:
    of = replace(problem(seed, size=size), home=Whole(1))
    if table:
        of = replace(of, joins=TableJoins(seed))
    assert eop(of).seconds == pytest.approx(least_by_listing(of))


@given(SEEDS)
def test_a_splitter_takes_the_better_home(seed: int) -> None:
    of = problem(seed)
    found = splitter("eop").choose(of)
    assert found == min((eop(replace(of, home=Whole(home))) for home in (0, 1)), key=lambda one: one.seconds)
    assert found.seconds <= min(_whole(replace(of, home=Whole(r)), r) for r in (0, 1)) + 1e-9


@given(SEEDS)
def test_its_states_cost_what_it_says(seed: int) -> None:
    of = problem(seed)
    found = eop(of)
    assert found.seconds == pytest.approx(coupled_s(of, found.states))


@pytest.mark.promise("splits-equal-all-ways")
@given(SEEDS, st.floats(0.0, 3.0))
def test_under_a_constant_cm_it_is_the_separate_optima(seed: int, join_s: float) -> None:
    of = replace(problem(seed), joins=ConstantJoins(join_s))
    keys = key_operators(of.operators)
    alone = [best_split(of, op) if op in keys else one.best_whole for op, one in enumerate(of.operators)]
    assert eop(of).seconds == pytest.approx(apart_s(of, alone))


@pytest.mark.promise("splits-equal-all-ways")
@given(SEEDS)
def test_eop_is_never_above_the_paper_nor_the_paper_above_separate(seed: int) -> None:
    of = problem(seed)
    ours, paper, alone = eop(of), eop_paper(of), separate(of)
    assert ours.seconds <= paper.seconds + 1e-9
    assert paper.seconds <= alone.seconds + 1e-9
    assert ours.seconds <= min(equal(of).seconds, fixed(of).seconds, _whole(of, 0), _whole(of, 1)) + 1e-9


def _whole(of: SplitProblem, resource: int) -> float:
    return coupled_s(of, [Whole(resource)] * len(of.operators))


@pytest.mark.promise("splits-equal-all-ways")
@given(SEEDS, st.one_of(st.none(), st.floats(0.0, 3.0)))
def test_the_joint_tuning_of_the_paper_is_empty(seed: int, join_s: float | None) -> None:
    of = problem(seed)
    if join_s is not None:
        of = replace(of, joins=ConstantJoins(join_s))
    assert eop_paper(of) == separate(of)


@given(SEEDS)
def test_tuning_has_something_to_find_once_neighbours_share_a_join(seed: int) -> None:
    of = problem(seed)
    found = tuned(of, pair_coupled_s)
    keys = sorted(key_operators(of.operators))
    paired = {op for pair in found.pairs for op in pair}
    assert len(paired) == 2 * len(found.pairs)
    apart = math.fsum(apart_cost_s(of, op, found.states[op]) for op in keys if op not in paired)
    pairs = [pair_coupled_s(of, (a, b), (found.states[a], found.states[b])) for a, b in found.pairs]
    assert found.seconds == pytest.approx(apart + math.fsum(pairs))
    assert found.seconds <= tuned(of, pair_apart_s).seconds + 1e-9


def test_it_finds_it_in_many_pairs() -> None:
    pairs = [replace(problem(seed, size=2), chains=[range(2)]) for seed in range(300)]
    assert sum(bool(tuned(of, pair_apart_s).pairs) for of in pairs) == 0
    assert sum(bool(tuned(of, pair_coupled_s).pairs) for of in pairs) > 20


def test_neighbours_share_a_boundary_where_no_split_pays_by_itself() -> None:
    """Sixteen rows, optima at 11 and 8 (11 s and 8 s, whole 16 s each), a barrier of 4 s.

    Apart two barriers each: 19 and 16 s. Both at 11, or both at 10: 22 s and two barriers.
    """
    of = two_operators(barrier_s=4.0)
    assert eop_paper(of).splits == () and eop_paper(of).seconds == 32.0
    found = eop(of)
    assert found.seconds == 30.0
    assert found.splits in ((Split(0, 1, Axis.ROWS, 11),), (Split(0, 1, Axis.ROWS, 10),))


def test_without_barriers_neighbours_keep_their_own_boundaries() -> None:
    of = two_operators(barrier_s=0.0)
    assert eop(of).splits == eop_paper(of).splits == (Split(0, 0, Axis.ROWS, 11), Split(1, 1, Axis.ROWS, 8))


def two_operators(barrier_s: float, window: int = 1) -> SplitProblem:
    """Sixteen rows, a second each; the first operator takes twice as long on resource 1."""
    quick, late = Pattern(0.0, 1.0), Pattern(0.0, 2.0)
    operators = [
        SplittableOperator((16.0, 32.0), (AxisTimes(Axis.ROWS, 16, (quick, late)),)),
        SplittableOperator((16.0, 16.0), (AxisTimes(Axis.ROWS, 16, (quick, quick)),)),
    ]
    rows = {Axis.ROWS: 16}
    one = OperatorBytes(
        input_bytes=16,
        output_bytes=16,
        input_extents=rows,
        output_extents=rows,
        reads={Axis.ROWS: Reads(Axis.ROWS, 1, window)},
    )
    joins = BorderJoins(operators=[one, one], barrier_s=barrier_s)
    return SplitProblem(operators=operators, joins=joins, chains=[range(2)])


def test_a_halo_changes_sides_at_a_barrier() -> None:
    """Each at its own optimum then, with three barriers."""
    found = eop(two_operators(barrier_s=4.0, window=3))
    assert found.seconds == 31.0
    assert found.splits == (Split(0, 0, Axis.ROWS, 11), Split(1, 1, Axis.ROWS, 8))


@given(SEEDS, st.integers(0, 4))
def test_fewer_splits_never_cost_less_and_never_more_than_a_resource_alone(seed: int, most: int) -> None:
    of = problem(seed)
    found, fewer = eop(of), eop_at_most(of, most)
    assert len(fewer.splits) <= most
    assert fewer.seconds == pytest.approx(coupled_s(of, fewer.states))
    assert found.seconds <= fewer.seconds + 1e-9
    assert fewer.seconds <= min(_whole(of, 0), _whole(of, 1)) + 1e-9
    assert eop_at_most(of, len(found.splits)) == found


def test_the_split_that_gains_most_is_kept() -> None:
    """16 s whole: 12 in two parts where resource 1 takes three times as long, 8 where it is as fast."""
    axes = [AxisTimes(Axis.ROWS, 16, (Pattern(0.0, 1.0), Pattern(0.0, slow))) for slow in (3.0, 1.0, 3.0)]
    operators = [SplittableOperator((16.0, 16.0 * one.part_s[1](1)), (one,)) for one in axes]
    of = SplitProblem(operators=operators, joins=ConstantJoins(0.0), chains=[range(3)])
    assert eop(of).seconds == 32.0
    assert eop_at_most(of, 1).splits == (Split(1, 1, Axis.ROWS, 8),)
    assert eop_at_most(of, 2).seconds == 36.0
    assert eop_at_most(of, 0).seconds == 48.0


# Chains beside each other


def test_chains_of_a_stage_run_beside_each_other_where_that_is_shorter() -> None:
    operators = [
        SplittableOperator((3.0, 4.0)),
        SplittableOperator((5.0, 5.0)),
        SplittableOperator((1.0, 9.0)),
    ]
    alone = [OperatorBytes(input_bytes=1, output_bytes=1)] * 3
    of = SplitProblem(
        operators=operators,
        joins=BorderJoins(operators=alone, barrier_s=0.25),
        chains=[range(1), range(1, 2), range(2, 3)],
    )
    assert eop(of).seconds == 9.0
    found = eop(replace(of, stages=[(0, 1, 2)]))
    # 1 on resource 1: there and back two barriers
    assert found.beside == (((0, 2), (1,)),)
    assert found.seconds == pytest.approx(max(4.0, 5.0 + 2 * 0.25))
    assert found.resources == (0, 1, 0)
    assert eop(replace(of, stages=[(0,), (1,), (2,)])).seconds == 9.0


@given(SEEDS)
def test_stages_never_cost_more_than_chains_in_turn(seed: int) -> None:
    random = Random(seed)
    of = problem(seed)
    places = list(range(len(of.chains)))
    cut = random.randint(0, len(places))
    staged = replace(of, stages=[one for one in (places[:cut], places[cut:]) if one])
    assert eop(staged).seconds <= eop(of).seconds + 1e-9


# One operator


@given(SEEDS)
def test_the_best_split_is_the_best_of_all_boundaries_and_pays(seed: int) -> None:
    of = problem(seed)
    for op, operator in enumerate(of.operators):
        listed = [
            apart_cost_s(of, op, Halves(one.axis, end)) for one in operator.axes for end in one.boundaries
        ]
        found = best_split(of, op)
        assert apart_cost_s(of, op, found) == min([operator.least_whole_s, *listed])
        if isinstance(found, Halves):
            assert apart_cost_s(of, op, found) < operator.least_whole_s


def test_key_operators_are_the_fewest_that_take_over_95_percent() -> None:
    operators = [SplittableOperator((one, 9 * one)) for one in (10.0, 80.0, 6.0, 3.0, 1.0)]
    assert key_operators(operators) == {0, 1, 2}
    assert key_operators(operators, share=0.8) == {0, 1}
    assert key_operators([SplittableOperator((1.0, 2.0))]) == {0}


@given(st.integers(2, 2000), st.sampled_from([1, 4, 16]))
def test_the_grid_of_ratios_is_of_boundaries_and_every_ratio_is_near_one(extent: int, quantum: int) -> None:
    axis = AxisTimes(Axis.CHANNELS, extent, (Pattern(1.0), Pattern(1.0)), (quantum, quantum))
    ends = grid(axis)
    assert set(ends) <= set(axis.boundaries) and len(ends) <= 99
    for step in range(1, 100):
        wanted = step * SPAN * extent
        near = min((abs(end - wanted) for end in axis.boundaries), default=0.0)
        assert not ends or min(abs(end - wanted) for end in ends) == near


def test_boundaries_fill_the_last_tile_of_one_part() -> None:
    axis = AxisTimes(Axis.CHANNELS, 40, (Pattern(1.0), Pattern(1.0)), (16, 12))
    assert axis.boundaries == (4, 16, 28, 32)
    assert replace(axis, granule=8).boundaries == (16, 32)


def test_tuning_moves_shares_against_each_other() -> None:
    """From optima that are none, which only a wrong caller hands in, it finds better ones on its line."""
    of = two_operators(barrier_s=0.0)
    states, seconds = tune(of, (0, 1), (Halves(Axis.ROWS, 7), Halves(Axis.ROWS, 12)), pair_apart_s)
    assert states == (Halves(Axis.ROWS, 11), Halves(Axis.ROWS, 8))
    assert seconds == 19.0
    whole = (HOME, Halves(Axis.ROWS, 8))
    assert tune(of, (0, 1), whole, pair_apart_s) == (whole, 24.0)


def test_what_one_resource_cannot_run_stays_on_the_other() -> None:
    operators = [
        SplittableOperator((1.0, inf)),
        SplittableOperator((inf, 1.0)),
        SplittableOperator((1.0, 2.0)),
    ]
    of = SplitProblem(operators=operators, joins=ConstantJoins(0.5), chains=[range(3)])
    assert eop(of).resources == eop_paper(of).resources == (0, 1, 0)
    assert fixed(of, [(0,), (1,)]).seconds == 3.0


# The rivals


def test_equal_and_fixed_split_every_operator_at_their_ratio() -> None:
    of = two_operators(barrier_s=0.0)
    assert equal(of).splits == (Split(0, 0, Axis.ROWS, 8), Split(1, 1, Axis.ROWS, 8))
    assert equal(of).seconds == 24.0
    alone = fixed(of, [(0,), (1,)])  # two thirds, and a half
    assert alone.splits == (Split(0, 0, Axis.ROWS, 11), Split(1, 1, Axis.ROWS, 8))
    assert fixed(of).splits == (Split(0, 0, Axis.ROWS, 10), Split(1, 1, Axis.ROWS, 10))  # 48 of 80 s


def test_every_splitter_answers_by_name_and_others_are_refused() -> None:
    of = problem(3)
    for name, one in splitters().items():
        found = splitter(name).choose(of)
        assert len(found.states) == len(of.operators) and one.help
        assert {op for op, r in enumerate(found.resources) if r is None} == {
            op for split in found.splits for op in range(split.first, split.last + 1)
        }
    with pytest.raises(SettingError, match="there is no splitter 'eopp'"):
        splitter("eopp")
