"""A training from beginning to end, with one learner in this process."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.learning.maddpg.course import Course, Progress
from stageloom.planner.learning.maddpg.environment import bound_plan
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.schedules import ScheduleTable
from stageloom.planner.learning.maddpg.settings import Settings
from stageloom.planner.learning.maddpg.work import Evaluate
from stageloom.planner.learning.maddpg.workers import Actors, Here, Workers
from stageloom.planner.tournament.score import Score
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.checkpoint import Checkpoint, encode
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.search.beam import beam
from stageloom.shared.search.interface import Budget

BOOK = 4096
"""Schedules that a policy takes along: those that were needed most."""

_THOROUGH = Budget(expansions=5_000)
_EVALUATIONS, _LEAST_EVALUATIONS = 16, 4
_LAST_EVALUATIONS = 5  # as long as so many others: two of twice the seeds, and the last searches


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training leaves."""

    checkpoint: bytes  # the best policy with its schedules
    plan: Plan  # the best plan that was met
    plan_worth: Score  # on arrivals that chose neither it nor the policy
    policy_worth: Score  # the same of the policy alone
    seeds_worth: Mapping[str, Score]  # of the rivals' plans, by the seeds' names, on the arrivals that chose
    history: tuple[Progress, ...]
    transitions: int
    updates: int
    train_s: float  # with those of earlier runs
    ended: str  # "done", "time", "interrupted"


def train(
    problem: Problem,
    settings: Settings,
    seed: int,
    *,
    clock: Callable[[], float],
    budget_s: float | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    state: bytes | None = None,
    spent_s: float = 0.0,
    save: Callable[[bytes], None] = lambda state: None,
    pool: SearchPool | None = None,
    told: Callable[[Course], None] = lambda course: None,
) -> Trained:
    """Train to the end, or for about `budget_s` by `clock`, or until Ctrl-C; the best so far counts.

    `state` is what `save` was given after a validation of an earlier run: that run goes on. It took
    `spent_s`, which are within the budget, too. Episodes and evaluations run on the workers of `pool`, or
    here, one after another; `told` is called after each. Here, or with one worker, equal seeds give equal
    results within the budget on the same machine, interrupted or not.

    Raises:
        DecodeError: `state` is none, or of another problem.
        UnavailableError: the pool's workers die again and again.
    """
    torch.set_num_threads(1)  # seeds side by side gain more than threads inside one
    began_s = clock() - spent_s
    course = Course(problem, settings, seed) if state is None else Course.restored(problem, state)
    workers: Workers = Here(course) if pool is None else Actors(course, pool)
    ended, polished = "done", False
    given_s: dict[int, float] = {}
    took_s: deque[float] = deque(maxlen=_EVALUATIONS)
    while not course.done:
        try:
            while workers.room and (work := course.next_work()) is not None:
                if course.settled and not polished and course.candidates.best is not None:
                    polish(problem, course.table, course.candidates.best.actions)
                    polished = True
                given_s[work.number] = clock()
                workers.give(work)
            work, done = workers.take()
            if done is None:
                course.lost(work)
                continue
            progress = course.take(work, done)
            if isinstance(work, Evaluate):
                took_s.append(clock() - given_s[work.number])
            told(course)
            if progress is not None:
                on_progress(progress)
                if not course.stopped:  # else the next run, which may have more time, would be over, too
                    save(course.state())
        except KeyboardInterrupt:
            if ended == "interrupted":
                raise  # a second time, while the best so far is looked at for the last time
            ended = "interrupted"
            course.abandon()
            course.stop()
        left_s = float("inf") if budget_s is None else began_s + budget_s - clock()
        if left_s < _LAST_EVALUATIONS * _usual(took_s) and not course.stopped:
            ended = "time"
            course.stop()
    return _trained(course, clock() - began_s, ended)


def _usual(took_s: Sequence[float]) -> float:
    """What an evaluation takes; a worker's first, which starts a process and compiles, is not usual."""
    return sorted(took_s)[len(took_s) // 4] if len(took_s) >= _LEAST_EVALUATIONS else 0.0


def polish(problem: Problem, table: ScheduleTable, actions: tuple[float, ...]) -> None:
    """Search longer for the schedules of one plan."""
    for block in bound_plan(problem, table, actions).plan.combined:
        table.put({table.blocks.key(block.members): table.searched(block.members, (beam,), _THOROUGH)})


def _trained(course: Course, train_s: float, ended: str) -> Trained:
    best = course.candidates.best
    plan_worth, policy_worth = course.plan_worth, course.policy_worth
    assert best is not None and plan_worth is not None and policy_worth is not None
    problem, table = course.problem, course.table
    provenance = provenance_of(course, ended)
    network = MaddpgNetwork(course.policy_weights, problem.space.agents)
    book = table.book(table.most_used(BOOK))
    return Trained(
        checkpoint=encode(Checkpoint(problem.space, network, book, provenance)),
        plan=bound_plan(problem, table, best.actions).plan,
        plan_worth=plan_worth,
        policy_worth=policy_worth,
        seeds_worth=course.seeds_worth,
        history=tuple(course.history),
        transitions=course.transitions,
        updates=course.learner.updates,
        train_s=train_s,
        ended=ended,
    )


def provenance_of(course: Course, ended: str) -> dict[str, Any]:
    """What a checkpoint says of where it comes from."""
    problem = course.problem
    return {
        "settings": course.settings.plain(),
        "seed": course.seed,
        "models": {model.name: model.artifact for model in problem.template.models},
        "graphs": {artifact: graph.digest for artifact, graph in problem.graphs.items()},
        "arrivals_per_s": list(problem.arrivals_per_s),
        "transitions": course.transitions,
        "updates": course.learner.updates,
        "policy": None if course.policy_worth is None else course.policy_worth.plain(),
        "rivals": {name: worth.plain() for name, worth in course.seeds_worth.items()},
        "best_plan": None if course.plan_worth is None else course.plan_worth.plain(),
        "ended": ended,
        "versions": {"torch": torch.__version__.split("+")[0], "numpy": np.__version__},
    }
