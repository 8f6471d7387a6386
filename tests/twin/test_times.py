"""What a step takes alone and its share, worked out by hand."""

from dataclasses import replace

import pytest

from stageloom.planner.replan.predict import block_costs, step_s
from stageloom.planner.twin.times import StepTime, StepTimes, border_bytes
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan
from stageloom.shared.schedule import Launch, Schedule, StreamSchedule, stage_schedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, MeasuredStage, fitted, samples
from tests.search.graphs import DIAMOND, model
from tests.twin.cases import device

NAMES = ("a", "b")
SECONDS = [0.001, 0.004, 0.002, 0.003]  # of the diamond's operators


def diamonds(
    schedule: Schedule, count: int = 1, *, batch: int = 1, barrier: Barrier = Barrier.FULL, threads: int = 1
) -> tuple[BoundPlan, dict[Digest, Graph]]:
    """One combined block of so many whole diamonds."""
    found = [model(name, DIAMOND) for name in NAMES[:count]]
    graphs = dict(found)
    models = tuple(
        ModelPlan(name=name, artifact=artifact, batch=batch)
        for name, (artifact, _) in zip(NAMES, found, strict=False)
    )
    members = tuple(Member(index, 0, 0) for index in range(count))
    plan = Plan(
        models=models,
        combined=(CombinedBlock(members, schedule),),
        barrier=barrier,
        executor=ExecutorOptions(intra_op_threads=threads),
    )
    return bind(plan, graphs), graphs


def costs(graphs: dict[Digest, Graph], **rates: object) -> CostTable:
    measured = {(artifact, OpId(op)): SECONDS[op] for artifact in graphs for op in range(4)}
    return CostTable(measured_s=measured, rates=DeviceRates(**{"launch_s": 0.0, "barrier_s": 0.0, **rates}))  # type: ignore[arg-type]


def seconds_of(bound: BoundPlan, times: StepTimes, mask: int = 1, buckets: tuple[int, ...] = (1,)) -> float:
    return times.of_plan(bound).step(0, mask, buckets).seconds


SEQUENTIAL = stage_schedule([[[0]], [[1]], [[2]], [[3]]])
FORKED = stage_schedule([[[0]], [[1], [2]], [[3]]])


def test_one_after_another_is_the_sum_and_the_fixed_costs() -> None:
    """Four single stages are one item; three stages with a fork between are four."""
    bound, graphs = diamonds(SEQUENTIAL)
    plain = StepTimes(device(), costs(graphs))
    assert seconds_of(bound, plain) == pytest.approx(0.010)
    dear = StepTimes(device(step_s=0.0005, item_s=0.0001), costs(graphs))
    assert seconds_of(bound, dear) == pytest.approx(0.010 + 0.0005 + 0.0001)
    forked, _ = diamonds(FORKED)
    assert seconds_of(forked, dear) == pytest.approx(0.010 + 0.0005 + 4 * 0.0001)


def test_groups_of_a_stage_cost_the_longest_the_interference_and_the_barrier() -> None:
    bound, graphs = diamonds(FORKED)
    times = StepTimes(device(cores=8), costs(graphs, contention=0.25, barrier_s=0.0002))
    assert seconds_of(bound, times) == pytest.approx(0.001 + (0.004 + 0.25 * 0.002 + 0.0002) + 0.003)


def test_groups_cannot_be_faster_than_their_work_allows() -> None:
    """Two threads' worth of work on cores for two, and two groups of two threads each on two cores."""
    bound, graphs = diamonds(FORKED, threads=2)
    times = StepTimes(device(cores=2), costs(graphs, contention=0.0))
    assert seconds_of(bound, times) == pytest.approx(0.001 + 0.006 + 0.003)
    wide = StepTimes(device(cores=4), costs(graphs, contention=0.0))
    assert seconds_of(bound, wide) == pytest.approx(0.001 + 0.004 + 0.003)


