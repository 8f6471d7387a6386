"""What joins cost, by hand, and where a graph has chains."""

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import zoo
from stageloom.shared.bitmask import bits
from stageloom.shared.partition import Axis, Split
from stageloom.shared.search.eop import apart_cost_s
from stageloom.shared.search.patterns import Pattern
from stageloom.shared.search.split_problem import (
    AxisTimes,
    BorderJoins,
    ConstantJoins,
    Halves,
    OperatorBytes,
    Reads,
    SplitProblem,
    SplitState,
    SplittableOperator,
    Whole,
    apart_s,
    chains_of,
    coupled_s,
    gathered_s,
    into_s,
    runs_of,
)
from tests.search.split_problems import problem

HOME = Whole(0)
CHANNELS, ROWS = Axis.CHANNELS, Axis.ROWS
EXTENTS = {CHANNELS: 64, ROWS: 28}


def border(
    reads: dict[Axis, Reads], made: dict[Axis, int] = EXTENTS, home: int = 0
) -> Callable[[SplitState, SplitState], float]:
    """cm of the second of two operators: a bus of 100 bytes/s, a barrier of 1 s and a latency of 1/4 s."""
    of = joined(reads, made, home)
    return lambda before, after: into_s(of, 1, before, after)


def joined(reads: dict[Axis, Reads], made: dict[Axis, int] = EXTENTS, home: int = 0) -> SplitProblem:
    first = OperatorBytes(input_bytes=1, output_bytes=2800, output_extents=EXTENTS)
    second = OperatorBytes(
        input_bytes=2800, output_bytes=1400, input_extents=EXTENTS, output_extents=made, reads=reads
    )
    joins = BorderJoins(operators=[first, second], barrier_s=1.0, latency_s=0.25, bytes_per_s=100.0)
    return SplitProblem(
        operators=[SplittableOperator((1.0, 1.0))] * 2, joins=joins, chains=[range(2)], home=Whole(home)
    )


def test_a_convolution_split_on_channels_reads_all_of_its_input_on_both_sides() -> None:
    cm = border({})
    assert cm(HOME, Halves(CHANNELS, 16)) == 1.0 + 0.25 + 28.0
    assert cm(Halves(CHANNELS, 16), Halves(CHANNELS, 16)) == 1.0 + (0.25 + 21.0) + (0.25 + 28.0)
    assert joined({}).joins.carried(1, Halves(CHANNELS, 16)) is None


def test_rows_of_a_3x3_convolution_read_a_halo() -> None:
    reads = {ROWS: Reads(ROWS, 1, 3, 1)}
    assert joined(reads).joins.carried(1, Halves(ROWS, 14)) is None
    assert border(reads)(HOME, Halves(ROWS, 14)) == pytest.approx(1.0 + 0.25 + 15.0)
    assert border(reads, home=1)(Whole(1), Halves(ROWS, 14)) == pytest.approx(1.0 + 0.25 + 15.0)
    assert border(reads)(HOME, Halves(ROWS, 27)) == pytest.approx(1.0 + 0.25 + 2.0)
    assert border(reads)(Halves(ROWS, 14), Halves(ROWS, 14)) == pytest.approx(1.0 + 0.5 + 14.0 + 15.0)


@given(st.integers(1, 27), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9))
def test_parts_together_read_the_input_at_least_once(end: int, stride: int, window: int, pad: int) -> None:
    one = OperatorBytes(
        input_bytes=1, output_bytes=1, input_extents=EXTENTS, reads={ROWS: Reads(ROWS, stride, window, pad)}
    )
    first, second = one.read_shares(Halves(ROWS, end))
    assert 0.0 <= first <= 1.0 and 0.0 <= second <= 1.0
    assert window < stride or first + second >= 1.0 - 1e-9


def test_a_state_without_a_halo_is_carried_and_costs_nothing() -> None:
    reads = {ROWS: Reads(ROWS), CHANNELS: Reads(CHANNELS)}
    for state in (Halves(ROWS, 5), Halves(CHANNELS, 16)):
        assert joined(reads).joins.carried(1, state) == state
        assert border(reads)(state, state) == 0.0
    assert border(reads)(Halves(ROWS, 5), Halves(ROWS, 7)) == pytest.approx(1.0 + 0.5 + 23.0 + 21.0)


