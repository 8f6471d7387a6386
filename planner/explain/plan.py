"""A plan explained from the store: its costs on a device class, who decided for it, and the alternatives."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stageloom.planner.costs.measured_parts import costs_there
from stageloom.planner.costs.records import Calibration, combined_block_digest
from stageloom.planner.explain.block import explain_block
from stageloom.planner.explain.splits import explain_splits, parts_measured, unsplit_s
from stageloom.planner.replan.predict import predict, serves
from stageloom.planner.schema.explanation import (
    CostsCalibration,
    EvaluationVerdict,
    PlanDecision,
    PlanExplanation,
    RelatedPlan,
)
from stageloom.planner.schema.replan import TrialInfo
from stageloom.planner.store.costs import calibration_of, measured_operators, measured_stages, schedules_of
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.generations import device_of_plan, generation_history
from stageloom.planner.store.plans import plan_info, plan_names
from stageloom.planner.store.predictions import LookedAt, considered_plans
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.tables import OperatorCostRow
from stageloom.planner.store.telemetry import step_times
from stageloom.planner.store.trials import newest_trials, trial_infos, trial_of
from stageloom.shared.bound import BoundModel, BoundPlan, bind
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import decode_plan
from stageloom.shared.search.costs import CostTable, stage_batch
from stageloom.shared.split_graph import SplitOrigin, SplitRole

_LOOKED_AT: Final = 1000  # newest rows
_HISTORY: Final = 1000

_Steps = dict[tuple[Digest, int], float]
"""Microseconds of whole steps by (plan, combined block), as a device measured them last."""


def explain(store: ReadStore, name: str, device_name: DeviceId | None, now_us: int = 0) -> PlanExplanation:
    """A plan in words, under the costs of a device's class; None: of the device that it was made for or given
    to last, and under estimates where there is none. `now_us`: the planner's wall clock, in microseconds; 0:
    no measurement is too old.

    Raises:
        InputError: there is no such plan or device, or an artifact of the plan is not here any more.
    """
    info = store.read(plan_info, name)
    where = store.read(device_of_plan, info.digest) if device_name is None else device_name
    device = None if where is None else store.read(device_info, where)
    plan = decode_plan(info.wire, info.digest)
    device_class = "" if device is None else device.device_class
    graphs = {model.artifact: store.graph(model.artifact) for model in plan.models}
    bound = bind(plan, graphs)
    held = None if device is None else store.read(calibration_of, device.device)
    key = "" if held is None else held.costs_key
    table = CostTable() if where is None else costs_there(store, where, plan, graphs, now_us=now_us)
    busy_s = predict(plan, graphs, table, ()).busy
    unsplit = unsplit_s(bound, table, busy_s)
    steps = {} if device is None else store.read(step_times, device.device)
    blocks = tuple(
        explain_block(bound, index, table, **_known(store, bound, index, key, steps, table))
        for index in range(len(plan.combined))
    )
    looked_at = store.read(considered_plans, serves(plan), device_class, limit=_LOOKED_AT)
    operators = {
        (bound.executor_of(index), model.plan.artifact, own, model.plan.batch)
        for index, block in enumerate(plan.combined)
        for member in block.members
        for model in (bound.models[member.model],)
        for op in model.blocks[member.block].operators
        for own in model.origin(op).ops
    }
    return PlanExplanation(
        plan=info.plan,
        digest=info.digest,
        scheduler=info.scheduler,
        created_at_us=info.created_at_us,
        models=info.models,
        device="" if device is None else device.device,
        device_class=device_class,
        calibration=_calibration(held),
        contention=table.rates.contention,
        fitted_to=0 if table.interference is None else table.interference.samples,
        operators=len(operators),
        operators_measured=sum(
            table.under(executor).is_measured(artifact, op, batch)
            for executor, artifact, op, batch in operators
        ),
        stages_measured=sum(len(table.under(executor).stages) for executor in plan.executors),
        predicted_ms=1e3 * busy_s,
        decided=None if device is None else _decided(store, info.digest, device.device, looked_at),
        active=None if device is None else device.report.active,
        blocks=blocks,
        others=tuple(_others(store, info.digest, looked_at, where, held, steps)),
        splits=tuple(explain_splits(bound, table)),
        unsplit_ms=None if unsplit is None else 1e3 * unsplit,
    )


def _calibration(held: Calibration | None) -> CostsCalibration | None:
    return None if held is None else CostsCalibration(own=held.own, ratio=held.ratio, at_us=held.at_us)


def _known(
    store: ReadStore, bound: BoundPlan, index: int, key: str, steps: _Steps, table: CostTable
) -> dict[str, Any]:
    """What the store knows of one combined block, for `explain_block`."""
    plan, combined = bound.plan, bound.combined[index]
    batches = [plan.models[m.model].batch for m in combined.plan.members]
    batch = stage_batch(batches)
    graphs = {model.plan.artifact: model.source for model in bound.models}
    digest = combined_block_digest(combined.plan, plan.models, graphs)
    executor = bound.executor_of(index)
    operators = []
    for member in combined.plan.members:
        model = bound.models[member.model]
        measured = store.read(measured_operators, key, model.plan.artifact, model.plan.batch, executor)
        operators += [
            _behind(measured, model, model.origin(op), table) for op in model.blocks[member.block].operators
        ]
    return {
        "operators": operators,
        "stages": {} if batch is None else store.read(measured_stages, key, executor, digest, batch),
        "found": store.read(schedules_of, key, digest, max(batches)) if key else (),
        "step_us": steps.get((plan.digest, index)),
    }


def _behind(
    measured: Mapping[int, OperatorCostRow], model: BoundModel, origin: SplitOrigin, table: CostTable
) -> OperatorCostRow | None:
    """The measurement that an operator's seconds come from, of several the oldest; None: an estimate."""
    if origin.role is not SplitRole.WHOLE and not parts_measured(model, origin, table):
        return None
    rows = [measured[op] for op in origin.ops if op in measured]
    whole = len(rows) == len(origin.ops)
    return min(rows, key=lambda row: row.measured_at_us) if whole else None


