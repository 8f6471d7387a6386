"""`stageloom policy ...`: learned policies; which there are, those of devices, those from elsewhere."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.cli.connection import call, connected, every
from stageloom.planner.cli.jobs import run_job
from stageloom.planner.cli.options import TwinFile, checked, parse_rates
from stageloom.planner.cli.output import emit, emit_table, progress, pushed_text, show, when
from stageloom.planner.cli.request_file import twin_text
from stageloom.planner.schema import policy as schema
from stageloom.planner.schema.device import PolicyAttachRequest
from stageloom.planner.schema.plan import ArrivalRate
from stageloom.shared.errors import ExitCode, InputError, StageloomError
from stageloom.shared.ids import DeviceId

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List and check learned policies, take them over.",
)

Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Let it plan although it did not pass its check.")
]


@app.command("list")
def list_policies() -> None:
    """List the policies that are kept, newest first. Works while the planner is down, too.

    A ratio is what a task costs under the policy on blocks or arrivals that it did not learn from: of maddpg
    over every block alone, of gpg over one operator after another. Below 1 is better. A policy of maddpg that
    did not pass its check has no say; stderr says why.

    \b
    stageloom policy list
    """
    infos = every(routes.POLICY_LIST, schema.PolicyListRequest())
    columns = ["digest", "policy", "models", "steps", "ratio", "trained (UTC)", "class", "check"]
    rows = [
        (
            info.digest[:12],
            info.policy,
            ", ".join(name or artifact[:12] for artifact, name in info.artifacts.items()),
            info.steps,
            f"{info.ratio:.3f}",
            when(info.trained_at_us),
            info.device_class or "any",
            _standing(info),
        )
        for info in infos
    ]
    empty = "no policy is kept; train one with `stageloom policy train`, or see `policy import --help`"
    show(infos, lambda: emit_table(columns, rows, empty=empty))
    for info in infos:
        if info.unshown:
            progress(f"{info.digest[:12]}: {info.unshown}")
        if info.withheld:
            progress(f"no say: {info.withheld}")


def _standing(info: schema.PolicyInfo) -> str:
    """What a list says of a policy's check."""
    if info.policy != "maddpg":
        return "none needed"
    said = "not checked" if info.verdict is None else "passed" if info.verdict.passed else "not passed"
    return f"{said}, may plan" if info.unchecked and said != "passed" else said


@app.command()
def check(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", help="8 or more characters of its digest, as `policy list` shows it."
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Simulate it. Default: one of the policy's class."),
    ] = None,
    twin: TwinFile = "",
    rate: Annotated[
        list[str] | None,
        typer.Option(
            "--rate",
            metavar="MODEL=PER_S",
            help="Make the loads of these rates. Repeatable. Default: those it was trained at.",
        ),
    ] = None,
) -> None:
    """Check on a twin whether a policy may plan.

    Its loads are such as the training never saw. The verdict is kept.

    It passes if its answers depend on the state, if it beats the best plan that needed no training with
    confidence, and if it is nowhere behind that by more than a margin. Exit code 1: it did not pass.

    \b
    stageloom policy check 3f2a9c01
    stageloom policy check 3f2a9c01 --device shop-7
    stageloom policy check 3f2a9c01 --twin nano --rate resnet50=30 --rate squeezenet=60
    """
    rates = tuple(ArrivalRate(model=name, per_s=per_s) for name, per_s in parse_rates(rate).items())
    request = checked(
        schema.PolicyCheckRequest(
            policy=policy,
            device=None if device is None else DeviceId(device),
            twin=twin_text(twin or None) or "",
            rates=rates,
        )
    )
    verdict = run_job(routes.POLICY_CHECK, request)
    show(verdict, lambda: tell_verdict(verdict))
    if not verdict.passed:
        raise typer.Exit(ExitCode.FAILED)


def tell_verdict(verdict: schema.PolicyVerdict) -> None:
    """The criteria, and the loads that they were judged under."""
    rows = [(one.name, "passed" if one.passed else "not passed", one.reason) for one in verdict.criteria]
    emit_table(["criterion", "verdict", "why"], rows, empty="")
    columns = ["load", "best seed", "by", "ratio", "95 %", "tasks/s", "seed's", "p99 ms", "seed's p99"]
    loads = [
        (
            load.load,
            load.seed,
            load.figure,
            f"{load.ratio:.3f}",
            f"{load.low:.3f} to {load.high:.3f}",
            f"{load.policy_per_s:.1f}",
            f"{load.seed_per_s:.1f}",
            f"{1000.0 * load.policy_p99_s:.3g}",
            f"{1000.0 * load.seed_p99_s:.3g}",
        )
        for load in verdict.loads
    ]
    emit_table(columns, loads, empty="")
    progress(f"twin: {verdict.twin}; {verdict.arrivals}")
    tell_standing(verdict)


