"""The stream pool: every item once, in an order that obeys the waits, whatever the number of threads."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from stageloom.edge_agent.executor.threads import StreamPool, _Run, assign
from stageloom.shared.launch_list import Item

CORES = tuple(sorted(os.sched_getaffinity(0)))


def _item(stream: int, waits: tuple[int, ...]) -> Item:
    return Item(0, (0,), stream, waits, 0)


def _random_items(rng: random.Random, count: int, streams: int) -> list[Item]:
    items: list[Item] = []
    for index in range(count):
        stream = rng.randrange(streams) * 3  # streams need not be dense
        others = [i for i in range(index) if items[i].stream != stream]
        items.append(_item(stream, tuple(sorted(rng.sample(others, min(len(others), rng.randint(0, 3)))))))
    return items


@pytest.mark.parametrize("max_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_items_run_once_and_after_what_they_wait_for(seed: int, max_threads: int) -> None:
    rng = random.Random(seed)
    items = _random_items(rng, 30, 6)
    plan = assign(items, max_threads)
    pool = StreamPool()
    pool.grow(max_threads)
    order: list[int] = []
    try:
        pool.run(plan, order.append)
    finally:
        pool.close()
    assert sorted(order) == list(range(len(items)))
    place = {item: position for position, item in enumerate(order)}
    for index, item in enumerate(items):
        earlier = [i for i in range(index) if items[i].stream == item.stream]
        assert all(place[before] < place[index] for before in (*item.waits, *earlier))


@pytest.mark.promise("groups-stage-run-whoever")
def test_two_groups_run_side_by_side_the_first_on_the_callers_thread() -> None:
    pool = StreamPool()
    pool.grow(1)
    names: dict[int, int] = {}
    both = threading.Barrier(2, timeout=30.0)

    def note(item: int) -> None:
        names[item] = threading.get_ident()
        both.wait()

    try:
        pool.run(assign([_item(0, ()), _item(1, ())], 2), note)
    finally:
        pool.close()
    assert names[0] == threading.get_ident() != names[1]


@pytest.mark.promise("groups-stage-run-whoever")
def test_a_group_whose_helper_has_not_woken_runs_on_the_callers_thread() -> None:
    """1. Another run keeps the only helper. 2. A stage of two groups ends without it."""
    pool = StreamPool()
    pool.grow(1)
    busy, release = threading.Event(), threading.Event()
    plan = assign([_item(0, ()), _item(1, ())], 2)
    caller = threading.get_ident()

    def hold(item: int) -> None:
        if item:
            busy.set()
        assert release.wait(30.0)

    holder = threading.Thread(target=pool.run, args=(plan, hold))
    holder.start()
    assert busy.wait(30.0)
    names: list[int] = []
    try:
        pool.run(plan, lambda item: names.append(threading.get_ident()))
    finally:
        release.set()
        holder.join()
        pool.close()
    assert names == [caller, caller]


@pytest.mark.promise("groups-stage-run-whoever")
def test_no_helper_is_called_while_every_core_has_a_thread_at_work() -> None:
    """1. Another lane's step takes one core of two: both groups run on the caller's thread. 2. It ended."""
    now_s = 0.0
    pool = StreamPool(cores=2, clock=lambda: now_s)
    pool.grow(1)
    plan = assign([_item(0, ()), _item(1, ())], 2)
    names: list[int] = []
    both = threading.Barrier(2, timeout=30.0)

    def alone(item: int) -> None:
        names.append(threading.get_ident())

    def side_by_side(item: int) -> None:
        names.append(threading.get_ident())
        both.wait()

    def lane() -> None:
        pool.begin()
        went_on.wait(30.0)
        pool.end()

    went_on = threading.Event()
    other = threading.Thread(target=lane)
    other.start()
    try:
        assert _until(lambda: pool._at_work_until_s != {})
        pool.begin()
        pool.run(plan, alone)
        went_on.set()
        other.join()
        pool.run(plan, alone)  # the other lane's next step would begin in a moment
        assert names == [threading.get_ident()] * 4
        now_s = 1.0
        names.clear()
        pool.run(plan, side_by_side)
    finally:
        went_on.set()
        pool.close()
    assert len(set(names)) == 2


@pytest.mark.promise("groups-stage-run-whoever")
@pytest.mark.parametrize("cores", [1, 2])
def test_a_step_on_the_only_core_calls_no_helper(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    pool = StreamPool()
    pool.grow(1)
    helping: list[int] = []
    try:
        pool.begin()
        pool.run(assign([_item(0, ()), _item(1, ())], 2), lambda item: helping.append(pool._helping))
    finally:
        pool.close()
    assert max(helping) == cores - 1


@pytest.mark.promise("groups-stage-run-whoever")
def test_whoever_ends_a_stage_goes_on_with_the_next() -> None:
    """1. The caller has ended its group and sleeps. 2. The helper ends the other one and begins item 2."""
    pool = StreamPool()
    pool.grow(1)
    begun = threading.Event()
    names: dict[int, int] = {}

    def body(item: int) -> None:
        names[item] = threading.get_ident()
        if item == 0:
            assert begun.wait(30.0)
        if item == 1:
            begun.set()
            assert _until(lambda: run.asleep)

    plan = assign([_item(0, ()), _item(1, ()), _item(0, (0, 1))], 2)
    run = _Run(plan, body, pool)
    try:
        run.lead()
    finally:
        pool.close()
    assert names[0] == threading.get_ident()
    assert names[1] == names[2] != names[0]


def _until(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        if time.monotonic() > deadline_s:
            return False
    return True


@pytest.mark.promise("groups-stage-run-whoever")
def test_without_helpers_a_run_ends_all_the_same() -> None:
    ran: list[int] = []
    StreamPool().run(assign([_item(0, ()), _item(1, ()), _item(2, (0, 1))], 3), ran.append)
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("broken", range(4))
def test_an_error_on_any_thread_reaches_the_caller_and_blocks_nobody(broken: int) -> None:
    items = [_item(0, ()), _item(1, ()), _item(0, (1,)), _item(1, (2,))]
    pool = StreamPool()
    pool.grow(1)

    def body(item: int) -> None:
        if item == broken:
            raise KeyError(item)

    try:
        with pytest.raises(KeyError, match=str(broken)):
            pool.run(assign(items, 2), body)
        done: list[int] = []
        pool.run(assign(items, 2), done.append)
    finally:
        pool.close()
    assert sorted(done) == [0, 1, 2, 3]


def test_steps_of_several_lanes_share_the_pool() -> None:
    items = _random_items(random.Random(4), 20, 4)
    plan = assign(items, 3)
    pool = StreamPool()
    pool.grow(4 * 2)
    counts = [0] * 4

    def lane(number: int) -> None:
        for _ in range(50):
            ran: list[int] = []
            pool.run(plan, ran.append)
            counts[number] += len(ran)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert counts == [50 * 20] * 4


def _placed(items: list[Item], rng: random.Random, resources: int) -> list[Item]:
    return [replace(item, resource=rng.randrange(-1, resources)) for item in items]


@pytest.mark.parametrize("seed", range(20))
def test_items_that_name_a_resource_run_on_its_threads_and_obey_the_waits(
    seed: int,
) -> None:
    """Resource 0 is the caller's own; those of 1 and 2 are taken by a thread of that resource alone."""
    rng = random.Random(seed)
    items = _placed(_random_items(rng, 30, 4), rng, 3)
    pool = StreamPool()
    pool.grow(2)
    order: list[int] = []
    names: dict[int, str] = {}

    def body(item: int) -> None:
        names[item] = threading.current_thread().name
        order.append(item)

    cores = {1: CORES[:1], 2: CORES[-1:]} if len(CORES) > 1 else {1: (), 2: CORES}
    try:
        for _ in range(5):
            order.clear()
            pool.run(assign(items, 2), body, 0, cores)
            assert sorted(order) == list(range(len(items)))
            place = {item: position for position, item in enumerate(order)}
            for index, item in enumerate(items):
                earlier = [i for i in range(index) if items[i].stream == item.stream]
                assert all(place[before] < place[index] for before in (*item.waits, *earlier))
                named = (
                    f"cores-{','.join(map(str, cores[item.resource])) or 'any'}" if item.resource > 0 else ""
                )
                assert names[index] == named if named else not names[index].startswith("cores-")
    finally:
        pool.close()


