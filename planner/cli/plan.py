"""`stageloom plan ...`: read plans, push them, see who decided what."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from msgspec.structs import asdict
from typer.core import TyperCommand

from stageloom.planner.api import routes
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.cli import explain, plan_create, plan_trace, push_wait, trial
from stageloom.planner.cli.connection import LONG_S, Caller, call, connected, every, first
from stageloom.planner.cli.options import MOST_ROWS, checked
from stageloom.planner.cli.output import emit, emit_table, pair, progress, pushed_text, when
from stageloom.planner.cli.output import show as show_result
from stageloom.planner.cli.settings import settings
from stageloom.planner.schema import plan as schema
from stageloom.planner.schema.device import DeviceShowRequest
from stageloom.shared.errors import ExitCode, InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Activation, Autonomy
from stageloom.shared.messages.outputs import DEFAULT_TOLERANCE, OutputsVerdict
from stageloom.shared.text import counted

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make plans, read them, push them to devices."
)
app.command()(plan_create.create)
app.command()(explain.explain)
app.command()(trial.compare)
app.command()(plan_trace.trace)

_SHOWN: Final = 16


@app.command("list")
def list_plans() -> None:
    """List the plans.

    \b
    stageloom plan list
    """
    infos = every(routes.PLAN_LIST, schema.PlanListRequest())
    columns = ["plan", "digest", "scheduler", "models", "wire bytes", "created (UTC)", "outputs"]
    rows = [
        (
            info.plan,
            info.digest[:12],
            info.scheduler,
            ", ".join(info.models),
            info.wire_bytes,
            when(info.created_at_us),
            _agreement([found.outputs.agrees for found in info.compared]),
        )
        for info in infos
    ]
    empty = "there is no plan; make one with `stageloom plan create`"
    show_result(infos, lambda: emit_table(columns, rows, empty=empty))


def _agreement(agree: Sequence[bool]) -> str:
    """On how many devices a plan's outputs agreed with those of the plan before."""
    counts = ((sum(agree), "agree"), (len(agree) - sum(agree), "differ"))
    return ", ".join(f"{word} on {number}" for number, word in counts if number)


@app.command()
def show(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="Its name, or 8 or more characters of its digest.")
    ],
    toml: Annotated[
        bool,
        typer.Option(
            "--toml",
            help="Print a plan file of its rules, for `plan create --from`, which searches anew.",
        ),
    ] = False,
) -> None:
    """Print a plan as text. Its rules, and the stage string of every combined block.

    \b
    stageloom plan show inception
    stageloom plan show inception --toml > plan.toml
    stageloom plan explain inception     # in words, with costs and what else was tried
    """
    request = checked(schema.PlanShowRequest(plan=plan))
    if toml:
        again = call(routes.PLAN_REQUEST, schema.PlanRequestRequest(plan=request.plan), timeout_s=LONG_S)
        show_result(again, lambda: emit(_plan_file(again)))
        return
    info = call(routes.PLAN_SHOW, request)
    show_result(info, lambda: emit(info.text))
    for found in info.compared[:_SHOWN]:
        progress(f"{found.device}: {OutputsVerdict(**asdict(found.outputs)).text()}")
    progress(f"{info.text_bytes} bytes as text, {info.wire_bytes} on the wire, digest {info.digest}")


def _plan_file(request: schema.PlanCreateRequest) -> str:
    import tomli_w

    def given(part: msgspec.Struct) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        plain = msgspec.to_builtins(part)
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(part))}
        return {
            name: value
            for name, value in plain.items()
            if value is not None and getattr(part, name) != defaults[name]
        }

    fields = given(request)
    fields["models"] = [given(model) for model in request.models]
    return tomli_w.dumps(fields)


