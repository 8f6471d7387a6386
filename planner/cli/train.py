"""`stageloom policy train ...`: learn to schedule models (gpg), and to combine blocks and launch (maddpg)."""

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import msgspec
import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import connected
from stageloom.planner.cli.jobs import run_job
from stageloom.planner.cli.options import Rates, TwinFile, model_options, parse_duration, parse_rates
from stageloom.planner.cli.output import emit, progress, show
from stageloom.planner.cli.policy import Unchecked, tell_standing
from stageloom.planner.cli.request_file import From, request_from, twin_text
from stageloom.planner.schema import policy as policy_schema
from stageloom.planner.schema import training as schema
from stageloom.planner.schema.plan import ArrivalRate
from stageloom.shared.errors import StorageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train the learned policies.")

Output = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where the policy and its curves go, too. Default: not written."),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Equal seeds give equal policies. Default: 0.")]


@app.command()
def gpg(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="Learn from this one. Repeatable. Default: all."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="Learn its class's measured costs. Default: estimates."
        ),
    ] = None,
    imitation_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Blocks to imitate exact search on. Default: 400.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(metavar="N", help="Blocks to try and learn from. Default: 300.")
    ] = None,
    seed: Seed = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "--time-limit",
            metavar="TIME",
            help="Such as 90s, 10m or 1h; the best so far is kept. Default: 15m.",
        ),
    ] = None,
    output: Output = None,
    file: From = None,
) -> None:
    """Train gpg on random combined blocks of the planner's models. Keeps the policy in the store.

    The next search with the scheduler gpg takes the new policy. Ctrl-C keeps the best so far. A training that
    was interrupted goes on when the same command is given again.

    \b
    stageloom policy train gpg --output training
    stageloom plan create --device D --model resnet50 --scheduler gpg

    \b
    Fields for --from alone:
      members_max   blocks in a combined one, at most; 3
    """
    request = request_from(
        schema.GpgTrainingRequest,
        file,
        {
            "models": tuple(model) if model else None,
            "device": device or None,
            "imitation_steps": imitation_steps,
            "episodes": episodes,
            "seed": seed,
            "budget_s": None if budget is None else parse_duration(budget, "--budget"),
        },
    )
    folder = _folder(output)
    reply = run_job(routes.TRAIN_GPG, request)
    if reply.resumed_steps:
        progress(f"it went on after {reply.resumed_steps} steps")
    show(
        reply,
        lambda: emit(
            f"{reply.checkpoint[:12]}: {reply.steps} steps in {reply.train_s:.0f} s, ended: {reply.ended}; "
            f"costs {reply.validation_ratio:.3f} of sequential on the validation blocks"
        ),
    )
    if folder is not None:
        from stageloom.planner.learning.gpg.curves import to_json, to_svg

        _write(folder / "curves.json", to_json(reply.curves))
        _write(folder / "curves.svg", to_svg(reply.curves))
        _fetch(reply.checkpoint, folder / "gpg.checkpoint")


@app.command()
def maddpg(
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="Learn for it, from what was measured there."),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME[:KEY=VALUE,...]",
            help="A model to serve there, as for `plan create`, cut at its base blocks by default. "
            "Repeatable. Default: those of the plan it runs.",
        ),
    ] = None,
    rate: Rates = None,
    twin: TwinFile = "",
    transitions: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of experience; fewer end sooner. Default: 2000.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Such as 90s, 10m or 1h, in all; the best so far is kept. Default: 10m.",
        ),
    ] = None,
    output: Output = None,
    unchecked: Unchecked = False,
    file: From = None,
) -> None:
    """Train maddpg on the device's twin. Keeps the policy and the best plan found on the way.

    It ends with the policy's check. A policy that passes is taken into account by the next re-plan of a
    device of this class; one that does not is kept and has no say. Nothing is pushed: a plan must win its
    trial on the device. Ctrl-C keeps the best so far. A training that was interrupted goes on when
    the same command is given again, at most one validation earlier.

    \b
    stageloom policy train maddpg --device shop-7 --budget 10m --output training
    stageloom policy train maddpg --device shop-7 --model resnet50 --model squeezenet:replicas=2 \\
        --rate resnet50=30 --rate squeezenet=60 --twin nano

    \b
    Fields for --from alone:
      seed          with one worker, equal seeds give equal policies; 0
      workers       rollout actors; one less than there are cores
      ray_address   HOST:PORT has the actors on this Ray cluster, local on a Ray of the machine
      members_max   blocks in a combined one; TOP's for the twin
      last_s        of the device's telemetry the newest so many seconds count; 600
      scheduler     finds the stages of combined blocks on the way: beam, or gpg with its trained policy; beam
    """
    rates = parse_rates(rate)
    request = request_from(
        schema.MaddpgTrainingRequest,
        file,
        {
            "device": device,
            "models": tuple(model_options(text, partition="base") for text in model or ()) or None,
            "rates": tuple(ArrivalRate(model=name, per_s=per_s) for name, per_s in rates.items()) or None,
            "twin": twin_text(twin or None),
            "transitions": transitions,
            "budget_s": None if budget is None else parse_duration(budget, "--budget"),
            "unchecked": unchecked or None,
        },
    )
    folder = _folder(output)
    reply = run_job(routes.TRAIN_MADDPG, request)
    progress(f"twin: {reply.twin}; arrivals: {reply.arrivals}")
    if reply.resumed_s:
        progress(f"it went on after {reply.resumed_s:.0f} s of training")
    tell_standing(reply.verdict, unchecked=request.unchecked)
    show(reply, lambda: _tell(device, reply))
    if folder is not None:
        curves = json.dumps([msgspec.to_builtins(point) for point in reply.curves], indent=1)
        _write(folder / "curves.json", curves + "\n")
        _write(folder / "twin.toml", reply.device_file)
        _fetch(reply.checkpoint, folder / "maddpg.checkpoint")


def _tell(device: str, reply: schema.MaddpgTrainingReply) -> None:
    for name, score in reply.rows.items():
        emit(f"{name:<12} {_figures(score)}")
    emit(
        f"{reply.checkpoint[:12]}: {reply.transitions} transitions in {reply.train_s:.0f} s, "
        f"ended: {reply.ended}; plan {reply.plan}"
    )
    progress(f"try the plan on the device: stageloom plan push {device} {reply.plan}")


def _figures(score: schema.TrainedScore) -> str:
    """What decides between plans, with its spread."""
    return (
        f"{score.throughput_per_s:.1f} ±{score.throughput_spread:.1f} tasks/s, "
        f"p99 {1000.0 * score.p99_s:.3g} ±{1000.0 * score.p99_spread:.2g} ms"
    )


# -- files ------------------------------------------------------------------------------------------------


def _folder(output: Path | None) -> Path | None:
    """The folder that was named, made before anything is trained; files can be written there."""
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=output).close()
        except OSError as error:
            raise StorageError(
                f"{output} cannot be written: {error.strerror}", remedy="name another folder"
            ) from error
    return output


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file}: {error.strerror}", remedy="name another folder") from error


def _fetch(checkpoint: str, file: Path) -> None:
    """Have a policy as a file, in place of one that is there."""
    part = file.with_name(file.name + ".part")
    part.unlink(missing_ok=True)
    request: Any = policy_schema.PolicyExportRequest(policy=checkpoint)
    with connected(live=False) as caller:
        caller.download(routes.POLICY_EXPORT, request, part)
    part.replace(file)
