"""The command `stageloom-agent`. Data goes to stdout, everything else to stderr."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from stageloom.edge_agent.cli.bench import bench
from stageloom.edge_agent.config import AUTO, ModelFile, encode_config, load_config
from stageloom.edge_agent.ingest.channel import HOME_VARIABLE, default_home, socket_of
from stageloom.edge_agent.machine.doctor import Check
from stageloom.edge_agent.metrics.settings import check_metrics
from stageloom.edge_agent.reporting.status import AgentStatus, TrialStatus
from stageloom.edge_agent.serving.settings import check_settings
from stageloom.shared.errors import ExitCode, SettingError, StageloomError, UnavailableError
from stageloom.shared.importer.model_argument import MODEL_METAVAR, parse_model, parse_models, parse_shape
from stageloom.shared.module_command import module_command
from stageloom.shared.search.registry import schedulers
from stageloom.shared.standard_streams import write_any_text
from stageloom.shared.text import counted
from stageloom.shared.version import __version__

_CODES = """
Exit codes: 0 done, 1 the answer is no (a check failed, the agent is not ready), 2 wrong input or setting,
3 the comparison proves nothing, 4 no agent or planner answers, 5 disk or permission, 6 no executor,
7 refused by the planner, 130 Ctrl-C before it was done.
"""

SERVICE_NAME = "stageloom-agent"
_EXECUTORS = "onnx, openvino, onnx_cuda, torch_cuda, torch_cpu or null"

# typer carries its own copy of click, whose usage errors have no public name.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="stageloom-agent",
    help="The edge agent of Stageloom: serves neural networks on this machine by a plan.\n" + _CODES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Home = Annotated[
    Path | None,
    typer.Option(
        "--home", metavar="DIR", envvar=HOME_VARIABLE, help="State directory.", show_default="var/agent"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command()
def run(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar=MODEL_METAVAR,
            help="Serve this ONNX file, with its open inputs pinned. Repeat for more models.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="INPUT=DIMS", help="Pin an input of the only --model."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Scheduler for plans made here, with --executor: {', '.join(schedulers())}."
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Executor for plans made here: {_EXECUTORS}; or auto, which measures what runs each model "
            "best, and decides --scheduler, --threads and --replicas, too.",
            show_default="auto",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=256, help="Threads inside one operator, with --executor."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Precision of plans made here. bf16: about twice as fast where the processor has it; tf32, "
            "fp16: on a GPU. Results are approximate then; `verify --precision bf16` tells how far.",
            show_default="fp32",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=64, help="Instances of each model that may overlap, with --executor."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve the Open Inference Protocol v2 over HTTP there."),
    ] = None,
    grpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve it over gRPC, too or alone.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Tell metrics for Prometheus there, at /metrics."),
    ] = None,
    everybody: Annotated[
        bool,
        typer.Option("--open", help="Serve beyond this machine without TLS or tokens, to whoever connects."),
    ] = False,
    home: Home = None,
) -> None:
    """Run the agent in the foreground until Ctrl-C or SIGTERM.

    After `join` it serves what the planner desires, and starts on its last-known-good plan if the planner is
    away. With --model it needs no planner: it imports the files and makes a plan itself.

    \b
    stageloom-agent run --model squeezenet.onnx
    stageloom-agent run --model detector=yolo.onnx:images=1x3x640x640 \\
                        --model bert.onnx:input_ids=1x128,attention_mask=1x128

    DIMS are numbers joined by x, or `scalar`; LOW..HIGH leaves a dimension open, '{A,B}' serves
    each of these sizes. Without NAME a model is called like its file.
    """
    from stageloom.edge_agent.lifecycle.alone import require_names

    models = None
    if model:
        models = tuple(
            msgspec.to_builtins(
                ModelFile(
                    path=one.path,
                    name=one.called,
                    version=one.version or 1,
                    shapes=one.largest,
                    smallest=one.smallest,
                )
            )
            for argument in parse_models(model, shape or ())
            for one in argument.each()
        )
    elif shape:
        raise SettingError("--shape is given without --model", remedy="name the ONNX file with --model FILE")
    config = load_config(
        home,
        models=models,
        scheduler=scheduler,
        executor=executor,
        intra_op_threads=threads,
        precision=precision,
        replicas=replicas,
        serving=_given(http=http, grpc=grpc, open=everybody),
        metrics=_given(listen=metrics, open=everybody),
    )
    require_names(config)
    if not config.models:
        given = {"--scheduler": scheduler, "--precision": precision, "--replicas": replicas}
        _refuse_unused(given, "without --model: a planner decides that", "leave it out")
    elif config.executor == AUTO:
        given = {"--scheduler": scheduler, "--threads": threads, "--replicas": replicas}
        _refuse_unused(
            given,
            "on plans of the executor auto, which decides that by what it measures",
            "name another one with --executor, too, or leave it out",
        )
    check_settings(config.serving)
    check_metrics(config.metrics)
    sys.stdout.flush()
    command = module_command("stageloom.edge_agent.run", encode_config(config))
    os.execv(command[0], command)


def _refuse_unused(given: Mapping[str, object], why: str, remedy: str) -> None:
    """In a file these may stand for the day that they count; who types one means it now.

    Raises:
        SettingError: one is given.
    """
    for name, value in given.items():
        if value is not None:
            raise SettingError(f"{name} has no effect {why}", remedy=remedy)


def _given(**options: str | bool | None) -> dict[str, str | bool] | None:
    """Those that the command line has; None without any."""
    return {name: value for name, value in options.items() if value} or None


@app.command()
def join(
    token: Annotated[
        str,
        typer.Argument(
            metavar="TOKEN|-",
            help="From `stageloom device token`; good for one device, once. - reads it from stdin, so "
            "that no list of processes shows it.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of this device.", show_default="host name")
    ] = None,
    home: Home = None,
) -> None:
    """Enrol this machine with a planner. Makes its key pair and trades the token for a place in the fleet.

    \b
    stageloom-agent join stgl2.l8Qg...
    ssh planner stageloom device token | stageloom-agent join -
    """
    from stageloom.edge_agent.link.factory import join_planner

    text = sys.stdin.readline().strip() if token == "-" else token
    device = join_planner(load_config(home), text, name)
    typer.echo(f"joined as {device}; start serving with `stageloom-agent run`, or restart it", err=True)


@app.command()
def status(home: Home = None, as_json: Json = False) -> None:
    """Show how the agent that runs here is. Health, readiness, plan, link, queues and tasks.

    Exit code 0 if it is ready, 1 if it runs but takes no tasks, 4 if no agent answers.
    """
    from stageloom.edge_agent.reporting.status import ask_status

    answer = ask_status(socket_of(home or default_home()))
    _print(msgspec.to_builtins(answer), status_text(answer), as_json)
    if not answer.ready:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def doctor(home: Home = None, as_json: Json = False) -> None:
    """Check whether this machine is fit. Python, packages, GPU, permissions, settings, disk, limits, clock.

    Exit code 0 if nothing stands in the way, 1 otherwise.
    """
    from stageloom.edge_agent.machine.doctor import examine

    checks = examine(home or default_home())
    found = [msgspec.to_builtins(check) for check in checks]
    ok = all(check.result != "fail" for check in checks)
    _print({"ok": ok, "checks": found}, doctor_text(checks), as_json)
    if not ok:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar=MODEL_METAVAR, help="ONNX file, open inputs pinned.")],
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", "--scheduler", metavar="NAME", help=f"Scheduler: {', '.join(schedulers())}."
        ),
    ] = "sequential",
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="INPUT=DIMS", help="Pin an input, like images=1x3x640x640."),
    ] = None,
    value_range: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="NAME=LO:HI", help="Valid values of an input, like ids=0:30521."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="whole, base or paper.",
            show_default="paper where the model has borders, else base",
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="NAME", help=f"Executor to run it with: {_EXECUTORS}.")
    ] = "onnx",
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="fp32, or bf16 (openvino): results are approximate then.")
    ] = "fp32",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights and inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare a model under a schedule with onnxruntime. Every block border and every output.

    Weights that are constant are replaced by seeded ones, so that the outputs depend on everything. Exit code
    0 only if they agree and could have differed, 1 if they differ, 3 if the comparison proves nothing or
    onnxruntime differs from itself as much. It looks before a final Sigmoid or Softmax, which hides defects.
    In bf16 results may differ by what rounding to it explains, and it tells how often the largest agrees.

    \b
    stageloom-agent verify yolo.onnx:images=1x3x640x640 --schedule greedy
    """
    from stageloom.edge_agent.verify.check import verify
    from stageloom.edge_agent.verify.inputs import parse_ranges

    chosen = parse_model(model).with_shapes(map(parse_shape, shape or ()))
    report = verify(
        Path(chosen.path),
        schedule,
        shapes=chosen.pinned("verify"),
        ranges=parse_ranges(value_range or ()),
        partition=partition,
        executor=executor,
        precision=precision,
        seed=seed,
        progress=_say,
    )
    _print(report.to_json(), report.to_text(), as_json)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


