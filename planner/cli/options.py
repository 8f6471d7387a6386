"""Options that several commands share, and the values that they take."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer

from stageloom.planner.schema.plan import ModelOptions
from stageloom.shared.errors import InputError
from stageloom.shared.plan import QueueRule

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="INPUT=DIMS", help="Pin an input, such as images=1x3x640x640. Repeatable."
    ),
]
Rates = Annotated[
    list[str] | None,
    typer.Option(
        "--rate",
        metavar="MODEL=PER_S",
        help="Tasks of a model that arrive a second. Repeatable. Default: what --device counted.",
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="NAME",
        help="How the named models are cut: whole, base, or paper where they have borders.",
    ),
]
Combine = Annotated[
    str | None,
    typer.Option(
        "--combine",
        metavar="HOW",
        help="alone: each block by itself; aligned: models' i-th blocks together; replicas: a model's; "
        "abreast: blocks as far through their models as each other; pipelined: a replica's neighbours.",
    ),
]
MOST_ROWS = 1_000_000_000
"""Of what `--limit` takes; far above what is stored, and below what a database takes for a number."""
TwinFile = Annotated[
    str,
    typer.Option(
        "--twin",
        metavar="NAME|FILE",
        help="A device file: nano, tx2, xavier_nx, orin_nx, a100, h100, or a path. Default: --device's.",
    ),
]

R = TypeVar("R")


def checked(made: R, names: Mapping[str, str] | None = None) -> R:
    """A message made from what a person typed, checked against its own bounds.

    `names`: what the command calls fields that other commands call otherwise.

    Raises:
        InputError: a value is outside its bounds; the message names it.
    """
    plain = msgspec.to_builtins(made)
    try:
        return msgspec.convert(plain, type(made))
    except msgspec.ValidationError as error:
        raise refused(error, plain, names) from error


def refused(error: msgspec.ValidationError, plain: Any, names: Mapping[str, str] | None = None) -> InputError:
    """What is wrong with plain values, in terms of the options that gave them; `names` as for `checked`."""
    reason, _, path = str(error).replace("`", "").partition(" - at $.")
    return InputError(
        f"{_option_of(path, names or {}) if path else 'the input'} {_shown(_at(plain, path))} is not "
        f"acceptable: {_plainly(reason)}",
        remedy="see --help",
    )


_ARGUMENTS: Final = ("device", "plan", "model", "policy", "job", "name", "rollout", "webhook", "url")
_OPTIONS: Final = {
    "combination": "--combine",
    "compare_outputs": "--tolerance",
    "devices": "device",
    "intra_op_threads": "--threads",
    "models": "--model",
    "rates": "--rate",
    "schedulers": "--scheduler",
    "wait": "--timeout",
}
"""Fields that are not called like the options and arguments that give them."""


def _option_of(path: str, names: Mapping[str, str]) -> str:
    """What a person calls the field: `--budget` for `budget_s`, `replicas` for `models[0].replicas`."""
    *outer, field = re.sub(r"\[.*?\]", "", path).split(".")
    name = field.removesuffix("_s")
    if name in names:
        return names[name]
    if name in _ARGUMENTS or outer:
        return name
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


def _shown(value: Any) -> str:
    return repr(value[:80]) if isinstance(value, str) else str(value)[:80]


def _plainly(reason: str) -> str:
    if "0-9a-f" in reason:
        return "a digest has letters of 0 to 9 and a to f"
    if "regex" in reason:
        return "a name has 1 to 64 letters, digits, dots, dashes or underscores"
    plain = reason[:1].lower() + reason[1:]
    return plain.replace("expected float", "expected a number").replace("expected int", "expected a number")


def _at(value: Any, path: str) -> Any:
    """The part of plain values that msgspec's path names, such as `models[0].model`."""
    for step in path.replace("[", ".[").split("."):
        if not step:
            continue
        if step[0] == "[" and isinstance(value, list | tuple):
            value = value[int(step[1:-1])] if step[1:-1].isdecimal() else value
        elif isinstance(value, dict):
            value = value.get(step)
    return value


_MOST_PER_S = 1e6  # what messages carry


def parse_rates(texts: Sequence[str] | None) -> dict[str, float]:
    """`--rate MODEL=PER_S`, each.

    Raises:
        InputError: not of that form, or a model given twice.
    """
    found: dict[str, float] = {}
    for text in texts or ():
        name, equals, value = text.rpartition("=")
        try:
            per_s = float(value)
        except ValueError:
            per_s = 0.0
        if not equals or not 0.0 < per_s <= _MOST_PER_S:
            raise InputError(f"--rate {text!r} is not MODEL=PER_S", remedy="such as --rate resnet50=60")
        if name in found:
            raise InputError(f"--rate names {name} twice", remedy="give each model once")
        found[name] = per_s
    return found


_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def parse_duration(text: str, option: str) -> float:
    """Seconds of `90`, `500ms`, `90s`, `10m` or `1.5h`.

    Raises:
        InputError: not of that form, or not above 0.
    """
    number = text.rstrip("smh")
    try:
        seconds = float(number) * _UNITS_S.get(text[len(number) :], 0.0)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InputError(f"{option} {text[:80]!r} is no duration", remedy=f"write it like {option} 10m")
    return seconds


def _yes_or_no(text: str) -> bool:
    try:
        return {"yes": True, "no": False}[text]
    except KeyError:
        raise ValueError("yes or no") from None


def _queue_rule(text: str) -> QueueRule:
    try:
        return QueueRule(text)
    except ValueError:
        raise ValueError(f"one of {', '.join(rule.value for rule in QueueRule)}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number of seconds") from None


MODEL_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "partition": ("partition", str),
    "replicas": ("replicas", _whole),
    "batch": ("batch", _whole),
    "delay": ("batch_max_delay_s", _seconds),
    "interval": ("launch_interval_s", _seconds),
    "strict": ("work_conserving", lambda text: not _yes_or_no(text)),
    "weight": ("weight", _whole),
    "queue": ("queue", _queue_rule),
    "queue-tasks": ("queue_max_tasks", _whole),
    "queue-bytes": ("queue_max_bytes", _whole),
}
"""Per key the field of `ModelOptions` that it sets, and how its text is read."""


def model_options(text: str, **for_all: Any) -> ModelOptions:
    """`NAME[:KEY=VALUE,...]`; fields whose key is absent take the values for all models.

    Raises:
        InputError: not of that form, a key is unknown or given twice, or a value cannot be read.
    """
    name, colon, rest = text.partition(":")
    fields = {}
    for pair in rest.split(",") if colon else []:
        key, equals, value = pair.partition("=")
        if not equals or key not in MODEL_KEYS:
            raise InputError(
                f"--model {text!r} is not NAME[:KEY=VALUE,...]",
                remedy=f"the keys are {', '.join(MODEL_KEYS)}",
            )
        field, read = MODEL_KEYS[key]
        if field in fields:
            raise InputError(f"--model {text!r} gives {key} twice", remedy="give each key once")
        try:
            fields[field] = read(value)
        except ValueError as error:
            raise InputError(
                f"{key} = {value!r} in --model {text!r} cannot be used", remedy=f"it takes {error}"
            ) from error
    return ModelOptions(model=name, **{**for_all, **fields})
