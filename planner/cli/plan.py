"""`stageloom plan ...`: read plans, push them, see who decided what, compare the plans of a trial."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from msgspec.structs import replace
from typer.core import TyperCommand

from stageloom.planner.admin.client import ask
from stageloom.planner.cli import explain, plan_create
from stageloom.planner.cli.options import MOST_ROWS, DatabaseUrl, DataDir, Json, checked, data_dir_of, reading
from stageloom.planner.cli.output import (
    emit,
    emit_json,
    emit_table,
    interval,
    pair,
    progress,
    pushed_json,
    pushed_text,
    when,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import admin
from stageloom.shared.messages.admin import TrialInfo
from stageloom.shared.messages.telemetry import RowKind, StepTrace
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.text import counted

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make plans, read them, push them to devices."
)

app.command()(plan_create.create)
app.command()(explain.explain)


@app.command()
def schedulers(json: Json = False) -> None:
    """List what --scheduler and --policy take, and what each does.

    \b
    stageloom plan schedulers
    """
    from stageloom.shared.search.registry import help_line
    from stageloom.shared.search.registry import schedulers as known_schedulers
    from stageloom.shared.search.rivals import policies

    rows = [
        *(("--scheduler", name, help_line(name)) for name in known_schedulers()),
        *(("--policy", name, rival.help) for name, rival in policies().items()),
    ]
    if json:
        emit_json([{"option": option, "name": name, "help": text} for option, name, text in rows])
    else:
        emit_table(["option", "name", "what it does"], rows, empty="there is none")


@app.command("list")
def list_plans(data_dir: DataDir = None, database_url: DatabaseUrl = "", json: Json = False) -> None:
    """List the plans.

    \b
    stageloom plan list
    """
    from stageloom.planner.store.plans import plan_infos

    with reading(data_dir, database_url) as store:
        infos = store.read(plan_infos, limit=1_000_000)
    if json:
        emit_json(infos)
        return
    emit_table(
        ["plan", "digest", "scheduler", "models", "wire bytes", "created (UTC)"],
        [
            (p.plan, p.digest[:12], p.scheduler, ", ".join(p.models), p.wire_bytes, when(p.created_at_us))
            for p in infos
        ],
        empty="there is no plan; make one with `stageloom plan create`",
    )


@app.command()
def show(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="Its name, or 8 or more characters of its digest.")
    ],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Print a plan as text. Its rules, and the stage string of every combined block.

    \b
    stageloom plan show inception
    stageloom plan explain inception     # the same in words, with costs and what else was tried
    """
    from stageloom.planner.store.plans import plan_info

    with reading(data_dir, database_url) as store:
        info = store.read(plan_info, plan)
    if json:
        emit_json(info)
        return
    emit(info.text)
    progress(f"{info.text_bytes} bytes as text, {info.wire_bytes} on the wire, digest {info.digest}")


class _PushCommand(TyperCommand):
    """Its one argument takes devices and then a plan, which no metavar of one argument can say."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands behind the command's name."""
        return ["[OPTIONS]", "[DEVICE]...", "PLAN"]