@app.command()
def trace(
    out: Annotated[Path, typer.Option("--out", "--output", "-o", metavar="FILE", help="File to write.")],
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="How long to record.")] = 5.0,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The device's profile, as `stageloom device telemetry DEVICE --kind profile_result --json` "
            "prints it.",
            show_default="an estimate",
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Send each task as OpenTelemetry spans to this OTLP collector, too."
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Record what the engine does while it serves. A Chrome trace: open it in Perfetto.

    Steps and groups on their lanes and streams, beside them as planned by the operators' costs; launches,
    queues, tasks and swaps.
    """
    from stageloom.edge_agent.trace.command import trace_text, write_trace

    directory = home or default_home()
    found = write_trace(directory, socket_of(directory), seconds, out, costs, _say, otlp)
    _print(found, trace_text(found), as_json)
    if "unsent" in found:
        raise UnavailableError(found["unsent"])


app.command()(bench)

config = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See the agent's settings.")
app.add_typer(config, name="config")


@config.command("show")
def show_config(
    home: Home = None,
    as_json: Json = False,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print what somebody set as an agent.toml for the home.")
    ] = False,
) -> None:
    """Show the settings in force, and where each is from. `-`: nobody set it.

    A setting is given in agent.toml in the state directory, table [agent], or as STAGELOOM_AGENT_NAME in the
    environment, which goes before it.

    \b
    stageloom-agent config show
    STAGELOOM_AGENT_PROBATION_S=10 stageloom-agent run
    """
    from stageloom.edge_agent.config import TABLE, set_values

    directory = home or default_home()
    values, sources = set_values(directory, os.environ)
    if toml:
        typer.echo(msgspec.toml.encode({TABLE: values}).decode(), nl=False)
        return
    plain = msgspec.to_builtins(load_config(home))
    shown = {name: {"value": value, "from": sources.get(name)} for name, value in plain.items()}
    width = max(map(len, plain))
    lines = [f"{name:<{width}}  {value}  {sources.get(name, '-')}" for name, value in plain.items()]
    _print(shown, "\n".join(lines), as_json)


@app.command()
def install(
    home: Annotated[Path, typer.Option("--home", metavar="DIR", help="State directory.")] = Path(
        "/var/lib/stageloom-agent"
    ),
    user: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Account that it runs as; made if missing. Applications run as the same."
        ),
    ] = "stageloom",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit and change nothing.")] = False,
) -> None:
    """Install the agent as a systemd service of this machine. Needs root.

    Writes /etc/systemd/system/stageloom-agent.service; running it again brings the unit up to date. Options
    beyond these belong into a drop-in (`systemctl edit stageloom-agent`) or into agent.toml in the state
    directory.
    """
    from stageloom.shared.systemd import install as systemd
    from stageloom.shared.systemd.unit import quoted

    service = systemd.Service(
        name=SERVICE_NAME,
        package="stageloom.edge_agent",
        program="stageloom-agent",
        arguments=("run", "--home", str(home)),
        home=home,
        user=user,
        groups=("video", "render"),
        settings={
            "Environment": (
                quoted(f"CUDA_CACHE_PATH={home}/cuda-cache"),
                quoted(f"XDG_CACHE_HOME={home}/.cache"),  # homes of people are out of a service's reach
            )
        },
    )
    if dry_run:
        typer.echo(systemd.unit_text(service), nl=False)
        return
    systemd.install(service, _say)
    program = systemd.installed_program("stageloom-agent")
    _say("next: " + shlex.join(["sudo", "-u", user, program, "join", "TOKEN", "--home", str(home)]))
    _say(f"then: sudo systemctl enable --now {SERVICE_NAME}")


@app.command()
def uninstall() -> None:
    """Stop the service and remove its unit. Needs root; state directory and account stay."""
    from stageloom.shared.systemd.install import uninstall as uninstall_unit

    if uninstall_unit(SERVICE_NAME, _say):
        _say("state and account stay; remove them with `rm -r` and `userdel` if nothing of them is needed")


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version.

    \b
    stageloom-agent version --json | jq -r .version
    """
    typer.echo(json.dumps({"version": __version__}) if as_json else __version__)


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before a command; the help text is the app's."""


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _print(data: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(data, indent=2) if as_json else text)


