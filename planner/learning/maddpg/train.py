"""A training from beginning to end: one learner in this process, workers here or in a pool, the run on disk.

A run on disk is one file: a line of JSON (what it is of, the seconds it took), then the course's state. It is
replaced whole or not at all, so a run that is killed while it writes goes on from the validation before.
"""

import json
import os
import secrets
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.learning.maddpg.course import TrainingCourse, TrainingProgress
from stageloom.planner.learning.maddpg.problem import Problem, ScheduleEntry, ScheduleTable
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.work import (
    Evaluate,
    Work,
    WorkResult,
    bound_plan,
    rollout,
    run,
    task_of,
)
from stageloom.planner.tournament.score import Score
from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.decide import BlockKey
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.search.interface import Budget

LOST_MOST: Final = 2
"""Times per worker that work may be lost with nothing done between: more is no accident."""


class Workers(Protocol):
    """Runs work, and returns results in the order in which they come."""

    @property
    def room(self) -> int:
        """Pieces of work that can be given now."""
        ...

    def give(self, work: Work) -> None:
        """Begin a piece of work, or queue it."""
        ...

    def take(self) -> tuple[Work, WorkResult | None]:
        """Wait for a result; None for work whose worker was killed.

        Raises:
            UnavailableError: workers die again and again.
        """
        ...


class LocalWorker:
    """This process, one piece of work after another, with the course's own schedules."""

    def __init__(self, course: TrainingCourse) -> None:
        self._course = course
        self._given: list[Work] = []

    @property
    def room(self) -> int:
        return 1 - len(self._given)

    def give(self, work: Work) -> None:
        self._given.append(work)

    def take(self) -> tuple[Work, WorkResult | None]:
        work, course = self._given.pop(), self._course
        return work, run(course.problem, course.table, course.settings, work)


class PooledWorkers:
    """The processes of a pool, on this machine or on a Ray cluster."""

    def __init__(self, course: TrainingCourse, pool: SearchPool) -> None:
        self._course, self._pool = course, pool
        self._task = task_of(course.problem, course.settings, course.table, secrets.token_hex(8))
        self._given: dict[Future[WorkResult], Work] = {}
        self._lost = 0  # since the last result

    @property
    def room(self) -> int:
        return self._pool.workers - len(self._given)

    def give(self, work: Work) -> None:
        future = self._pool.submit(rollout, self._task, work, self._known(work))
        self._given[future] = work

    def take(self) -> tuple[Work, WorkResult | None]:
        ended, _ = wait(self._given, return_when=FIRST_COMPLETED)
        future = next(one for one in self._given if one in ended)
        work = self._given.pop(future)
        try:
            done = future.result()
        except UnavailableError as error:
            self._lost += 1
            if self._lost > LOST_MOST * self._pool.workers:
                raise UnavailableError(
                    f"the training's workers end again and again: {error}",
                    remedy="find what kills them (memory?), use fewer workers, ask for the training again",
                ) from error
            return work, None
        self._lost = 0
        return work, done

    def _known(self, work: Work) -> Mapping[BlockKey, ScheduleEntry]:
        """The best known schedules of the plan that is to be evaluated."""
        if not isinstance(work, Evaluate) or work.weights is not None:
            return {}
        course = self._course
        problem, table = course.problem, course.table
        combination = combine_blocks(problem.space, work.row[problem.space.num_models :])
        keys = (table.blocks.key(members) for members in combination.combined)
        return {key: table.entries[key] for key in keys if key in table.entries}


BOOK = 4096
"""Schedules that a policy takes along: those that were needed most."""

_THOROUGH = Budget(expansions=5_000)
_EVALUATIONS, _LEAST_EVALUATIONS = 16, 4
_LAST_EVALUATIONS = 9  # as long as so many others: four of twice the seeds, and the last searches


@dataclass(frozen=True, kw_only=True)
class MaddpgResult:
    """What a training leaves."""

    checkpoint: bytes  # the best policy with its schedules
    plan: Plan  # the best plan that was met
    plan_worth: Score  # on arrivals that chose neither it nor the policy
    policy_worth: Score  # the same of the policy alone
    rivals_worth: Mapping[str, Score]  # the same of every block alone and the best rival, by the seeds' names
    history: tuple[TrainingProgress, ...]
    transitions: int
    updates: int
    train_s: float  # with those of earlier runs
    ended: str  # "done", "time", "interrupted"


