"""What other distributions add by entry points: found by name in their metadata, imported when it is used.

A broken one stops nothing but itself: it is named with its distribution, and with what to do about it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from stageloom.shared.errors import ExtensionError, SettingError

T = TypeVar("T")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ExtensionGroup(str, Enum):
    """The entry point groups. The value is what a distribution's metadata says."""

    SCHEDULERS = "stageloom.schedulers"
    EXECUTORS = "stageloom.executors"
    POLICIES = "stageloom.policies"


@dataclass(frozen=True, slots=True)
class Extension:
    """One entry point that may be used by its name. `distribution`: name and version."""

    name: str
    distribution: str
    entry: EntryPoint

    def load(self, check: Callable[[Any], T]) -> T:
        """Import it, and return what `check` makes of the object; `check` raises TypeError for a wrong one.

        Raises:
            ExtensionError: the import fails, or the object is of a wrong type.
        """
        try:
            return check(self.entry.load())
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything
            raise self.error(f"does not load: {type(error).__name__}: {error}") from error

    def error(self, what: str) -> ExtensionError:
        """The error that says what this one does wrong."""
        return ExtensionError(
            f"{self.name} of {self.distribution} {what}", remedy="repair that package, or uninstall it"
        )

    @property
    def is_there(self) -> bool:
        """Whether its package can be found; nothing is imported."""
        try:
            return find_spec(self.entry.module.partition(".")[0]) is not None
        except (ImportError, ValueError):
            return False


@dataclass(frozen=True, slots=True)
class Extensions:
    """Those of one group by name, and why the others cannot be used."""

    usable: Mapping[str, Extension]
    problems: Mapping[str, ExtensionError]

    def named(self, name: str, kind: str, own: Collection[str]) -> Extension:
        """The one of that name. `kind` and Stageloom's own names are for the error.

        Raises:
            SettingError: there is none; the error lists the names.
            ExtensionError: there is, and it cannot be used.
        """
        if name in self.problems:
            raise self.problems[name]
        if name not in self.usable:
            raise SettingError(
                f"there is no {kind} {name!r}",
                remedy=f"choose one of {', '.join(sorted((*own, *self.usable)))}",
            )
        return self.usable[name]


def extensions(group: ExtensionGroup, taken: Collection[str]) -> Extensions:
    """What installed distributions offer in a group, ascending by name. Only metadata is read.

    Names in `taken` are Stageloom's own. A name that two distributions offer is neither's, since the order
    of the import path would decide.
    """
    found: dict[str, list[Extension]] = {}
    for entry in entry_points(group=group.value):
        found.setdefault(entry.name, []).append(Extension(entry.name, _distribution(entry), entry))
    usable: dict[str, Extension] = {}
    problems: dict[str, ExtensionError] = {}
    for name, offers in sorted(found.items()):
        wrong = _wrong_name(name, taken, offers) or _wrong_target(offers[0].entry)
        if wrong:
            problems[name] = offers[0].error(wrong)
        else:
            usable[name] = offers[0]
    return Extensions(usable, problems)


def _wrong_name(name: str, taken: Collection[str], offers: list[Extension]) -> str:
    if not _NAME.fullmatch(name):
        return "has a name that is not of lower-case letters, digits and _"
    if name in taken:
        return "has the name of one of Stageloom's own"
    if len(offers) > 1:
        others = " and ".join(sorted(offer.distribution for offer in offers[1:]))
        return f"has a name that {others} offers, too"
    return ""


def _wrong_target(entry: EntryPoint) -> str:
    try:
        entry.module, entry.attr  # noqa: B018 - which parse what the metadata says
    except AttributeError:
        return f"points to {entry.value!r}, which is no module:name"
    return ""


def _distribution(entry: EntryPoint) -> str:
    if entry.dist is None:
        return "an unnamed distribution"
    return f"{entry.dist.name} {entry.dist.version}"
