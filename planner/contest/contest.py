"""The best plan so far, at any time, and whether it still is on arrivals that did not choose it. Pure.

Entrant 0 is the first valid plan: it is there before anything is judged, and it is the answer whenever
nothing else proved better. The others are searched and judged elsewhere, a few at a time; every event gives
back what is to be done now. In the end the best so far and entrant 0 are judged once more, on fresh arrivals:
a plan that is chosen among many by the arrivals it was lucky with loses there, and entrant 0 is the answer.

Time: no task begins or goes on once what is left of the budget is needed for the last look, which is taken to
last as long as the slowest task so far, and at most a quarter of the budget. The last look itself may go on
for `RECHECK_S`, if the budget ends sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from stageloom.planner.contest.worth import Worth, better

RECHECK_S: Final = 20.0
_RESERVE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Judge:
    """Search and judge this entrant."""

    entrant: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop what is under way for this entrant; it is not asked for any more."""

    entrant: int


@dataclass(frozen=True, slots=True)
class Recheck:
    """Judge these entrants' plans on fresh arrivals."""

    entrants: tuple[int, ...]


Action: TypeAlias = Judge | Drop | Recheck


class Phase(Enum):
    """What goes on."""

    JUDGING = "judging"
    RECHECKING = "rechecking"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan became the best so far, so many seconds after the start."""

    at_s: float
    entrant: int
    worth: Worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer. `fresh`: the worth of the best so far and of entrant 0 on fresh arrivals.

    It is empty where `unchecked` says why nobody looked again; entrant 0 is the answer then.
    """

    entrant: int
    fresh: Mapping[int, Worth]
    unchecked: str = ""


class Contest:
    """One contest. `size` entrants, `workers` of which are judged at a time; times are of one clock."""

    def __init__(self, size: int, *, budget_s: float, workers: int, began_s: float) -> None:
        assert size > 0 and workers > 0 and budget_s > 0.0
        self._size, self._workers = size, workers
        self._budget_s, self._began_s = budget_s, began_s
        self._next = 0
        self._running: dict[int, float] = {}
        self._slowest_s = 0.0
        self._recheck_until_s = 0.0
        self.phase = Phase.JUDGING
        self.curve: list[Point] = []
        """Each better than the one before it."""
        self.judged: dict[int, tuple[float, Worth]] = {}
        """By entrant: seconds since the start, and its worth."""
        self.failures: dict[int, str] = {}
        self.outcome: Outcome | None = None

    @property
    def best(self) -> int:
        """The best so far; entrant 0 before anything was judged."""
        return self.curve[-1].entrant if self.curve else 0

    @property
    def done(self) -> int:
        """Entrants that were judged or failed."""
        return len(self.judged) + len(self.failures)

    @property
    def ends_s(self) -> float:
        """When `passed` has something to do at the latest."""
        if self.phase is Phase.RECHECKING:
            return self._recheck_until_s
        reserve_s = min(self._slowest_s, _RESERVE * self._budget_s)
        return self._began_s + self._budget_s - reserve_s

    def begin(self) -> list[Action]:
        """Once, first."""
        return self._more(self._began_s)

    def was_judged(self, entrant: int, worth: Worth, now_s: float) -> list[Action]:
        """An entrant's plan is worth this. One that was dropped meanwhile is ignored."""
        if not self._ended(entrant, now_s):
            return []
        at_s = now_s - self._began_s
        self.judged[entrant] = at_s, worth
        if not self.curve or better(worth, self.curve[-1].worth):
            self.curve.append(Point(at_s=at_s, entrant=entrant, worth=worth))
        return self._more(now_s)

    def failed(self, entrant: int, reason: str, now_s: float) -> list[Action]:
        """An entrant has no plan, or it could not be judged: the others go on."""
        if not self._ended(entrant, now_s):
            return []
        self.failures[entrant] = reason
        return self._more(now_s)

    def passed(self, now_s: float) -> list[Action]:
        """Time has passed."""
        if now_s < self.ends_s:
            return []
        if self.phase is Phase.RECHECKING:
            self._end(0, {}, "the last look took too long")
            return []
        return self._finish(now_s)

    def stop(self, now_s: float) -> list[Action]:
        """The operator wants the best so far; asked for again, without the last look."""
        if self.phase is Phase.RECHECKING:
            self._end(0, {}, "it was stopped before the last look")
        return self._finish(now_s)

    def rechecked(self, fresh: Mapping[int, Worth]) -> None:
        """What the best so far and entrant 0 are worth on fresh arrivals."""
        if self.phase is not Phase.RECHECKING:
            return
        best = self.best
        wins = best == 0 or 0 not in fresh or better(fresh[best], fresh[0])
        self._end(best if wins else 0, fresh, "")

    def recheck_failed(self, reason: str) -> None:
        """Nobody knows what the best so far is worth on fresh arrivals."""
        if self.phase is Phase.RECHECKING:
            self._end(0, {}, reason)

    def _ended(self, entrant: int, now_s: float) -> bool:
        began_s = self._running.pop(entrant, None)
        if began_s is None or self.phase is not Phase.JUDGING:
            return False
        self._slowest_s = max(self._slowest_s, now_s - began_s)
        return True

    def _more(self, now_s: float) -> list[Action]:
        """Fill the workers; when nothing is left, or time is, finish."""
        if now_s >= self.ends_s:
            return self._finish(now_s)
        actions: list[Action] = []
        while self._next < self._size and len(self._running) < self._workers:
            self._running[self._next] = now_s
            actions.append(Judge(self._next))
            self._next += 1
        return actions if self._running else self._finish(now_s)

    def _finish(self, now_s: float) -> list[Action]:
        if self.phase is not Phase.JUDGING:
            return []
        drops: list[Action] = [Drop(entrant) for entrant in self._running]
        self._running.clear()
        if not self.curve:
            reason = next(iter(self.failures.values()), "")
            self._end(0, {}, f"nothing was judged: {reason}" if reason else "nothing was judged in time")
            return drops
        self.phase = Phase.RECHECKING
        self._recheck_until_s = max(self._began_s + self._budget_s, now_s + RECHECK_S)
        both = {self.best, 0} if 0 not in self.failures else {self.best}
        return [*drops, Recheck(tuple(sorted(both)))]

    def _end(self, entrant: int, fresh: Mapping[int, Worth], unchecked: str) -> None:
        self.phase = Phase.ENDED
        self.outcome = Outcome(entrant=entrant, fresh=dict(fresh), unchecked=unchecked)
