"""The best plan so far, at any time, and whether it stays the best on arrivals that did not choose it. Pure.

Candidate 0 is the first valid plan. It exists before anything is evaluated, and it is the answer whenever
nothing else proves better. Workers search and evaluate the others, a few at a time; every event returns what
to do now. Once all that are listed have begun, and while time is left, neighbours of the best so far are
drawn and evaluated, each a candidate with a number behind the listed ones: a local search, in which a worker
may still evaluate a neighbour of what was best when it was drawn.

At the end the best so far, the best listed one and candidate 0 are evaluated once more, on fresh arrivals.
The best of hundreds of plans by a few arrivals looks better by these than it is. A neighbour that is not
surely better on fresh arrivals than the best listed one leaves the answer to that, and a listed one that is
not better than candidate 0 to this.

Where that fails, the same is decided by the arrivals that chose, and the outcome says so.

Time: no task begins or goes on once the rest of the budget is needed for that last evaluation. Each of its
plans is assumed to take as long as the slowest task so far, times the seeds that it has more of; workers take
them abreast; and a quarter of the budget is kept at most. If the budget ends sooner, the last evaluation may
go on for as long, or for `RECHECK_S`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

from stageloom.planner.tournament.score import Score, better, improves, surely_better

RECHECK_S: Final = 20.0
_RESERVE: Final = 0.25


class Actions(NamedTuple):
    """What to do now, in this order, by candidate."""

    drop: tuple[int, ...] = ()  # stop its search or evaluation
    start: tuple[int, ...] = ()  # search and evaluate its plan
    refine: tuple[int, ...] = ()  # draw a neighbour of the best so far for it, and evaluate that
    recheck: tuple[int, ...] = ()  # evaluate its plan on fresh arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A plan became the best so far, `at_s` after the start."""

    at_s: float
    candidate: int
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class TournamentOutcome:
    """The answer. `fresh`: scores of candidate 0, the best listed one and the best so far on fresh arrivals.

    It is empty where `unchecked` says why there was no last evaluation. The answer then goes by the arrivals
    that chose; it is candidate 0 where nothing was evaluated at all.
    """

    candidate: int
    fresh: Mapping[int, Score]
    unchecked: str = ""