def test_items_of_a_resource_whose_cores_have_gone_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(thread: int, cores: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    items = [_item(0, ()), replace(_item(1, ()), resource=1), _item(0, (1,))]
    pool = StreamPool()
    done: list[int] = []
    try:
        for _ in range(3):
            pool.run(assign(items, 2), done.append, 0, {1: (1022, 1023)})
    finally:
        pool.close()
    assert sorted(done) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert caplog.text.count("no core of 1022, 1023 can be used any more") == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_a_half_on_either_resource_reaches_the_caller_and_ends_the_run(failing: int) -> None:
    items = [_item(0, ()), replace(_item(1, ()), resource=1), _item(0, (1,))]
    pool = StreamPool()

    def body(item: int) -> None:
        if item == failing:
            raise ValueError(f"item {item} broke")

    try:
        with pytest.raises(ValueError, match=f"item {failing} broke"):
            pool.run(assign(items, 2), body, 0, {1: ()})
        done: list[int] = []
        pool.run(assign(items, 2), done.append, 0, {1: ()})
        assert sorted(done) == [0, 1, 2]
    finally:
        pool.close()


def test_the_two_halves_of_a_split_run_side_by_side() -> None:
    items = [replace(_item(0, ()), resource=0), replace(_item(1, ()), resource=1), _item(0, (1,))]
    both = threading.Barrier(2, timeout=30.0)
    pool = StreamPool()

    def meet(item: int) -> None:
        if item < 2:
            both.wait()

    try:
        pool.run(assign(items, 2), meet, 0, {1: ()})
    finally:
        pool.close()