def test_a_mask_leaves_the_other_members_out() -> None:
    joint = stage_schedule([[[0], [4]], [[1], [2]], [[3]], [[5], [6]], [[7]]])
    bound, graphs = diamonds(joint, 2)
    times = StepTimes(device(cores=8), costs(graphs, contention=0.5))
    whole = 0.001 + 0.5 * 0.001 + 2 * (0.004 + 0.5 * 0.002 + 0.003)
    assert seconds_of(bound, times, 0b11, (1, 1)) == pytest.approx(whole)
    assert seconds_of(bound, times, 0b10) == pytest.approx(0.001 + 0.004 + 0.5 * 0.002 + 0.003)


def test_without_a_program_members_run_one_after_another_under_one_overhead() -> None:
    joint = stage_schedule([[[0], [4]], [[1], [2], [5], [6]], [[3], [7]]])
    bound, graphs = diamonds(joint, 2)
    times = StepTimes(device(cores=8, step_s=0.01), costs(graphs, contention=0.0)).of_plan(bound)
    apart = times.step(0, 0b11, (1, 1), fallback=True)
    assert apart.seconds == pytest.approx(2 * (0.001 + 0.004 + 0.003) + 0.01)
    assert times.step(0, 0b11, (1, 1)).seconds == pytest.approx(0.001 + 0.004 + 0.003 + 0.01)


def test_streams_run_as_a_fluid() -> None:
    launches = tuple(Launch(op, 1 if op == 2 else 0) for op in range(4))
    bound, graphs = diamonds(StreamSchedule(launches))
    times = StepTimes(device(cores=8), costs(graphs, contention=0.0))
    assert seconds_of(bound, times) == pytest.approx(0.001 + 0.004 + 0.003)
    data, _ = diamonds(FORKED, barrier=Barrier.DATA)
    assert seconds_of(data, times) == pytest.approx(0.001 + 0.004 + 0.003)


def test_the_share_is_the_work_over_the_seconds() -> None:
    """One thread of four cores; overhead is no work; a fork uses two cores for a while."""
    bound, graphs = diamonds(SEQUENTIAL)
    quarter = StepTimes(device(cores=4), costs(graphs)).of_plan(bound).step(0, 1, (1,))
    assert quarter.share == pytest.approx(0.25)
    half_idle = StepTimes(device(cores=4, step_s=0.010), costs(graphs)).of_plan(bound).step(0, 1, (1,))
    assert half_idle.share == pytest.approx(0.125)
    forked, _ = diamonds(FORKED)
    wide = StepTimes(device(cores=4), costs(graphs, contention=0.0)).of_plan(forked).step(0, 1, (1,))
    assert wide.share == pytest.approx(0.010 / 4 / 0.008)
    unknown = StepTimes(device(), costs(graphs)).of_plan(bound).step(0, 1, (1,))
    assert unknown.share == 1.0


def test_with_no_core_for_a_second_group_items_come_one_after_another() -> None:
    """Four stages' items in full, no barrier and no contention; one thread of two cores."""
    bound, graphs = diamonds(FORKED)
    known = costs(graphs, contention=0.25, barrier_s=0.0002)
    one = StepTimes(device(cores=2, step_s=0.010, item_s=0.001), known).of_plan(bound).step(0, 1, (1,))
    assert one.items == 4
    assert one.crowded_s == pytest.approx(0.001 + 0.004 + 0.002 + 0.003 + 0.004 + 0.010)
    assert one.crowded_share == pytest.approx(0.010 / 2 / 0.024)
    data, _ = diamonds(FORKED, barrier=Barrier.DATA)
    fluid = StepTimes(device(cores=2, step_s=0.010, item_s=0.001), known).of_plan(data).step(0, 1, (1,))
    assert fluid.crowded_s == pytest.approx(one.crowded_s)
    assert fluid.items == 4
    single, _ = diamonds(SEQUENTIAL)
    alone = StepTimes(device(cores=2), known).of_plan(single).step(0, 1, (1,))
    assert alone == StepTime.of_one_item(alone.seconds, alone.share)


def test_groups_that_slow_each_other_keep_their_cores() -> None:
    """Of two cores: 3 ms of work in the fork take 4.5 ms instead of 4, so they are 3.375; the rest are 2."""
    bound, graphs = diamonds(FORKED)
    times = StepTimes(device(cores=2), costs(graphs, contention=0.25, barrier_s=0.0002))
    assert times.of_plan(bound).step(0, 1, (1,)).share == pytest.approx((0.003375 + 0.002) / 0.0087)