@app.command()
def export(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="Its name, or 8 or more characters of its digest.")
    ],
    form: Annotated[
        schema.ExportFormat,
        typer.Option("--format", metavar="FORMAT", help="dot, perfetto or ort-partition."),
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="D", help="The timeline's costs are its; else estimates."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write files there, not to stdout."),
    ] = None,
) -> None:
    """Print a plan in a format of another tool. See the page on exports.

    dot is for Graphviz, perfetto a predicted timeline for ui.perfetto.dev, ort-partition a file per model
    for onnxruntime's session.node_partition_config_file, about the file that `model export` writes.

    \b
    stageloom plan export inception --format dot | dot -Tsvg -o inception.svg
    stageloom plan export inception --format perfetto --device shop-7 -o exported
    stageloom plan export inception --format ort-partition -o exported
    """
    request = schema.PlanExportRequest(
        plan=plan, format=form, device=DeviceId(device) if device is not None else None
    )
    found = call(routes.PLAN_EXPORT, checked(request), timeout_s=LONG_S)
    if output is None and len(found.files) > 1 and not settings.json:
        raise InputError(f"that makes {len(found.files)} files", remedy="name a folder with --output")
    if output is None:
        show_result(found, lambda: emit(found.files[0].text))
        return
    output.mkdir(parents=True, exist_ok=True)
    paths = [output / file.name for file in found.files]
    for path, file in zip(paths, found.files, strict=True):
        path.write_text(file.text, encoding="utf-8")
    show_result([str(path) for path in paths], lambda: emit("\n".join(map(str, paths))))


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
    compare_outputs: Annotated[
        bool,
        typer.Option(
            "--compare-outputs",
            help="Activate new versions of models only if they give what those that run give.",
        ),
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="How far outputs may differ, |new - old| / (1 + |old|) of numbers; of labels and "
            "other integers, the share that does.",
            show_default=str(DEFAULT_TOLERANCE),
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Until each device has decided: tells its steps, and fails unless all keep the plan.",
        ),
    ] = False,
) -> None:
    """Make a plan what devices should run, as their next generation. An absent one gets it when it returns.

    A device compares it with the plan that it runs, under its own load, and keeps it only if it is better:
    see `stageloom plan history DEVICE`. That takes seconds to a minute, or up to ten where tasks are slow or
    rare. There is no trial where nothing comparable runs, or where the plan was committed on the device
    before. A device that is offline is not waited for.

    A new version of a model does other work, so that speed is not compared. With --compare-outputs the device
    runs both versions on inputs of its tasks and rejects a new one that gives something else.

    \b
    stageloom plan push shop-7 inception --wait
    stageloom plan push shop-7 inception --now
    stageloom plan push shop-7 retrained --compare-outputs --tolerance 0.05 --wait
    stageloom plan push shop-7 shop-8 shop-9 inception
    stageloom plan push --all inception
    """
    *devices, plan = names
    if everyone == bool(devices):
        raise InputError(
            "name devices and then the plan, or --all and the plan", remedy="see `stageloom plan push --help`"
        )
    if autonomy is not None and autonomy not in {value.value for value in Autonomy}:
        raise InputError(f"there is no autonomy {autonomy!r}", remedy="choose off, proven or full")
    if tolerance is not None and not compare_outputs:
        raise InputError("--tolerance goes with --compare-outputs", remedy="give both, or none")
    request = checked(
        schema.PlanPushRequest(
            plan=plan,
            autonomy=Autonomy(autonomy) if autonomy is not None else None,
            activation=Activation.NOW if now else Activation.TRIAL,
            compare_outputs=_tolerance(tolerance, now=now) if compare_outputs else None,
        )
    )
    pushed = [entry for reply in _replies(request, devices) for entry in reply.pushed]
    refused = [entry for entry in pushed if entry.cause]
    if len(devices) == 1 and refused:
        raise InputError(refused[0].cause)
    taken = [entry for entry in pushed if not entry.cause]
    found = _outcomes(pushed, taken) if wait else ()
    rows = found or pushed
    show_result(rows[0] if len(devices) == 1 else rows, lambda: None if wait else _tell_pushed(pushed))
    for entry in refused[:_SHOWN]:
        progress(f"{entry.device}: {entry.cause}")
    if refused:
        raise InputError(
            f"{len(refused)} of {len(pushed)} devices were refused",
            remedy="the others have it; push to these again once the cause is gone",
        )
    if wait and not push_wait.all_kept(taken, found):
        raise typer.Exit(ExitCode.FAILED)


