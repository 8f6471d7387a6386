"""`stageloom plan create`: search a plan, keep it, push it."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stageloom.planner.admin.client import ask
from stageloom.planner.cli.options import (
    MODEL_KEYS,
    DatabaseUrl,
    DataDir,
    Json,
    Rates,
    checked,
    data_dir_of,
    model_options,
    parse_duration,
    parse_rates,
    require_own,
)
from stageloom.planner.cli.output import emit, emit_json, progress, pushed_json, pushed_text
from stageloom.planner.cli.searching import run_tournament, search, search_and_measure, tell
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.launch_list import Barrier
from stageloom.shared.messages import admin
from stageloom.shared.plan import QueueRule, StepChoice, Wait
from stageloom.shared.search.registry import schedulers
from stageloom.shared.search.rivals import policies
from stageloom.shared.search.rivals import policy as find_policy

Models = Annotated[
    list[str],
    typer.Option(
        "--model",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"A model, with values of its own for: {', '.join(MODEL_KEYS)}. Repeatable.",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="D", help="Use this device's measured costs.")
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Default: the first 12 characters of its digest."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Do as others do; one of {', '.join(policies())}. `plan schedulers` explains them.",
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"One of {', '.join(schedulers())}; `plan schedulers` explains them. "
        "Default: sequential, or the policy's.",
    ),
]
Partition = Annotated[
    str, typer.Option(metavar="NAME", help="whole, base, or paper where the model has borders.")
]
Combine = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="alone: each block by itself; aligned: models' i-th blocks together; replicas: a model's.",
    ),
]
Members = Annotated[
    int, typer.Option("--members", "--members-max", metavar="H", help="Blocks per combined block at most.")
]
Replicas = Annotated[int, typer.Option(metavar="N", help="Instances of each model in flight.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Tasks per instance at most.")]
BatchDelay = Annotated[
    float, typer.Option(metavar="S", help="A task waits this long for others to fill its batch.")
]
Queue = Annotated[QueueRule, typer.Option(help="Who loses when a queue is full; the last two also order it.")]
Choice = Annotated[
    StepChoice,
    typer.Option(help="Which block goes first: the fullest, in turn, by weights, or by deadline."),
]
Waiting = Annotated[
    Wait, typer.Option(help="Whether a combined block waits until all its members have a task.")
]
WaitTimeout = Annotated[
    float, typer.Option(metavar="S", help="With --wait timeout: how long it waits at most.")
]
RunAhead = Annotated[int, typer.Option(metavar="N", help="Steps in flight per lane at most.")]
MaxSkips = Annotated[int, typer.Option(metavar="N", help="A block passed over this often goes first.")]
Barriers = Annotated[
    Barrier,
    typer.Option(help="A stage waits for the whole stage before it, or only for data it reads."),
]
Lanes = Annotated[int, typer.Option(metavar="N", help="Steps that may overlap.")]
Threads = Annotated[int, typer.Option(metavar="N", help="Threads inside one operator (onnx).")]
EXECUTORS = ("onnx", "onnx_cuda", "torch_cuda", "torch_cpu", "null")


def _executor(name: str) -> str:
    if name not in EXECUTORS:
        raise InputError(f"there is no executor {name!r}", remedy=f"choose one of {', '.join(EXECUTORS)}")
    return name


Executor = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        callback=_executor,
        help=f"{', '.join(EXECUTORS[:-1])} or {EXECUTORS[-1]}; the device must have it.",
    ),
]
LimitR = Annotated[int | None, typer.Option("-r", metavar="N", help="Operators per group at most.")]
LimitS = Annotated[int | None, typer.Option("-s", metavar="N", help="Groups per stage at most.")]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help=(
            "Such as 30s or 2m. With --scheduler or --policy: search on for so long. Without: rivals and "
            "searches compete on the device's twin, under --rate; the best so far wins."
        ),
    ),
]
Measure = Annotated[
    float | None,
    typer.Option(
        "--measure", metavar="S", help="Have --device measure the stages found, S seconds a plan at most."
    ),
]
Push = Annotated[bool, typer.Option("--push", help="Push it to --device, as `stageloom plan push` does.")]


def create(
    models: Models,
    device: Device = None,
    name: Name = None,
    policy: Policy = None,
    scheduler: Scheduler = None,
    partition: Partition = "whole",
    combine: Combine = "alone",
    members: Members = 2,
    replicas: Replicas = 1,
    batch: Batch = 1,
    batch_delay: BatchDelay = 0.0,
    queue: Queue = QueueRule.REFUSE_NEWEST,
    step_choice: Choice = StepChoice.RATIO,
    wait: Waiting = Wait.NONE,
    wait_timeout: WaitTimeout = 0.0,
    run_ahead: RunAhead = 2,
    max_skips: MaxSkips = 8,
    barrier: Barriers = Barrier.FULL,
    lanes: Lanes = 1,
    threads: Threads = 1,
    executor: Executor = "onnx",
    r: LimitR = None,
    s: LimitS = None,
    budget: Budget = None,
    rate: Rates = None,
    measure: Measure = None,
    push_it: Push = False,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Search a plan and keep it under a name.

    \b
    stageloom plan create --device shop-7 --model resnet50 --model squeezenet:replicas=2 --push
    stageloom plan create --model inception_v3 --partition paper --scheduler greedy --name inception
    stageloom plan create --model resnet50 --model squeezenet --policy synchronised --name joint
    stageloom plan create --model detector:batch=4,delay=0.02 --model alarm:queue=priority,queue-tasks=16
    stageloom plan create --device shop-7 --model detector --model alarm --budget 30s --push

    \b
    The keys of --model NAME:KEY=VALUE,... :
      partition, replicas, batch, delay, queue   as the options for all models (delay is --batch-delay)
      interval       seconds between two launches of the model
      strict         yes: keep that interval even while a lane is idle; no: launch early
      weight         the model's share, with --step-choice weighted
      queue-tasks    tasks that may wait at most
      queue-bytes    bytes of inputs that may wait at most
    """
    if (push_it or measure is not None) and device is None:
        raise InputError("--push and --measure need a device", remedy="name it with --device")
    competing = _competing(policy, scheduler, budget=budget, rate=rate, measure=measure)
    for_all = {
        "partition": partition,
        "replicas": replicas,
        "batch": batch,
        "batch_max_delay_s": batch_delay,
        "queue": queue,
    }
    choices = tuple(model_options(text, **for_all) for text in models)
    request = admin.PlanCreateRequest(
        plan=name,
        models=choices,
        scheduler=scheduler or (find_policy(policy).scheduler if policy else "sequential"),
        policy=policy,
        device=DeviceId(device) if device is not None else None,
        combination=combine,
        members_max=members,
        lanes=lanes,
        executor=executor,
        intra_op_threads=threads,
        r=r,
        s=s,
        step_choice=step_choice,
        wait=wait,
        wait_timeout_s=wait_timeout,
        run_ahead=run_ahead,
        max_skips=max_skips,
        barrier=barrier,
        budget_s=None if budget is None else parse_duration(budget, "--budget"),
        contest=competing,
        rates=tuple(admin.ArrivalRate(model=one, per_s=per_s) for one, per_s in parse_rates(rate).items()),
    )
    _create(data_dir_of(data_dir), database_url, checked(request), measure, push=push_it, json=json)


