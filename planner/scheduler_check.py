"""Tries a scheduler, Stageloom's own or another distribution's, on many graphs: does it keep its promises?

The scheduler runs in two processes of its own, so that it can be ended, and so that what depends on the
process (the order of a set, memory addresses) shows.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Final

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.shared.errors import ExtensionError, UnavailableError
from stageloom.shared.search.conformance import (
    IN_TIME,
    RULES,
    Case,
    CaseOutcome,
    Fault,
    compared_outcomes,
    try_case,
)
from stageloom.shared.search.interface import Scheduler
from stageloom.shared.search.registry import unchecked_scheduler

_CALLS: Final = 2  # that `try_case` makes
_LOAD_S: Final = 120.0
"""Seconds for a scheduler's import, which may load a large library from a slow disk."""
_SAME: Final = 1e-9
"""Two sums of the same seconds in another order differ by less, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRule:
    """One rule: cases that broke it, and the first of them in words."""

    rule: str
    meaning: str
    broken: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCheck:
    """What came of a check. A case that does not end in time, or ends its process, is the last one tried.

    `cheaper` and `dearer`: cases whose schedule takes less or more seconds than one operator after another;
    `worst`: the most such seconds over those. Neither breaks a rule.
    """

    scheduler: str
    cases: int
    tried: int
    rules: tuple[CheckedRule, ...]
    cheaper: int
    dearer: int
    worst: float

    @property
    def passed(self) -> bool:
        """No rule was broken."""
        return not any(rule.broken for rule in self.rules)


def check_scheduler(
    name: str,
    cases: Sequence[Case],
    limit_s: float,
    told: Callable[[int], None],
    *,
    load_s: float = _LOAD_S,
) -> SchedulerCheck:
    """Try it on every case; `told` hears how many cases are done.

    A call may take `limit_s`. One that has taken what all calls of its case may take together is ended.

    Raises:
        SettingError: there is no scheduler of that name.
        ExtensionError: it does not load, or not within `load_s`.
        UnavailableError: its import ended its process.
    """
    with closing(ProcessPool()) as first, closing(ProcessPool()) as second:
        loading = [pool.submit(_load, name) for pool in (first, second)]  # no part of a call
        if wait(loading, load_s).not_done:
            raise ExtensionError(
                f"the import of {name} does not end within {load_s:g} s", remedy="repair that package"
            )
        for future in loading:
            future.result()
        outcomes: list[CaseOutcome] = []
        for outcome in _outcomes(name, cases, limit_s, (first, second)):
            outcomes.append(outcome)
            told(len(outcomes))
    return _report(name, len(cases), outcomes)


def _outcomes(
    name: str, cases: Sequence[Case], limit_s: float, pools: tuple[SearchPool, SearchPool]
) -> Iterator[CaseOutcome]:
    for case in cases:
        running = [pool.submit(_tried, name, case, limit_s) for pool in pools]
        try:
            late = wait(running, _CALLS * limit_s).not_done
            if late:
                for future in late:
                    future.cancel()
                text = f"{case.name}: {_CALLS} calls do not end within {_CALLS * limit_s:g} s"
                yield _ended(Fault(IN_TIME, text))
                return
            here, there = (future.result() for future in running)
        except UnavailableError as error:
            yield _ended(Fault("answers", f"{case.name}: {error}"))
            return
        yield compared_outcomes(case, here, there)


def _ended(fault: Fault) -> CaseOutcome:
    return CaseOutcome(faults=(fault,))


@cache
def _loaded(name: str) -> Scheduler:
    return unchecked_scheduler(name)


def _load(name: str) -> None:
    _loaded(name)


def _tried(name: str, case: Case, limit_s: float) -> CaseOutcome:
    return try_case(_loaded(name), case, limit_s, monotonic)


def _report(name: str, cases: int, outcomes: Sequence[CaseOutcome]) -> SchedulerCheck:
    ratios = [outcome.over_sequential for outcome in outcomes if outcome.over_sequential is not None]
    broken: dict[str, list[str]] = {rule: [] for rule in RULES}
    for outcome in outcomes:
        for rule, detail in {fault.rule: fault.detail for fault in reversed(outcome.faults)}.items():
            broken[rule].append(detail)
    return SchedulerCheck(
        scheduler=name,
        cases=cases,
        tried=len(outcomes),
        rules=tuple(
            CheckedRule(
                rule=rule, meaning=meaning, broken=len(broken[rule]), example=next(iter(broken[rule]), "")
            )
            for rule, meaning in RULES.items()
        ),
        cheaper=sum(ratio < 1.0 - _SAME for ratio in ratios),
        dearer=sum(ratio > 1.0 + _SAME for ratio in ratios),
        worst=max(ratios, default=1.0),
    )
