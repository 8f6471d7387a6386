"""The oracle of the kills: what was acknowledged and is missing, or differs, is found."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from benchmarks.adversary.acknowledged import Acknowledged
from benchmarks.adversary.kills import drawn, victims
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.store.desired import Push, push_wanted
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.shared.messages import control
from tests.store.helpers import NANO, add_model, enrol, key, row, small_plan, write_of

BOOT, ROWS = 7, 20
REPORT = control.Report(revision=3, reason="report 3 of this device")


def sender() -> Any:
    """What a witness has sent and knows to be stored."""
    return SimpleNamespace(
        device=NANO,
        boot=BOOT,
        rows=[row(sequence).body for sequence in range(ROWS)],
        reports={3: REPORT},
        rows_acknowledged=ROWS,
        revision_acknowledged=3,
    )


@pytest.fixture
def acknowledged(store: Store) -> Acknowledged:
    """A store that holds all of it."""
    enrol(store)
    add_model(store, store.data_dir)
    store.write(add_plan, "whole", small_plan(store), "greedy")
    desired = store.submit_together(
        push_wanted, Push(device=NANO, plan="whole", decided_by="operator")
    ).result(30)
    LinkStore(store).record_reports([ReportRecord(NANO, BOOT, REPORT)])
    LinkStore(store).append_telemetry([write_of(0, ROWS - 1)])
    pushes = {(str(NANO), desired.epoch, desired.generation): "whole"}
    return Acknowledged(pushes=pushes, keys={str(NANO): key(1)})


def test_a_database_that_holds_everything_passes(store: Store, acknowledged: Acknowledged) -> None:
    for _ in range(2):
        acknowledged.check(store.database, sender())
    assert not acknowledged.lost and not acknowledged.wrong


@pytest.mark.parametrize(
    ("defect", "lost", "wrong"),
    [
        ("DELETE FROM telemetry WHERE sequence = 11", {"row 11"}, set()),
        ("UPDATE telemetry SET body = kind_of.body FROM (SELECT body FROM telemetry WHERE sequence = 4) AS "
         "kind_of WHERE sequence = 5", set(), {"row 5 is not what was sent"}),
        ("UPDATE reported SET revision = 2", {"report 3 of nano"}, set()),
        ("UPDATE reported SET reason = 'another'", set(), {"report 3 is not what was sent"}),
        ("DELETE FROM generations", {"generation ('nano', 1, 1)"}, set()),
        ("UPDATE devices SET revoked = true", {"the key of device nano"}, set()),
        ("UPDATE telemetry_ledgers SET lost = 2", {f"2 rows of nano, boot {BOOT}"}, set()),
    ],
)  # fmt: skip
def test_whatever_is_missing_or_differs_is_found(
    store: Store, acknowledged: Acknowledged, defect: str, lost: set[str], wrong: set[str]
) -> None:
    with store.database.write() as session:
        session.execute(text(defect))
    acknowledged.check(store.database, sender(), everything=True)
    assert (acknowledged.lost, acknowledged.wrong) == (lost, wrong)


def test_every_victim_dies_as_often_as_it_was_named_and_the_same_seed_draws_the_same_kills() -> None:
    named = victims(50, postgres=True)
    kills = drawn(Random(3), named)
    assert sorted(kill.victim for kill in kills) == sorted(named)
    assert kills == drawn(Random(3), named)
    assert {kill.victim for kill in kills if kill.failpoint} == {"planner", "agent"}
    assert {kill.scene for kill in kills} == {"serve", "push", "trial", "transfer", "enrol"}
