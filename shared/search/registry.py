"""Schedulers by name: Stageloom's own, and those that other distributions add (`stageloom.schedulers`).

An added one is a function as `stageloom.shared.search.interface.Scheduler` says. It is imported when it is
asked for, and what it returns is checked each time, since no plan may be made of an illegal schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.errors import StageloomError
from stageloom.shared.extensions import Extension, ExtensionGroup, Extensions, extensions
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.baselines import greedy, sequential, wavefront
from stageloom.shared.search.beam import beam
from stageloom.shared.search.conformance import schedule_faults
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.gpg import gpg, with_checkpoint
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.ios import brute, ios, ios_merge, ios_parallel, ios_rooted
from stageloom.shared.search.streams import nimble, opara


@dataclass(frozen=True, slots=True)
class _Entry:
    scheduler: Scheduler
    help: str  # one line
    reads_costs: bool = True
    searches: bool = False


_ENTRIES: Mapping[str, _Entry] = MappingProxyType(
    {
        "beam": _Entry(beam, "stages by beam search, within a budget", searches=True),
        "brute": _Entry(
            brute, "the cheapest of all stage schedules, listed; small graphs only", searches=True
        ),
        "gpg": _Entry(gpg, "stages by a trained graph policy, or the best of beam (TOP)", searches=True),
        "greedy": _Entry(greedy, "each stage takes every operator that can run by then", reads_costs=False),
        "ios": _Entry(ios, "the cheapest stages by dynamic programming (IOS)", searches=True),
        "ios_merge": _Entry(
            ios_merge, "as ios, in stages of one operator or of several merged into one", searches=True
        ),
        "ios_parallel": _Entry(ios_parallel, "as ios, without merges", searches=True),
        "ios_rooted": _Entry(
            ios_rooted, "as ios, over the groups that IOS's released code enumerates", searches=True
        ),
        "nimble": _Entry(nimble, "few streams with the fewest waits (Nimble)", reads_costs=False),
        "opara": _Entry(opara, "greedy streams, launches mixed by kind (Opara)", reads_costs=False),
        "sequential": _Entry(sequential, "one operator after another", reads_costs=False),
        "wavefront": _Entry(wavefront, "waves of operators on the unit that is free first (Rammer)"),
    }
)
_SCHEDULERS = MappingProxyType({name: entry.scheduler for name, entry in _ENTRIES.items()})


def schedulers() -> Mapping[str, Scheduler]:
    """Return Stageloom's own schedulers by the name that commands and settings use."""
    return _SCHEDULERS


def added_schedulers() -> Extensions:
    """Schedulers of other distributions, as their metadata says; none is imported."""
    return extensions(ExtensionGroup.SCHEDULERS, _ENTRIES)


def require_scheduler(name: str) -> None:
    """Refuse a name without importing what has it.

    Raises:
        SettingError: there is no scheduler of that name; the error lists the names.
    """
    if name not in _ENTRIES:
        _added(name)


def scheduler(name: str, checkpoint: bytes = b"") -> Scheduler:
    """The scheduler of that name, with a trained policy where it takes one.

    Raises:
        SettingError: there is none; the error lists the names.
        ExtensionError: it is another distribution's, and does not load.
    """
    chosen = unchecked_scheduler(name)
    if name not in _ENTRIES:
        return _Checked(_added(name), chosen)
    return with_checkpoint(checkpoint) if checkpoint and chosen is gpg else chosen


def unchecked_scheduler(name: str) -> Scheduler:
    """The scheduler of that name as it is, which a check of it needs.

    Raises:
        SettingError: there is none; the error lists the names.
        ExtensionError: it is another distribution's, and does not load.
    """
    entry = _ENTRIES.get(name)
    return _added(name).load(_callable) if entry is None else entry.scheduler


def help_line(name: str) -> str:
    """What the scheduler does, in one line; of another distribution's the first line of its docstring.

    Raises:
        SettingError: there is no scheduler of that name.
        ExtensionError: it does not load.
    """
    entry = _ENTRIES.get(name)
    if entry is not None:
        return entry.help
    lines = (_added(name).load(_callable).__doc__ or "").strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else ""


def reads_costs(name: str) -> bool:
    """Whether costs can change what the scheduler finds, so that measuring them first is worth the time.

    Of another distribution's it is assumed, so it never runs inside the planner's own process.

    Raises:
        SettingError: there is no scheduler of that name.
    """
    entry = _ENTRIES.get(name)
    return _added(name) is not None if entry is None else entry.reads_costs


def searches(name: str) -> bool:
    """Whether the scheduler looks for the cheapest schedule within its budget, never above `sequential`.

    Of another distribution's it is not assumed: each block is given to it as it is.

    Raises:
        SettingError: there is no scheduler of that name.
    """
    entry = _ENTRIES.get(name)
    return _added(name) is None if entry is None else entry.searches


def _added(name: str) -> Extension:
    return added_schedulers().named(name, "scheduler", _ENTRIES)


def _callable(loaded: Any) -> Scheduler:
    if not callable(loaded) or isinstance(loaded, type):
        raise TypeError(f"a scheduler is a function, not {type(loaded).__name__}")
    return cast(Scheduler, loaded)


@dataclass(frozen=True, slots=True)
class _Checked:
    """Another distribution's scheduler. What it raises, and what is wrong with its schedules, names it."""

    extension: Extension
    scheduler: Scheduler

    def __call__(self, graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> Schedule:
        """Raises:
        ExtensionError: it fails, or its schedule is not legal.
        """
        try:
            found = self.scheduler(graph, costs, limits, budget)
        except StageloomError:
            raise
        except Exception as error:
            raise self.extension.error(f"failed: {type(error).__name__}: {error}") from error
        faults = schedule_faults(found, graph, limits)
        if faults:
            raise self.extension.error(f"made a wrong schedule: {faults[0]}")
        return found
