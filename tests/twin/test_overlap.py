"""How steps of different lanes share the device, against closed forms and a fine-stepped simulation."""

from itertools import count
from random import Random

import pytest

from stageloom.planner.twin.lanes import Lanes, noise_factors, slowdown
from stageloom.planner.twin.times import StepTime
from stageloom.shared.engine.steps import PlanKey, ProgramKey, Step
from stageloom.shared.ids import StepId
from tests.twin.cases import device


def step(number: int, lane: int, after: tuple[int, ...] = ()) -> Step:
    program = ProgramKey(PlanKey(0), 0, 1, (1,))
    return Step(StepId(number), lane, program, (), tuple(map(StepId, after)))


def play(issues: list[tuple[float, Step, StepTime]], interference: float) -> tuple[dict[int, float], Lanes]:
    """When each step ends, and the lanes afterwards."""
    lanes = Lanes(device(lanes_interference=interference))
    lanes.make(1 + max(one.lane for _, one, _ in issues))
    waiting = sorted(issues, key=lambda issue: issue[0])
    ends: dict[int, float] = {}
    while waiting or lanes.next_end_s < float("inf"):
        if waiting and waiting[0][0] < lanes.next_end_s:
            at_s, one, time = waiting.pop(0)
            lanes.issue(one, time, at_s)
        else:
            at_s = lanes.next_end_s
            ended, _ = lanes.end_next()
            ends[ended.id] = at_s
    return ends, lanes


def test_one_step_takes_its_time_whatever_its_share() -> None:
    for share in (0.01, 0.5, 1.0):
        assert slowdown([share], 5.0) == 1.0
        ends, lanes = play([(2.0, step(0, 0), StepTime.of_one_item(0.3, share))], 5.0)
        assert ends == {0: 2.3}
        assert lanes.busy_s == pytest.approx(0.3)
        assert lanes.used_s == pytest.approx(0.3 * share)


def test_a_step_is_longer_by_fixed_seconds_per_step_that_runs_when_it_begins() -> None:
    lanes = Lanes(device(beside_s=0.05))
    lanes.make(2)
    for number, lane, at_s in ((0, 0, 0.0), (1, 1, 0.1), (2, 0, 0.1)):
        lanes.issue(step(number, lane), StepTime.of_one_item(0.3, 0.5), at_s)
    ends = {lanes.end_next()[0].id: lanes.busy_s for _ in range(3)}
    assert ends == pytest.approx({0: 0.3, 1: 0.45, 2: 0.65})


def test_each_item_after_the_first_costs_a_step_beside_others_fixed_seconds_too() -> None:
    lanes = Lanes(device(beside_s=0.05, item_beside_s=0.01))
    lanes.make(3)
    four = StepTime(0.3, 0.2, 0.9, 0.2, items=4)
    for lane in range(3):
        lanes.issue(step(lane, lane), four, 0.0)
    ends = {lanes.end_next()[0].id: lanes.busy_s for _ in range(3)}
    assert ends == pytest.approx({0: 0.3, 1: 0.3 + 0.08, 2: 0.3 + 2 * 0.08})


@pytest.mark.parametrize(("cores", "crowded"), [(0, ()), (1, (1, 2)), (2, (1, 2)), (3, (2,)), (4, ())])
def test_groups_come_one_after_another_where_others_leave_a_step_one_core(
    cores: int, crowded: tuple[int, ...]
) -> None:
    """As `StreamPool` calls helpers: while fewer threads are at work than cores, two at least."""
    lanes = Lanes(device(cores=cores))
    lanes.make(3)
    for lane in range(3):
        lanes.issue(step(lane, lane), StepTime(1.0 + 0.1 * lane, 0.2, 2.0 + 0.1 * lane, 0.1, items=2), 0.0)
    ends = {lanes.end_next()[0].id: lanes.busy_s for _ in range(3)}
    assert ends == pytest.approx({n: (2.0 if n in crowded else 1.0) + 0.1 * n for n in range(3)})


def test_small_steps_side_by_side_cost_each_other_only_the_interference() -> None:
    assert slowdown([0.3, 0.4], 0.0) == 1.0
    assert slowdown([0.3, 0.4], 0.2) == pytest.approx(1.2)
    assert slowdown([0.3, 0.3, 0.3], 0.2) == pytest.approx(1.4)


