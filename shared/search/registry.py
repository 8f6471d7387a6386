"""Schedulers by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stageloom.shared.errors import SettingError
from stageloom.shared.search.baselines import greedy, sequential, wavefront
from stageloom.shared.search.beam import beam
from stageloom.shared.search.gpg import gpg, with_checkpoint
from stageloom.shared.search.interface import Scheduler
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
    """Return every scheduler by the name that commands and settings use."""
    return _SCHEDULERS


def scheduler(name: str, checkpoint: bytes = b"") -> Scheduler:
    """The scheduler of that name, with a trained policy where it takes one.

    Raises:
        SettingError: there is none; the error lists the names.
    """
    chosen = _entry(name).scheduler
    return with_checkpoint(checkpoint) if checkpoint and chosen is gpg else chosen


def help_line(name: str) -> str:
    """What the scheduler does, in one line.

    Raises:
        SettingError: there is no scheduler of that name.
    """
    return _entry(name).help


def reads_costs(name: str) -> bool:
    """Whether costs can change what the scheduler finds, so that measuring them first is worth the time.

    Raises:
        SettingError: there is no scheduler of that name.
    """
    return _entry(name).reads_costs


def searches(name: str) -> bool:
    """Whether the scheduler looks for the cheapest schedule within its budget, never above `sequential`.

    Raises:
        SettingError: there is no scheduler of that name.
    """
    return _entry(name).searches


def _entry(name: str) -> _Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise SettingError(
            f"there is no scheduler {name!r}", remedy=f"choose one of {', '.join(sorted(_ENTRIES))}"
        )
    return entry
