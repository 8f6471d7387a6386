"""When a load for which nothing was found is searched for again: closed forms, and through the re-planner."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.costs.measured import STALE_S
from stageloom.planner.replan.backoff import (
    FruitlessSearch,
    is_tried_again,
    judged_rates,
    not_again_yet,
    wait_s,
)
from stageloom.planner.replan.decide import NOTHING_BETTER, NOTHING_TO_TRY
from stageloom.planner.replan.policy import Observation
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.store.desired import Push, newest_desired, push
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.replan_pushes import push_replan
from stageloom.planner.store.replan_settings import change_replan_settings
from stageloom.shared.clock import ManualClock, SystemClock
from stageloom.shared.messages.control import Alarm, ModelLoad
from stageloom.shared.plan import Plan
from tests.replan.drifting import BOOT, InlinePool, planned
from tests.replan.test_recalibration import World
from tests.replan.test_regimes import DAY, NIGHT, A, B, seen
from tests.store.helpers import NANO

AT_US = 1_000_000_000
NOW = seen(A, "variance", DAY)


def fruitless(*ago_s: float, of: Observation = NOW) -> list[FruitlessSearch]:
    return [
        FruitlessSearch(AT_US - round(1e6 * ago), of.incumbent.structure, judged_rates(of.loads))
        for ago in ago_s
    ]


def test_each_fruitless_search_in_a_row_doubles_the_wait_up_to_half_an_hour() -> None:
    waits = [wait_s(number) for number in range(9)]
    assert waits == [0.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0, 1800.0]
    assert wait_s(10_000) == 1800.0


def test_it_is_searched_again_once_the_wait_since_the_last_search_is_over() -> None:
    assert not_again_yet(NOW, [], AT_US) == ""
    assert not_again_yet(NOW, fruitless(59.9), AT_US) != ""
    assert not_again_yet(NOW, fruitless(60.0), AT_US) == ""
    assert not_again_yet(NOW, fruitless(119.9, 1000.0), AT_US) != ""
    assert not_again_yet(NOW, fruitless(120.0, 1000.0), AT_US) == ""
    assert not_again_yet(NOW, fruitless(-5.0), AT_US) != "", "a clock that was set back"


def test_the_reason_says_when_it_was_looked_for_and_when_it_will_be() -> None:
    assert not_again_yet(NOW, fruitless(40.0, 400.0, 800.0, 900.0), AT_US) == (
        "nothing to try was found for this load 40 s ago; it is looked for again in 8 min"
    )


def test_searches_for_another_plan_or_load_do_not_count() -> None:
    for of in (seen(B, "variance", DAY), seen(A, "variance", NIGHT, NIGHT)):
        assert not_again_yet(NOW, fruitless(1.0, of=of), AT_US) == ""
    among = [*fruitless(1.0, of=seen(B, "variance", DAY)), *fruitless(70.0)]
    assert not_again_yet(NOW, among, AT_US) == "", "one in a row, and its minute is over"


def test_two_seconds_with_few_tasks_are_the_same_load() -> None:
    quiet = seen(A, "variance", tuple(one / 3.0 for one in DAY))
    assert not_again_yet(quiet, fruitless(1.0), AT_US) != ""


@pytest.mark.parametrize("cause", ["drift", "power_mode", "of another version"])
def test_what_is_no_matter_of_load_is_searched_for_always(cause: str) -> None:
    assert not_again_yet(seen(A, cause, DAY), fruitless(1.0), AT_US) == ""


class CountingPool(InlinePool):
    """How many searches began."""

    def __init__(self) -> None:
        self.begun = 0

    def submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        self.begun += 1
        return super().submit(function, *arguments)


class Alarms:
    """A device whose queues diverge although it runs the best plan that there is."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.pool = ManualClock(wall_us=SystemClock().wall_us()), CountingPool()
        self.world = World(folder, clock=self.clock, pool=self.pool)
        self.number = 0

    def next(
        self, per_s: float = 20.0, cause: str = "variance", queued: int = 0, runs: Plan | None = None
    ) -> Alarm:
        """An alarm a second later."""
        self.clock.advance(1.0)
        self.number += 1
        return Alarm(
            boot=BOOT,
            number=self.number,
            at_us=self.clock.wall_us(),
            cause=cause,
            value=0.5,
            threshold=0.0625,
            plan=(runs or self.world.first).digest,
            loads=(ModelLoad("branches", per_s, 1500.0, queued, 0),),
            samples=(),
        )

    def won(self, plan: Plan) -> None:
        """A re-plan had a plan tried against the one that runs, whose place it took."""
        store, device = self.world.store, self.world.device
        replan = LinkStore(store).record_alarm(NANO, self.next(runs=device.plan))
        assert replan is not None
        above = store.read(newest_desired, NANO)
        pushed = store.write(
            push_replan, NANO, replan, plan, scheduler="search", above=above, how="search", predicted=None
        )
        assert pushed is not None
        device.committed((pushed.epoch, pushed.generation), plan)

    def answered(
        self, per_s: float = 20.0, cause: str = "variance", queued: int = 0, runs: Plan | None = None
    ) -> tuple[ReplanInfo, bool]:
        """What the re-plan of the next alarm found, and whether something was searched for it.

        With a queue it has other launch intervals to propose.
        """
        before = self.pool.begun
        alarm = self.next(per_s, cause, queued, runs)
        replan = self.world.answered(alarm)
        assert (replan.outcome == "no_gain") == (queued == 0)
        return replan, self.pool.begun > before


