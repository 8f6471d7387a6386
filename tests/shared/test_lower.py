"""Lowering: every execution that a launch list allows is walked through, operator by operator."""

from collections.abc import Iterator
from random import Random

import pytest

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.launch_list import Barrier, Item, LaunchList, lower
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule, stage_schedule
from tests.shared.randoms import dag, random_dag, random_schedule, random_stages, random_streams

SEEDS = range(150)
BOTH = pytest.mark.parametrize("barrier", list(Barrier))


def executions(items: LaunchList) -> Iterator[tuple[int, int]]:
    """Every (operator, operators done before it) of every execution; a stuck execution fails.

    Streams run their items in order and each item's operators in order; an item begins once the items that it
    waits for have ended. All else is free. Walks the reachable states: how far each item has come.
    """
    streams = {item.stream for item in items}
    queue = {s: [i for i, item in enumerate(items) if item.stream == s] for s in streams}
    everything = sum(1 << op for item in items for op in item.ops)
    todo, seen = [tuple(0 for _ in items)], set()
    while todo:
        progress = todo.pop()
        if progress in seen:
            continue
        seen.add(progress)
        done = sum(1 << op for item, k in zip(items, progress, strict=True) for op in item.ops[:k])
        stuck = True
        for stream in streams:
            head = next((i for i in queue[stream] if progress[i] < len(items[i].ops)), None)
            if head is None or any(progress[w] < len(items[w].ops) for w in items[head].waits):
                continue
            stuck = False
            yield items[head].ops[progress[head]], done
            todo.append((*progress[:head], progress[head] + 1, *progress[head + 1 :]))
        assert not stuck or done == everything, "an execution got stuck"


def check_dependencies_hold(items: LaunchList, graph: CombinedGraph, mask: int) -> None:
    assert sorted(op for item in items for op in item.ops) == list(bits(graph.active_ops(mask)))
    for op, done in executions(items):
        assert not graph.predecessors[op] & ~done, f"operator {op} ran before what it depends on"


def always_before(items: LaunchList) -> set[tuple[int, int]]:
    """Pairs of operators that the launch list orders: streams and waits, closed under transitivity."""
    earlier: list[set[int]] = []
    pairs = set()
    for i, item in enumerate(items):
        direct = {*item.waits, *(j for j in range(i) if items[j].stream == item.stream)}
        earlier.append(direct.union(*(earlier[j] for j in direct)))
        ops = [op for j in earlier[i] for op in items[j].ops]
        for op in item.ops:
            pairs |= {(before, op) for before in ops}
            ops.append(op)
    return pairs


def closure(pairs: set[tuple[int, int]], order: list[int]) -> set[tuple[int, int]]:
    before: dict[int, set[int]] = {}
    for op in order:
        direct = {a for a, b in pairs if b == op}
        before[op] = direct.union(*(before[a] for a in direct))
    return {(a, op) for op, earlier in before.items() for a in earlier}


def check_shape(items: LaunchList, graph: CombinedGraph) -> None:
    """Waits name earlier items of other streams; an item has one member and is convex (edges and waits)."""
    edges = {(a, op) for item in items for op in item.ops for a in bits(graph.predecessors[op])}
    order = [op for item in items for op in item.ops]
    ordered = closure(always_before(items) | edges, order)
    for i, item in enumerate(items):
        assert {graph.member_of[op] for op in item.ops} == {item.member}
        assert list(item.waits) == sorted(set(item.waits))
        assert all(w < i and items[w].stream != item.stream for w in item.waits)
        before = {a for a, b in ordered if b in item.ops} - {*item.ops}
        after = {b for a, b in ordered if a in item.ops} - {*item.ops}
        assert not before & after, "a path leaves an item and comes back"


def random_case(seed: int) -> tuple[Random, CombinedGraph]:
    random = Random(seed)
    sizes = [random.randint(1, 5) for _ in range(random.randint(1, 3))]
    return random, random_dag(random, sizes, random.choice([0.2, 0.4, 0.7]))


@pytest.mark.promise("lowering-keeps-dependency-execution")
@BOTH
@pytest.mark.parametrize("seed", SEEDS)
def test_dependencies_hold_in_every_execution_under_every_mask(seed: int, barrier: Barrier) -> None:
    random, graph = random_case(seed)
    schedule = random_schedule(random, graph)
    for mask in range(1 << graph.num_members):
        items = lower(schedule, graph, mask, barrier=barrier)
        check_shape(items, graph)
        check_dependencies_hold(items, graph, mask)


def broken(items: LaunchList) -> Iterator[LaunchList]:
    """The launch list with one wait taken away, for every wait."""
    for i, item in enumerate(items):
        for wait in item.waits:
            kept = tuple(w for w in item.waits if w != wait)
            yield (*items[:i], Item(item.member, item.ops, item.stream, kept, item.stage), *items[i + 1 :])


