"""The roofline of a device that small kernels do not fill, and what stages make of the room."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.planner.twin.device_file import device_names, load_device
from stageloom.shared.blocks import split
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId
from stageloom.shared.schedule import Launch, StreamSchedule, stage_schedule
from stageloom.shared.search.analytic import DeviceRates, alone_s, occupancy, work_s
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.makespan import lower_bounds, schedule_s
from tests.learning.cases import cell
from tests.search.graphs import union

# 4 elements out, 1e6 flop, 48 bytes moved: on 16 threads a quarter of the peak and the whole bus.
SMALL = DeviceRates(flop_per_s=1e6, bytes_per_s=16.0, launch_s=0.5, threads=16)


def small(flop: int) -> Graph:
    graph = cell("one", channels=1, side=2)
    first = replace(graph.operators[1], flop=flop, weight_bytes=16)
    return replace(graph, operators=(graph.operators[0], first, *graph.operators[2:]))


def test_a_small_kernel_reaches_its_share_of_the_peak_and_leaves_the_rest() -> None:
    graph = small(8_000_000)
    assert occupancy(graph, OpId(1), SMALL) == 0.25
    assert alone_s(graph, OpId(1), SMALL) == 0.5 + 8.0 / 0.25
    assert work_s(graph, OpId(1), SMALL) == 8.0


def test_a_quarter_of_the_threads_fills_the_bus_and_fewer_do_not() -> None:
    graph = small(0)
    assert alone_s(graph, OpId(1), SMALL) == 0.5 + 48 / 16.0
    assert alone_s(graph, OpId(1), replace(SMALL, threads=32)) == 0.5 + 48 / 8.0
    assert work_s(graph, OpId(1), SMALL) == 3.0


@pytest.mark.parametrize("device", device_names())
def test_work_is_never_more_than_the_seconds_alone(device: str) -> None:
    graph, rates = cell("cell", channels=512, side=56), load_device(device).rates()
    for op in range(len(graph.operators)):
        assert 0.0 < work_s(graph, OpId(op), rates) <= alone_s(graph, OpId(op), rates)


def test_weights_are_read_once_for_a_batch_and_a_launch_is_paid_once() -> None:
    """One element a row in, one out, 16 bytes of weights; more rows fill more of the device."""
    graph, wide = small(8_000_000), replace(SMALL, threads=0)
    row_bytes = 16 + 16
    assert alone_s(small(0), OpId(1), wide, 3) == 0.5 + (16 + 3 * row_bytes) / 16.0
    assert alone_s(graph, OpId(1), wide, 3) == 0.5 + 24.0
    assert alone_s(graph, OpId(1), SMALL, 2) == 0.5 + 16.0 / 0.5
    assert alone_s(graph, OpId(1), SMALL, 4) == alone_s(graph, OpId(1), SMALL, 1), "four fill it"
    assert work_s(graph, OpId(1), SMALL, 4) == 32.0


def test_devices_that_fill_up_say_what_each_operator_leaves() -> None:
    graph = small(8_000_000)
    whole = (graph.digest, graph, split(graph, ())[0])
    assert CostTable(rates=SMALL).for_members([whole]).work_s[1] == pytest.approx(8.0)
    assert CostTable(rates=replace(SMALL, threads=0)).for_members([whole]).work_s == ()
    measured = CostTable(measured_s={(graph.digest, OpId(1)): 65.0}, rates=SMALL)
    assert measured.for_members([whole]).work_s[1] == pytest.approx(16.0)  # the estimate's share


def test_groups_take_as_long_as_the_longest_while_there_is_room_and_then_their_work() -> None:
    costs = StageCosts((4.0, 3.0, 2.0), contention=0.0, barrier_s=0.5, work_s=(2.0, 1.5, 1.5))
    assert costs.stage_s([(0,), (1,)]) == 4.0 + 0.5
    assert costs.stage_s([(0,), (1,), (2,)]) == 5.0 + 0.5
    half = replace(costs, contention=0.5)
    assert half.stage_s([(0,), (1,), (2,)]) == 5.0 + 0.5 * (9.0 - 5.0) + 0.5
    assert half.stage_s([(0, 1, 2)]) == 9.0


SHARES = st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=5)


@given(shares=SHARES, contention=st.floats(0.0, 1.5))
def test_no_schedule_beats_the_bound_of_the_work(
    shares: list[tuple[float, float]], contention: float
) -> None:
    seconds = tuple(alone for alone, _ in shares)
    costs = StageCosts(seconds, contention, work_s=tuple(alone * share for alone, share in shares))
    graph = union([[] for _ in shares])
    least_s = max(lower_bounds(graph, costs, Limits())) * (1.0 - 1e-9)
    together = stage_schedule([[[op] for op in range(graph.size)]])
    streams = StreamSchedule(tuple(Launch(op, op) for op in range(graph.size)))
    assert schedule_s(together, graph, costs) >= least_s
    assert schedule_s(streams, graph, costs) >= least_s


@given(alone=st.floats(0.01, 1.0), share=st.floats(0.0, 1.0), count=st.integers(1, 5))
def test_equal_streams_that_start_together_take_what_their_stage_takes(
    alone: float, share: float, count: int
) -> None:
    costs = StageCosts((alone,) * count, 0.25, barrier_s=0.125, work_s=(alone * share,) * count)
    graph = union([[] for _ in range(count)])
    streams = StreamSchedule(tuple(Launch(op, op) for op in range(count)))
    stages = stage_schedule([[[op] for op in range(count)]])
    assert schedule_s(streams, graph, costs) == pytest.approx(schedule_s(stages, graph, costs))
