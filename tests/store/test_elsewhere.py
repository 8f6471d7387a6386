"""What ran elsewhere than on a plan's first executor, or on resources that a schedule names, is no cost of
the block there."""

from pathlib import Path

import pytest

from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.planner.twin.stored import served_steps
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.bound import bind
from stageloom.shared.messages.telemetry import PLAN_CHARS, Ledger, RowData, RowKind, StepTimings
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Resource
from stageloom.shared.schedule import OWN_RESOURCE, Stage, StageSchedule
from tests.shared.test_merge import siblings
from tests.store.helpers import NANO, enrol, row

GRAPH = siblings(None, None)
BESIDE = ((0,), (1,))
ALONE = StageSchedule((Stage(BESIDE),))
APART = StageSchedule((Stage(BESIDE, resources=(OWN_RESOURCE, 1)),))


class Rig:
    """A store with a device and a model of two operators."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        enrol(store)
        self.artifact, blob = pack_artifact(GRAPH, b"two")
        (folder / "two.artifact").write_bytes(blob)
        store.add_model("two", folder / "two.artifact", self.artifact)
        self.graphs = {self.artifact: store.graph(self.artifact)}
        self._rows = 0

    def plan(self, schedule: StageSchedule, executor: int = 0) -> Plan:
        """A plan of one block that has two executors and two resources to choose from; the store knows it."""
        plan = Plan(
            models=(ModelPlan(name="two", artifact=self.artifact),),
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
    ("schedule", "executor", "counts"), [(ALONE, 0, True), (ALONE, 1, False), (APART, 0, False)]
)
def test_a_twin_is_fitted_to_steps_of_its_own_executor_alone(
    rig: Rig, schedule: StageSchedule, executor: int, counts: bool
) -> None:
    plan = rig.plan(schedule, executor)
    rig.tells(RowKind.STEP_TIMINGS, StepTimings(plan.digest[:PLAN_CHARS], 0, 1, 500, 500 * 2000, 3000))
    found = served_steps(rig.store, NANO, bind(rig.plan(ALONE), rig.graphs))
    assert bool(found) is counts