def _competing(
    policy: str | None,
    scheduler: str | None,
    *,
    budget: str | None,
    rate: list[str] | None,
    measure: float | None,
) -> bool:
    """Whether rivals and searches compete for the budget, because nothing says which of them is meant.

    Raises:
        InputError: --rate or --measure is for the other case.
    """
    competing = budget is not None and policy is None and scheduler is None
    if competing and measure is not None:
        raise InputError("--measure is for one scheduler", remedy="name it with --scheduler")
    if rate and not competing:
        raise InputError(
            "--rate says what arrives in a tournament", remedy="give --budget, and no --scheduler or --policy"
        )
    if measure is not None and policy and "scheduler" in find_policy(policy).decides:
        raise InputError(
            f"nothing is searched under the policy {policy}, so measuring changes nothing",
            remedy="leave --measure out",
        )
    return competing


def _create(
    folder: Path,
    database_url: str,
    request: admin.PlanCreateRequest,
    measure_s: float | None,
    *,
    push: bool,
    json: bool,
) -> None:
    """Search, measure if wanted, push if wanted, tell."""
    require_own(folder, database_url)
    if request.contest:
        reply = run_tournament(folder, request)
    elif measure_s is not None and request.device is not None:
        reply = search_and_measure(folder, database_url, request, request.device, budget_s=measure_s)
    else:
        reply = search(folder, request)
    _made(folder, reply, request.device if push else None, json)


def _made(folder: Path, reply: admin.PlanReply, device: str | None, json: bool) -> None:
    """Push a plan that was made to a device, if one is named, and tell of both."""
    made = reply.plan
    pushed = None
    if device is not None:
        pushed = ask(
            folder, admin.PlanPushRequest(plan=made.plan, device=DeviceId(device)), admin.PlanPushReply
        )
    if json:
        emit_json(
            {
                **msgspec.to_builtins(made),
                "search_s": reply.search_s,
                "contest": msgspec.to_builtins(reply.contest),
                "pushed": pushed_json(pushed) if pushed else None,
            }
        )
        return
    if reply.contest is not None:
        tell(reply.contest)
    emit(made.plan)
    progress(
        f"plan with digest {made.digest[:12]} made in {1000 * reply.search_s:.0f} ms: "
        f"{made.text_bytes} bytes as text, {made.wire_bytes} on the wire"
    )
    if pushed:
        progress(f"pushed to {device} as {pushed_text(pushed)}; see `stageloom watch {device}`")
