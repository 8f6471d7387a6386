"""`stageloom plan create`: search a plan, keep it, push it. Rare options are in a plan file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import call
from stageloom.planner.cli.jobs import run_job
from stageloom.planner.cli.options import (
    MODEL_KEYS,
    Combine,
    Partition,
    checked,
    model_options,
    parse_duration,
)
from stageloom.planner.cli.output import emit, progress, pushed_text
from stageloom.planner.cli.output import show as show_result
from stageloom.planner.cli.request_file import request_from
from stageloom.planner.cli.settings import settings
from stageloom.planner.schema.plan import (
    PlanCreateRequest,
    PlanPushRequest,
    PlanReply,
    Pushed,
    TournamentFigures,
    TournamentInfo,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.search.eop import splitters
from stageloom.shared.search.registry import schedulers
from stageloom.shared.search.rivals import policies
from stageloom.shared.text import counted

EXECUTORS: Final = ("onnx", "openvino", "onnx_cuda", "torch_cuda", "torch_cpu", "null")


def _check_executor(name: str | None, device: str | None) -> None:
    """A device may have executors of other distributions, which it told the planner of."""
    if name is not None and name not in EXECUTORS and device is None:
        raise InputError(
            f"there is no executor {name!r}",
            remedy=f"choose one of {', '.join(EXECUTORS)}, or name a DEVICE that has it",
        )


Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"A model, with values of its own for: {', '.join(MODEL_KEYS)}. Repeatable. Default: the "
        "versions that DEVICE should run now, else all.",
    ),
]
Device = Annotated[
    str | None, typer.Argument(metavar="DEVICE", help="Plan for what is known of this device.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", metavar="D", help="The same as DEVICE.")]
Called = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Default: the first 12 characters of its digest."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A plan file (TOML), as `plan show --toml` writes it; options go before it.",
    ),
]
SchedulerName = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="NAME",
        help=f"auto, or one of {', '.join((*schedulers(), *splitters()))}; `scheduler list` explains them. "
        "Default: auto "
        "where a DEVICE and no rules are given, else sequential, or the policy's.",
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help=f"Do as others do; one of {', '.join(policies())}. `scheduler list` explains them.",
    ),
]
SearchBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Such as 30s or 2m. With --scheduler or --policy: search on for so long. Without: rivals "
        "and searches compete on the device's twin, then neighbours of the best; the best so far wins.",
    ),
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        help=f"{', '.join(EXECUTORS[:-1])} or {EXECUTORS[-1]}; the device must have it. Default: onnx.",
    ),
]
Lanes = Annotated[
    int | None, typer.Option("--lanes", metavar="N", help="Steps that may overlap. Default: 1.")
]
Push = Annotated[bool, typer.Option("--push", help="Push it to DEVICE, as `stageloom plan push` does.")]


def create(
    device: Device = None,
    models: Models = None,
    device_option: DeviceOption = None,
    name: Called = None,
    file: PlanFile = None,
    scheduler: SchedulerName = None,
    policy: PolicyName = None,
    budget: SearchBudget = None,
    executor: ExecutorName = None,
    lanes: Lanes = None,
    partition: Partition = None,
    combine: Combine = None,
    push_it: Push = False,
) -> None:
    """Make a plan and keep it under a name. For a DEVICE without a --scheduler, from what is known of it.

    \b
    stageloom plan create shop-7 --push                  # auto: its models, on its cores and executors
    stageloom plan create shop-7 --model resnet50 --model squeezenet:replicas=2 --scheduler ios
    stageloom plan create --model inception_v3 --partition paper --scheduler greedy --name inception
    stageloom plan create shop-7 --model detector --model alarm --budget 30s --push
    stageloom plan create shop-7 --model detector --scheduler eop --push
    stageloom plan show inception --toml > plan.toml && stageloom plan create --from plan.toml --name again

    \b
    auto has a lane per core, runs each model on the executor that was measured to be fastest there
    (`stageloom device profile DEVICE --executor NAME`), and the task of the earliest deadline first; one
    without a deadline counts as due after 1 s.
    It says what it knew and what was not measured. Any rule of your own turns it off.

    \b
    eop splits operators of one model over two resources of a DEVICE that measured parts of them
    (`stageloom device profile DEVICE --splits`): its first two cores, on the executors that are predicted to
    be fastest, or what --executor (other than onnx, the default) or a plan file with two [[resources]] names.
    eop_paper, separate, equal and fixed are what it is compared with. It says what is predicted with and
    without splits; where none pays, the plan has none. With --budget and without --scheduler such plans are
    among those that compete.

    \b
    The keys of --model NAME:KEY=VALUE,... :
      partition      how it is cut: whole, base or paper
      replicas       instances in flight
      batch, delay   tasks per instance, and seconds that the first waits for others
      interval       seconds between two launches of the model
      strict         yes: keep that interval even while a lane is idle; no: launch early
      weight         the model's share, with step_choice = "weighted" in a plan file
      queue          who loses when it is full: refuse_newest, drop_oldest, priority or deadline
      queue-tasks    tasks that may wait at most
      queue-bytes    bytes of inputs that may wait at most

    \b
    A plan file has these, and: members_max, intra_op_threads, precision (fp32; bf16 on openvino; tf32 or
    fp16 on a GPU), issue (device, or schedule: launches on torch_cuda as the schedule lists them), r, s
    (limits of a stage), step_choice, wait, wait_timeout_s, run_ahead, max_skips, barrier, measure_s (have the
    device measure what is unsure, so many seconds a plan), and of a tournament [[rates]] with model and
    per_s. Of several executors and of cores: [[further_executors]] with name, intra_op_threads, precision and
    issue, [[resources]] with cores, lane_resources (of each lane the number of its resource), placement, and
    of a model cuts, executors and resources (numbers, for each block). With a placement
    a block may run on each resource that it names, or on any, and is placed when it is ready.
    """
    if device is not None and device_option not in (None, device):
        raise InputError(f"{device} and --device {device_option} are two devices", remedy="name one")
    for_all: dict[str, Any] = {"partition": partition} if partition is not None else {}
    given = {
        "plan": name,
        "models": tuple(model_options(text, **for_all) for text in models or ()) or None,
        "scheduler": scheduler,
        "policy": policy,
        "device": device or device_option,
        "combination": combine,
        "lanes": lanes,
        "executor": executor,
        "budget_s": None if budget is None else parse_duration(budget, "--budget"),
    }
    request = _with_rules(request_from(PlanCreateRequest, file, given), given, models, partition)
    if not request.models and request.device is None:
        raise InputError("a plan needs models", remedy="name one with --model, a DEVICE, or a --from file")
    if not request.models and partition is not None:
        raise InputError(
            "--partition cuts the models that are named, and none is",
            remedy="name them with --model, or leave it out",
        )
    _check_executor(executor, request.device)
    if push_it and request.device is None:
        raise InputError("--push needs a device", remedy="name it, as in `stageloom plan create DEVICE`")
    reply = run_job(routes.PLAN_CREATE, request)
    pushed = _push(reply.plan.plan, request.device) if push_it and request.device is not None else None
    document = {
        **msgspec.to_builtins(reply.plan),
        "search_s": reply.search_s,
        "contest": msgspec.to_builtins(reply.contest),
        "known": reply.known,
        "pushed": pushed,
    }
    show_result(document, lambda: _tell(reply, pushed))
    if reply.contest is not None and not settings.json:
        tell_tournament(reply.contest)


def _with_rules(
    request: PlanCreateRequest, given: Mapping[str, Any], models: list[str] | None, partition: str | None
) -> PlanCreateRequest:
    """The request with --partition for models of a plan file; an option that is a rule turns auto off, even
    where it says what would be so anyway."""
    if partition is not None and not models:
        own = (msgspec.structs.replace(model, partition=partition) for model in request.models)
        request = checked(msgspec.structs.replace(request, models=tuple(own)))
    rules = [given["combination"], given["lanes"], given["executor"], partition]
    chosen = request.scheduler or request.policy or request.budget_s is not None
    if not chosen and any(rule is not None for rule in rules):
        request = msgspec.structs.replace(request, scheduler="sequential")
    return request


def _push(plan: str, device: DeviceId) -> Pushed:
    (pushed,) = call(routes.PLAN_PUSH, PlanPushRequest(plan=plan, devices=(device,))).pushed
    return pushed


def _tell(reply: PlanReply, pushed: Pushed | None) -> None:
    made = reply.plan
    emit(made.plan)
    progress(
        f"plan with digest {made.digest[:12]} made in {1000 * reply.search_s:.0f} ms: "
        f"{made.text_bytes} bytes as text, {made.wire_bytes} on the wire"
    )
    if reply.known:
        progress(reply.known)
    if pushed is not None:
        progress(f"pushed to {pushed.device} as {pushed_text(pushed)}; see `stageloom watch {pushed.device}`")


def tell_tournament(tournament: TournamentInfo) -> None:
    """Tell a tournament's course and result on stderr."""
    progress(f"evaluated on a twin ({tournament.twin}); arrivals: {tournament.arrivals}")
    for failure in tournament.failed:
        progress(f"{failure.name} took no part: {failure.reason}")
    for point in tournament.judged:
        if point.led:
            progress(f"  {point.at_s:6.1f} s  {point.name:30}  {_score(point)}")
    if tournament.neighbours:
        progress(
            f"{counted(tournament.neighbours, 'neighbour')} of the best plans so far were evaluated, too"
        )
    if tournament.left:
        progress(f"{tournament.left} more were not evaluated in time")
    for figures in tournament.fresh:
        progress(f"on fresh arrivals {figures.name}: {_score(figures)}")
    if tournament.unchecked:
        progress(f"{tournament.winner} is taken without fresh arrivals: {tournament.unchecked}")


def _score(figures: TournamentFigures) -> str:
    return f"{figures.throughput_per_s:.1f} tasks/s, p99 {1e3 * figures.p99_s:.1f} ms"
