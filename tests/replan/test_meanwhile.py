"""What becomes of a search when something else is desired of its device meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.store.desired import Push, desired, push
from stageloom.planner.store.generations import set_states
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.tables import ReplanRow
from stageloom.shared.clock import ManualClock, SystemClock
from stageloom.shared.messages.control import Alarm, DeviceState, ModelLoad, Report
from stageloom.shared.plan import Plan, decode_plan
from tests.planner.processes import until
from tests.replan.drifting import BOOT, InlinePool, planned
from tests.replan.test_recalibration import World
from tests.store.helpers import NANO


class MeanwhilePool(InlinePool):
    """Something happens once, while a search runs."""

    def __init__(self) -> None:
        self.meanwhile: list[Callable[[], object]] = []

    def submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().submit(function, *arguments)


class Pushed:
    """A device that runs a plan to which a search finds a better one, and an operator who has another."""

    def __init__(self, folder: Path) -> None:
        self.revision = 0
        self.clock, self.pool = ManualClock(wall_us=SystemClock().wall_us()), MeanwhilePool()
        self.world = World(folder, clock=self.clock, pool=self.pool)
        self.runs = planned(self.world.device, "greedy")
        self.others = replace(self.runs, lanes=2)
        for name, plan in (("runs", self.runs), ("others", self.others)):
            self.world.store.write(add_plan, name, plan, "sequential")
        self._push("runs")
        self.world.device.runs(self.runs)

    def _push(self, plan: str) -> None:
        self.clock.advance(1.0)
        self.world.store.write(push, Push(device=NANO, plan=plan, decided_by="operator"))

    def others_pushed(self) -> None:
        """The operator pushes; the device says nothing yet."""
        self._push("others")

    def says(self, state: DeviceState) -> None:
        """How far the device is with what is desired of it."""
        wanted = self.world.store.read(desired, NANO)
        assert wanted is not None
        told = (NANO, wanted.epoch, wanted.generation, state, "", self.clock.wall_us())
        self.world.store.write(set_states, [told])

    def reports(self, state: DeviceState, runs: Plan) -> None:
        """As `says`, and which plan runs."""
        wanted = self.world.store.read(desired, NANO)
        assert wanted is not None
        self.revision += 1
        told = Report(
            revision=self.revision, epoch=wanted.epoch, generation=wanted.generation, active=runs.digest,
            state=state,
        )  # fmt: skip
        LinkStore(self.world.store).record_reports([ReportRecord(NANO, BOOT, told)])

    def pushed(self, replan: ReplanInfo) -> Plan:
        """The plan of a re-plan."""
        assert replan.generation, replan.reason
        return decode_plan(self.world.store.read(plan_info, replan.plan).wire)

    def answered_late(self) -> ReplanInfo:
        """What becomes of an alarm for other arrivals within some quarters of an hour."""
        store = self.world.store
        number = LinkStore(store).record_alarm(NANO, alarm_of(self.runs, "regime"))
        assert number is not None
        self.world.due.put((NANO, number))

        def answered() -> bool:
            self.clock.advance(901.0)
            (replan,) = store.read(replan_infos)
            return replan.outcome != "pending" or replan.generation > 0

        assert until(answered)
        self.world.close()
        (replan,) = store.read(replan_infos)
        return replan

    @property
    def is_desired(self) -> bool:
        """Whether the operator's plan is what the device should run."""
        wanted = self.world.store.read(desired, NANO)
        return wanted is not None and wanted.plan_digest == self.others.digest


def alarm_of(plan: Plan, cause: str, number: int = 1) -> Alarm:
    load = ModelLoad("branches", 20.0, 1500.0, 0, 0)
    return Alarm(
        boot=BOOT, number=number, at_us=1, cause=cause, value=4.0, threshold=2.0, plan=plan.digest,
        loads=(load,), samples=(),
    )  # fmt: skip


@pytest.mark.parametrize("state", [None, DeviceState.COMMITTED, DeviceState.REJECTED])
def test_a_plan_that_an_operator_pushes_while_a_re_plan_waits_stands_unless_the_device_refused_it(
    tmp_path: Path, state: DeviceState | None
) -> None:
    """What the re-plan reads when its turn comes has the operator's generation as the newest."""
    rig = Pushed(tmp_path)

    def meanwhile() -> None:
        rig.others_pushed()
        if state is not None:
            rig.says(state)

    replan = rig.world.answered(alarm_of(rig.runs, "variance"), meanwhile)
    rig.world.close()
    assert rig.is_desired == (state is not DeviceState.REJECTED)
    if rig.is_desired:
        assert (replan.outcome, replan.reason) == ("no_gain", "something newer was desired meanwhile")


@pytest.mark.parametrize("state", [None, DeviceState.COMMITTED, DeviceState.REJECTED])
def test_arrivals_that_moved_are_answered_once_the_device_has_tried_what_an_operator_pushed_meanwhile(
    tmp_path: Path, state: DeviceState | None
) -> None:
    """1. An operator pushes while the search runs. 2. For fifteen minutes the device says nothing of it, or
    it says at once how that ended."""
    rig = Pushed(tmp_path)

    def meanwhile() -> None:
        rig.others_pushed()
        if state is not None:
            rig.says(state)

    rig.pool.meanwhile.append(meanwhile)
    replan = rig.answered_late()
    assert rig.is_desired == (state is None)
    if state is None:
        assert replan.reason == "the device tries a plan that was pushed by others"


