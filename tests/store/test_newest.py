"""A device's history stays bounded, and what is in use stays whatever its age."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.store import plans
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import AlarmRow, EventRow, GenerationRow, PlanRow, ReplanRow, Table
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, Autonomy, DeviceState, LocalPlan, Report
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.store.helpers import NANO, add_model, enrol, small_plan

KEPT = 5
KEEP = Retention(0.0, 0.0, 0.0, KEPT)


@pytest.fixture
def plan(store: Store, tmp_path: Path) -> Plan:
    """The plan `first` of a device with a model."""
    enrol(store)
    add_model(store, tmp_path)
    made = small_plan(store)
    store.write(add_plan, "first", made, "sequential")
    return made


def tidy_all(store: Store) -> int:
    return sum(tidy(store, KEEP))


def generations(store: Store) -> list[int]:
    with store.database.read() as session:
        wanted = select(GenerationRow.generation).order_by(GenerationRow.generation)
        return list(session.scalars(wanted))


def count(store: Store, table: type[Table]) -> int:
    with store.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def report(store: Store, revision: int, generation: int, state: DeviceState, **more: Any) -> None:
    said = Report(revision=revision, epoch=1, generation=generation, state=state, **more)
    LinkStore(store).record_reports([ReportRecord(NANO, 7, said)])


def alarm(number: int) -> Alarm:
    return Alarm(
        boot=7, number=number, at_us=5, cause="age", value=1.0, threshold=0.1, plan=None, loads=(), samples=()
    )


@pytest.mark.promise("device-s-generations-alarms")
def test_the_newest_generations_stay_and_those_that_are_in_use(store: Store, plan: Plan) -> None:
    """1. 20 are pushed. 2. Generations 2 and 4 commit: 4 is last-known-good. 3. The device reports 6."""
    for _ in range(20):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    for revision, generation in enumerate((2, 4), 1):
        report(store, revision, generation, DeviceState.COMMITTED)
    report(store, 3, 6, DeviceState.STAGED)
    assert tidy_all(store) > 0
    assert generations(store) == [4, 6, 16, 17, 18, 19, 20]
    assert tidy_all(store) == 0, "again changes nothing"


@pytest.mark.promise("device-s-generations-alarms")
def test_alarms_go_but_not_the_one_whose_replan_is_pending(
    store: Store, plan: Plan, clock: ManualClock
) -> None:
    assert LinkStore(store).record_alarm(NANO, alarm(1)) is not None
    for number in range(2, 30):
        clock.advance(1.0)
        LinkStore(store).record_alarm(NANO, alarm(number))
    tidy_all(store)
    with store.database.read() as session:
        left = list(session.scalars(select(AlarmRow.number).order_by(AlarmRow.number)))
    assert left == [1, 25, 26, 27, 28, 29]
    assert count(store, ReplanRow) == 1


def test_events_of_one_device_leave_those_of_others_alone(store: Store, plan: Plan) -> None:
    quiet = enrol(store, DeviceId("quiet"), 2)
    for number in range(50):
        LinkStore(store).note_excess(NANO, f"alarms {number}")
    tidy_all(store)
    codes = [(device, code) for _, device, code, _ in store.read(newest_events)]
    assert codes.count((NANO, "quota")) == KEPT and (quiet, "enrolled") in codes
    assert count(store, EventRow) == KEPT + 1


@pytest.mark.promise("device-s-generations-alarms")
def test_a_plan_that_a_device_made_goes_once_nothing_refers_to_it(
    store: Store, plan: Plan, clock: ManualClock
) -> None:
    """1. The plan of a device that may plan is adopted: it is desired. 2. Newer generations push it out of
    the history. 3. It goes, and what an operator named stays."""
    info = store.read(named_models, ["relu"])[0]
    graph = store.load_artifact(info.digest).graph
    own = compose([ModelChoice(name="relu", artifact=info.digest, graph=graph, replicas=2)])
    assert own.digest != plan.digest
    told = store.write(push, Push(device=NANO, plan="first", decided_by="operator", autonomy=Autonomy.FULL))
    local = LocalPlan(
        boot=7,
        epoch=told.epoch,
        generation=told.generation,
        local_counter=1,
        plan_digest=own.digest,
        plan=own.wire,
        artifacts=(),
        cause="age",
    )
    assert LinkStore(store).adopt_local(NANO, local) is not None
    clock.advance(7_200.0)
    tidy_all(store)
    assert count(store, PlanRow) == 2, "it is desired"
    for _ in range(KEPT + 1):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    tidy_all(store)
    with store.database.read() as session:
        assert [info.plan for info in plans.plan_infos(session)] == ["first"]


def test_plans_of_replans_without_a_search_go_once_nothing_refers_to_them(
    store: Store, plan: Plan, clock: ManualClock
) -> None:
    """Each alarm may bring other launch intervals, and so another plan."""
    schedulers = ("intervals", "proven", "regime", "returning", "arranged", "expected", "ios", "search")
    for lanes, scheduler in enumerate(schedulers, start=2):
        store.write(add_plan, scheduler, replace(plan, lanes=lanes), scheduler)
    store.write(push, Push(device=NANO, plan="arranged", decided_by="replan"))
    tidy_all(store)
    assert count(store, PlanRow) == 1 + len(schedulers), "they came just now"
    clock.advance(7_200.0)
    tidy_all(store)
    with store.database.read() as session:
        assert {info.plan for info in plans.plan_infos(session)} == {"first", "arranged", "ios", "search"}


def test_without_a_bound_everything_stays(store: Store, plan: Plan) -> None:
    for _ in range(20):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    assert sum(tidy(store, Retention(0.0, 0.0, 0.0))) == 0
    assert len(generations(store)) == 20