def test_a_batch_costs_what_the_estimates_say_relative_to_the_measured_batch() -> None:
    """Measured at batch 4. Compute bound: a quarter for one row; launch bound: the same for any."""
    bound, graphs = diamonds(SEQUENTIAL, batch=4)
    at_four = dict.fromkeys(graphs, 4)
    computing = StepTimes(device(), replace(costs(graphs, flop_per_s=1.0), measured_at=at_four))
    assert seconds_of(bound, computing, 1, (4,)) == pytest.approx(0.010)
    assert seconds_of(bound, computing, 1, (1,)) == pytest.approx(0.0025)
    launching = StepTimes(device(), replace(costs(graphs, launch_s=1e6), measured_at=at_four))
    assert seconds_of(bound, launching, 1, (1,)) == pytest.approx(0.010)
    assert seconds_of(bound, launching, 1, (2,)) == pytest.approx(0.010)


def test_a_larger_batch_than_was_measured_costs_more_whatever_plan_runs_it() -> None:
    """Measured one task at a time; the plan that is priced has batches of four."""
    bound, graphs = diamonds(SEQUENTIAL, batch=4)
    times = StepTimes(device(), costs(graphs, flop_per_s=1.0))
    assert seconds_of(bound, times, 1, (1,)) == pytest.approx(0.010)
    assert seconds_of(bound, times, 1, (4,)) == pytest.approx(0.040)


def test_a_stage_that_was_measured_takes_what_was_measured() -> None:
    """Also the run of several stages of one group, which are one item; not a part of it."""
    bound, graphs = diamonds(FORKED)
    (artifact,) = graphs
    members = ((artifact, 0, 4),)
    forked = MeasuredStage(members, 1, ((1,), (2,)), 0.0055)
    whole = MeasuredStage(members, 1, ((0, 1, 2, 3),), 0.008)
    table = replace(costs(graphs), stages=(forked, whole))
    assert seconds_of(bound, StepTimes(device(), table)) == pytest.approx(0.001 + 0.0055 + 0.003)
    sequential, _ = diamonds(SEQUENTIAL)
    assert seconds_of(sequential, StepTimes(device(), table)) == pytest.approx(0.008)
    part = replace(table, stages=(MeasuredStage(members, 1, ((0,),), 9.0),))
    assert seconds_of(sequential, StepTimes(device(), part)) == pytest.approx(0.010)


def test_a_stage_that_was_measured_at_one_batch_tells_nothing_of_members_with_different_ones() -> None:
    joint = stage_schedule([[[0], [4]], [[1], [2], [5], [6]], [[3], [7]]])
    bound, graphs = diamonds(joint, 2, batch=8)
    members = tuple((artifact, 0, 4) for artifact in graphs)
    known = costs(graphs, flop_per_s=1.0)
    table = replace(known, stages=(MeasuredStage(members, 8, ((0,), (4,)), 9.0),))
    first, second = bound.plan.models
    mixed = bind(replace(bound.plan, models=(first, replace(second, batch=1))), graphs)
    for one, batches, seen in ((bound, (8, 8), True), (mixed, (8, 1), False)):
        measured, estimated = (seconds_of(one, StepTimes(device(), t), 0b11, batches) for t in (table, known))
        assert (measured != estimated) is seen


def test_what_stages_taught_of_the_device_class_prices_the_others() -> None:
    """As the searches price them, and scaled by batch as the operators are."""
    bound, graphs = diamonds(FORKED, batch=2)
    (artifact,) = graphs
    taught = [
        MeasuredStage(((artifact, 0, 4),), 2, groups, seconds)
        for groups, seconds in ((((1,), (2,)), 0.0058), (((1,),), 0.0041), (((0, 1, 2, 3),), 0.0099))
    ]
    table = replace(costs(graphs, flop_per_s=1.0, launch_s=1e-6, contention=0.3), stages=tuple(taught))
    rates, learned = fitted(samples(table, graphs), table.rates)
    table = replace(table, rates=rates, interference=learned, stages=())
    known = block_costs(bound, 0, table)
    expected = step_s(known, bound.combined[0].graph, FORKED, 1)
    times = StepTimes(device(), table)
    assert learned.samples == 3
    assert seconds_of(bound, times, 1, (2,)) == pytest.approx(expected)
    assert seconds_of(bound, times, 1, (1,)) == pytest.approx(expected / 2)


