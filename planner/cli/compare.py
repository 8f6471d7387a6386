"""`stageloom plan compare`: the plan that ran and the one that was tried against it."""

from typing import Annotated, Any

import typer

from planner.cli.options import DatabaseUrl, DataDir, Json, data_dir_of
from planner.cli.output import emit, emit_json, pair
from planner.cli.replans import interval
from shared.errors import InputError
from shared.ids import DeviceId, Digest
from shared.messages.admin import TrialInfo
from shared.messages.telemetry import RowKind, StepTrace
from shared.plan import Plan, decode_plan

_TRACES_US = 600_000_000


def compare(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    generation: Annotated[
        int | None, typer.Option(metavar="N", help="The generation tried. Default: the newest trial.")
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Show control and candidate of a trial side by side: schedules, predictions, and what was measured.

    A line that begins with `-` is the control's, with `+` the candidate's; others are common to both. The
    ratio is above 1 where the candidate is better. Drift is measured over planned time of a stage.

    \b
    stageloom plan compare shop-7 --generation 4
    """
    from planner.store.reading import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    try:
        trial = _trial(store.trials(DeviceId(device)), generation, device)
        said = _comparison(store, trial)
    finally:
        store.close()
    if json:
        emit_json(said)
    else:
        emit("\n".join(_lines(trial, said)))


def _trial(trials: list[TrialInfo], generation: int | None, device: str) -> TrialInfo:
    found = [trial for trial in trials if generation in (None, trial.generation)]
    if not found:
        which = "no plan" if generation is None else f"generation {generation} was not"
        raise InputError(
            f"{which} tried on {device}", remedy=f"see `stageloom plan history {device}` for what happened"
        )
    return found[0]


def _comparison(store: Any, trial: TrialInfo) -> dict[str, Any]:
    from planner.costs.measured import device_costs
    from planner.replan.compare import block_pairs, drift, predicted_ratio

    candidate = decode_plan(store.plan(trial.candidate).wire)
    control = _known(store, trial.control)
    graphs = {model.artifact: store.graph(model.artifact) for model in candidate.models}
    costs = device_costs(
        store,
        trial.environment,
        candidate.executor,
        [(model.artifact, model.batch) for model in candidate.models],
        graph_of=store.graph,
    )
    said: dict[str, Any] = {
        "trial": trial,
        "blocks": [],
        "predicted_control_busy": None,
        "predicted_candidate_busy": None,
        "predicted_ratio": None,
    }
    if control is not None:
        left, right = predicted_ratio(control, candidate, graphs, costs)
        said["blocks"] = block_pairs(control, candidate)
        said["predicted_control_busy"], said["predicted_candidate_busy"] = left.busy, right.busy
        said["predicted_ratio"] = left.busy / right.busy if right.busy > 0.0 else None
    rows = store.newest_telemetry(trial.device, [RowKind.STEP_TRACE], _TRACES_US)
    traces = [row.data for row in rows if isinstance(row.data, StepTrace)]
    said["drift"] = drift(candidate, graphs, costs, traces)
    return said


def _known(store: Any, digest: Digest | None) -> Plan | None:
    """The control; None where the device planned it alone and the planner never saw it."""
    if digest is None:
        return None
    try:
        return decode_plan(store.plan(digest).wire)
    except InputError:
        return None


def _lines(trial: TrialInfo, said: dict[str, Any]) -> list[str]:
    control = (trial.control or "")[:12] or "none"
    lines = [
        f"control   {control}",
        f"candidate {trial.candidate[:12]}  generation {pair(trial.epoch, trial.generation)}",
        f"verdict   {trial.verdict} by {trial.how}" + (f": {trial.reason}" if trial.reason else ""),
        f"ratio     {interval(trial.ratio, trial.ratio_low, trial.ratio_high) or 'not measured'}, "
        f"{trial.pairs} pairs in {(trial.decided_us - trial.began_us) / 1e6:.1f} s",
    ]
    if said["predicted_ratio"] is not None:
        lines.append(f"predicted {said['predicted_ratio']:.3f}")
    for block in said["blocks"]:
        lines += (
            [f"  {block.members}  {block.control}"]
            if block.same
            else [
                f"{sign} {block.members}  {text}"
                for sign, text in (("-", block.control), ("+", block.candidate))
                if text
            ]
        )
    lines += [
        f"drift     block {one.combined_block} stage {one.stage}: planned {1e6 * one.planned_s:.0f} us, "
        f"measured {1e6 * one.measured_s:.0f} us over {one.samples} steps ({one.drift:.2f})"
        for one in said["drift"]
        if one.measured_s is not None and one.drift is not None
    ]
    return lines
