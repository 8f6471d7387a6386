"""The options of `stageloom plan create`, in the order in which its help lists them."""

from typing import Annotated

import typer

from stageloom.planner.cli.choices import MODEL_KEYS
from stageloom.shared.errors import InputError
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import QueueRule, StepChoice, Wait
from stageloom.shared.search.registry import schedulers
from stageloom.shared.search.rivals import policies

Models = Annotated[
    list[str],
    typer.Option(
        "--model",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"A model, with values of its own for: {', '.join(MODEL_KEYS)}. Repeatable.",
    ),
]
ComparedModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME[:KEY=VALUE,...]",
        help="A model to schedule, as for `plan create`. Repeatable.",
    ),
]
ComparedSchedulers = Annotated[
    list[str] | None,
    typer.Option("--scheduler", metavar="NAME", help="Only this one. Repeatable. Default: all."),
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
