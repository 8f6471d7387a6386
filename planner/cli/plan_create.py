"""`stageloom plan create`: search a plan, keep it, push it. Rare options are in a plan file."""

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import call
from stageloom.planner.cli.jobs import run_job
from stageloom.planner.cli.options import MODEL_KEYS, checked, model_options, parse_duration
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
from stageloom.shared.search.registry import schedulers
from stageloom.shared.search.rivals import policies

EXECUTORS: Final = ("onnx", "openvino", "onnx_cuda", "torch_cuda", "torch_cpu", "null")


def _executor(name: str | None) -> str | None:
    if name is not None and name not in EXECUTORS:
        raise InputError(f"there is no executor {name!r}", remedy=f"choose one of {', '.join(EXECUTORS)}")
    return name


def create(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME[:KEY=VALUE,...]",
            help=f"A model, with values of its own for: {', '.join(MODEL_KEYS)}. Repeatable.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="D", help="Use this device's measured costs.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Default: the first 12 characters of its digest."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A plan file (TOML), as `plan show --toml` writes it; options go before it.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(schedulers())}; `scheduler list` explains them. "
            "Default: sequential, or the policy's.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Do as others do; one of {', '.join(policies())}. `scheduler list` explains them.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Such as 30s or 2m. With --scheduler or --policy: search on for so long. Without: rivals "
            "and searches compete on the device's twin; the best so far wins.",
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=_executor,
            help=f"{', '.join(EXECUTORS[:-1])} or {EXECUTORS[-1]}; the device must have it. Default: onnx.",
        ),
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(metavar="N", help="Steps that may overlap. Default: 1.")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How models are cut: whole, base, or paper where they have borders."
        ),
    ] = None,
    combine: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="alone: each block by itself; aligned: models' i-th blocks together; replicas: a model's.",
        ),
    ] = None,
    push_it: Annotated[
        bool, typer.Option("--push", help="Push it to --device, as `stageloom plan push` does.")
    ] = False,
) -> None:
    """Search a plan and keep it under a name.

    \b
    stageloom plan create --device shop-7 --model resnet50 --model squeezenet:replicas=2 --push
    stageloom plan create --model inception_v3 --partition paper --scheduler greedy --name inception
    stageloom plan create --device shop-7 --model detector --model alarm --budget 30s --push
    stageloom plan show inception --toml > plan.toml && stageloom plan create --from plan.toml --name again

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
    A plan file has these, and: members_max, intra_op_threads, r, s (limits of a stage), step_choice, wait,
    wait_timeout_s, run_ahead, max_skips, barrier, measure_s (have the device measure what is unsure, so many
    seconds a plan), and of a tournament [[rates]] with model and per_s.
    """
    for_all: dict[str, Any] = {"partition": partition} if partition is not None else {}
    given = {
        "plan": name,
        "models": tuple(model_options(text, **for_all) for text in models or ()) or None,
        "scheduler": scheduler,
        "policy": policy,
        "device": device,
        "combination": combine,
        "lanes": lanes,
        "executor": executor,
        "budget_s": None if budget is None else parse_duration(budget, "--budget"),
    }
    if file is None and not models:
        raise InputError("a plan needs models", remedy="name one with --model, or a plan file with --from")
    request = request_from(PlanCreateRequest, file, given)
    if partition is not None and not models:
        own = (msgspec.structs.replace(model, partition=partition) for model in request.models)
        request = checked(msgspec.structs.replace(request, models=tuple(own)))
    if push_it and request.device is None:
        raise InputError("--push needs a device", remedy="name it with --device")
    reply = run_job(routes.PLAN_CREATE, request)
    pushed = _push(reply.plan.plan, request.device) if push_it and request.device is not None else None
    document = {
        **msgspec.to_builtins(reply.plan),
        "search_s": reply.search_s,
        "contest": msgspec.to_builtins(reply.contest),
        "pushed": pushed,
    }
    show_result(document, lambda: _tell(reply, pushed))
    if reply.contest is not None and not settings.json:
        tell_tournament(reply.contest)


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
    if tournament.left:
        progress(f"{tournament.left} more were not evaluated in time")
    for figures in tournament.fresh:
        progress(f"on fresh arrivals {figures.name}: {_score(figures)}")
    if tournament.unchecked:
        progress(f"the first valid plan is taken: {tournament.unchecked}")


def _score(figures: TournamentFigures) -> str:
    return f"{figures.throughput_per_s:.1f} tasks/s, p99 {1e3 * figures.p99_s:.1f} ms"
