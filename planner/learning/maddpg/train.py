"""A training in this process, from beginning to end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from planner.learning.maddpg.course import Course, Progress
from planner.learning.maddpg.environment import bound_plan
from planner.learning.maddpg.problem import Problem
from planner.learning.maddpg.schedules import ScheduleTable
from planner.learning.maddpg.settings import Settings
from planner.learning.maddpg.work import Evaluate, Row, run
from shared.plan import Plan
from shared.policy.maddpg.checkpoint import Checkpoint, encode
from shared.policy.maddpg.network import MaddpgNetwork
from shared.search.beam import beam
from shared.search.interface import Budget

BOOK = 4096
"""Schedules that a policy takes along: those that were needed most."""

_THOROUGH = Budget(expansions=5_000)
_LAST_EVALUATIONS = 5  # as long as so many others: two of twice the seeds, and the last searches


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training leaves."""

    checkpoint: bytes  # the best policy with its schedules
    plan: Plan  # the best plan that was met
    plan_row: Row  # on arrivals that chose neither it nor the policy
    policy_row: Row  # the same of the policy alone
    history: tuple[Progress, ...]
    transitions: int
    updates: int
    train_s: float
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
    save: Callable[[bytes], None] = lambda state: None,
) -> Trained:
    """Train to the end, or for about `budget_s` by `clock`, or until Ctrl-C; the best so far counts.

    `state` is what `save` was given after a validation of an earlier run: that run goes on. Within the budget
    equal seeds give equal results on the same machine, interrupted or not.

    Raises:
        DecodeError: `state` is none, or of another problem.
    """
    torch.set_num_threads(1)  # seeds side by side gain more than threads inside one
    began_s = clock()
    course = Course(problem, settings, seed) if state is None else Course.restored(problem, state)
    table = course.table
    ended, longest_s, polished = "done", 0.0, False
    while not course.done:
        try:
            work = course.next_work()
            assert work is not None, "one worker is never kept waiting"
            work_began_s = clock()
            progress = course.take(work, run(problem, table, settings, work))
            if isinstance(work, Evaluate):
                longest_s = max(longest_s, clock() - work_began_s)
            if progress is not None:
                on_progress(progress)
                save(course.state())
        except KeyboardInterrupt:
            if course.stopped:
                raise  # a second time, while the best so far is looked at for the last time
            ended = "interrupted"
            course.abandon()
            course.stop()
        left_s = float("inf") if budget_s is None else began_s + budget_s - clock()
        if left_s < _LAST_EVALUATIONS * longest_s and not course.stopped:
            ended = "time"
            course.stop()
        if course.stopped and not polished and course.candidates.best is not None:
            polish(problem, table, course.candidates.best.actions)
            polished = True
    return _trained(course, clock() - began_s, ended)


def polish(problem: Problem, table: ScheduleTable, actions: tuple[float, ...]) -> None:
    """Search longer for the schedules of one plan."""
    for block in bound_plan(problem, table, actions).plan.combined:
        table.put({table.blocks.key(block.members): table.searched(block.members, (beam,), _THOROUGH)})


def _trained(course: Course, train_s: float, ended: str) -> Trained:
    best = course.candidates.best
    plan_row, policy_row = course.plan_row, course.policy_row
    assert best is not None and plan_row is not None and policy_row is not None
    problem, table = course.problem, course.table
    provenance = provenance_of(course, ended)
    network = MaddpgNetwork(course.policy_weights, problem.space.agents)
    book = table.book(table.most_used(BOOK))
    return Trained(
        checkpoint=encode(Checkpoint(problem.space, network, book, provenance)),
        plan=bound_plan(problem, table, best.actions).plan,
        plan_row=plan_row,
        policy_row=policy_row,
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
        "arrivals_per_s": list(problem.arrivals_per_s),
        "transitions": course.transitions,
        "updates": course.learner.updates,
        "policy": None if course.policy_row is None else course.policy_row.plain(),
        "best_plan": None if course.plan_row is None else course.plan_row.plain(),
        "ended": ended,
        "versions": {"torch": torch.__version__.split("+")[0], "numpy": np.__version__},
    }
