"""P10: the order in which launches are issued, and that it breaks no order of the launch list."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from stageloom.edge_agent.executor.cuda.streams import Nature, issue_order, scheduled_order
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.launch_list import Barrier, Item
from stageloom.shared.plan import ExecutorOptions, IssueOrder
from tests.executor.contract.schedules import StepMaker, graph_of, plan_of, random_streams
from tests.executor.models import artifact_of, random_inputs
from tests.executor.torch.conftest import simulated
from tests.executor.torch.lists import random_items
from tests.executor.torch.steps import KEY, load, members, run, wrong


def launches(items: Sequence[Item], natures: Sequence[Sequence[Nature]]) -> list[tuple[int, int]]:
    """The order without the ends of items."""
    return [(item, at) for item, at in issue_order(items, natures) if at < len(natures[item])]


def _natures(items: tuple[Item, ...], rng: random.Random) -> list[list[Nature]]:
    return [
        [Nature(rng.random(), rng.random() < 0.5, rng.random()) for _ in item.ops[: rng.randint(0, 3)]]
        for item in items
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_launch_comes_once_and_after_what_its_item_waits_for(seed: int) -> None:
    rng = random.Random(seed)
    items = random_items(rng, 25, 5)
    natures = _natures(items, rng)
    order = launches(items, natures)
    assert sorted(order) == [(i, at) for i, one in enumerate(natures) for at in range(len(one))]
    place = {launch: at for at, launch in enumerate(order)}
    for index, item in enumerate(items):
        for at in range(1, len(natures[index])):
            assert place[index, at - 1] < place[index, at]
        earlier = [i for i in range(index) if items[i].stream == item.stream]
        for before in (*item.waits, *earlier):
            for own in range(len(natures[index])):
                assert all(place[before, at] < place[index, own] for at in range(len(natures[before])))


def _groups(*lengths: int) -> list[Item]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        Item(0, tuple(range(start, start + length)), stream, (), 0)
        for stream, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def test_groups_are_issued_breadth_first() -> None:
    order = launches(_groups(3, 1, 2), [[Nature()] * 3, [Nature()], [Nature()] * 2])
    assert [at for _, at in order] == [0, 0, 0, 1, 1, 2]
    assert {item for item, at in order[:3]} == {0, 1, 2}


def test_the_longest_way_to_the_end_goes_first_among_equals() -> None:
    order = launches(_groups(1, 3, 2), [[Nature()], [Nature()] * 3, [Nature()] * 2])
    assert [item for item, _ in order] == [1, 2, 0, 1, 2, 1]


def test_a_small_demand_goes_before_a_large_one() -> None:
    natures = [[Nature(demand=0.9)], [Nature(demand=0.1)], [Nature(demand=0.5)]]
    assert [item for item, _ in launches(_groups(1, 1, 1), natures)] == [1, 2, 0]


def test_memory_and_compute_bound_launches_take_turns() -> None:
    memory = [Nature(memory_bound=True)]
    order = launches(_groups(1, 1, 1, 1), [memory, memory, [Nature()], [Nature()]])
    assert [item for item, _ in order] == [2, 0, 3, 1]


def test_an_item_without_launches_does_not_hold_up_those_that_wait_for_it() -> None:
    items = [Item(0, (0,), 0, (), 0), Item(0, (1,), 1, (0,), 1), Item(0, (2,), 0, (1,), 2)]
    assert issue_order(items, [[Nature()], [], [Nature()]]) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("seed", range(10))
def test_an_item_ends_after_its_launches_and_before_any_that_waits_for_it(seed: int) -> None:
    rng = random.Random(seed)
    items = random_items(rng, 25, 5)
    natures = _natures(items, rng)
    place = {launch: at for at, launch in enumerate(issue_order(items, natures))}
    for index, item in enumerate(items):
        count = len(natures[index])
        assert all(place[index, at] < place[index, count] for at in range(count))
        for before in item.waits:
            assert place[before, len(natures[before])] < place[index, 0]


def test_items_of_streams_that_were_joined_follow_each_other_whole_whatever_the_schedule_lists() -> None:
    """Memory is shared on the strength of that: the second may write where the first still reads.

    The first two are on one stream; the third waits for the second, and is listed before the first ends.
    """
    items = [Item(0, (0, 1), 0, (), 0), Item(0, (2,), 0, (), 1), Item(0, (3,), 1, (1,), 2)]
    order = scheduled_order(items, [[0.0, 3.0], [1.0], [2.0]])
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_on_fewer_streams_than_the_schedule_names_what_is_on_one_stream_keeps_its_order() -> None:
    model = artifact_of("inception_v3")
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(3), 20)
    options = ExecutorOptions(name="torch_cuda", issue=IssueOrder.SCHEDULE)
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA, lanes=16)
    executor = simulated()
    steps = StepMaker(KEY, load(executor, replace(plan, executor=options), [model]))
    step, inputs = steps.step(0, {0: (InstanceId(1), 1)}), random_inputs(model.graph, 1)
    assert not wrong(model, inputs, run(executor, step, {InstanceId(1): [inputs]})[InstanceId(1)])
    recipe = executor._built[step.program].program.recipe
    assert recipe.streams == 2
    for stream in range(recipe.streams):
        own = [item for item, _ in recipe.script if recipe.items[item].stream == stream]
        assert own == sorted(own)
    executor.close()


@pytest.mark.parametrize("streams", [4, 20])
def test_a_plan_may_have_its_launches_issued_as_its_schedule_lists_them(streams: int) -> None:
    """Also on more streams than other plans get; a rival's schedule is compared as it was made."""
    model = artifact_of("inception_v3")
    schedule = random_streams(graph_of([model], [()], members(1)), random.Random(3), streams)
    options = ExecutorOptions(name="torch_cuda", issue=IssueOrder.SCHEDULE)
    plan = plan_of([model], [()], [members(1)], [schedule], barrier=Barrier.DATA)
    executor = simulated()
    steps = StepMaker(KEY, load(executor, replace(plan, executor=options), [model]))
    step, inputs = steps.step(0, {0: (InstanceId(1), 1)}), random_inputs(model.graph, 1)
    assert not wrong(model, inputs, run(executor, step, {InstanceId(1): [inputs]})[InstanceId(1)])
    recipe = executor._built[step.program].program.recipe
    issued = [
        op
        for _, call in recipe.script
        if call is not None and (unit := recipe.kernels[call]) is not None
        for op in unit.ops
    ]
    listed = [launch.op for launch in schedule.launches]
    assert issued == [op for op in listed if op in set(issued)] and len(issued) > len(listed) / 2
    assert (recipe.streams > 8) == (streams > 8), "a stream may take over the place of one that has ended"
    executor.close()
