"""Contests that an operator waits for: the pure contest, driven by the pool's futures and the clock."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.contest.contest import Action, Contest, Drop, Judge, Outcome
from stageloom.planner.contest.entrants import Entrant
from stageloom.planner.contest.judge import Course
from stageloom.planner.contest.task import Entered, Scene, enter, judge_again
from stageloom.planner.contest.worth import Worth
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError
from stageloom.shared.messages.admin import PlanProgressReply
from stageloom.shared.plan import Plan

CHOICE: Final = Course(seeds=(1_000_001, 1_000_002, 1_000_003))
"""Arrivals by which plans are chosen,"""

FRESH: Final = Course(seeds=(2_000_001, 2_000_002, 2_000_003, 2_000_004, 2_000_005))
"""and those by which what was chosen is judged again."""


class _Stop:
    """The operator wants the best so far."""


_Event: TypeAlias = _Stop | tuple[int, Future[Entered]] | Future[dict[int, Worth]]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A contest that has ended. `plans`: of the entrants that were judged, and of entrant 0."""

    contest: Contest
    outcome: Outcome
    plans: dict[int, Plan]
    search_s: dict[int, float]


class Contests:
    """What is held now, by ticket. May be called from several threads at once."""

    def __init__(self, pool: SearchPool, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self._lock = threading.Lock()
        self._held: dict[int, _Shell] = {}

    def hold(
        self, entrants: Sequence[Entrant], first: Plan, scene: Scene, *, budget_s: float, ticket: int = 0
    ) -> Held:
        """Hold one to its end; `first` is the plan of entrant 0."""
        shell = _Shell(entrants, first, scene, self._pool, self._clock, budget_s)
        if ticket:
            with self._lock:
                self._held[ticket] = shell
        try:
            return shell.run()
        finally:
            with self._lock:
                self._held.pop(ticket, None)

    def stop(self, ticket: int) -> bool:
        """End one with its best so far; whether there is one."""
        with self._lock:
            shell = self._held.get(ticket)
        if shell is not None:
            shell.stop()
        return shell is not None

    def progress(self, ticket: int) -> PlanProgressReply:
        """How far one is."""
        with self._lock:
            shell = self._held.get(ticket)
        return PlanProgressReply() if shell is None else shell.progress()


class _Shell:
    """One contest; all but `stop` and `progress` happens on the thread of `run`."""

    def __init__(
        self,
        entrants: Sequence[Entrant],
        first: Plan,
        scene: Scene,
        pool: SearchPool,
        clock: Clock,
        budget_s: float,
    ) -> None:
        self._entrants, self._scene, self._pool, self._clock = entrants, scene, pool, clock
        self._began_s = clock.monotonic_s()
        self._contest = Contest(len(entrants), budget_s=budget_s, workers=pool.workers, began_s=self._began_s)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._futures: dict[int, Future[Entered]] = {}
        self._last: Future[dict[int, Worth]] | None = None
        self._plans = {0: first}
        self._search_s: dict[int, float] = {}

    def run(self) -> Held:
        """Until it has an outcome."""
        contest = self._contest
        actions = contest.begin()
        while True:
            for action in actions:
                self._do(action)
            if contest.outcome is not None:
                break
            try:
                event = self._events.get(timeout=max(contest.ends_s - self._clock.monotonic_s(), 0.0))
            except queue.Empty:
                actions = contest.passed(self._clock.monotonic_s())
            else:
                actions = self._took(event, self._clock.monotonic_s())
        if self._last is not None:
            self._last.cancel()
        return Held(contest=contest, outcome=contest.outcome, plans=self._plans, search_s=self._search_s)

    def stop(self) -> None:
        """From any thread."""
        self._events.put(_Stop())

    def progress(self) -> PlanProgressReply:
        """From any thread: a curve only grows."""
        contest, curve = self._contest, self._contest.curve
        worth = curve[-1].worth if curve else None
        return PlanProgressReply(
            done=contest.done,
            size=len(self._entrants),
            elapsed_s=self._clock.monotonic_s() - self._began_s,
            best=self._entrants[contest.best].name if worth else "",
            throughput_per_s=worth.throughput_per_s if worth else 0.0,
            p99_s=worth.p99_s if worth else 0.0,
        )

    def _do(self, action: Action) -> None:
        if isinstance(action, Judge):
            entrant = action.entrant
            future = self._pool.submit(enter, self._entrants[entrant].job, self._scene, CHOICE)
            self._futures[entrant] = future
            future.add_done_callback(lambda done: self._events.put((entrant, done)))
        elif isinstance(action, Drop):
            self._futures.pop(action.entrant).cancel()
        else:
            plans = {entrant: self._plans[entrant] for entrant in action.entrants}
            self._last = self._pool.submit(judge_again, plans, self._scene, FRESH)
            self._last.add_done_callback(self._events.put)

    def _took(self, event: _Event, now_s: float) -> list[Action]:
        if isinstance(event, _Stop):
            return self._contest.stop(now_s)
        if isinstance(event, Future):
            if event.cancelled() or event.exception() is not None:
                self._contest.recheck_failed(_reason(event))
            else:
                self._contest.rechecked(event.result())
            return []
        entrant, future = event
        if self._futures.pop(entrant, None) is None:  # it was dropped
            return []
        if future.cancelled() or future.exception() is not None:
            return self._contest.failed(entrant, _reason(future), now_s)
        entered = future.result()
        self._plans[entrant], self._search_s[entrant] = entered.plan, entered.search_s
        return self._contest.was_judged(entrant, entered.worth, now_s)


def _reason(future: "Future[Entered] | Future[dict[int, Worth]]") -> str:
    """Why there is no result."""
    if future.cancelled():
        return "it was cancelled"
    error = future.exception()
    if isinstance(error, StageloomError):
        return str(error)[:512]
    return f"{type(error).__name__}: {error}"[:512]
