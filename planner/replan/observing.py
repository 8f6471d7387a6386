"""Reads the store for a re-plan: the `Observation` of a device, and costs renewed after a drift."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from stageloom.planner.costs.drift import Renewal, drift_of, first_steps, renewal
from stageloom.planner.costs.measured import STALE_S, plan_costs, trained_policy
from stageloom.planner.costs.measured_parts import with_parts
from stageloom.planner.costs.records import Calibration, OperatorCost
from stageloom.planner.replan.alarm_loads import loads_of
from stageloom.planner.replan.backoff import is_tried_again
from stageloom.planner.replan.policy import Observation
from stageloom.planner.replan.predict import stands_in
from stageloom.planner.replan.regimes import ExpectedRegime, KnownRegime, losses
from stageloom.planner.replan.scene import WayTimes
from stageloom.planner.store.barred import barred_plans
from stageloom.planner.store.costs import kept_schedules, operator_costs
from stageloom.planner.store.expected import expected_regimes
from stageloom.planner.store.fruitless import measured_us
from stageloom.planner.store.machines import CHOSEN, NULL, Machine, machine_of, whole_times
from stageloom.planner.store.models import model_references
from stageloom.planner.store.plans import plan_wires
from stageloom.planner.store.policies import fitting_policy
from stageloom.planner.store.regimes import known_regimes
from stageloom.planner.store.replans import Begun, begun_replan
from stageloom.planner.store.store import ReadStore, Snapshot
from stageloom.planner.store.telemetry import filed_rows, is_believed, newest_telemetry, oldest_step_timings
from stageloom.planner.store.trials import committed_plans
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import (
    PlanActivated,
    Row,
    RowKind,
    StageProfileResult,
    StepTimings,
    StepTrace,
)
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan
from stageloom.shared.policy.trigger import Cause

BARRED_S: Final = 3600.0
"""What did not gain on a device is not proposed there again for so long under like arrivals, at least.

Nor does it count once the device's costs were renewed."""

_PROVEN_MOST: Final = 16
_PROVEN_LOOKED_AT: Final = 64  # plans that differ in launch intervals alone count once

_decoded = lru_cache(maxsize=256)(decode_plan)
"""A plan is a value: what a device runs and has proven is the same in every observation of it."""


def observe(store: ReadStore, device: DeviceId, replan: int, now_us: int) -> Observation:
    """What a policy sees of a re-plan's device: one snapshot.

    Raises:
        InputError: the alarm, the device or the plan that runs there is unknown here.
    """
    with store.snapshot() as view:
        begun = _begun(view, replan)
        environment = begun.device_class
        committed = view.read(committed_plans, device, environment)[:_PROVEN_LOOKED_AT]
        incumbent, proven = _plans(view, begun, committed)
        machine = view.read(machine_of, device)
        known = view.read(whole_times, device, [model.artifact for model in incumbent.models])
        times = {artifact: _on_cores(taken, incumbent) for artifact, taken in known.items()}
        costs = plan_costs(
            view,
            begun.calibration.costs_key,
            incumbent,
            graph_of=store.graph,
            now_us=now_us,
            taught_by=begun.calibration.taught_by,
            others=_others(proven, times),
        )
        barred_since_us = max(now_us - round(BARRED_S * 1e6), begun.calibration.at_us)
        loads = loads_of(begun.alarm)
        barred = view.read(barred_plans, device, environment, barred_since_us, loads)
    held = begun.calibration
    graphs = {model.artifact: store.graph(model.artifact) for model in incumbent.models}
    learned = store.read(
        fitting_policy, "maddpg", environment, [model.artifact for model in incumbent.models]
    )
    return Observation(
        device=device,
        cause=begun.alarm.cause,
        incumbent=incumbent,
        desired=begun.desired,
        loads=loads,
        samples=begun.alarm.samples,
        graphs=graphs,
        costs=with_parts(store, device, costs, (incumbent, *proven), graphs),
        proven=proven,
        barred=tuple(barred),
        settings=begun.settings,
        environment=environment,
        costs_since_us=begun.calibration.at_us,
        costs_key=held.costs_key,
        learned=learned.body,
        withheld=learned.withheld,
        schedules=store.read(kept_schedules, [held.costs_key, *held.taught_by]) if learned.body else {},
        checkpoint=trained_policy(store, environment) if begun.settings.scheduler == "gpg" else b"",
        cores=_cores(machine, incumbent),
        times=times,
    )