@pytest.mark.promise("lowering-keeps-dependency-execution")
def test_the_walk_catches_a_missing_wait() -> None:
    """Every wait of a lowered stream schedule is needed: without it some execution breaks a dependency."""
    dropped = 0
    for seed in range(30):
        random, graph = random_case(seed)
        full = (1 << graph.num_members) - 1
        for items in broken(lower(random_streams(random, graph), graph, full)):
            dropped += 1
            with pytest.raises(AssertionError, match="ran before what it depends on"):
                check_dependencies_hold(items, graph, full)
    assert dropped > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_barrier_ends_a_stage_before_the_next_and_orders_nothing_else(seed: int) -> None:
    random, graph = random_case(seed)
    schedule = random_stages(random, graph)
    for mask in range(1, 1 << graph.num_members):
        active = graph.active_ops(mask)
        wanted: set[tuple[int, int]] = set()
        finished: list[int] = []
        for stage in schedule.stages:
            kept = [op for op in stage.operators if active >> op & 1]
            wanted |= {(before, op) for before in finished for op in kept}
            for group in [stage.operators] if stage.merge else stage.groups:
                kept_group = [op for op in group if active >> op & 1]
                wanted |= {(a, b) for i, b in enumerate(kept_group) for a in kept_group[:i]}
            finished += kept
        assert always_before(lower(schedule, graph, mask, barrier=Barrier.FULL)) == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_a_data_barrier_orders_streams_and_groups_that_read_each_other_and_nothing_else(seed: int) -> None:
    random, graph = random_case(seed)
    schedule = random_stages(random, graph)
    for mask in range(1, 1 << graph.num_members):
        active = graph.active_ops(mask)
        groups: list[tuple[int, tuple[int, ...]]] = []
        for stage in schedule.stages:
            parts = [stage.operators] if stage.merge else stage.groups
            kept = [group for group in parts if active >> group[0] & 1]
            groups += enumerate(kept)
        wanted = set()
        for j, (stream, group) in enumerate(groups):
            wanted |= {(a, b) for i, b in enumerate(group) for a in group[:i]}
            for other_stream, other in groups[:j]:
                reads = any(graph.predecessors[b] >> a & 1 for a in other for b in group)
                if other_stream == stream or reads:
                    wanted |= {(a, b) for a in other for b in group}
        order = [op for _, group in groups for op in group]
        assert always_before(lower(schedule, graph, mask, barrier=Barrier.DATA)) == closure(wanted, order)


@pytest.mark.promise("lowering-keeps-dependency-execution")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_schedule_keeps_its_streams_and_its_edges_and_nothing_else(seed: int) -> None:
    random, graph = random_case(seed)
    schedule = random_streams(random, graph)
    for mask in range(1, 1 << graph.num_members):
        active = graph.active_ops(mask)
        launches = [launch for launch in schedule.launches if active >> launch.op & 1]
        wanted = {(a, x.op) for x in launches for a in bits(graph.predecessors[x.op])}
        for i, launch in enumerate(launches):
            wanted |= {(x.op, launch.op) for x in launches[:i] if x.stream == launch.stream}
        items = lower(schedule, graph, mask)
        assert always_before(items) == closure(wanted, [launch.op for launch in launches])
        assert {op: item.stream for item in items for op in item.ops} == {x.op: x.stream for x in launches}


def test_a_sequential_schedule_is_one_item_per_member_under_either_barrier() -> None:
    graph = dag(5, [(0, 1), (1, 2), (3, 4)], sizes=[3, 2])
    schedule = stage_schedule([[[op]] for op in range(5)])
    for barrier in Barrier:
        assert lower(schedule, graph, 0b11, barrier=barrier) == (
            Item(0, (0, 1, 2), 0, (), 0),
            Item(1, (3, 4), 0, (), 3),
        )


def test_two_groups_fork_after_a_stage_and_join_before_the_next() -> None:
    graph = dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert lower(stage_schedule([[[0]], [[1], [2]], [[3]]]), graph, 1) == (
        Item(0, (0,), 0, (), 0),
        Item(0, (1,), 0, (), 1),
        Item(0, (2,), 1, (0,), 1),
        Item(0, (3,), 0, (2,), 2),
    )


def test_a_mask_drops_the_stages_of_idle_members_and_closes_the_gap() -> None:
    graph = dag(3, [(0, 2)], sizes=[3])
    two = dag(4, [(0, 1), (2, 3)], sizes=[2, 2])
    schedule = stage_schedule([[[0], [2]], [[3]], [[1]]])
    assert lower(schedule, two, 0b01) == (Item(0, (0, 1), 0, (), 0),)
    assert lower(schedule, two, 0b00) == ()
    assert lower(stage_schedule([[[0]], [[1]], [[2]]]), graph, 0) == ()


def test_a_merge_stage_is_one_item_and_is_never_joined_to_its_neighbours() -> None:
    graph = dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    schedule = StageSchedule((Stage(((0,),)), Stage(((1,), (2,)), merge=True), Stage(((3,),))))
    for barrier in Barrier:
        assert lower(schedule, graph, 1, barrier=barrier) == (
            Item(0, (0,), 0, (), 0),
            Item(0, (1, 2), 0, (), 1, merge=True),
            Item(0, (3,), 0, (), 2),
        )


def test_another_stream_waits_for_the_operator_it_reads_and_not_for_those_launched_after_it() -> None:
    """Operators 0 and 1 are launched on stream 0 before 2 on stream 1, which reads 0 only."""
    graph = dag(3, [(0, 1), (0, 2)])
    schedule = StreamSchedule((Launch(0, 0), Launch(1, 0), Launch(2, 1)))
    assert lower(schedule, graph, 1) == (
        Item(0, (0,), 0, (), 0),
        Item(0, (1,), 0, (), 1),
        Item(0, (2,), 1, (0,), 2),
    )


def test_a_wait_that_another_wait_implies_is_left_out() -> None:
    """3 reads 0 and 2; 2 has waited for 0 already."""
    graph = dag(4, [(0, 2), (0, 3), (2, 3)])
    schedule = StreamSchedule((Launch(0, 0), Launch(2, 1), Launch(1, 1), Launch(3, 2)))
    items = lower(schedule, graph, 1)
    assert [(item.ops, item.waits) for item in items] == [((0,), ()), ((2,), (0,)), ((1,), ()), ((3,), (1,))]


def test_a_schedule_is_lowered_alike_twice() -> None:
    random, graph = random_case(5)
    schedule: Schedule = random_schedule(random, graph)
    assert lower(schedule, graph, 1) == lower(schedule, graph, 1)
