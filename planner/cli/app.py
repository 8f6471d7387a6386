"""The command tree, and how every error becomes one line and an exit code."""

import os
import sys
from functools import cache
from typing import Any

import typer

from stageloom.planner.cli import (
    access,
    device,
    model,
    plan,
    policy,
    prediction,
    replan,
    rollout,
    scheduler,
    service,
    simulate,
    train,
    webhook,
)
from stageloom.planner.cli.output import progress
from stageloom.planner.cli.settings import EPILOG, take_options
from stageloom.shared.errors import ExitCode, StageloomError
from stageloom.shared.standard_streams import write_any_text

_EXIT_CODES = "\n".join(
    f"{code.value:>3}  {text}"
    for code, text in {
        ExitCode.OK: "done",
        ExitCode.FAILED: "the command ran and its answer is no",
        ExitCode.USAGE: "wrong arguments, or an input that cannot be used",
        ExitCode.UNAVAILABLE: "the planner does not run or does not answer",
        ExitCode.STORAGE: "disk full, no permission, a broken database",
        ExitCode.BACKEND: "a library that this command needs is missing or failed",
        ExitCode.DENIED: "refused: token, key, revoked device",
        ExitCode.INTERRUPTED: "Ctrl-C before the command was done",
    }.items()
)

app = typer.Typer(
    name="stageloom",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    help="""Plans how several neural networks share one edge device, and sends the plans to the devices.

    The daily way:

    \b
    stageloom up                                     # start the planner (leave it running)
    stageloom device token D                         # then, on the device: stageloom-agent join TOKEN
                                                     # and there: stageloom-agent run
    stageloom device list
    stageloom model add resnet50.onnx --name resnet50
    stageloom device profile D                       # measure it there
    stageloom plan create --device D --model resnet50 --push
    stageloom watch
    stageloom plan history D                         # what became of the plan
    stageloom plan explain D                         # why it is as it is
    stageloom plan push D NAME                       # another one
    """,
    epilog=f"{EPILOG}\n\n\b\nExit codes:\n{_EXIT_CODES}",
)
service.add_to(app)
prediction.app.command("create")(simulate.create)
policy.app.add_typer(train.app, name="train")
for name, noun in {
    "device": device.app,
    "model": model.app,
    "plan": plan.app,
    "replan": replan.app,
    "rollout": rollout.app,
    "scheduler": scheduler.app,
    "prediction": prediction.app,
    "policy": policy.app,
    "job": access.job,
    "access": access.app,
    "audit": access.audit,
    "webhook": webhook.app,
    "config": service.config,
    "planner": service.app,
}.items():
    app.add_typer(noun, name=name)
    for command in noun.registered_commands:
        command.epilog = command.epilog or EPILOG
for command in train.app.registered_commands:
    command.epilog = EPILOG

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of every mistake on a command line; typer exports only this child of it."""

_EXTRAS = {
    "matplotlib": "plot",
    "numba": "planner",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "psycopg": "postgres",
    "ray": "planner",
    "torch": "learn",
}
"""The extra that installs a package which `planner-lite` leaves out."""


_RENAMED = {
    ("backup",): ("planner", "backup"),
    ("install",): ("planner", "install"),
    ("migrate",): ("planner", "migrate"),
    ("plan", "schedulers"): ("scheduler", "list"),
    ("predictions",): ("prediction", "list"),
    ("replans",): ("replan", "list"),
    ("simulate",): ("prediction", "create"),
    ("telemetry",): ("device", "telemetry"),
    ("train",): ("policy", "train"),
    ("trust-clock",): ("planner", "trust-clock"),
    ("uninstall",): ("planner", "uninstall"),
}
"""Commands of 0.1.0 by their first words, and what they are called now."""


def run(arguments: list[str] | None = None) -> None:
    """Run one command line; the process ends with its exit code."""
    sys.exit(execute(arguments))


def _renamed(words: list[str]) -> list[str]:
    """A command line of 0.1.0 in today's words, with a hint on stderr; any other as it is."""
    old, new = next(
        ((old, new) for old, new in _RENAMED.items() if tuple(words[: len(old)]) == old), ((), ())
    )
    if not new:
        if words[:2] != ["plan", "compare"] or not any(word.partition("=")[0] == "--model" for word in words):
            return words
        old, new = ("plan", "compare"), ("scheduler", "compare")
    progress(f"hint: `stageloom {' '.join(old)}` is now `stageloom {' '.join(new)}`")
    return [*new, *words[len(old) :]]


@cache
def _command() -> Any:
    """The tree of commands; building it takes longer than most of them, and an application may run many."""
    return typer.main.get_command(app)


def execute(arguments: list[str] | None) -> int:
    """Run one command line and return its exit code; every error is one line on stderr."""
    write_any_text(sys.stdout, sys.stderr)
    try:
        words = sys.argv[1:] if arguments is None else arguments
        code = _command()(args=_renamed(take_options(words)), prog_name="stageloom", standalone_mode=False)
        sys.stdout.flush()
    except StageloomError as error:
        return _fail(str(error), error.exit_code)
    except _UsageError as error:
        return _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read stdout has seen enough; the interpreter must not try to flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0], "planner,onnx")
        return _fail(
            f"{error.name or error} cannot be imported: {error}; install it with "
            f"`pip install 'stageloom[{extra}]'`",
            ExitCode.BACKEND,
        )
    except UnicodeEncodeError as error:  # of a word that would go to the planner
        return _fail(f"{error.object[:80]!r} is not UTF-8; write it in UTF-8", ExitCode.USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(
            f"{where}{error.strerror or error}; check the path and its permissions", ExitCode.STORAGE
        )
    if code == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
        return _fail("interrupted", ExitCode.INTERRUPTED)
    return code if isinstance(code, int) else ExitCode.OK


def _fail(line: str, code: ExitCode) -> int:
    progress("error: " + " ".join(line.split()))
    return code


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "stageloom"
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    message = message.replace(": Value error, ", ": ")  # what typer puts before an unknown choice
    if message.startswith("Usage:"):  # a group without a command: its help is the answer
        progress(message)
        return ExitCode.USAGE
    return _fail(f"{' '.join(message.split()).rstrip('.')}; see `{path} --help`", ExitCode.USAGE)
