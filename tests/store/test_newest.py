"""A device's history stays bounded, and what is in use stays whatever its age."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy import Connection, event, func, select
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.store import plans
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.generations import set_states
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.regimes import delete_rolled_back, known_regimes
from stageloom.planner.store.replans import end_replan
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import (
    AlarmRow,
    EventRow,
    GenerationRow,
    PlanRow,
    RegimeRow,
    ReplanRow,
    Table,
)
from stageloom.planner.store.unused_plans import delete_unused_plans, unused_plans
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, Autonomy, DeviceState, LocalPlan, Report
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.store.helpers import NANO, add_model, enrol, small_plan
from tests.store.migrated import new_store
from tests.store.test_replan_view import Rig

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


def test_plans_that_the_library_or_a_re_plan_compares_with_stay(
    store: Store, plan: Plan, clock: ManualClock
) -> None:
    """What a winner took the place of is gone back to; what ran at an alarm tells launch intervals apart."""
    made = {
        name: replace(plan, lanes=lanes) for lanes, name in enumerate(("won", "before", "ran", "gone"), 2)
    }
    for name, one in made.items():
        store.write(add_plan, name, one, "arranged")
    store.write(keep_entry, made["won"], made["before"])
    LinkStore(store).record_alarm(NANO, structs.replace(alarm(1), plan=made["ran"].digest))
    clock.advance(7_200.0)
    tidy_all(store)
    with store.database.read() as session:
        assert {info.plan for info in plans.plan_infos(session)} == {"first", "won", "before", "ran"}


def keep_entry(session: Session, won: Plan, replaced: Plan) -> None:
    """One plan took the place of another in the library of the device."""
    entry = RegimeRow(
        device=NANO, boot=7, sequence=1, environment="cpu-2-core", won=won.digest,
        won_structure=won.structure, lost_structure=replaced.structure, replaced=replaced.digest,
        loads=b"", at_us=1,
    )  # fmt: skip
    session.add(entry)


def test_a_plan_that_is_pushed_after_it_was_found_unused_stays(
    store: Store, plan: Plan, clock: ManualClock
) -> None:
    for lanes, name in enumerate(("gone", "pushed"), start=2):
        store.write(add_plan, name, replace(plan, lanes=lanes), "intervals")
    names = store.read(unused_plans, clock.wall_us() + 1)
    assert sorted(names) == ["gone", "pushed"]
    store.write(push, Push(device=NANO, plan="pushed", decided_by="replan"))
    assert store.write(delete_unused_plans, names) == 1
    with store.database.read() as session:
        assert {info.plan for info in plans.plan_infos(session)} == {"first", "pushed"}


def winners(store: Store) -> list[Plan]:
    return [one.winner for one in store.read(known_regimes, NANO, "cpu-2-core")]


@pytest.mark.parametrize("pushed_by", ["replan", "operator"])
def test_a_winner_that_was_rolled_back_stays_out_of_the_library_once_nothing_tells_so_any_more(
    store: Store, tmp_path: Path, clock: ManualClock, pushed_by: str
) -> None:
    """1. Two plans win. 2. One is rolled back later. 3. Newer re-plans and generations push that out."""
    rig = Rig(store, tmp_path)
    bad, good = (replace(rig.runs, lanes=lanes) for lanes in (2, 3))
    rig.replanned(bad, "commit")
    rig.replanned(good, "commit")
    assert winners(store) == [good, bad]
    clock.advance(60.0)
    if pushed_by == "replan":
        rig.replanned(bad, "rolled_back")
    else:
        store.write(add_plan, "bad", bad, "search")
        told = store.write(push, Push(device=NANO, plan="bad", decided_by="operator"))
        end = (NANO, told.epoch, told.generation, DeviceState.ROLLED_BACK, "", 1)
        store.write(set_states, [end])
        rig.tried(bad, "reject", known=False, generation=(told.epoch, told.generation))
    for _ in range(KEPT + 1):
        store.write(end_replan, rig.replan(rig.runs), "nothing to try")
        store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    tidy_all(store)
    assert count(store, ReplanRow) == KEPT
    assert winners(store) == [good]


@pytest.mark.parametrize(
    ("tried_in", "counts", "stays"),
    [
        (["cpu-2-core"], False, False),
        (["another"], True, True),
        (["cpu-2-core", "another"], False, True),
        ([], False, True),
    ],
)
def test_a_plan_that_an_operator_pushed_and_that_was_rolled_back_in_another_environment_wins_in_this_one(
    store: Store, tmp_path: Path, clock: ManualClock, tried_in: list[str], *, counts: bool, stays: bool
) -> None:
    """Where it is not known in which, or in several, it does not count while the generation is there."""
    rig = Rig(store, tmp_path)
    won = replace(rig.runs, lanes=2)
    rig.replanned(won, "commit")
    clock.advance(60.0)
    store.write(add_plan, "won", won, "search")
    told = store.write(push, Push(device=NANO, plan="won", decided_by="operator"))
    for environment in tried_in:
        told_of = (told.epoch, told.generation)
        rig.tried(won, "commit", known=False, generation=told_of, environment=environment)
    store.write(set_states, [(NANO, told.epoch, told.generation, DeviceState.ROLLED_BACK, "", 1)])
    assert winners(store) == ([won] if counts else [])
    for _ in range(KEPT + 1):
        store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    tidy_all(store)
    assert count(store, RegimeRow) == int(stays)


def test_twice_the_plans_and_generations_take_about_twice_as_long_to_look_at(
    tmp_path: Path, clock: ManualClock
) -> None:
    """In steps of SQLite's virtual machine: where each table is searched once per plan, it is four times."""
    store = new_store(tmp_path, clock=clock)
    enrol(store)
    steps, taken = counted_steps(store), []
    for begin, end in ((0, 300), (300, 600)):
        store.write(add_used_plans, range(begin, end))
        clock.advance(7_200.0)
        steps.clear()
        assert sum(tidy(store, Retention(0.0, 0.0, 0.0, 10_000))) == 0
        taken.append(len(steps))
    assert taken[1] < 2.5 * taken[0]
    store.close()


