"""What every scheduler promises, as checks that name what is wrong.

`schedule_faults` looks at one schedule; `try_case` calls a scheduler on a case and looks at what it does.
`stageloom scheduler check`, the tests, and whatever uses another distribution's scheduler ask here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.errors import StageloomError
from stageloom.shared.legality import violations
from stageloom.shared.schedule import Schedule, StageSchedule, StreamSchedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.makespan import schedule_s
from stageloom.shared.stage_string import parse, to_string

IN_TIME: Final = "in time"

RULES: Final = {
    "answers": "returns a schedule, and raises nothing",
    "complete": "runs every operator once",
    "legal": "keeps to the dependencies; groups of a stage are independent",
    "limits": "has at most r operators a group and s groups a stage",
    "canonical": "is what its stage string says",
    "repeatable": "finds the same for the same arguments, in another process, too",
    IN_TIME: "answers within the time limit",
}
"""The rules by name. Streams have no groups, so no limits."""

_COMPLETE: Final = ("unknown", "repeated", "missing")
_LIMITS: Final = ("operators", "groups")


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule of `RULES`."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one call."""

    name: str
    graph: CombinedGraph
    costs: StageCosts
    limits: Limits
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """What came of a case. `text` is the schedule as a stage string, empty where there is none.
    `over_sequential`: its seconds over those of one operator after another, by the case's costs."""

    text: str = ""
    faults: tuple[Fault, ...] = ()
    over_sequential: float | None = None


def schedule_faults(found: object, graph: CombinedGraph, limits: Limits) -> list[Fault]:
    """What is wrong with a scheduler's result, whatever it is; nothing for a legal, canonical schedule."""
    if not isinstance(found, StageSchedule | StreamSchedule):
        return [Fault("answers", f"a {type(found).__name__} is no schedule")]
    try:
        wrong = violations(found, graph, r=limits.r, s=limits.s)
        if wrong:
            return [Fault(_rule_of(violation.rule), violation.detail) for violation in wrong]
    except (TypeError, ValueError, AttributeError) as error:
        return [Fault("answers", f"a schedule of wrong values: {type(error).__name__}: {error}")]
    try:
        text = to_string(found)
        return [] if parse(text) == found else [Fault("canonical", f"{text} is read as another schedule")]
    except StageloomError as error:
        return [Fault("canonical", str(error))]


def _rule_of(violation: str) -> str:
    if violation in _COMPLETE:
        return "complete"
    return "limits" if violation in _LIMITS else "legal"


def try_case(
    scheduler: Scheduler,
    case: Case,
    limit_s: float = inf,
    now_s: Callable[[], float] = lambda: 0.0,
) -> CaseOutcome:
    """Call it twice and look at both results; each may take `limit_s` by the clock `now_s`."""
    found: list[Schedule] = []
    longest_s = 0.0
    try:
        for _ in range(2):
            began_s = now_s()
            found.append(scheduler(case.graph, case.costs, case.limits, case.budget))
            longest_s = max(longest_s, now_s() - began_s)
    except Exception as error:
        return CaseOutcome(faults=(Fault("answers", f"{case.name}: {type(error).__name__}: {error}"),))
    first, again = found
    faults = schedule_faults(first, case.graph, case.limits)
    if faults:
        return CaseOutcome(faults=tuple(Fault(one.rule, f"{case.name}: {one.detail}") for one in faults))
    if again != first:
        faults = [Fault("repeatable", f"{case.name}: another schedule the second time")]
    if longest_s > limit_s:
        faults.append(Fault(IN_TIME, f"{case.name}: {longest_s:.3g} s, more than {limit_s:g} s"))
    return CaseOutcome(
        text=to_string(first), faults=tuple(faults), over_sequential=_over_sequential(first, case)
    )


def _over_sequential(found: Schedule, case: Case) -> float:
    plain = sequential(case.graph, case.costs, case.limits, case.budget)
    return schedule_s(found, case.graph, case.costs) / schedule_s(plain, case.graph, case.costs)


def compared_outcomes(case: Case, here: CaseOutcome, there: CaseOutcome) -> CaseOutcome:
    """The outcome of a case that two processes tried: they must have found the same."""
    if here.faults:
        return here
    faults = [fault for fault in there.faults if fault.rule == IN_TIME]
    if here.text != there.text:
        faults.append(Fault("repeatable", f"{case.name}: another schedule in another process"))
    return replace(here, faults=tuple(faults))
