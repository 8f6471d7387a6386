"""`--model NAME:KEY=VALUE,...`: how one model enters a plan."""

from collections.abc import Callable
from typing import Any

from stageloom.shared.errors import InputError
from stageloom.shared.messages.admin import ModelOptions
from stageloom.shared.plan import QueueRule


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


def model_choice(text: str, **for_all: Any) -> ModelOptions:
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