def test_a_pool_of_two_halves_the_boundary_where_it_is_even() -> None:
    joins = joined({ROWS: Reads(ROWS, 2, 2)}, {CHANNELS: 64, ROWS: 14}).joins
    assert joins.carried(1, Halves(ROWS, 12)) == Halves(ROWS, 6)
    assert joins.carried(1, Halves(ROWS, 13)) is None
    assert joins.carried(1, Halves(ROWS, 1)) is None


def test_an_operator_that_changes_its_resource_takes_its_input_along() -> None:
    of = joined({})
    assert border({})(HOME, Whole(1)) == border({})(Whole(1), HOME) == 1.0 + 0.25 + 28.0
    assert border({})(Whole(1), Whole(1)) == gathered_s(of, 1, HOME) == 0.0
    assert gathered_s(of, 1, Whole(1)) == 1.0 + 0.25 + 14.0
    assert gathered_s(of, 1, Halves(ROWS, 21)) == 1.0 + 0.25 + 3.5
    other = joined({}, home=1)
    assert gathered_s(other, 1, Halves(ROWS, 21)) == 1.0 + 0.25 + 10.5
    assert gathered_s(other, 1, HOME) == 1.0 + 0.25 + 14.0


def test_resources_that_share_memory_pay_for_barriers_alone() -> None:
    one = OperatorBytes(input_bytes=10, output_bytes=10, output_extents=EXTENTS)
    joins = BorderJoins(operators=[one], barrier_s=0.5)
    of = SplitProblem(operators=[SplittableOperator((1.0, 1.0))], joins=joins, chains=[range(1)])
    assert joins.bytes_per_s == inf
    assert into_s(of, 0, HOME, Halves(ROWS, 3)) == gathered_s(of, 0, Halves(ROWS, 3)) == 0.5


def test_a_constant_cm_is_paid_by_every_operator_that_is_split() -> None:
    of = SplitProblem(
        operators=[SplittableOperator((1.0, 1.0))] * 2, joins=ConstantJoins(2.0), chains=[range(2)]
    )
    state = Halves(ROWS, 3)
    assert into_s(of, 1, state, state) == into_s(of, 1, HOME, state) == 2.0
    assert into_s(of, 1, Whole(1), HOME) == gathered_s(of, 1, state) == into_s(of, 1, state, HOME) == 0.0


def test_a_state_that_an_operator_does_not_offer_takes_for_ever() -> None:
    one = SplittableOperator((3.0, 2.0), (AxisTimes(ROWS, 4, (Pattern(0.0, 1.0), Pattern(0.0, 2.0))),))
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


class Sessions(ConstantJoins):
    """Whoever runs whole and does not go on where the one before ran begins a session, for half a second."""

    def enter_s(self, op: int, state: SplitState, home: Whole) -> float:
        return self.join_s if isinstance(state, Halves) else 0.5


@pytest.mark.parametrize(("chains", "begun_s"), [([range(2)], 0.5), ([range(1), range(1, 2)], 0.0)])
def test_whoever_follows_a_split_in_its_chain_begins_anew_however_it_is_counted(
    chains: list[range], begun_s: float
) -> None:
    """Two operators of 4 s, the first split into halves of 2 s with a join of 1 s."""
    axis = AxisTimes(ROWS, 4, (Pattern(0.0, 1.0), Pattern(0.0, 1.0)))
    operators = [SplittableOperator((4.0, 4.0), (axis,)), SplittableOperator((4.0, 4.0))]
    of = SplitProblem(operators=operators, joins=Sessions(1.0), chains=chains)
    state = Halves(ROWS, 2)
    assert coupled_s(of, [state, HOME]) == apart_s(of, [state, HOME]) == 7.0 + begun_s
    assert apart_cost_s(of, 0, state) == 3.0 + begun_s
    assert apart_s(of, [HOME, HOME]) == 8.0


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