def library(store: ReadStore, seen: Observation) -> list[KnownRegime]:
    """Which plans of its models won on the device of an observation under which arrivals, newest first.

    Plans of other versions of them say nothing of what runs there now, and may not be pushed in its place.
    """
    found = store.read(known_regimes, seen.device, seen.environment, seen.costs_since_us)
    return [one for one in found if stands_in(one.winner, seen.incumbent)]


def with_losses(
    store: ReadStore, seen: Observation, known: Sequence[KnownRegime], now_us: int
) -> Observation:
    """The observation, in which what lost to the plan that runs is barred under such arrivals.

    Proven plans: a device runs them without a trial, so that two would change places at every alarm. Others
    that were tried, for longer with each loss since anything was measured. `known`: the device's library.
    """
    lost = losses(seen, known)
    if not lost:
        return seen
    since_us = store.read(measured_us, seen.device, seen.environment, seen.costs_key)
    proven = {plan.structure for plan in seen.proven}
    barred = list(seen.barred)
    for structure, entries in lost.items():
        tried_us = [one.at_us for one in entries if one.replaced is None and one.at_us >= since_us]
        if structure in proven or not is_tried_again(tried_us, now_us):
            barred.append((structure, structure))
    return replace(seen, barred=tuple(barred))


def ahead(store: ReadStore, seen: Observation, since_us: int = 0) -> list[ExpectedRegime]:
    """Plans of its models that were found ahead for the device of an observation, under costs that hold yet.

    None that was found before `since_us`.
    """
    since_us = max(since_us, seen.costs_since_us)
    found = store.read(expected_regimes, seen.device, seen.environment, since_us)
    return [one for one in found if stands_in(one.plan, seen.incumbent)]


def _cores(machine: Machine | None, incumbent: Plan) -> tuple[int, ...]:
    """Those of a device, where the plan that runs uses them alone."""
    on_cores = all(options.name in _chosen(incumbent) for options in incumbent.executors)
    return machine.cores if machine is not None and on_cores else ()


def _on_cores(known: WayTimes, incumbent: Plan) -> WayTimes:
    return {way: taken for way, taken in known.items() if way[0].name in _chosen(incumbent)}


def _chosen(incumbent: Plan) -> tuple[str, ...]:
    """Executors that another plan may have."""
    return (NULL,) if incumbent.executor.name == NULL else CHOSEN


def _others(proven: Iterable[Plan], times: Mapping[Digest, WayTimes]) -> list[ExecutorOptions]:
    """Executors that a proposal may have beside those of the plan that runs."""
    tried = [way[0] for taken in times.values() for way, seconds in taken.items() if seconds < math.inf]
    return [*(executor for plan in proven for executor in plan.executors), *tried]


def without_costs(store: ReadStore, replan: int, now_us: int) -> list[str]:
    """Names of the incumbent's models of which there is no measured operator for the device, or no fresh one.

    Costs at the model's batch or of one task at a time will do: a profile gives no others.

    Raises:
        InputError: as `observe`.
    """
    with store.snapshot() as view:
        begun, incumbent = running(view, replan)
        key = begun.calibration.costs_key
        # What a profile tells: one task at a time in fp32, of an artifact on one of its executors.
        measured_on = {
            incumbent.models[member.model].artifact: replace(
                incumbent.executors[block.executor], precision=ExecutorOptions().precision
            )
            for block in incumbent.combined
            for member in block.members
        }
        missing = dict.fromkeys(
            model.artifact
            for model in incumbent.models
            if all(
                _old(
                    view.read(operator_costs, key, model.artifact, batch, measured_on[model.artifact]), now_us
                )
                for batch in {model.batch, 1}
            )
        )
    if not missing:
        return []
    names = store.read(model_references)
    return [names[artifact] for artifact in missing if artifact in names]


def running(view: Snapshot, replan: int) -> tuple[Begun, Plan]:
    """What a re-plan's alarm found, and the plan that runs.

    Raises:
        InputError: as `observe`.
    """
    begun = _begun(view, replan)
    return begun, _plans(view, begun, [])[0]


