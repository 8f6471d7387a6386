"""Measured stages under the key that a search looks them up by: what they compute, merged or apart."""

from pathlib import Path

import pytest

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.costs import stage_costs
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import open_requests, request_stage_profile
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


@pytest.mark.parametrize(("batches", "kept"), [((8, 8), [8]), ((8, 1), []), ((1, 8), [])])
def test_stages_of_members_with_different_batches_are_not_kept_as_those_of_equal_ones(
    store: Store, tmp_path: Path, batches: tuple[int, int], kept: list[int]
) -> None:
    """The profile is answered all the same."""
    enrol(store)
    digest, blob = pack_artifact(siblings(same((1, 1)), same((3, 3))), b"two")
    (tmp_path / "two.artifact").write_bytes(blob)
    store.add_model("two", tmp_path / "two.artifact", digest)
    block = CombinedBlock((Member(0, 0, 0), Member(1, 0, 0)), StageSchedule((Stage(((0, 1), (2, 3))),)))
    models = tuple(
        ModelPlan(name=name, artifact=digest, batch=batch) for name, batch in zip("ab", batches, strict=True)
    )
    plan = Plan(models=models, combined=(block,))
    store.write(add_plan, "plan", plan, "ios")
    request, _ = store.write(request_stage_profile, NANO, "plan")
    result = StageProfileResult(request, plan.digest, 0, "", (StageTiming(0, 30.0, 1.0, 9),), 30.0, True)
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (stored(0, result),), (Ledger(7, 1, 0),))])
    assert store.read(open_requests, [request]) == []
    assert [one.batch for one in store.read(stage_costs, "cpu-2-core", plan.executor)] == kept
