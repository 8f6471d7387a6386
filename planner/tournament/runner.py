"""Drives a tournament with a pool of workers and the clock."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.cluster.packed import Packed
from stageloom.planner.tournament.candidates import PlanCandidate
from stageloom.planner.tournament.evaluator import (
    EvaluationSettings,
    Scenario,
    evaluate_again,
    evaluate_candidate,
)
from stageloom.planner.tournament.refinement import NeighbourJob, Refinement
from stageloom.planner.tournament.score import Score
from stageloom.planner.tournament.tournament import (
    Actions,
    Tournament,
    TournamentOutcome,
)
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError
from stageloom.shared.plan import Plan
from stageloom.shared.search.job import SearchJob

CHOICE: Final = EvaluationSettings(seeds=(1_000_001, 1_000_002, 1_000_003))
"""Arrivals by which plans are chosen."""

FRESH: Final = EvaluationSettings(seeds=(2_000_001, 2_000_002, 2_000_003, 2_000_004, 2_000_005))
"""Arrivals of the last evaluation."""


class _Stop:
    """The operator wants the best so far."""


class _Rechecked(NamedTuple):
    """The last evaluation of a candidate has ended."""

    candidate: int
    future: Future[Score]


class _Ended(NamedTuple):
    """The search and evaluation of a candidate have ended."""

    candidate: int
    future: "Future[_Evaluated]"


_Evaluated: TypeAlias = tuple[Plan, Score, float]
_Event: TypeAlias = _Stop | _Ended | _Rechecked


@dataclass(frozen=True, kw_only=True)
class TournamentResult:
    """A tournament that has ended.

    `candidates`: the listed ones, and neighbours that were the best so far or failed. `plans` and `search_s`:
    of those of them that were evaluated; `plans` has that of candidate 0 in any case.
    """

    tournament: Tournament
    outcome: TournamentOutcome
    candidates: dict[int, PlanCandidate]
    plans: dict[int, Plan]
    search_s: dict[int, float]


class TournamentProgress(NamedTuple):
    """How far a tournament is; `score` is None until a candidate was evaluated.

    `done` of the `size` listed candidates, then `neighbours`, None before these may begin.
    """

    done: int
    size: int
    best: str
    score: Score | None
    neighbours: int | None = None


class TournamentRun:
    """One tournament; all but `stop` happens on the thread of `to_end`."""

    def __init__(
        self,
        candidates: Sequence[PlanCandidate],
        first: Plan,
        scenario: Scenario,
        pool: SearchPool,
        clock: Clock,
        *,
        budget_s: float,
        refinement: Refinement | None = None,
        choice: EvaluationSettings = CHOICE,
        fresh: EvaluationSettings = FRESH,
        watch: Callable[[TournamentProgress], None] = lambda progress: None,
    ) -> None:
        """`first` is the plan of candidate 0; `watch` is told of every change.

        `refinement` draws neighbours of the best once all candidates have begun; None: there are none.
        `choice` and `fresh`: the arrivals that choose, and those of the last evaluation.
        """
        self._watch, self._refinement, self._choice, self._fresh = watch, refinement, choice, fresh
        self._scenario, self._pool, self._clock = Packed.of(scenario), pool, clock
        self._candidates, self._size = dict(enumerate(candidates)), len(candidates)
        self._drawn: dict[int, NeighbourJob] = {}  # that are being evaluated
        self._began_s = clock.monotonic_s()
        self._tournament = Tournament(
            len(candidates),
            budget_s=budget_s,
            workers=pool.workers,
            began_s=self._began_s,
            refines=refinement is not None,
            fresh_ratio=fresh.simulated_s / choice.simulated_s,
        )
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._futures: dict[int, Future[_Evaluated]] = {}
        self._last: list[Future[Score]] = []
        self._plans = {0: first}
        self._search_s: dict[int, float] = {}

    def to_end(self) -> TournamentResult:
        """Run it."""
        tournament = self._tournament
        actions = tournament.begin()
        while True:
            self._execute(actions)
            self._watch(self._progress())
            if (outcome := tournament.outcome) is not None:
                break
            try:
                event = self._events.get(timeout=max(tournament.ends_s - self._clock.monotonic_s(), 0.0))
            except queue.Empty:
                actions = tournament.passed(self._clock.monotonic_s())
            else:
                actions = self._handle(event, self._clock.monotonic_s())
        for future in self._last:
            future.cancel()
        return TournamentResult(
            tournament=tournament,
            outcome=outcome,
            candidates=self._candidates,
            plans=self._plans,
            search_s=self._search_s,
        )

    def stop(self) -> None:
        """End it with its best so far; from any thread."""
        self._events.put(_Stop())

    def _progress(self) -> TournamentProgress:
        tournament, curve = self._tournament, self._tournament.curve
        score = curve[-1].score if curve else None
        best = self._candidates[tournament.best].name if score else ""
        neighbours = tournament.neighbours if tournament.refining else None
        return TournamentProgress(tournament.done, self._size, best, score, neighbours)

    def _execute(self, actions: Actions) -> None:
        for candidate in actions.drop:
            if future := self._futures.pop(candidate, None):  # none where nothing was drawn yet
                future.cancel()
        for candidate in actions.start:
            wanted = self._candidates[candidate]
            self._submit(candidate, wanted.job if wanted.ready is None else wanted.ready)
        for candidate in actions.refine:
            self._refine(candidate)
        for candidate in actions.recheck:
            again = self._pool.submit(evaluate_again, self._plans[candidate], self._scenario, self._fresh)
            self._last.append(again)
            again.add_done_callback(partial(self._rechecked, candidate))

    def _submit(self, candidate: int, job: SearchJob | NeighbourJob | Plan) -> None:
        future = self._pool.submit(evaluate_candidate, job, self._scenario, self._choice)
        self._futures[candidate] = future
        future.add_done_callback(partial(self._ended, candidate))

    def _refine(self, candidate: int) -> None:
        """Draw a neighbour of the best so far, and have it evaluated."""
        best = self._tournament.best
        drawn = None if self._refinement is None else self._refinement.draw(self._plans[best])
        if drawn is None:
            self._execute(self._tournament.none_left(candidate, self._clock.monotonic_s()))
            return
        number = candidate - self._size + 1
        self._candidates[candidate] = self._candidates[best].neighbour(drawn.move, number)
        self._drawn[candidate] = drawn.job
        self._submit(candidate, drawn.job)

    def _ended(self, candidate: int, future: "Future[_Evaluated]") -> None:
        self._events.put(_Ended(candidate, future))

    def _rechecked(self, candidate: int, future: "Future[Score]") -> None:
        self._events.put(_Rechecked(candidate, future))

    def _handle(self, event: _Event, now_s: float) -> Actions:
        if isinstance(event, _Stop):
            return self._tournament.stop(now_s)
        if isinstance(event, _Rechecked):
            if reason := _failure(event.future):
                self._tournament.recheck_failed(reason)
            else:
                self._tournament.rechecked(event.candidate, event.future.result())
            return Actions()
        candidate, future = event
        if self._futures.pop(candidate, None) is None:  # it was dropped
            return Actions()
        job = self._drawn.pop(candidate, None)
        if reason := _failure(future):
            return self._tournament.failed(candidate, reason, now_s)
        plan, score, search_s = future.result()
        if job is not None and self._refinement is not None:
            self._refinement.keep(job, plan)
        self._plans[candidate], self._search_s[candidate] = plan, search_s
        actions = self._tournament.was_evaluated(candidate, score, now_s)
        if job is not None and self._tournament.best != candidate:  # hundreds of plans that nobody asks for
            del self._plans[candidate], self._search_s[candidate], self._candidates[candidate]
        return actions


def _failure(future: "Future[_Evaluated] | Future[Score]") -> str:
    """Why there is no result; empty where there is one."""
    if future.cancelled():
        return "it was cancelled"
    error = future.exception()
    if error is None:
        return ""
    return (str(error) if isinstance(error, StageloomError) else f"{type(error).__name__}: {error}")[:512]