class Tournament:
    """`size` listed candidates, `workers` of which are evaluated at a time; all times are of one clock.

    `refines`: neighbours follow. `fresh_ratio`: how much longer a plan is simulated on fresh arrivals.
    """

    def __init__(
        self,
        size: int,
        *,
        budget_s: float,
        workers: int,
        began_s: float,
        refines: bool = False,
        fresh_ratio: float = 1.0,
    ) -> None:
        assert size > 0 and workers > 0 and budget_s > 0.0
        self._size, self._workers = size, workers
        self._budget_s, self._began_s, self._refines = budget_s, began_s, refines
        self._fresh_ratio = fresh_ratio
        self._fresh: dict[int, Score] = {}
        self._next = 0
        self._running: dict[int, float] = {}
        self._slowest_s = 0.0
        self._recheck_until_s: float | None = None  # once the last evaluation has begun
        self.curve: list[Improvement] = []
        """Each scores better than the one before it, and level with the most throughput met until then."""
        self._top: Score | None = None  # the most throughput of any
        self._listed = 0  # the best of the listed ones
        self._listed_top: Score | None = None  # the most throughput of these
        self._tried: int | None = None  # whose neighbours have all been drawn
        self.evaluated: dict[int, tuple[float, Score]] = {}
        """By candidate: seconds since the start, and its score."""
        self.failures: dict[int, str] = {}
        self.outcome: TournamentOutcome | None = None

    @property
    def best(self) -> int:
        """The best so far; candidate 0 before anything was evaluated."""
        return self.curve[-1].candidate if self.curve else 0

    @property
    def done(self) -> int:
        """Listed candidates that were evaluated or failed."""
        return sum(candidate < self._size for candidate in (*self.evaluated, *self.failures))

    @property
    def left(self) -> int:
        """Listed candidates that were neither."""
        return self._size - self.done

    @property
    def neighbours(self) -> int:
        """Neighbours that were evaluated or failed."""
        return len(self.evaluated) + len(self.failures) - self.done

    @property
    def refining(self) -> bool:
        """Whether all listed candidates have begun, and neighbours may."""
        return self._refines and self._next >= self._size and self._evaluating

    @property
    def ends_s(self) -> float:
        """The latest time at which to call `passed`."""
        if self._recheck_until_s is not None:
            return self._recheck_until_s
        return self._began_s + self._budget_s - self._reserve_s

    def begin(self) -> Actions:
        """Call this once, before all other events."""
        return self._more(self._began_s)

    def was_evaluated(self, candidate: int, score: Score, now_s: float) -> Actions:
        """Take the score of a candidate's plan; one that was dropped meanwhile is ignored."""
        if not self._ended(candidate, now_s):
            return Actions()
        at_s = now_s - self._began_s
        self.evaluated[candidate] = at_s, score
        top = self._top or score
        self._top = _most(top, score)
        if not self.curve or improves(score, self.curve[-1].score, top):
            self.curve.append(Improvement(at_s=at_s, candidate=candidate, score=score))
        if candidate < self._size:
            self._take_listed(candidate, score)
        return self._more(now_s)

    def _take_listed(self, candidate: int, score: Score) -> None:
        top = self._listed_top or score
        if self._listed_top is None or improves(score, self.evaluated[self._listed][1], top):
            self._listed = candidate
        self._listed_top = _most(top, score)

    def none_left(self, candidate: int, now_s: float) -> Actions:
        """There was no neighbour to draw for it: it is as if it had not begun."""
        self._running.pop(candidate, None)
        self._tried = self.best
        return self._more(now_s) if self._evaluating else Actions()

    def failed(self, candidate: int, reason: str, now_s: float) -> Actions:
        """A candidate has no plan, or its plan could not be evaluated; the others go on."""
        if not self._ended(candidate, now_s):
            return Actions()
        self.failures[candidate] = reason
        return self._more(now_s)

    def passed(self, now_s: float) -> Actions:
        """It is `now_s`; call this at `ends_s`."""
        if now_s < self.ends_s:
            return Actions()
        if self._rechecking:
            self.recheck_failed("the last evaluation took too long")
            return Actions()
        return self._finish(now_s)

    def stop(self, now_s: float) -> Actions:
        """End with the best so far; a second call skips the last evaluation."""
        if self._rechecking:
            self.recheck_failed("it was stopped before the last evaluation")
        return self._finish(now_s)

    def rechecked(self, candidate: int, score: Score) -> None:
        """Take the score on fresh arrivals of one that was to be evaluated again."""
        if not self._rechecking:
            return
        self._fresh[candidate] = score
        if len(self._fresh) == len(self._finalists):
            fresh = {candidate: self._fresh[candidate] for candidate in self._finalists}
            self._end(self._best_by(fresh), fresh, "")

    def recheck_failed(self, reason: str) -> None:
        """The last evaluation failed, or that of one of its plans."""
        if self._rechecking:
            known = (candidate for candidate in self._finalists if candidate in self.evaluated)
            chose = {candidate: self.evaluated[candidate][1] for candidate in known}
            self._end(self._best_by(chose), {}, reason)

    def _best_by(self, scores: Mapping[int, Score]) -> int:
        """The answer among finalists with these scores, which are in their order."""
        answer, *challengers = scores
        for challenger in challengers:
            wins = surely_better if challenger >= self._size else better
            if wins(scores[challenger], scores[answer]):
                answer = challenger
        return answer

    @property
    def _reserve_s(self) -> float:
        """What is kept for the last evaluation."""
        rounds = ceil((3 if self._refines else 2) / self._workers)  # of the most finalists that there may be
        return min(rounds * self._fresh_ratio * self._slowest_s, _RESERVE * self._budget_s)

    @property
    def _finalists(self) -> list[int]:
        """Candidate 0, unless it failed, the best listed one and the best so far, each once."""
        first = [] if 0 in self.failures else [0]
        return list(dict.fromkeys([*first, self._listed, self.best]))

    @property
    def _rechecking(self) -> bool:
        return self._recheck_until_s is not None and self.outcome is None

    @property
    def _evaluating(self) -> bool:
        return self._recheck_until_s is None and self.outcome is None

    def _ended(self, candidate: int, now_s: float) -> bool:
        began_s = self._running.pop(candidate, None)
        if began_s is None or not self._evaluating:
            return False
        self._slowest_s = max(self._slowest_s, now_s - began_s)
        return True

    def _more(self, now_s: float) -> Actions:
        """Fill the workers; when nothing is left, or time is, finish."""
        if now_s >= self.ends_s:
            return self._finish(now_s)
        first = self._next
        while (self._next < self._size or self._may_refine) and len(self._running) < self._workers:
            self._running[self._next] = now_s
            self._next += 1
        if not self._running:
            return self._finish(now_s)
        begun = range(first, self._next)
        return Actions(
            start=tuple(candidate for candidate in begun if candidate < self._size),
            refine=tuple(candidate for candidate in begun if candidate >= self._size),
        )

    @property
    def _may_refine(self) -> bool:
        return self.refining and bool(self.curve) and self._tried != self.best

    def _finish(self, now_s: float) -> Actions:
        if not self._evaluating:
            return Actions()
        drops = tuple(self._running)
        self._running.clear()
        if not self.curve:
            reason = next(iter(self.failures.values()), "")
            self._end(
                0, {}, f"no plan was evaluated: {reason}" if reason else "no plan was evaluated in time"
            )
            return Actions(drop=drops)
        longest_s = max(self._reserve_s, RECHECK_S)
        self._recheck_until_s = max(self._began_s + self._budget_s, now_s + longest_s)
        return Actions(drop=drops, recheck=tuple(sorted(self._finalists)))

    def _end(self, candidate: int, fresh: Mapping[int, Score], unchecked: str) -> None:
        self.outcome = TournamentOutcome(candidate=candidate, fresh=dict(fresh), unchecked=unchecked)


def _most(one: Score, other: Score) -> Score:
    """The one with more throughput."""
    return max(one, other, key=lambda score: score.throughput_per_s)