def run_command_line() -> None:
    """Run and exit."""
    sys.exit(execute(sys.argv[1:]))


@cache
def _command() -> Any:
    """The tree of commands; building it takes longer than most of them, and an application may run many."""
    return typer.main.get_command(app)


def execute(arguments: list[str]) -> int:
    """One command line; every error is one line on stderr, and the exit code tells its kind."""
    write_any_text(sys.stdout, sys.stderr)
    try:
        code = _command()(args=arguments or ["--help"], prog_name="stageloom-agent", standalone_mode=False)
        sys.stdout.flush()
    except StageloomError as error:
        return _fail(str(error), error.exit_code)
    except _UsageError as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "stageloom-agent"
        return _fail(f"{text.rstrip('.')}; see `{path} --help`", ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read stdout has seen enough; the interpreter must not try to flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK
    except ImportError as error:
        return _fail(
            f"{error.name or error} cannot be imported: {error}; install it with "
            "`pip install 'stageloom[edge,onnx]'`",
            ExitCode.BACKEND,
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}; check the path", ExitCode.STORAGE)
    if code == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
        return _fail("interrupted", ExitCode.INTERRUPTED)
    return code if isinstance(code, int) else ExitCode.OK


def _fail(line: str, code: ExitCode) -> int:
    typer.echo("error: " + " ".join(line.split()), err=True)
    return code


def status_text(status: AgentStatus) -> str:
    """A few lines; those without content are left out."""
    engine, link = status.engine, status.link
    lines = [
        f"ready      {'yes' if status.ready else 'no: ' + status.reason}",
        f"agent      {status.version}, process {status.pid}, up {status.uptime_s:.0f} s, home {status.home}",
        f"engine     {f'process {engine.pid}' if engine.pid else 'not running'}, {engine.restarts} restarts"
        + (f", last ended with {engine.last_exit}" if engine.last_exit else ""),
    ]
    if status.plan:
        plan = status.plan
        lines.append(f"plan       {plan.digest[:12]} from {plan.origin}, models {', '.join(plan.models)}")
    else:
        lines.append("plan       none")
    if status.trial:
        lines.append(f"trial      {_trial_text(status.trial)}")
    if status.measuring:
        lines.append(f"measuring  {status.measuring} runs of models on executors, while nothing is served")
    if status.last_pause_ms is not None:
        lines.append(f"pause      {status.last_pause_ms:.0f} ms at the last swap: both plans did not fit")
    lines.append(f"link       {link.state}" + (f": {link.detail}" if link.detail else ""))
    if link.device:
        lines.append(f"device     {link.device}")
    if link.desired:
        reason = f" ({link.reason})" if link.reason else ""
        lines.append(f"desired    generation {link.desired}, {link.desired_state}{reason}")
    if serving := status.serving:
        where = [
            f"{kind} {address}"
            for kind, address in (("http", serving.http), ("grpc", serving.grpc))
            if address
        ]
        ended = f"; restarts {serving.restarts}, last {serving.last_exit}" if serving.restarts else ""
        lines.append(f"serving    {', '.join(where) or 'not yet'}{ended}")
    if metrics := status.metrics:
        ended = f"; restarts {metrics.restarts}, last {metrics.last_exit}" if metrics.restarts else ""
        lines.append(f"metrics    {f'http {metrics.http}' if metrics.http else 'not yet'}{ended}")
    if status.policy:
        policy = status.policy
        says = f": has no say, {policy.refused}" if policy.refused else ", plans where no planner answers"
        lines.append(f"policy     {policy.digest[:12]}{says}")
    lines += [f"queue      {q.model}: {q.tasks} tasks, oldest {q.oldest_age_s:.3f} s" for q in status.queues]
    lines += [
        f"tasks      {t.model}: {t.submitted} submitted, {t.completed} completed, {t.refused} refused, "
        f"{t.failed} failed, {t.cancelled} cancelled, {t.expired} expired, {t.open} open"
        for t in status.tasks
    ]
    lines += [f"problem    {problem}" for problem in status.problems]
    return "\n".join(lines)


def _trial_text(trial: TrialStatus) -> str:
    if trial.phase != "trial":
        return f"the desired plan is {trial.phase}"
    ratio = f", ratio so far {trial.ratio:.3f}" if trial.ratio is not None else ""
    pairs = counted(trial.pairs, "pair")
    return f"{pairs} of windows{ratio}, decided within {trial.seconds_left:.0f} s"


def doctor_text(checks: Sequence[Check]) -> str:
    """One line per check, the remedy below those that need one."""
    lines = []
    for check in checks:
        lines.append(f"{check.result:5} {check.name}: {check.detail}")
        if check.remedy:
            lines.append(f"      -> {check.remedy}")
    return "\n".join(lines)
