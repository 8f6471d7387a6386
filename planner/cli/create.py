"""`stageloom plan create`: search a plan, keep it, push it."""

from pathlib import Path

import msgspec

from stageloom.planner.admin.client import ask
from stageloom.planner.cli import contest
from stageloom.planner.cli import create_options as opt
from stageloom.planner.cli.choices import model_choice
from stageloom.planner.cli.options import (
    DatabaseUrl,
    DataDir,
    Json,
    Rates,
    checked,
    data_dir_of,
    parse_duration,
    parse_rates,
    require_own,
)
from stageloom.planner.cli.output import emit, emit_json, progress
from stageloom.planner.cli.pushing import as_json, in_words
from stageloom.planner.cli.searching import search, search_and_measure
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.launch_list import Barrier
from stageloom.shared.messages import admin
from stageloom.shared.plan import QueueRule, StepChoice, Wait
from stageloom.shared.search.rivals import policy as find_policy


def create(
    models: opt.Models,
    device: opt.Device = None,
    name: opt.Name = None,
    policy: opt.Policy = None,
    scheduler: opt.Scheduler = None,
    partition: opt.Partition = "whole",
    combine: opt.Combine = "alone",
    members: opt.Members = 2,
    replicas: opt.Replicas = 1,
    batch: opt.Batch = 1,
    batch_delay: opt.BatchDelay = 0.0,
    queue: opt.Queue = QueueRule.REFUSE_NEWEST,
    step_choice: opt.Choice = StepChoice.RATIO,
    wait: opt.Waiting = Wait.NONE,
    wait_timeout: opt.WaitTimeout = 0.0,
    run_ahead: opt.RunAhead = 2,
    max_skips: opt.MaxSkips = 8,
    barrier: opt.Barriers = Barrier.FULL,
    lanes: opt.Lanes = 1,
    threads: opt.Threads = 1,
    executor: opt.Executor = "onnx",
    r: opt.LimitR = None,
    s: opt.LimitS = None,
    budget: opt.Budget = None,
    rate: Rates = None,
    measure: opt.Measure = None,
    push_it: opt.Push = False,
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
    choices = tuple(model_choice(text, **for_all) for text in models)
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
            "--rate says what arrives in a contest", remedy="give --budget, and no --scheduler or --policy"
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
        reply = contest.hold(folder, request)
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
                "pushed": as_json(pushed) if pushed else None,
            }
        )
        return
    if reply.contest is not None:
        contest.tell(reply.contest)
    emit(made.plan)
    progress(
        f"plan with digest {made.digest[:12]} made in {1000 * reply.search_s:.0f} ms: "
        f"{made.text_bytes} bytes as text, {made.wire_bytes} on the wire"
    )
    if pushed:
        progress(f"pushed to {device} as {in_words(pushed)}; see `stageloom watch {device}`")
