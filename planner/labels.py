"""Labels of devices: `site=a` says something of a device, and several of them together select devices."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from stageloom.planner.schema.device import MOST_LABELS
from stageloom.shared.errors import InputError

_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ALLOWED: Final = "1 to 64 letters, digits, '.', '_' and '-', a letter or digit first"


class LabelChanges(NamedTuple):
    """Labels to give to a device, and names of labels to take away."""

    given: dict[str, str]
    removed: tuple[str, ...]


def checked_label(name: str, value: str) -> tuple[str, str]:
    """The label, if it may be one.

    Raises:
        InputError: its name or its value is empty, too long, or has a character that is not allowed.
    """
    return _part(name, f"the name of label {name[:64]!r}"), _part(value, f"the value of label {name[:64]!r}")


def _part(text: str, said: str) -> str:
    if not _PART.fullmatch(text):
        raise InputError(f"{said} is not allowed", remedy=f"use {_ALLOWED}")
    return text


def parse_label(text: str) -> tuple[str, str]:
    """Read `NAME=VALUE`.

    Raises:
        InputError: it has no `=`, or as `checked_label`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text[:80]!r} is no label", remedy="write NAME=VALUE, such as site=a")
    return checked_label(name, value)


def parse_selection(texts: Iterable[str]) -> dict[str, str]:
    """Labels that a device must have, all of them.

    Raises:
        InputError: as `parse_label`, a name is given with two values, or there are too many.
    """
    selection: dict[str, str] = {}
    for text in texts:
        name, value = parse_label(text)
        if selection.setdefault(name, value) != value:
            raise InputError(
                f"no device has two values of label {name!r}", remedy="name each label with one value"
            )
    if len(selection) > MOST_LABELS:
        raise InputError(f"a selection of more than {MOST_LABELS} labels", remedy="name fewer")
    return selection


def parse_changes(words: Iterable[str]) -> LabelChanges:
    """Read `NAME=VALUE` to give a label and `NAME-` to take it away.

    Raises:
        InputError: a word is neither, or a label is named twice.
    """
    given: dict[str, str] = {}
    removed: list[str] = []
    for word in words:
        if "=" not in word and word.endswith("-"):
            name = _part(word[:-1], f"the name of label {word[:64]!r}")
            removed.append(name)
        else:
            name, value = parse_label(word)
            if name in given:
                raise InputError(f"label {name!r} is named twice", remedy="name it once")
            given[name] = value
        if name in given and name in removed:
            raise InputError(f"label {name!r} is given and taken away", remedy="name it once")
    return LabelChanges(given, tuple(dict.fromkeys(removed)))


def checked_changes(given: Mapping[str, str], removed: Iterable[str]) -> LabelChanges:
    """Changes that did not come as words. Raises as `parse_changes`."""
    labels = dict(checked_label(name, value) for name, value in given.items())
    names = tuple(_part(name, f"the name of label {name[:64]!r}") for name in removed)
    for name in names:
        if name in labels:
            raise InputError(f"label {name!r} is given and taken away", remedy="name it once")
    return LabelChanges(labels, names)


def label_text(labels: Mapping[str, str]) -> str:
    """`site=a tier=b`, by name; empty where there are none."""
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))
