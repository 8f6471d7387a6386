"""What ran elsewhere than on a plan's first executor, or on resources that a schedule names, is no cost of
the block there."""

from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from stageloom.planner.costs.drift import LEAST_TRACES, BlockDrift, Drift, renewal, unsure_blocks
from stageloom.planner.costs.records import found_schedules
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.store.costs import stage_costs, stage_row
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import open_requests, request_stage_profile
from stageloom.planner.store.store import Store
from stageloom.planner.twin.stored import served_steps
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.bound import bind
from stageloom.shared.ids import OpId
from stageloom.shared.messages.telemetry import (
    PLAN_CHARS,
    GroupSpan,
    Ledger,
    RowData,
    RowKind,
    StageProfileResult,
    StageTiming,
    StepTimings,
    StepTrace,
)
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Resource
from stageloom.shared.schedule import OWN_RESOURCE, Stage, StageSchedule
from stageloom.shared.search.costs import CostTable, MeasuredStage
from stageloom.shared.search.interference import fit
from tests.shared.test_merge import siblings
from tests.store.helpers import NANO, T0_US, enrol, row

CLASS = "cpu-2-core"
GRAPH = siblings(None, None, None)
FIRST, BESIDE, APART = Stage(((0,),)), Stage(((1,), (2,))), Stage(((1,), (2,)), resources=(OWN_RESOURCE, 1))
ALONE, THEN_APART = StageSchedule((FIRST, BESIDE)), StageSchedule((FIRST, APART))


class Rig:
    """A store with a device and a model of three operators."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        enrol(store)
        self.artifact, blob = pack_artifact(GRAPH, b"three")
        (folder / "three.artifact").write_bytes(blob)
        store.add_model("three", folder / "three.artifact", self.artifact)
        self.graphs = {self.artifact: store.graph(self.artifact)}
        self._rows = 0

    def plan(self, schedule: StageSchedule, executor: int = 0) -> Plan:
        """A plan of one block that has two executors and two resources to choose from; the store knows it."""
        plan = Plan(
            models=(ModelPlan(name="three", artifact=self.artifact),),
            combined=(CombinedBlock((Member(0, 0, 0),), schedule, executor),),
            further_executors=(ExecutorOptions(name="openvino"),),
            resources=(Resource(cores=(0,)), Resource(cores=(1,))),
            lane_resources=(0,),
        )
        bind(plan, self.graphs)
        self.store.write(add_plan, plan.digest[:12], plan, "ios")
        return plan

    def tells(self, kind: RowKind, data: RowData) -> None:
        rows = (row(self._rows, data, kind=kind),)
        self._rows += 1
        LinkStore(self.store).append_telemetry([TelemetryWrite(NANO, rows, (Ledger(7, self._rows, 0),))])


@pytest.fixture
def rig(store: Store, tmp_path: Path) -> Rig:
    return Rig(store, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "executor", "counts"), [(ALONE, 0, True), (ALONE, 1, False), (THEN_APART, 0, False)]
)
def test_a_twin_is_fitted_to_steps_of_its_own_executor_alone(
    rig: Rig, schedule: StageSchedule, executor: int, counts: bool
) -> None:
    plan = rig.plan(schedule, executor)
    rig.tells(RowKind.STEP_TIMINGS, StepTimings(plan.digest[:PLAN_CHARS], 0, 1, 500, 500 * 2000, 3000))
    found = served_steps(rig.store, NANO, bind(rig.plan(ALONE), rig.graphs))
    assert bool(found) is counts


def test_a_stage_with_groups_on_other_resources_is_not_kept_as_one_of_the_blocks_executor(rig: Rig) -> None:
    """A plan of two stages, the second with a group elsewhere: the profile is answered, and one is kept."""
    plan = rig.plan(THEN_APART)
    request, _ = rig.store.write(request_stage_profile, NANO, plan.digest[:12])
    timings = (StageTiming(0, 20.0, 1.0, 9), StageTiming(1, 30.0, 1.0, 9))
    rig.tells(
        RowKind.STAGE_PROFILE_RESULT,
        StageProfileResult(request, plan.digest, 0, CLASS, timings, 50.0, True),
    )
    assert rig.store.read(open_requests, [request]) == []
    found = rig.store.read(stage_costs, CLASS, plan.executor)
    assert [one.groups for one in found] == [((0,),)]
    assert found[0].seconds == pytest.approx(20e-6)


def test_such_a_stage_that_an_older_planner_kept_is_not_read(rig: Rig) -> None:
    def keep(session: Session, stage: Stage) -> None:
        members = ((rig.artifact, 0, 3),)
        key = CLASS, ExecutorOptions(), members, 1, stage
        session.merge(
            stage_row(*key, median_us=9.0, spread_us=0.0, runs=9, measured_on=NANO, measured_at_us=T0_US)
        )

    for stage in THEN_APART.stages:
        rig.store.write(keep, stage)
    found = rig.store.read(stage_costs, CLASS, ExecutorOptions())
    assert [one.groups for one in found] == [((0,),)]


def test_a_schedule_that_names_resources_is_not_kept_for_other_plans(rig: Rig) -> None:
    assert found_schedules(rig.plan(THEN_APART), rig.graphs) == {}
    assert list(found_schedules(rig.plan(ALONE), rig.graphs).values()) == ["0/1|2"]


def test_costs_that_are_renewed_have_no_stage_with_groups_on_other_resources(rig: Rig) -> None:
    """Nor is such a stage compared with the same groups on one resource."""
    bound = bind(rig.plan(THEN_APART), rig.graphs)
    members = ((rig.artifact, 0, 3),)
    stages = tuple(MeasuredStage(members, 1, stage.groups, 1e-3) for stage in THEN_APART.stages)
    costs = CostTable(measured_s={(rig.artifact, OpId(op)): 1e-3 for op in range(3)}, stages=stages)
    spans = (GroupSpan(0, 0, 0, 1000), GroupSpan(1, 0, 1000, 3000), GroupSpan(2, 1, 1000, 3000))
    traces = [StepTrace(bound.plan.digest[:PLAN_CHARS], 0, 1, 0, 3000, spans, whole=True)] * LEAST_TRACES
    made = renewal(bound, costs, Drift((BlockDrift(0, 100, 1.0, 1.5),)), traces, 77)
    assert [one.groups for one in made.stages] == [((0,),)]
    assert [made.factor(rig.artifact, OpId(op)) for op in range(3)] == [1.0, 1.5, 1.5]


def test_nobody_is_asked_for_a_stage_whose_time_would_not_be_kept(rig: Rig) -> None:
    costs = CostTable(interference=fit(()))
    apart, alone = (bind(rig.plan(one), rig.graphs) for one in (THEN_APART, ALONE))
    assert unsure_blocks(alone, costs) == (0,) and unsure_blocks(apart, costs) == ()