def test_full_steps_share_the_device_and_interference_one_is_one_after_another() -> None:
    assert slowdown([1.0, 1.0], 0.0) == pytest.approx(2.0)
    assert slowdown([0.8, 0.7], 0.0) == pytest.approx(1.5)
    assert slowdown([0.2, 0.2, 0.2], 1.0) == pytest.approx(3.0)


@pytest.mark.promise("lanes-share-device-closed")
@pytest.mark.parametrize("interference", [0.0, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_two_equal_steps_that_begin_together_end_together(share: float, interference: float) -> None:
    time = StepTime.of_one_item(0.1, share)
    ends, lanes = play([(0.0, step(0, 0), time), (0.0, step(1, 1), time)], interference)
    least = max(2 * share, 1.0)
    expected = 0.1 * (least + interference * (2 - least))
    assert ends == {0: pytest.approx(expected), 1: pytest.approx(expected)}
    assert lanes.busy_s == pytest.approx(expected)


def test_the_second_of_two_full_steps_delays_the_first_as_under_processor_sharing() -> None:
    """t = 1 and d = 0.4 apart: the first ends at 2t - d, the second at 2t."""
    time = StepTime.of_one_item(1.0, 1.0)
    ends, lanes = play([(0.0, step(0, 0), time), (0.4, step(1, 1), time)], 0.0)
    assert ends == {0: pytest.approx(1.6), 1: pytest.approx(2.0)}
    assert lanes.used_s == pytest.approx(2.0)


def test_a_lane_runs_in_order_and_a_step_waits_for_those_it_names() -> None:
    short, long = StepTime.of_one_item(0.1, 0.1), StepTime.of_one_item(1.0, 0.1)
    ends, _ = play(
        [
            (0.0, step(0, 0), long),
            (0.0, step(1, 1), short),
            (0.0, step(2, 1, after=(0,)), short),
            (0.0, step(3, 1), short),  # behind it in the lane, though it waits for nobody
        ],
        0.0,
    )
    assert ends == {
        0: pytest.approx(1.0),
        1: pytest.approx(0.1),
        2: pytest.approx(1.1),
        3: pytest.approx(1.2),
    }


@pytest.mark.promise("lanes-share-device-closed")
@pytest.mark.parametrize("seed", range(5))
def test_lanes_agree_with_a_simulation_in_small_steps(seed: int) -> None:
    rng, interference = Random(seed), 0.25
    numbers = count()
    issues = [
        (
            rng.uniform(0.0, 0.5),
            step(next(numbers), rng.randrange(3)),
            StepTime.of_one_item(rng.uniform(0.05, 0.2), share),
        )
        for share in (rng.uniform(0.1, 1.0) for _ in range(12))
    ]
    issues.sort(key=lambda issue: issue[0])
    ends, _ = play(issues, interference)
    tick, now = 2e-5, 0.0
    left = {one.id: time.seconds for _, one, time in issues}
    found: dict[int, float] = {}
    while left:
        running: dict[int, tuple[StepId, float]] = {}
        for at_s, one, time in issues:
            if at_s <= now and one.id in left:
                running.setdefault(one.lane, (one.id, time.share))
        slow = slowdown([share for _, share in running.values()], interference)
        now += tick
        for number, _ in running.values():
            left[number] -= tick / slow
            if left[number] <= 0.0:
                del left[number]
                found[number] = now
    assert found == {number: pytest.approx(at_s, abs=40 * tick) for number, at_s in ends.items()}


def test_noise_is_drawn_from_the_quantiles_and_by_the_seed_alone() -> None:
    quantiles = ((0.0, 0.9), (0.25, 0.95), (0.5, 1.0), (0.75, 1.1), (1.0, 1.6))
    drawn = noise_factors(quantiles, 7)
    assert drawn == noise_factors(quantiles, 7) != noise_factors(quantiles, 8)
    assert 0.9 <= min(drawn) < 0.92
    assert 1.55 < max(drawn) <= 1.6
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(1.0, abs=0.01)
    assert noise_factors((), 7) == []