def counted_steps(store: Store) -> list[int]:
    """Grows by one with each hundred steps of SQLite's virtual machine."""
    steps: list[int] = []

    def count_steps(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: steps.append(1), 100)

    event.listen(store.database.engine, "begin", count_steps)
    return steps


def test_twice_the_library_and_generations_take_about_twice_as_long_to_compare(
    tmp_path: Path, clock: ManualClock
) -> None:
    """Where the generations are searched once per entry, it is four times."""
    store = new_store(tmp_path, clock=clock)
    enrol(store)
    steps, taken = counted_steps(store), []
    for begin, end in ((0, 300), (300, 600)):
        store.write(add_used_plans, range(begin, end), decided_by="operator", state="rolled_back")
        store.write(add_entries, range(begin, end))
        steps.clear()
        store.read(known_regimes, NANO, "cpu-2-core")
        store.write(delete_rolled_back, NANO, 500)
        taken.append(len(steps))
    assert count(store, RegimeRow) == 600
    assert taken[1] < 2.5 * taken[0]
    store.close()


def add_entries(session: Session, numbers: range) -> None:
    """Plans that won before they were rolled back, it is not known in which environment."""
    for number in numbers:
        session.add(
            RegimeRow(
                device=NANO, boot=7, sequence=number, environment="cpu-2-core", won=f"{number:064}",
                won_structure=f"{number:064}", lost_structure="", replaced=None, loads=b"", at_us=1,
            )
        )  # fmt: skip


def add_used_plans(
    session: Session, numbers: range, *, decided_by: str = "replan", state: str = "rejected"
) -> None:
    """Plans that were made at alarms, each in the history of a device."""
    for number in numbers:
        at_us, digest = now_us(session), f"{number:064}"
        made = PlanRow(name=f"p{number}", digest=digest, wire=b"", scheduler="intervals", created_at_us=at_us)
        entry = GenerationRow(
            device=NANO, epoch=1, generation=number, plan=made.name, digest=digest, decided_by=decided_by,
            decided_at_us=at_us, state=state, reason="", state_at_us=at_us,
        )  # fmt: skip
        session.add_all([made, entry])


def test_without_a_bound_everything_stays(store: Store, plan: Plan) -> None:
    for _ in range(20):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    assert sum(tidy(store, Retention(0.0, 0.0, 0.0))) == 0
    assert len(generations(store)) == 20