@pytest.mark.parametrize("state", [DeviceState.RECEIVED, DeviceState.WAITING, DeviceState.VERIFIED])
def test_arrivals_that_moved_leave_alone_what_the_device_still_fetches_for_an_operator(
    tmp_path: Path, state: DeviceState
) -> None:
    rig = Pushed(tmp_path)
    rig.others_pushed()
    rig.says(state)
    assert rig.answered_late().reason == "the device tries a plan that was pushed by others"
    assert rig.is_desired


@pytest.mark.parametrize("other", ["intervals", "lanes"])
def test_what_a_search_found_is_pushed_over_launch_intervals_that_the_device_took_meanwhile_alone(
    tmp_path: Path, other: str
) -> None:
    pool = MeanwhilePool()
    world = World(tmp_path, pool=pool)
    wide = planned(world.device, "greedy")
    models = tuple(replace(model, launch_interval_us=900) for model in wide.models)
    taken = replace(wide, models=models) if other == "intervals" else replace(wide, lanes=2)
    for name, plan in (("runs", wide), ("taken", taken)):
        world.store.write(add_plan, name, plan, "sequential")
    world.store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    world.device.runs(wide)
    pool.meanwhile.append(
        lambda: world.store.write(push, Push(device=NANO, plan="taken", decided_by="local"))
    )
    load = ModelLoad("branches", 20.0, 1500.0, 0, 0)
    alarm = Alarm(
        boot=BOOT, number=1, at_us=1, cause="variance", value=0.5, threshold=0.0625, plan=wide.digest,
        loads=(load,), samples=(),
    )  # fmt: skip
    replan = world.answered(alarm)
    world.close()
    if other == "intervals":
        assert (replan.how, replan.outcome) == ("search", "pending") and replan.digest != wide.digest
    else:
        assert (replan.outcome, replan.reason) == ("no_gain", "something newer was desired meanwhile")


def test_arrivals_that_moved_are_planned_for_from_the_plan_that_was_committed_since_their_alarm(
    tmp_path: Path,
) -> None:
    """A search leaves the lanes of the plan that runs as they are: the operator's has two."""
    rig = Pushed(tmp_path)
    rig.others_pushed()
    rig.reports(DeviceState.TRIAL, rig.runs)
    alarm = alarm_of(rig.runs, "regime")
    replan = rig.world.answered(alarm, lambda: rig.reports(DeviceState.COMMITTED, rig.others))
    assert (replan.how, rig.pushed(replan).lanes) == ("search", 2)
    assert rig.world.store.read(control_of, replan.replan) == rig.others.digest
    rig.world.close()


def test_what_a_search_found_against_a_plan_that_runs_no_longer_is_not_pushed_but_looked_for_again(
    tmp_path: Path,
) -> None:
    """1. A re-plan's plan is on trial when arrivals move. 2. It is committed during the search for those,
    which finds the same plan. 3. Against that itself nothing is better."""
    rig = Pushed(tmp_path)
    first = rig.world.answered(alarm_of(rig.runs, "variance"))
    better = rig.pushed(first)
    rig.reports(DeviceState.TRIAL, rig.runs)
    rig.pool.meanwhile.append(lambda: rig.reports(DeviceState.COMMITTED, better))
    second = rig.world.answered(alarm_of(rig.runs, "regime", number=2))
    assert (second.outcome, second.generation) == ("no_gain", 0), "the plan that runs is not pushed"
    assert second.reason.startswith("no plan to try")
    assert rig.world.store.read(control_of, second.replan) == better.digest
    rig.world.close()


def test_a_search_in_vain_says_nothing_of_a_plan_that_came_to_run_during_it_and_is_made_again_for_that(
    tmp_path: Path,
) -> None:
    """1. A re-plan's plan runs. 2. During a search that finds nothing better the operator's is committed.
    3. Against that the re-plan's is better."""
    rig = Pushed(tmp_path)
    better = rig.pushed(rig.world.answered(alarm_of(rig.runs, "variance")))
    rig.reports(DeviceState.COMMITTED, better)

    def meanwhile() -> None:
        rig.others_pushed()
        rig.reports(DeviceState.COMMITTED, rig.others)

    rig.pool.meanwhile.append(meanwhile)
    second = rig.world.answered(alarm_of(better, "regime", number=2))
    assert rig.pushed(second).structure == replace(better, lanes=2).structure, second.reason
    assert rig.world.store.read(control_of, second.replan) == rig.others.digest
    rig.world.close()


def test_a_search_in_vain_is_of_the_plan_that_it_was_made_for_whatever_runs_when_it_ends(
    tmp_path: Path,
) -> None:
    """With other launch intervals alone it is no other plan: the search is not made again."""
    rig = Pushed(tmp_path)
    better = rig.pushed(rig.world.answered(alarm_of(rig.runs, "variance")))
    rig.reports(DeviceState.COMMITTED, better)
    paced = replace(better, models=tuple(replace(one, launch_interval_us=900) for one in better.models))
    rig.world.store.write(add_plan, "paced", paced, "intervals")
    rig.pool.meanwhile.append(lambda: rig.reports(DeviceState.COMMITTED, paced))
    second = rig.world.answered(alarm_of(better, "regime", number=2))
    assert second.reason.startswith("no plan to try")
    assert rig.world.store.read(control_of, second.replan) == better.digest
    rig.world.close()


def control_of(session: Session, replan: int) -> str | None:
    """The plan that a re-plan weighed others against."""
    return session.scalar(select(ReplanRow.control).where(ReplanRow.replan == replan))
