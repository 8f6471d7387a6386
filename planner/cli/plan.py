"""`stageloom plan ...`: search plans, read them, push them, see who decided what."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from planner.admin.client import ask
from planner.cli import compare, pushing
from planner.cli.choices import MODEL_KEYS, model_choice
from planner.cli.options import DatabaseUrl, DataDir, Json, checked, data_dir_of
from planner.cli.output import emit, emit_json, emit_table, pair, progress, when
from planner.cli.searching import search, search_and_measure
from shared.errors import InputError
from shared.ids import DeviceId
from shared.launch_list import Barrier
from shared.messages import admin
from shared.plan import QueueRule, StepChoice, Wait
from shared.search.registry import schedulers

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make plans, read them, push them to devices."
)

app.command()(compare.compare)


@app.command()
def create(
    models: Annotated[
        list[str],
        typer.Option(
            "--model",
            metavar="NAME[:KEY=VALUE,...]",
            help=f"A model, with values of its own for: {', '.join(MODEL_KEYS)}. Repeatable.",
        ),
    ],
    device: Annotated[
        str | None, typer.Option("--device", metavar="D", help="Use this device's measured costs.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Default: the first 12 characters of its digest."),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(schedulers())}.")
    ] = "sequential",
    partition: Annotated[
        str, typer.Option(metavar="NAME", help="whole, base, or paper where the model has borders.")
    ] = "whole",
    combine: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="alone: each block by itself; aligned: models' i-th blocks together."
        ),
    ] = "alone",
    members: Annotated[int, typer.Option(metavar="H", help="Blocks per combined block at most.")] = 2,
    replicas: Annotated[int, typer.Option(metavar="N", help="Instances of each model in flight.")] = 1,
    batch: Annotated[int, typer.Option(metavar="N", help="Tasks per instance at most.")] = 1,
    batch_delay: Annotated[
        float, typer.Option(metavar="S", help="A task waits this long for others to fill its batch.")
    ] = 0.0,
    queue: Annotated[
        QueueRule, typer.Option(help="Who loses when a queue is full; the last two also order it.")
    ] = QueueRule.REFUSE_NEWEST,
    step_choice: Annotated[
        StepChoice,
        typer.Option(help="Which block runs next: fullest input first, in turn, or by the models' weights."),
    ] = StepChoice.RATIO,
    wait: Annotated[
        Wait, typer.Option(help="Whether a combined block waits until all its members have a task.")
    ] = Wait.NONE,
    wait_timeout: Annotated[
        float, typer.Option(metavar="S", help="With --wait timeout: how long it waits at most.")
    ] = 0.0,
    run_ahead: Annotated[int, typer.Option(metavar="N", help="Steps in flight per lane at most.")] = 2,
    max_skips: Annotated[
        int, typer.Option(metavar="N", help="A block passed over this often goes first.")
    ] = 8,
    barrier: Annotated[
        Barrier,
        typer.Option(help="A stage waits for the whole stage before it, or only for data it reads."),
    ] = Barrier.FULL,
    lanes: Annotated[int, typer.Option(metavar="N", help="Steps that may overlap.")] = 1,
    threads: Annotated[int, typer.Option(metavar="N", help="Threads inside one operator (onnx).")] = 1,
    executor: Annotated[str, typer.Option(metavar="NAME", help="onnx or null.")] = "onnx",
    r: Annotated[int | None, typer.Option("-r", metavar="N", help="Operators per group at most.")] = None,
    s: Annotated[int | None, typer.Option("-s", metavar="N", help="Groups per stage at most.")] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="S", help="Search on for so long; the best so far wins."),
    ] = None,
    measure: Annotated[
        float | None,
        typer.Option(
            "--measure", metavar="S", help="Have --device measure the stages found, S seconds a plan at most."
        ),
    ] = None,
    push_it: Annotated[
        bool, typer.Option("--push", help="Push it to --device, as `stageloom plan push` does.")
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Search a plan and keep it under a name.

    \b
    stageloom plan create --device shop-7 --model resnet50 --model squeezenet:replicas=2 --push
    stageloom plan create --model inception_v3 --partition paper --scheduler greedy --name inception
    stageloom plan create --model detector:batch=4,delay=0.02 --model alarm:queue=priority,queue-tasks=16

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
    folder = data_dir_of(data_dir)
    request = checked(
        admin.PlanCreateRequest(
            plan=name,
            models=tuple(
                model_choice(
                    text,
                    partition=partition,
                    replicas=replicas,
                    batch=batch,
                    batch_max_delay_s=batch_delay,
                    queue=queue,
                )
                for text in models
            ),
            scheduler=scheduler,
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
            budget_s=budget,
        )
    )
    if measure is not None and device is not None:
        reply = search_and_measure(folder, request, DeviceId(device), budget_s=measure)
    else:
        reply = search(folder, request)
    _made(folder, reply, device if push_it else None, json)


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
                "pushed": {"epoch": pushed.epoch, "generation": pushed.generation} if pushed else None,
            }
        )
        return
    emit(made.plan)
    progress(
        f"plan with digest {made.digest[:12]} made in {1000 * reply.search_s:.0f} ms: "
        f"{made.text_bytes} bytes as text, {made.wire_bytes} on the wire"
    )
    if pushed:
        progress(
            f"pushed to {device} as generation {pair(pushed.epoch, pushed.generation)}; "
            f"see `stageloom watch {device}`"
        )


@app.command("list")
def list_plans(data_dir: DataDir = None, database_url: DatabaseUrl = "", json: Json = False) -> None:
    """List the plans."""
    from planner.store.reading import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    infos = store.plans(limit=1_000_000)
    store.close()
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
    """Print a plan: its rules, and the stage string of every combined block."""
    from planner.store.reading import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    info = store.plan(plan)
    store.close()
    if json:
        emit_json(info)
        return
    emit(info.text)
    progress(f"{info.text_bytes} bytes as text, {info.wire_bytes} on the wire, digest {info.digest}")


@app.command()
def push(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICE... PLAN",
            help="Devices, and last the plan: its name, or 8 or more characters of its digest.",
        ),
    ],
    everyone: Annotated[
        bool, typer.Option("--all", help="To every enrolled device, with no DEVICE named.")
    ] = False,
    autonomy: Annotated[
        str, typer.Option(metavar="HOW", help="What the agent may re-plan by itself: off, proven or full.")
    ] = "off",
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
    from shared.messages.control import Activation, Autonomy

    *devices, plan = names
    if everyone == bool(devices):
        raise InputError(
            "name devices and then the plan, or --all and the plan", remedy="see `stageloom plan push --help`"
        )
    if autonomy not in {one.value for one in Autonomy}:
        raise InputError(f"there is no autonomy {autonomy!r}", remedy="choose off, proven or full")
    activation = Activation.NOW if now else Activation.TRIAL
    request = checked(admin.FleetPushRequest(plan=plan, autonomy=Autonomy(autonomy), activation=activation))
    if len(devices) == 1:
        pushing.push_to_one(data_dir_of(data_dir), request, devices[0], json)
    else:
        pushing.push_to_many(data_dir_of(data_dir), request, devices, json)


@app.command()
def history(
    device: Annotated[str | None, typer.Argument(metavar="[DEVICE]")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Newest entries to show.")] = 50,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """List generations, newest first: which plan, who decided it, how it ended."""
    from planner.store.reading import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    entries, _ = store.history(DeviceId(device) if device is not None else None, limit=limit)
    store.close()
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