@app.command(cls=_PushCommand)
def push(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICES PLAN",
            help="Devices, and last the plan: its name, or 8 or more characters of its digest.",
        ),
    ],
    everyone: Annotated[
        bool, typer.Option("--all", help="To every enrolled device, with no DEVICE named.")
    ] = False,
    autonomy: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="What the agent may re-plan by itself: off, proven or full; without this, as before "
            "(off at first).",
        ),
    ] = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="No trial: run it at once and go back only if tasks fail or the engine crashes."
        ),
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Make a plan what devices should run, as their next generation. An absent one gets it when it returns.

    A device compares it with the plan that it runs, for up to a minute under its own load, and keeps it
    only if it is better: see `stageloom plan history DEVICE`. There is no trial where nothing comparable
    runs, or where the plan was committed on the device before.

    \b
    stageloom plan push shop-7 inception
    stageloom plan push shop-7 inception --now
    stageloom plan push shop-7 shop-8 shop-9 inception
    stageloom plan push --all inception
    """
    from stageloom.shared.messages.control import Activation, Autonomy

    *devices, plan = names
    if everyone == bool(devices):
        raise InputError(
            "name devices and then the plan, or --all and the plan", remedy="see `stageloom plan push --help`"
        )
    if autonomy is not None and autonomy not in {one.value for one in Autonomy}:
        raise InputError(f"there is no autonomy {autonomy!r}", remedy="choose off, proven or full")
    request = checked(
        admin.FleetPushRequest(
            plan=plan,
            autonomy=Autonomy(autonomy) if autonomy is not None else None,
            activation=Activation.NOW if now else Activation.TRIAL,
        )
    )
    if len(devices) == 1:
        push_to_one(data_dir_of(data_dir), request, devices[0], json)
    else:
        push_to_many(data_dir_of(data_dir), request, devices, json)


@app.command()
def history(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="Newest entries to show.")
    ] = 50,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """List generations, newest first. Of each which plan, who decided it, how it ended.

    \b
    stageloom plan history shop-7
    """
    from stageloom.planner.store.generations import generation_history

    with reading(data_dir, database_url) as store:
        entries, _ = store.read(
            generation_history, DeviceId(device) if device is not None else None, limit=limit
        )
    if json:
        emit_json(entries)
        return
    emit_table(
        ["device", "generation", "plan", "digest", "decided by", "state", "at (UTC)", "reason"],
        [
            (
                e.device,
                pair(e.epoch, e.generation),
                e.plan,
                (e.digest or "")[:12],
                e.decided_by,
                e.state,
                when(e.at_us),
                e.reason,
            )
            for e in entries
        ],
        empty="nothing was ever pushed",
    )


_SHOWN: Final = 16


def push_to_one(folder: Path, wanted: admin.FleetPushRequest, device: str, json: bool) -> None:
    """Push to one device, and tell what came of it.

    Raises:
        AdminRefused: it was refused.
    """
    request = admin.PlanPushRequest(
        plan=wanted.plan,
        device=DeviceId(device),
        autonomy=wanted.autonomy,
        activation=wanted.activation,
    )
    reply = ask(folder, checked(request), admin.PlanPushReply)
    if json:
        emit_json({"device": device, **pushed_json(reply)})
    else:
        progress(f"pushed to {device} as {pushed_text(reply)}; see `stageloom watch {device}`")


def push_to_many(folder: Path, wanted: admin.FleetPushRequest, devices: Sequence[str], json: bool) -> None:
    """Push to the devices named, or to all where none is, and tell what came of it.

    Raises:
        InputError: some were refused; the others have it.
    """
    pushed = [entry for reply in _replies(folder, wanted, devices) for entry in reply.pushed]
    refused = [entry for entry in pushed if entry.cause]
    if json:
        emit_json(pushed)
    else:
        by_autonomy = Counter(one.autonomy.value for one in pushed if one.autonomy is not None)
        some = ", ".join(f"{number} {name}" for name, number in sorted(by_autonomy.items()))
        done = f"pushed to {counted(by_autonomy.total(), 'device')}"
        progress(f"{done}{some and f', autonomy: {some}'}; see `stageloom watch`")
    for one in refused[:_SHOWN]:
        progress(f"{one.device}: {one.cause}")
    if refused:
        raise InputError(
            f"{len(refused)} of {len(pushed)} devices were refused",
            remedy="the others have it; push to these again once the cause is gone",
        )


def _replies(
    folder: Path, wanted: admin.FleetPushRequest, devices: Sequence[str]
) -> Iterator[admin.FleetPushReply]:
    for at in range(0, len(devices), admin.MAX_PUSHED):
        some = tuple(DeviceId(name) for name in devices[at : at + admin.MAX_PUSHED])
        yield ask(folder, checked(replace(wanted, devices=some)), admin.FleetPushReply)
    after, more = "", not devices
    while more:
        reply = ask(folder, replace(wanted, after=after), admin.FleetPushReply)
        after, more = reply.pushed[-1].device if reply.pushed else "", reply.more
        yield reply


_TRACES_US = 600_000_000


@app.command()
def compare(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="The device whose trial to show.")],
    generation: Annotated[
        int | None, typer.Option(metavar="N", help="The generation tried. Default: the newest trial.")
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Compare the two plans of a trial. One ran on the device, the other was tried against it.

    A line that begins with `-` is the control's, with `+` the candidate's; others are common to both. The
    ratio is above 1 where the candidate is better. Drift is measured over planned time of a stage.

    \b
    stageloom plan compare shop-7
    stageloom plan compare shop-7 --generation 4
    """
    from stageloom.planner.store.replans import trial_infos

    with reading(data_dir, database_url) as store:
        trial = _trial(store.read(trial_infos, DeviceId(device)), generation, device)
        comparison = _comparison(store, trial)
    if json:
        emit_json(comparison)
    else:
        emit("\n".join(_lines(trial, comparison)))


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
    from stageloom.planner.store.costs import calibration_of
    from stageloom.planner.store.plans import plan_info
    from stageloom.planner.store.telemetry import newest_telemetry

    candidate = decode_plan(store.read(plan_info, trial.candidate).wire)
    control = _known(store, trial.control)
    graphs = {model.artifact: store.graph(model.artifact) for model in candidate.models}
    held = store.read(calibration_of, trial.device)
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
    rows = store.read(newest_telemetry, trial.device, [RowKind.STEP_TRACE], _TRACES_US)[0]
    traces = [row.data for row in rows if isinstance(row.data, StepTrace)]
    said["drift"] = drift(candidate, graphs, costs, traces)
    return said


def _known(store: Any, digest: Digest | None) -> Plan | None:
    """The control; None where the device planned it alone and the planner never saw it."""
    from stageloom.planner.store.plans import plan_info

    if digest is None:
        return None
    try:
        return decode_plan(store.read(plan_info, digest).wire)
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
