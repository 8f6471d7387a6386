"""From the store to costs that hold again: what a device served lately, against what its costs say of it."""

from dataclasses import dataclass
from functools import partial
from typing import Final

from stageloom.planner.costs.drift import Drift, Renewal, drift_of, first_steps, renewal
from stageloom.planner.costs.measured import device_costs
from stageloom.planner.replan.observing import running
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import newest_telemetry, oldest_step_timings, telemetry_rows
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import (
    PlanActivated,
    Row,
    RowKind,
    StageProfileResult,
    StepTimings,
    StepTrace,
)
from stageloom.shared.policy.trigger import Cause

WINDOWS_S: Final = (10.0, 60.0)
"""The device's own trigger has looked for longer than the first: all of it is after the change. A device with
few steps has looked for longer still."""

_KINDS: Final = (RowKind.STEP_TIMINGS, RowKind.STEP_TRACE)
_SETTLED_US: Final = 5_000_000  # first steps of a plan run while its programs are prepared
_FIRST_ROWS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """A device that drifted from its costs: what it runs, by how much, and what its own costs have become.

    `renewal` None: it takes again what its class does.
    """

    bound: BoundPlan
    drift: Drift
    renewal: Renewal | None
    newest_us: int  # of the steps that say so, by the device's clock

    @property
    def text(self) -> str:
        """For people."""
        then = "the costs of its class hold again" if self.renewal is None else "it has costs of its own"
        return f"its steps took {self.drift.ratio:.2f} of what was planned, so {then}"


def recalibration(store: ReadStore, device: DeviceId, replan: int, now_us: int) -> Recalibration | None:
    """What the device has drifted by that raised an alarm for that; None where it has not, or nothing tells.

    The device has watched for a while by then. Whatever else asks for a re-plan may as well disturb its steps
    for a moment, and another power mode has costs of its own.

    Raises:
        InputError: the alarm, the device, the plan that runs there or an artifact of it is unknown here.
    """
    with store.snapshot() as view:
        begun, plan = running(view, replan)
        if begun.alarm.cause != Cause.DRIFT.value:
            return None
        held = begun.calibration
        models = [(model.artifact, model.batch) for model in plan.models]
        costs_of = partial(device_costs, view, executor=plan.executor, models=models, graph_of=store.graph)
        costs = costs_of(held.costs_key, taught_by=held.taught_by)
        of_class = costs_of(held.device_class) if held.own else costs
    bound = bind(plan, {model.artifact: store.graph(model.artifact) for model in plan.models})
    expected_s = _expected_s(store, device, bound, held.steps_since_us)
    for window_s in WINDOWS_S:
        rows = [
            row
            for row in store.read(newest_telemetry, device, _KINDS, round(window_s * 1e6))[0]
            if row.at_us > held.steps_since_us
        ]
        steps = [row.data for row in rows if isinstance(row.data, StepTimings)]
        traces = [row.data for row in rows if isinstance(row.data, StepTrace)]
        found = drift_of(bound, costs, steps, traces, expected_s)
        if found.blocks:
            break
    if not found.beyond():
        return None
    made = renewal(bound, costs, found, traces, now_us)
    back = held.own and made.is_back(drift_of(bound, of_class, steps, traces, {}), costs, of_class)
    newest_us = max(row.at_us for row in rows)
    return Recalibration(bound=bound, drift=found, renewal=None if back else made, newest_us=newest_us)


def _expected_s(store: ReadStore, device: DeviceId, bound: BoundPlan, since_us: int) -> dict[int, float]:
    """Per combined block what whole steps took when the costs began to hold: by profile, else at first."""
    digest = bound.plan.digest

    def rows(kind: RowKind) -> list[Row]:
        return store.read(telemetry_rows, device, [kind], since_us=since_us + 1)

    activated = [
        row.at_us
        for row in rows(RowKind.PLAN_ACTIVATED)
        if isinstance(row.data, PlanActivated) and row.data.plan == digest
    ]
    began_us = min(activated) + _SETTLED_US if activated else since_us
    expected = first_steps(
        bound, store.read(oldest_step_timings, device, since_us=began_us + 1, limit=_FIRST_ROWS)
    )
    for row in rows(RowKind.STAGE_PROFILE_RESULT):
        data = row.data
        if isinstance(data, StageProfileResult) and data.plan == digest and data.step_us > 0.0:
            expected[data.combined_block] = data.step_us * 1e-6
    return expected