def test_borders_count_what_others_read_or_make() -> None:
    _, graph = model("a", DIAMOND)
    assert border_bytes(graph, [OpId(0)]) == 32
    assert border_bytes(graph, [OpId(1), OpId(2)]) == 16 + 2 * 16
    assert border_bytes(graph, [OpId(op) for op in range(4)]) == 32
    bound, graphs = diamonds(SEQUENTIAL)
    times = StepTimes(device(border_s_per_byte=1e-4), costs(graphs))
    assert seconds_of(bound, times) == pytest.approx(0.010 + 32e-4)


def test_the_stages_of_a_step_are_told_apart() -> None:
    """The last two stages of a sequential end are one item, which counts for the first of them."""
    bound, graphs = diamonds(FORKED)
    times = StepTimes(device(cores=8, step_s=0.01), costs(graphs, contention=0.5))
    assert times.of_plan(bound).blocks[0].stage_s(1, (1,)) == pytest.approx({0: 0.001, 1: 0.005, 2: 0.003})
    sequential, _ = diamonds(SEQUENTIAL)
    assert times.of_plan(sequential).blocks[0].stage_s(1, (1,)) == pytest.approx({0: 0.010})
    data, _ = diamonds(FORKED, barrier=Barrier.DATA)
    assert times.of_plan(data).blocks[0].stage_s(1, (1,)) == {}


def test_only_so_many_blocks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageloom.planner.twin.times.MAX_BLOCKS", 2)
    (one, graphs), (two, _) = diamonds(FORKED), diamonds(SEQUENTIAL)
    three, _ = diamonds(stage_schedule([[[0]], [[2]], [[1]], [[3]]]))
    times = StepTimes(device(), costs(graphs))
    first, second = times.of_plan(one).blocks[0], times.of_plan(two).blocks[0]
    assert times.of_plan(one).blocks[0] is first
    times.of_plan(three)
    assert times.of_plan(one).blocks[0] is first
    assert times.of_plan(two).blocks[0] is not second


def test_plans_share_the_times_of_equal_combined_blocks() -> None:
    bound, graphs = diamonds(FORKED)
    other = bind(replace(bound.plan, max_skips=3), graphs)
    sequential, _ = diamonds(SEQUENTIAL)
    times = StepTimes(device(), costs(graphs))
    assert times.of_plan(bound).blocks[0] is times.of_plan(other).blocks[0]
    assert times.of_plan(bound).blocks[0] is not times.of_plan(sequential).blocks[0]


def test_a_block_takes_what_its_own_executor_takes_whatever_runs_first_in_its_plan() -> None:
    """Ten times as long on two threads as on one, and the plan the other way round as well."""
    one, two = ExecutorOptions(intra_op_threads=1), ExecutorOptions(intra_op_threads=2)
    bound, graphs = diamonds(stage_schedule([[[op]] for op in range(8)]), 2)
    alone = tuple(CombinedBlock((Member(at, 0, 0),), SEQUENTIAL, executor=at) for at in range(2))
    plan = replace(bound.plan, combined=alone, executor=one, further_executors=(two,))
    slow = {operator: 10.0 * seconds for operator, seconds in costs(graphs).measured_s.items()}
    there = replace(costs(graphs), measured_s=slow, executor=two)
    times = StepTimes(device(cores=4), replace(costs(graphs), executor=one, beside={two: there}))
    for executors, seconds in (((one, two), (0.010, 0.100)), ((two, one), (0.100, 0.010))):
        first, further = executors
        known = times.of_plan(bind(replace(plan, executor=first, further_executors=(further,)), graphs))
        for at, (executor, expected_s) in enumerate(zip(executors, seconds, strict=True)):
            step = known.step(at, 1, (1,))
            assert step.seconds == pytest.approx(expected_s)
            assert step.share == pytest.approx(executor.intra_op_threads / 4)
