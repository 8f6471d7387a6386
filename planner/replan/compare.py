"""Control and candidate of a trial side by side: stage strings, predictions, what was measured."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from stageloom.planner.costs.drift import traced_stages
from stageloom.planner.costs.measured import plan_costs
from stageloom.planner.costs.measured_parts import costs_there
from stageloom.planner.replan.predict import block_costs, predict
from stageloom.planner.schema.replan import TrialInfo
from stageloom.planner.schema.trial import BlockPair, StageDrift, TrialComparison
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import newest_telemetry
from stageloom.planner.store.trials import trial_infos, trial_of
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import RowKind, StepTrace
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import CostTable
from stageloom.shared.stage_string import to_string

_TRACES_US: Final = 600_000_000
_HISTORY: Final = 1000


def trial_comparison(store: ReadStore, device: DeviceId, generation: int | None) -> TrialComparison:
    """The plans of a device's newest trial, or of the one in `generation`, under today's costs.

    Raises:
        InputError: there is no such device or trial, or the candidate or one of its artifacts is not here.
    """
    trial = _trial(store, device, generation)
    candidate = decode_plan(store.read(plan_info, trial.candidate).wire)
    control = _control(store, trial.control)
    graphs = {model.artifact: store.graph(model.artifact) for model in candidate.models}
    costs = _costs(store, trial, candidate, graphs)
    rows, _ = store.read(newest_telemetry, device, [RowKind.STEP_TRACE], _TRACES_US)
    traces = [row.data for row in rows if isinstance(row.data, StepTrace)]
    comparison = TrialComparison(trial=trial, drift=tuple(drift(candidate, graphs, costs, traces)))
    if control is None:
        return comparison
    blocks = tuple(block_pairs(control, candidate))
    if not {model.artifact for model in control.models} <= graphs.keys():
        return msgspec.structs.replace(comparison, blocks=blocks)  # other versions of models: other work
    left = predict(control, graphs, _costs(store, trial, control, graphs), ()).busy
    right = predict(candidate, graphs, costs, ()).busy
    return msgspec.structs.replace(
        comparison,
        blocks=blocks,
        predicted_control_busy=left,
        predicted_candidate_busy=right,
        predicted_ratio=left / right if right > 0.0 else None,
    )


def _trial(store: ReadStore, device: DeviceId, generation: int | None) -> TrialInfo:
    trials = store.read(trial_infos, device)
    trial = next((one for one in trials if generation in (None, one.generation)), None)
    if generation is not None:
        history, _ = store.read(generation_history, device, limit=_HISTORY)
        asked = (trial_of(entry, trials) for entry in history if entry.generation == generation)
        trial = next((one for one in asked if one is not None), trial)
    if trial is None:
        which = "no plan" if generation is None else f"generation {generation} was not"
        raise NotFoundError(
            f"{which} tried on {device}", remedy=f"see `stageloom plan history {device}` for what happened"
        )
    return trial


def _control(store: ReadStore, digest: Digest | None) -> Plan | None:
    """The control; None where the device planned it alone and the planner never saw it."""
    if digest is None:
        return None
    try:
        return decode_plan(store.read(plan_info, digest).wire)
    except InputError:
        return None


def _costs(store: ReadStore, trial: TrialInfo, plan: Plan, graphs: Mapping[Digest, Graph]) -> CostTable:
    """The device's, if it is still of the class that it was of in the trial; else that class's."""
    if store.read(calibration_of, trial.device).device_class == trial.environment:
        return costs_there(store, trial.device, plan, graphs)
    return plan_costs(store, trial.environment, plan, graph_of=store.graph)


def block_pairs(control: Plan, candidate: Plan) -> list[BlockPair]:
    """Every combined block of either plan, the control's order first."""
    left, right = _texts(control), _texts(candidate)
    return [
        BlockPair(members=name, control=left.get(name, ""), candidate=right.get(name, ""))
        for name in dict.fromkeys([*left, *right])
    ]


def drift(
    plan: Plan, graphs: Mapping[Digest, Graph], costs: CostTable, traces: Sequence[StepTrace]
) -> list[StageDrift]:
    """Per stage of a plan, from sampled whole steps; stages that run as one are numbered by the first."""
    bound = bind(plan, graphs)
    found = []
    for index, block in enumerate(plan.combined):
        if not isinstance(block.schedule, StageSchedule):
            continue
        known = block_costs(bound, index, costs)
        seen = traced_stages(bound, index, traces)
        found += [
            StageDrift(
                combined_block=index,
                stage=stage.first,
                planned_s=known.one_stage_s(stage.stage),
                measured_s=stage.seconds,
                samples=stage.samples,
            )
            for stage in seen
        ]
        if not seen:
            stages = enumerate(block.schedule.stages)
            found += [
                StageDrift(
                    combined_block=index,
                    stage=at,
                    planned_s=known.one_stage_s(stage),
                    measured_s=None,
                    samples=0,
                )
                for at, stage in stages
            ]
    return found


def _texts(plan: Plan) -> dict[str, str]:
    """Stage strings by the members' names."""
    return {
        " ".join(f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in block.members): to_string(
            block.schedule
        )
        for block in plan.combined
    }