@pytest.fixture
def alarms(tmp_path: Path) -> Iterator[Alarms]:
    made = Alarms(tmp_path)
    yield made
    made.world.close()


def test_a_device_that_goes_on_to_alarm_is_searched_for_at_growing_intervals(alarms: Alarms) -> None:
    replan, searched = alarms.answered()
    assert searched and replan.reason.startswith(NOTHING_TO_TRY)
    replan, searched = alarms.answered()
    assert not searched
    assert replan.reason == "nothing to try was found for this load 1 s ago; it is looked for again in 59 s"
    assert alarms.answered(per_s=100.0)[1], "another load"
    assert not alarms.answered()[1], "which the first one's wait outlasts"
    alarms.clock.advance(60.0)
    assert alarms.answered()[1]
    alarms.clock.advance(60.0)
    assert not alarms.answered()[1], "the second time in a row it is two minutes"


@pytest.mark.parametrize("change", ["costs", "settings", "drift"])
def test_whatever_may_make_another_answer_is_searched_for_at_once(alarms: Alarms, change: str) -> None:
    assert alarms.answered()[1]
    assert not alarms.answered()[1]
    if change == "costs":
        alarms.clock.advance(1.0)
        alarms.world.device.profile()
    elif change == "settings":
        alarms.world.store.write(change_replan_settings, NANO, {"budget_s": 5.0})
    assert alarms.answered(cause="drift" if change == "drift" else "variance")[1]
    assert not alarms.answered()[1]


def test_what_needs_no_search_is_proposed_meanwhile_and_leaves_the_wait_as_it_is(alarms: Alarms) -> None:
    assert alarms.answered()[1]
    replan, searched = alarms.answered(queued=8)
    assert (replan.how, searched) == ("intervals", False)
    world = alarms.world
    world.store.write(push, Push(device=NANO, plan="first", decided_by="operator"))  # which overtakes it
    assert not alarms.answered()[1]


def test_a_search_after_which_only_launch_intervals_change_was_in_vain_as_well(alarms: Alarms) -> None:
    """A backlog asks for other intervals each time, whether anything is searched or not."""
    replan, searched = alarms.answered(queued=8)
    assert (replan.how, searched, replan.remark) == ("intervals", True, NOTHING_BETTER)
    alarms.world.pushed(replan)
    replan, searched = alarms.answered(queued=16)
    assert (replan.how, searched, replan.remark) == ("intervals", False, "")
    alarms.world.pushed(replan)
    alarms.clock.advance(60.0)
    assert alarms.answered(queued=32)[1], "one in a row, and its minute is over"


def test_once_another_plan_was_tried_it_is_searched_for_at_once(alarms: Alarms) -> None:
    assert alarms.answered()[1]
    store = alarms.world.store
    replan = LinkStore(store).record_alarm(NANO, alarms.next())
    assert replan is not None
    wide = planned(alarms.world.device, "greedy")
    above = store.read(newest_desired, NANO)
    pushed = store.write(
        push_replan, NANO, replan, wide, scheduler="greedy", above=above, how="search", predicted=None
    )
    assert pushed is not None
    store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    assert alarms.answered()[1]


def test_a_search_that_had_its_device_measure_first_is_in_vain_as_any_other(alarms: Alarms) -> None:
    """What was measured for it came before it searched: the next alarm need neither measure nor search."""
    device = alarms.world.device
    measure = device.profile

    def takes_a_second(request: int | None = None) -> None:
        alarms.clock.advance(1.0)
        measure(request)

    device.profile = takes_a_second  # type: ignore[method-assign]
    alarms.clock.advance(STALE_S + 1.0)
    assert alarms.answered()[1]
    assert len(device.asked) == 1
    assert not alarms.answered()[1]
    assert len(device.asked) == 1


def test_a_proven_plan_that_lost_to_the_one_that_runs_does_not_change_places_with_it(alarms: Alarms) -> None:
    """By its costs it is the better one, and its device would not try it again."""
    first, wide = alarms.world.first, planned(alarms.world.device, "greedy")
    alarms.world.device.runs(wide)
    alarms.won(first)
    alarms.won(wide)
    replan, _ = alarms.answered(runs=wide)
    assert replan.outcome == "no_gain" and "did not gain here lately" in replan.reason


def test_each_loss_to_the_plan_that_runs_doubles_the_time_until_a_plan_is_tried_again(alarms: Alarms) -> None:
    world, wide = alarms.world, planned(alarms.world.device, "greedy")
    world.device.runs(wide)
    for wait_h in (1, 2, 4):
        tried = world.answered(alarms.next(runs=wide))
        assert tried.digest == world.first.digest
        world.device.refused((tried.epoch, tried.generation), world.first)
        alarms.clock.advance(3600.0 * wait_h - 120.0)
        assert "did not gain here lately" in world.answered(alarms.next(runs=wide)).reason
        alarms.clock.advance(240.0)
    assert is_tried_again([0, 0, 0, 0, 0, 0, 0, 0], round(86_400e6)), "a day at most"
