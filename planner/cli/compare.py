"""`stageloom plan compare`: the plan that ran and the one that was tried against it; or every scheduler."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stageloom.planner.cli import comparison_plot
from stageloom.planner.cli import create_options as opt
from stageloom.planner.cli.choices import model_choice
from stageloom.planner.cli.options import DatabaseUrl, DataDir, Json, checked, data_dir_of, require_own
from stageloom.planner.cli.output import emit, emit_json, pair, progress
from stageloom.planner.cli.replans import interval
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import admin
from stageloom.shared.messages.admin import TrialInfo
from stageloom.shared.messages.telemetry import RowKind, StepTrace
from stageloom.shared.plan import Plan, decode_plan

_TRACES_US = 600_000_000


def compare(
    device: Annotated[
        str | None,
        typer.Argument(metavar="DEVICE", help="The device whose trial to show; none with --model."),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(metavar="N", help="The generation tried. Default: the newest trial.")
    ] = None,
    models: opt.ComparedModels = None,
    schedulers: opt.ComparedSchedulers = None,
    costs_of: opt.Device = None,
    partition: opt.Partition = "whole",
    combine: opt.Combine = "alone",
    members: opt.Members = 2,
    executor: opt.Executor = "onnx",
    r: opt.LimitR = None,
    s: opt.LimitS = None,
    measure: Annotated[
        float | None,
        typer.Option(
            "--measure",
            metavar="S",
            help="Have --device measure every plan found, S seconds a plan at most.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --model: draw it, too, as .svg, .png or .pdf (extra `plot`)."
        ),
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Compare a trial's two plans, or with --model all schedulers. A trial is of a DEVICE.

    \b
    stageloom plan compare shop-7 --generation 4
    stageloom plan compare --model inception_v3 --partition paper
    stageloom plan compare --model resnet50 --model squeezenet --combine aligned --device shop-7 --measure 5
    stageloom plan compare --model resnet50 --scheduler ios --scheduler beam -r 3 -s 8 --plot resnet50.svg

    Of a trial: a line that begins with `-` is the control's, with `+` the candidate's; others are common to
    both. The ratio is above 1 where the candidate is better. Drift is measured over planned time of a stage.

    Of schedulers: predicted milliseconds of one task of each model; how much that is over what no schedule
    can beat (the bound) and over the cheapest stages within -r and -s (the optimum, where it can be known);
    search time; what --device measured of the plan, and how its trial there ended. Without --device costs
    are estimates. Only --measure needs a running planner.
    """
    if models:
        if device is not None or generation is not None:
            raise InputError(
                "--model compares schedulers, and DEVICE and --generation a trial",
                remedy="name the device whose costs to use with --device",
            )
        request = admin.PlanCreateRequest(
            models=tuple(model_choice(text, partition=partition) for text in models),
            scheduler="sequential",
            device=DeviceId(costs_of) if costs_of is not None else None,
            combination=combine,
            members_max=members,
            executor=executor,
            r=r,
            s=s,
        )
        where = data_dir_of(data_dir)
        _schedulers(where, database_url, checked(request), schedulers, measure, plot, json=json)
        return
    if device is None:
        raise InputError("name a DEVICE or a --model", remedy="see `stageloom plan compare --help`")
    given = {
        "--scheduler": schedulers,
        "--device": costs_of,
        "-r": r,
        "-s": s,
        "--measure": measure,
        "--plot": plot,
    }
    ignored = [name for name, value in given.items() if value]
    if ignored:
        raise InputError(
            f"{', '.join(ignored)} would change nothing about a trial of {device}",
            remedy="leave it out, or name models with --model in place of DEVICE",
        )
    _of_a_trial(data_dir_of(data_dir), database_url, device, generation, json=json)


def _schedulers(
    folder: Path,
    database_url: str,
    request: admin.PlanCreateRequest,
    names: list[str] | None,
    measure_s: float | None,
    plot: Path | None,
    *,
    json: bool,
) -> None:
    from stageloom.planner.cli.compare_schedulers import chosen, compare_schedulers, show

    if measure_s is not None and request.device is None:
        raise InputError("--measure needs a device", remedy="name it with --device")
    if measure_s is not None:
        require_own(folder, database_url)
    if plot is not None:
        comparison_plot.check_file(plot)
    rows = compare_schedulers(folder, database_url, request, chosen(names), measure_s)
    if plot is not None:
        comparison_plot.save([(row.standing, row.measured) for row in rows], plot)
        progress(f"drawn to {plot}")
    show(rows, json)


def _of_a_trial(folder: Path, database_url: str, device: str, generation: int | None, *, json: bool) -> None:
    from stageloom.planner.store.reading import ReadStore

    store = ReadStore.open(folder, database_url)
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
    from stageloom.planner.costs.measured import device_costs
    from stageloom.planner.replan.compare import block_pairs, drift
    from stageloom.planner.replan.predict import predict

    candidate = decode_plan(store.plan(trial.candidate).wire)
    control = _known(store, trial.control)
    graphs = {model.artifact: store.graph(model.artifact) for model in candidate.models}
    held = store.calibration(trial.device)
    same = held.device_class == trial.environment
    costs = device_costs(
        store,
        held.costs_key if same else trial.environment,
        candidate.executor,
        [(model.artifact, model.batch) for model in candidate.models],
        graph_of=store.graph,
        taught_by=held.taught_by if same else (),
    )
    said: dict[str, Any] = {
        "trial": trial,
        "blocks": [],
        "predicted_control_busy": None,
        "predicted_candidate_busy": None,
        "predicted_ratio": None,
    }
    if control is not None:
        left, right = predict(control, graphs, costs, ()), predict(candidate, graphs, costs, ())
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
