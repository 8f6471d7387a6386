"""The options of `stageloom train ...`, in the order in which its help lists them."""

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="Learn for it, from what was measured there.")
]
Budget = Annotated[
    str, typer.Option(metavar="TIME", help="Such as 90s, 10m or 1h, in all; the best so far is kept.")
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME[:KEY=VALUE,...]",
        help="A model to serve there, as for `plan create`. Repeatable. Default: those of the plan it runs.",
    ),
]
Partition = Annotated[str, typer.Option(metavar="NAME", help="How --model is cut: whole, base, or paper.")]
MembersMax = Annotated[
    int | None,
    typer.Option(min=1, max=8, metavar="H", help="Blocks in a combined one. Default: TOP's for the twin."),
]
Transitions = Annotated[int, typer.Option(min=20, metavar="N", help="Steps of experience; fewer end sooner.")]
Seed = Annotated[
    int,
    typer.Option(min=0, max=10_000, metavar="N", help="With one worker, equal seeds give equal policies."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, metavar="N", help="Rollout actors. Default: one less than there are cores."
    ),
]
RayAddress = Annotated[
    str,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT|local",
        help="Have the actors on this Ray cluster, or a Ray of this machine. Default: plain processes.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where the run, its curves and the policy go. Default: not kept."),
]

GpgModels = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="Learn from this one. Repeatable. Default: all."),
]
GpgDevice = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="Learn its class's measured costs. Default: estimates."),
]
GpgSeed = Annotated[int, typer.Option(min=0, metavar="N", help="Equal seeds give equal policies.")]
ImitationSteps = Annotated[int, typer.Option(min=0, metavar="N", help="Blocks to imitate exact search on.")]
Episodes = Annotated[int, typer.Option(min=0, metavar="N", help="Blocks to try and learn from.")]
GpgMembersMax = Annotated[
    int, typer.Option(min=1, max=8, metavar="H", help="Blocks in a combined one, at most.")
]
GpgBudget = Annotated[
    str,
    typer.Option(
        "--budget",
        "--time-limit",
        metavar="TIME",
        help="Such as 90s, 10m or 1h, in all; the best so far is kept.",
    ),
]