def _tolerance(given: float | None, *, now: bool) -> float:
    """Within what outputs are to agree.

    Raises:
        InputError: nothing is compared before a plan is activated at once.
    """
    if now:
        raise InputError(
            "--now activates a plan without comparing anything", remedy="leave out --now or --compare-outputs"
        )
    return DEFAULT_TOLERANCE if given is None else given


def _replies(request: schema.PlanPushRequest, devices: Sequence[str]) -> Iterator[schema.PlanPushReply]:
    parts = [
        tuple(map(DeviceId, devices[at : at + schema.MAX_PUSHED]))
        for at in range(0, len(devices), schema.MAX_PUSHED)
    ]
    requests = [checked(msgspec.structs.replace(request, devices=part)) for part in parts]
    with connected() as caller:
        for one in requests:
            yield _reply(caller, one, others=len(requests) > 1)
        after, more = "", not devices
        while more:
            reply = caller.call(routes.PLAN_PUSH, msgspec.structs.replace(request, after=after))
            after, more = reply.next, bool(reply.next)
            yield reply


def _reply(caller: Caller, request: schema.PlanPushRequest, *, others: bool) -> schema.PlanPushReply:
    """The planner's. There a refusal of one device is an error, which would hide the report of others."""
    try:
        return caller.call(routes.PLAN_PUSH, request)
    except ApiRefused as error:
        if not others or len(request.devices) > 1 or error.exit_code is not ExitCode.USAGE:
            raise
        return schema.PlanPushReply(pushed=(schema.Pushed(device=request.devices[0], cause=str(error)),))


def _outcomes(pushed: Sequence[schema.Pushed], taken: Sequence[schema.Pushed]) -> list[schema.HistoryEntry]:
    _tell_pushed(pushed)
    with connected() as caller:
        return push_wait.outcomes(
            taken,
            lambda device: caller.call(routes.DEVICE_SHOW, DeviceShowRequest(device=DeviceId(device))),
            progress,
            time.monotonic,
            time.sleep,
        )


def _tell_pushed(pushed: Sequence[schema.Pushed]) -> None:
    if len(pushed) == 1 and not pushed[0].cause:
        device = pushed[0].device
        progress(f"pushed to {device} as {pushed_text(pushed[0])}; see `stageloom watch {device}`")
        return
    by_autonomy = Counter(entry.autonomy.value for entry in pushed if entry.autonomy is not None)
    some = ", ".join(f"{number} {name}" for name, number in sorted(by_autonomy.items()))
    done = f"pushed to {counted(by_autonomy.total(), 'device')}"
    progress(f"{done}{some and f', autonomy: {some}'}; see `stageloom watch`")


@app.command()
def history(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="Newest entries to show.")
    ] = 50,
) -> None:
    """List generations, newest first. Of each which plan, who decided it, how it ended.

    \b
    stageloom plan history shop-7
    """
    request = schema.PlanHistoryRequest(device=DeviceId(device) if device is not None else None)
    entries = first(routes.PLAN_HISTORY, checked(request), limit)
    columns = ["device", "generation", "plan", "digest", "decided by", "state", "at (UTC)", "reason"]
    rows = [
        (
            entry.device,
            pair(entry.epoch, entry.generation),
            entry.plan,
            (entry.digest or "")[:12],
            entry.decided_by,
            entry.state,
            when(entry.at_us),
            entry.reason,
        )
        for entry in entries
    ]
    show_result(entries, lambda: emit_table(columns, rows, empty="nothing was ever pushed"))
