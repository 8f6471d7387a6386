"""What joins cost, by hand, and where a graph has chains."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import zoo
from stageloom.shared.bitmask import bits
from stageloom.shared.partition import Axis, Split
from stageloom.shared.search.patterns import Pattern
from stageloom.shared.search.split_costs import (
    HOME,
    BorderJoins,
    ConstantJoins,
    Halves,
    OperatorBytes,
    Reads,
    SplitAxis,
    SplitProblem,
    SplitState,
    SplittableOperator,
    Whole,
    apart_s,
    chains_of,
    coupled_s,
    runs_of,
)
from tests.search.split_problems import problem

CHANNELS, ROWS = Axis.CHANNELS, Axis.ROWS
EXTENTS = {CHANNELS: 64, ROWS: 28}


def border(reads: dict[Axis, Reads], made: dict[Axis, int] = EXTENTS) -> BorderJoins:
    one = OperatorBytes(
        input_bytes=2800, output_bytes=1400, input_extents=EXTENTS, output_extents=made, reads=reads
    )
    return BorderJoins(operators=[one], barrier_s=1.0, latency_s=0.25, bytes_per_s=100.0)


def test_a_convolution_split_on_channels_reads_all_of_its_input_on_both_sides() -> None:
    joins = border({})
    assert joins.into(0, HOME, Halves(CHANNELS, 16)) == 1.0 + 0.25 + 28.0
    assert joins.into(0, Halves(CHANNELS, 16), Halves(CHANNELS, 16)) == 1.0 + 2 * 0.25 + 28.0
    assert joins.carried(0, Halves(CHANNELS, 16)) is None


def test_rows_of_a_3x3_convolution_lack_one_row_of_halo_on_each_side() -> None:
    joins = border({ROWS: Reads(ROWS, 1, 3, 1)})
    assert joins.carried(0, Halves(ROWS, 14)) is None
    assert joins.into(0, Halves(ROWS, 14), Halves(ROWS, 14)) == pytest.approx(1.0 + 2 * (0.25 + 1.0))
    assert joins.into(0, Halves(ROWS, 14), Halves(ROWS, 13)) == pytest.approx(1.0 + 0.25 + 2.0)
    assert joins.into(0, HOME, Halves(ROWS, 14)) == pytest.approx(1.0 + 0.25 + 15.0)
    assert joins.into(0, Halves(CHANNELS, 16), Halves(ROWS, 14)) == pytest.approx(
        1.0 + 0.5 + 28 * (15 / 28 * 48 / 64 + 15 / 28 * 16 / 64)
    )


def test_a_state_without_a_halo_is_carried_and_costs_nothing() -> None:
    joins = border({ROWS: Reads(ROWS), CHANNELS: Reads(CHANNELS)})
    for state in (Halves(ROWS, 5), Halves(CHANNELS, 16)):
        assert joins.carried(0, state) == state
        assert joins.into(0, state, state) == 0.0
    assert joins.into(0, Halves(ROWS, 5), Halves(ROWS, 7)) == pytest.approx(1.0 + 0.25 + 2.0)


def test_a_pool_of_two_halves_the_boundary_where_it_is_even() -> None:
    joins = border({ROWS: Reads(ROWS, 2, 2)}, {CHANNELS: 64, ROWS: 14})
    assert joins.carried(0, Halves(ROWS, 12)) == Halves(ROWS, 6)
    assert joins.carried(0, Halves(ROWS, 13)) is None
    assert joins.carried(0, Halves(ROWS, 1)) is None


def test_an_operator_that_changes_its_resource_takes_its_input_along() -> None:
    joins = border({})
    assert joins.into(0, HOME, Whole(1)) == joins.into(0, Whole(1), HOME) == 1.0 + 0.25 + 28.0
    assert joins.into(0, Whole(1), Whole(1)) == joins.home(0, HOME) == 0.0
    assert joins.home(0, Whole(1)) == 1.0 + 0.25 + 14.0
    assert joins.home(0, Halves(ROWS, 21)) == 1.0 + 0.25 + 3.5


def test_resources_that_share_memory_pay_for_barriers_alone() -> None:
    joins = BorderJoins(
        operators=[OperatorBytes(input_bytes=10, output_bytes=10, output_extents=EXTENTS)], barrier_s=0.5
    )
    assert joins.bytes_per_s == inf
    assert joins.into(0, HOME, Halves(ROWS, 3)) == joins.home(0, Halves(ROWS, 3)) == 0.5


def test_a_constant_cm_is_paid_by_every_operator_that_is_split() -> None:
    joins = ConstantJoins(2.0)
    assert joins.into(0, Halves(ROWS, 3), Halves(ROWS, 3)) == joins.into(0, HOME, Halves(ROWS, 3)) == 2.0
    assert joins.into(0, Whole(1), HOME) == joins.home(0, Halves(ROWS, 3)) == 0.0
    assert joins.carried(0, Halves(ROWS, 3)) is None and joins.carried(0, Whole(1)) == Whole(1)


def test_a_state_that_an_operator_does_not_offer_takes_for_ever() -> None:
    one = SplittableOperator((3.0, 2.0), (SplitAxis(ROWS, 4, (Pattern(0.0, 1.0), Pattern(0.0, 2.0))),))
    assert one.seconds(Halves(ROWS, 3)) == 3.0 and one.seconds(Halves(ROWS, 1)) == 6.0
    assert one.seconds(Halves(ROWS, 4)) == one.seconds(Halves(CHANNELS, 1)) == inf
    assert one.best_whole == Whole(1) and one.axes[0].nearest(0.7) == 3


@given(st.integers(0, 100_000))
def test_joining_after_every_operator_never_costs_less(seed: int) -> None:
    of = problem(seed)
    states: list[SplitState] = [
        Halves(one.axes[0].axis, one.axes[0].boundaries[0]) if one.axes and seed + op & 1 else Whole(op & 1)
        for op, one in enumerate(of.operators)
    ]
    assert coupled_s(of, states) <= apart_s(of, states) + 1e-9


def test_neighbours_whose_state_is_carried_are_one_split() -> None:
    pool = OperatorBytes(
        input_bytes=8,
        output_bytes=4,
        input_extents={ROWS: 28},
        output_extents={ROWS: 14},
        reads={ROWS: Reads(ROWS, 2, 2)},
    )
    same = OperatorBytes(
        input_bytes=8,
        output_bytes=8,
        input_extents={ROWS: 28},
        output_extents={ROWS: 28},
        reads={ROWS: Reads(ROWS)},
    )
    joins = BorderJoins(operators=[same, same, pool, same], barrier_s=1.0)
    of = SplitProblem(
        operators=[SplittableOperator((1.0, 1.0))] * 4, joins=joins, chains=[range(3), range(3, 4)]
    )
    states: list[SplitState] = [HOME, Halves(ROWS, 12), Halves(ROWS, 6), Halves(ROWS, 6)]
    assert runs_of(of, states) == (Split(1, 2, ROWS, 6), Split(3, 3, ROWS, 6))


@pytest.mark.parametrize("name", ["googlenet", "squeezenet_bypass", "resnet50"])
def test_chains_are_read_by_their_successor_alone_and_stages_keep_the_order(name: str) -> None:
    graph = zoo.graph_of(name, width=0.25, size=75)
    chains, stages = chains_of(graph)
    assert [op for chain in chains for op in chain] == list(range(len(graph.operators)))
    for chain in chains:
        for op in chain[1:]:
            assert graph.predecessors[op] == 1 << op - 1 and graph.successors[op - 1] == 1 << op
    assert sorted(place for stage in stages for place in stage) == list(range(len(chains)))
    level = {op: at for at, stage in enumerate(stages) for place in stage for op in chains[place]}
    for op, before in enumerate(graph.predecessors):
        inside = next(chain for chain in chains if op in chain)
        assert all(level[one] < level[op] or one in inside for one in bits(before))
    assert max(map(len, stages)) > 1