def tell_standing(verdict: schema.PolicyVerdict | None, *, unchecked: bool = False) -> None:
    """One line for whoever waits: whether a policy passed, and why not; `unchecked`: it may plan anyway."""
    anyway = "; it may plan all the same" if unchecked else ""
    if verdict is None:
        no_say = "" if unchecked else ": it has no say before `stageloom policy check`"
        progress(f"the policy was not checked{no_say}{anyway}")
    elif verdict.passed:
        progress(f"policy {verdict.policy[:12]} passed its check")
    else:
        progress(f"policy {verdict.policy[:12]} did not pass its check: {verdict.reason}{anyway}")


@app.command()
def attach(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="8 or more characters of its digest; maddpg: the newest for the device's class; none.",
        ),
    ],
    unchecked: Unchecked = False,
) -> None:
    """Send a policy to a device. Where no planner answers it plans with it, as far as its autonomy goes.

    A re-plan does the same by itself where the store has a policy that fits its plan; this command turns that
    off, `stageloom device replan DEVICE --attach` on again.

    A policy that did not pass its check is refused. The device refuses one that was trained for other models
    or another device class: see `stageloom-agent status` there.

    \b
    stageloom policy attach shop-7 maddpg
    stageloom policy attach shop-7 none
    """
    wanted = "" if policy == "none" else policy
    request = PolicyAttachRequest(device=DeviceId(device), policy=wanted, unchecked=unchecked)
    reply = call(routes.POLICY_ATTACH, checked(request))
    done = f"attached to {device}" if wanted else f"no policy is attached to {device} from now on,"
    show(reply, lambda: progress(f"{done} as {pushed_text(reply)}"))


@app.command("import")
def import_policy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="As `stageloom policy train maddpg --output` wrote it.")
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="D", help="Adopt it for this device's class. Default: the class it names."
        ),
    ] = None,
    unchecked: Unchecked = False,
) -> None:
    """Keep a policy that was trained elsewhere, and check it. Once it passed, re-plans of its class ask it.

    A policy has a say only on the device class it was trained for. With --device it is adopted for that
    device's class, and for the planner's artifacts with the same graphs where its own are not here. Its plans
    must win a trial on the device like any. With --unchecked it is not checked.

    \b
    stageloom policy import maddpg.checkpoint --device shop-7
    stageloom policy attach shop-7 maddpg
    """
    named = None if device is None else DeviceId(device)
    reply = _uploaded(checked(schema.PolicyImportRequest(device=named, unchecked=unchecked)), file)
    if not unchecked:
        reply = msgspec.structs.replace(reply, verdict=_verdict_on(reply, named))
    show(reply, lambda: _tell(reply))


def _verdict_on(reply: schema.PolicyImportReply, device: DeviceId | None) -> schema.PolicyVerdict | None:
    """That of the check of what was imported; None, said on stderr, where it cannot be checked here."""
    try:
        verdict = run_job(routes.POLICY_CHECK, schema.PolicyCheckRequest(policy=reply.policy, device=device))
    except StageloomError as error:
        progress(f"policy {reply.policy[:12]} has no say before it is checked: {error}")
        return None
    tell_standing(verdict)
    return verdict


def _tell(reply: schema.PolicyImportReply) -> None:
    emit(reply.policy)
    same = reply.device_class == reply.trained_for
    adoption = "" if same else f", adopted from {reply.trained_for}"
    progress(f"policy {reply.policy[:12]} is kept for {reply.device_class}{adoption}")


def _uploaded(request: schema.PolicyImportRequest, file: Path) -> schema.PolicyImportReply:
    try:
        file.open("rb").close()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}",
            remedy="name a checkpoint as `stageloom policy train maddpg --output` writes it",
        ) from error
    with connected() as caller:
        assert isinstance(caller, PlannerClient)
        return caller.upload(routes.POLICY_IMPORT, request, file)


@app.command("export")
def export_policy(
    digest: Annotated[
        str, typer.Argument(metavar="DIGEST", help="8 or more characters, as `policy list` shows it.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be written; it must not exist.")],
) -> None:
    """Write a policy to a file. `policy import` takes one of maddpg on another planner.

    \b
    stageloom policy export 3f2a9c01 maddpg.checkpoint
    """
    request = checked(schema.PolicyExportRequest(policy=digest))
    with connected(live=False) as caller:
        size = caller.download(routes.POLICY_EXPORT, request, file)
    show({"file": str(file), "size_bytes": size}, lambda: progress(f"{size} bytes in {file}"))
