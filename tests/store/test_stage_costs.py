"""Measured stages under the key that a search looks them up by: what they compute, merged or apart."""

from pathlib import Path

import pytest

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.costs import stage_costs
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import request_stage_profile
from stageloom.planner.store.store import ReadStore, Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.messages.telemetry import Ledger, RowKind, StageProfileResult, StageTiming
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.costs import MeasuredStage
from tests.shared.test_merge import same, siblings
from tests.store.helpers import NANO, T0_US, enrol, row


def stored(sequence: int, result: StageProfileResult) -> StoredRow:
    return row(sequence, result, kind=RowKind.STAGE_PROFILE_RESULT)


@pytest.mark.promise("measured-merge-kept-apart")
def test_a_merge_and_the_same_operators_side_by_side_keep_times_of_their_own(
    store: Store, tmp_path: Path, database_url: str
) -> None:
    """1. Two plans differ in one merge stage. 2. Both are measured. 3. Each stage has its own time."""
    enrol(store)
    digest, blob = pack_artifact(siblings(same((1, 1)), same((3, 3))), b"two")
    (tmp_path / "two.artifact").write_bytes(blob)
    store.add_model("two", tmp_path / "two.artifact", digest)
    both = ((0,), (1,))
    rows = []
    for number, (merge, took_us) in enumerate([(True, 30.0), (False, 50.0)]):
        schedule = StageSchedule((Stage(both, merge=merge),))
        block = CombinedBlock((Member(0, 0, 0),), schedule)
        plan = Plan(models=(ModelPlan(name="two", artifact=digest),), combined=(block,))
        store.write(add_plan, f"plan-{number}", plan, "ios")
        timings = (StageTiming(0, took_us, 1.0, 9),)
        request, _ = store.write(request_stage_profile, NANO, f"plan-{number}")
        rows.append(stored(number, StageProfileResult(request, plan.digest, 0, "", timings, took_us, True)))
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, tuple(rows), (Ledger(7, 2, 0),))])
    reading = ReadStore.open(tmp_path, database_url)
    try:
        found = reading.read(stage_costs, "cpu-2-core", plan.executor)
    finally:
        reading.close()
    whole = ((digest, 0, 2),)
    assert sorted(found, key=lambda one: -one.seconds) == [
        MeasuredStage(whole, 1, both, 50e-6, merge=False, samples=9, measured_at_us=T0_US),
        MeasuredStage(whole, 1, both, 30e-6, merge=True, samples=9, measured_at_us=T0_US),
    ]