def _old(known: Mapping[int, OperatorCost], now_us: int) -> bool:
    """Whether nothing is known, or nothing that is not stale."""
    return all(cost.measured_at_us < now_us - STALE_S * 1e6 for cost in known.values())


def _begun(view: Snapshot, replan: int) -> Begun:
    begun = view.read(begun_replan, replan)
    if begun is None:
        raise InputError(f"there is no re-plan {replan}")
    return begun


def _plans(view: Snapshot, begun: Begun, committed: list[Digest]) -> tuple[Plan, tuple[Plan, ...]]:
    """The plan that runs, by what the device says of it, else the desired one; and those proven here.

    Proven are, of the plans that committed, those over the same models; the newest first, of each structure
    the newest alone.

    Raises:
        InputError: the plan that runs is not known here.
    """
    runs = begun.runs or begun.desired_plan
    if runs is None:
        raise InputError("nothing runs on the device", remedy="push a plan")
    wires = view.read(plan_wires, {runs, *committed})
    if runs not in wires:
        raise InputError(
            f"plan {runs[:12]}, which runs on the device, is not known here",
            remedy="push a plan of this planner",
        )
    incumbent = _decoded(wires[runs], runs)
    found: dict[Digest, Plan] = {}
    for digest in committed:
        if digest in wires and len(found) < _PROVEN_MOST:  # else planned on the device and never adopted
            plan = _decoded(wires[digest], digest)
            if stands_in(plan, incumbent):
                found.setdefault(plan.structure, plan)
    return incumbent, tuple(found.values())


WINDOWS_S: Final = (10.0, 60.0)
"""The device's own trigger has looked for longer than the first: all of it is after the change. A device with
few steps has looked for longer still."""

_KINDS: Final = (RowKind.STEP_TIMINGS, RowKind.STEP_TRACE)
_SETTLED_US: Final = 5_000_000  # first steps of a plan run while its programs are prepared
_FIRST_ROWS: Final = 2_000


def recalibration(
    store: ReadStore, device: DeviceId, replan: int, now_us: int
) -> tuple[Plan, float, Renewal | None, int] | None:
    """What a device runs that raised an alarm for its drift, measured over planned seconds of its steps, what
    its own costs have become, and the newest of the steps that say so, by the device's clock.

    The renewal is None where it takes again what its class does. None where it has not drifted, or nothing
    tells.

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
        costs_of = partial(plan_costs, view, plan=plan, graph_of=store.graph)
        costs = costs_of(held.costs_key, taught_by=held.taught_by)
        of_class = costs_of(held.device_class) if held.own else costs
    bound = bind(plan, {model.artifact: store.graph(model.artifact) for model in plan.models})
    expected_s = _expected_s(store, device, bound, held, now_us)
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
    return plan, found.ratio, None if back else made, newest_us


def _expected_s(
    store: ReadStore, device: DeviceId, bound: BoundPlan, held: Calibration, now_us: int
) -> dict[int, float]:
    """Per combined block what whole steps took when the costs began to hold: by profile, else at first.

    What is told since then is found by the device's clock, and the first steps by when they were filed, as
    spans of them have no other moment.
    """
    digest = bound.plan.digest

    def rows(kind: RowKind) -> list[tuple[int, Row]]:
        found = store.read(filed_rows, device, [kind])
        return [(filed_us, row) for filed_us, row in found if row.at_us > held.steps_since_us]

    activated = [
        filed_us
        for filed_us, row in rows(RowKind.PLAN_ACTIVATED)
        if isinstance(row.data, PlanActivated) and row.data.plan == digest
    ]
    began_us = held.steps_since_us if is_believed(held.steps_since_us, now_us) else held.at_us
    if activated:
        began_us = min(activated) + _SETTLED_US
    expected = first_steps(
        bound, store.read(oldest_step_timings, device, since_us=began_us + 1, limit=_FIRST_ROWS)
    )
    for _, row in rows(RowKind.STAGE_PROFILE_RESULT):
        data = row.data
        if not isinstance(data, StageProfileResult) or data.plan != digest:
            continue
        if data.step_us > 0.0 and data.environment in ("", held.device_class):
            expected[data.combined_block] = data.step_us * 1e-6
    return expected
