"""A planner's data with one small model and one device, written without any process."""

import json
from pathlib import Path
from typing import Any

from stageloom.planner.costs.records import found_schedules
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.replan.predict import evaluation_of, predict
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.store.costs import keep_schedules
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.predictions import keep_considered
from stageloom.planner.store.profiles import request_profile, request_stage_profile
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.clock import ManualClock
from stageloom.shared.graph import Graph
from stageloom.shared.messages.control import Desired, Origin
from stageloom.shared.messages.telemetry import (
    Ledger,
    OperatorTiming,
    ProfileResult,
    RowData,
    RowKind,
    StageProfileResult,
    StageTiming,
    TrialEnded,
)
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from tests.planner.processes import ok
from tests.search.graphs import DIAMOND, model
from tests.store.helpers import NANO, enrol, row
from tests.store.migrated import new_store

KINDS = {
    ProfileResult: RowKind.PROFILE_RESULT,
    StageProfileResult: RowKind.STAGE_PROFILE_RESULT,
    TrialEnded: RowKind.TRIAL_ENDED,
}


def ended(desired: Desired, candidate: Plan, verdict: str, **known: Any) -> TrialEnded:
    """What a device tells of a plan that it tried under what is desired; with no figures."""
    told = {"origin": Origin.PLANNER, "how": "trial", "decided_us": 2, **known}
    return TrialEnded(
        epoch=desired.epoch,
        generation=desired.generation,
        verdict=verdict,
        candidate=candidate.digest,
        control=None,
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        pairs=0,
        began_us=1,
        **told,
    )


class World:
    """A store with one model, a diamond of four operators of 100 us each, and one device."""

    def __init__(self, home: Path, store: Store | None = None) -> None:
        """`store`: that of a planner that runs on `home`."""
        home.mkdir(exist_ok=store is not None)
        self.home, self.clock, self.rows = home, ManualClock(), 0
        self.store = store or new_store(home, clock=self.clock)
        _, graph = model("diamond", DIAMOND)
        self.digest, blob = pack_artifact(graph, b"diamond")
        (home / "diamond.artifact").write_bytes(blob)
        self.store.add_model("diamond", home / "diamond.artifact", self.digest)
        self.graph: Graph = self.store.graph(self.digest)
        enrol(self.store)

    def plan(self, scheduler: str) -> Plan:
        """The model under a scheduler, with nothing measured."""
        choice = ModelChoice(name="diamond", artifact=self.digest, graph=self.graph)
        return compose([choice], scheduler=scheduler)

    def kept(self, scheduler: str, verdict: EvaluationVerdict = EvaluationVerdict.FOUND) -> Plan:
        """A plan that an operator searched for the device's class."""
        plan = self.plan(scheduler)
        self.store.write(add_plan, scheduler, plan, scheduler)
        graphs = {self.digest: self.graph}
        self.store.write(keep_schedules, "cpu-2-core", scheduler, found_schedules(plan, graphs))
        prediction = predict(plan, graphs, CostTable(), ())
        looked_at = evaluation_of(
            plan, verdict, scheduler=scheduler, how="operator", prediction=prediction, search_s=0.5
        )
        self.store.write(keep_considered, [looked_at], device_class="cpu-2-core", device=NANO)
        return plan

    def tells(self, *data: RowData) -> None:
        """Telemetry of the device."""
        rows = []
        for one in data:
            rows.append(row(self.rows, one, kind=KINDS[type(one)]))
            self.rows += 1
        LinkStore(self.store).append_telemetry(
            [TelemetryWrite(NANO, tuple(rows), (Ledger(7, self.rows, 0),))]
        )

    def profiled(self) -> None:
        """Every operator takes 100 us."""
        times = tuple(OperatorTiming(op, 100.0, 1.0, 9) for op in range(4))
        (request,), _ = self.store.write(request_profile, NANO, ["diamond"])
        self.tells(ProfileResult(request, self.digest, 1, "", times, True))

    def measured(
        self, plan: str, timings: tuple[StageTiming, ...], step_us: float, environment: str = ""
    ) -> None:
        """The stages of a plan were measured, as the planner asked."""
        request, _ = self.store.write(request_stage_profile, NANO, plan)
        self.tells(
            StageProfileResult(
                request, self.store.read(plan_info, plan).digest, 0, environment, timings, step_us, True
            )
        )

    def explained(self, *arguments: str) -> dict[str, Any]:
        """What `--json` says."""
        found: dict[str, Any] = json.loads(ok(self.home, "plan", "explain", *arguments, "--json"))
        return found
