"""Schedulers by name."""

from collections.abc import Mapping
from types import MappingProxyType

from shared.errors import SettingError
from shared.search.greedy import greedy
from shared.search.interface import Scheduler
from shared.search.ios import ios, ios_rooted
from shared.search.sequential import sequential

_SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    {"greedy": greedy, "ios": ios, "ios_rooted": ios_rooted, "sequential": sequential}
)


_COST_BLIND = frozenset({"greedy", "sequential"})


def schedulers() -> Mapping[str, Scheduler]:
    """Every scheduler by the name that commands and settings use."""
    return _SCHEDULERS


def scheduler(name: str) -> Scheduler:
    """The scheduler of that name.

    Raises:
        SettingError: there is none; the error lists the names.
    """
    found = _SCHEDULERS.get(name)
    if found is None:
        raise SettingError(
            f"there is no scheduler {name!r}", remedy=f"choose one of {', '.join(sorted(_SCHEDULERS))}"
        )
    return found


def reads_costs(name: str) -> bool:
    """Whether costs can change what the scheduler finds, so that measuring them first is worth the time.

    Raises:
        SettingError: there is no scheduler of that name.
    """
    scheduler(name)
    return name not in _COST_BLIND