def train(
    problem: Problem,
    settings: MaddpgSettings,
    seed: int,
    *,
    clock: Callable[[], float],
    budget_s: float | None = None,
    on_progress: Callable[[TrainingProgress], None] = lambda progress: None,
    state: bytes | None = None,
    spent_s: float = 0.0,
    save: Callable[[bytes], None] = lambda state: None,
    pool: SearchPool | None = None,
    on_result: Callable[[TrainingCourse], None] = lambda course: None,
) -> MaddpgResult:
    """Train to the end, or for about `budget_s` by `clock`, or until Ctrl-C; the best so far counts.

    `state` is what `save` was given after a validation of an earlier run: that run goes on. It took
    `spent_s`, which are within the budget, too. Episodes and evaluations run on the workers of `pool`, or
    here, one after another; `on_result` is called after each. Here, or with one worker, equal seeds give
    equal results within the budget on the same machine, interrupted or not.

    Raises:
        DecodeError: `state` is none, or of another problem.
        UnavailableError: the pool's workers die again and again.
    """
    torch.set_num_threads(1)  # seeds side by side gain more than threads inside one
    began_s = clock() - spent_s
    course = (
        TrainingCourse(problem, settings, seed) if state is None else TrainingCourse.restored(problem, state)
    )
    workers: Workers = LocalWorker(course) if pool is None else PooledWorkers(course, pool)
    ended, polished = "done", False
    given_s: dict[int, float] = {}
    took_s: deque[float] = deque(maxlen=_EVALUATIONS)
    while not course.done:
        try:
            while workers.room and (work := course.next_work()) is not None:
                if course.settled and not polished and course.candidates.best is not None:
                    polish(problem, course.table, course.candidates.best[0])
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
            on_result(course)
            if progress is not None:
                on_progress(progress)
                if not course.stopped:  # else the next run, which may have more time, would be over, too
                    save(course.state())
        except KeyboardInterrupt:
            if ended == "interrupted":
                raise  # a second time, during the last evaluation of the best so far
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
        found = table.searched(block.members, (table.scheduler,), _THOROUGH)
        table.put({table.blocks.key(block.members): found})


def _trained(course: TrainingCourse, train_s: float, ended: str) -> MaddpgResult:
    best = course.candidates.best
    plan_worth, policy_worth = course.plan_worth, course.policy_worth
    assert best is not None and plan_worth is not None and policy_worth is not None
    problem, table = course.problem, course.table
    provenance = provenance_of(course, ended)
    network = MaddpgNetwork(course.policy_weights, problem.space.agents)
    book = table.book(table.most_used(BOOK))
    return MaddpgResult(
        checkpoint=encode(MaddpgCheckpoint(problem.space, network, book, provenance)),
        plan=bound_plan(problem, table, best[0]).plan,
        plan_worth=plan_worth,
        policy_worth=policy_worth,
        rivals_worth=course.rivals_worth,
        history=tuple(course.history),
        transitions=course.transitions,
        updates=course.learner.updates,
        train_s=train_s,
        ended=ended,
    )


def provenance_of(course: TrainingCourse, ended: str) -> dict[str, Any]:
    """The provenance of a checkpoint, as JSON takes it."""
    problem = course.problem
    return {
        "settings": course.settings.plain(),
        "seed": course.seed,
        "models": {model.name: model.artifact for model in problem.template.models},
        "template": b64encode(problem.template.wire).decode(),
        "graphs": {artifact: graph.digest for artifact, graph in problem.graphs.items()},
        "arrivals_per_s": list(problem.arrivals_per_s),
        "transitions": course.transitions,
        "updates": course.learner.updates,
        "policy": None if course.policy_worth is None else course.policy_worth.plain(),
        "rivals": {name: worth.plain() for name, worth in course.rivals_worth.items()},
        "best_plan": None if course.plan_worth is None else course.plan_worth.plain(),
        "ended": ended,
        "versions": {"torch": torch.__version__.split("+")[0], "numpy": np.__version__},
    }


FILE: Final = "maddpg.run"
_REMEDY: Final = "delete it"


def save_run(folder: Path, about: Mapping[str, Any], spent_s: float, state: bytes) -> None:
    """Keep a run that took `spent_s` so far; `about` is what it is of, as JSON takes it.

    Raises:
        OSError: it cannot be written.
    """
    head = json.dumps({"about": about, "spent_s": spent_s})
    part = folder / (FILE + ".part")
    with part.open("wb") as file:
        file.write(head.encode() + b"\n" + state)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / FILE)


def load_run(folder: Path, about: Mapping[str, Any]) -> tuple[float, bytes] | None:
    """Seconds and state of the run that is kept there; None where there is none.

    Raises:
        InputError: it is a run of something else, or none at all.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            head, state = json.loads(file.readline()), file.read()
        found, spent_s = head["about"], float(head["spent_s"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is no training run: {str(error)[:120]}", remedy=_REMEDY) from error
    wanted = json.loads(json.dumps(about))
    if found != wanted:
        names = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
        raise InputError(f"{path} is a run with other {', '.join(names) or 'settings'}", remedy=_REMEDY)
    return spent_s, state