def _decided(
    store: ReadStore, plan: Digest, device: DeviceId, looked_at: Sequence[LookedAt]
) -> PlanDecision | None:
    """Why the device was asked to run the plan; None: it never was."""
    history, _ = store.read(generation_history, device, limit=_HISTORY)
    entry = next((entry for entry in history if entry.digest == plan), None)
    if entry is None:
        return None
    at = (entry.epoch, entry.generation)
    trials = store.read(trial_infos, device)
    replan = next(
        (row for row in store.read(replan_infos, device) if (row.epoch, row.generation) == at), None
    )
    left: set[Digest] = set()
    if replan is not None:
        found = [evaluation for evaluation, row in looked_at if row.replan == replan.replan]
        left = {one.plan for one in found if one.verdict is not EvaluationVerdict.TAKEN} - {plan}
    return PlanDecision(
        generation=entry,
        replan=replan,
        left=len(left),
        trial=trial_of(entry, trials) or next((row for row in trials if row.candidate == plan), None),
    )


def _others(
    store: ReadStore,
    this: Digest,
    looked_at: Sequence[LookedAt],
    device: DeviceId | None,
    calibration: Calibration | None,
    steps: _Steps,
) -> list[RelatedPlan]:
    """Each plan once, the cheapest under today's costs first, then those that were not kept."""
    rows: dict[Digest, list[LookedAt]] = {}
    for entry in looked_at:  # newest first
        rows.setdefault(entry[0].plan, []).append(entry)
    names = dict(store.read(plan_names, list(rows)))
    now_ms: dict[Digest, float] = {}
    steps_ms: dict[Digest, float] = {}
    for digest in names:
        try:
            plan = decode_plan(store.read(plan_info, digest).wire, digest)
            graphs = {model.artifact: store.graph(model.artifact) for model in plan.models}
            costs = CostTable() if device is None else costs_there(store, device, plan, graphs)
            now_ms[digest] = 1e3 * predict(plan, graphs, costs, ()).busy
        except StageloomError:
            continue  # it or its artifact is gone, or this version cannot read it
        measured_us = [steps.get((digest, index)) for index in range(len(plan.combined))]
        if None not in measured_us:
            steps_ms[digest] = sum(us for us in measured_us if us is not None) / 1e3
    trials: dict[str, TrialInfo] = {}
    if calibration is not None:
        trials = store.read(newest_trials, list(rows), calibration.device_class, device)
    others = [
        RelatedPlan(
            digest=digest,
            name=names.get(digest, ""),
            this=digest == this,
            times=len(seen),
            last=seen[0][0],
            at_us=seen[0][1].at_us,
            now_ms=now_ms.get(digest),
            steps_ms=steps_ms.get(digest),
            trial=trials.get(digest),
        )
        for digest, seen in rows.items()
    ]
    return sorted(others, key=lambda other: (other.now_ms is None, other.now_ms or 0.0, -other.at_us))
