"""What a rollout actor runs, in a process of its own: no torch, and nothing is kept that could not be lost.

An actor keeps its problem, and its schedules with it, from one piece of work to the next. One that is new to
the training (a worker that took another's place) begins with those that there were when the run began.
"""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.schedules import Entry, ScheduleTable
from stageloom.planner.learning.maddpg.settings import Settings
from stageloom.planner.learning.maddpg.work import Done, Work, run
from stageloom.shared.policy.maddpg.book import BlockKey


def task_of(problem: Problem, settings: Settings, table: ScheduleTable) -> bytes:
    """What all work of a run has in common; equal bytes find the problem that an actor has kept.

    `table` is where its own begins: a run that goes on goes on with the schedules that it had.
    """
    return pickle.dumps((problem, settings, table.saved()))


def rollout(task: bytes, work: Work, schedules: Mapping[BlockKey, Entry]) -> Done:
    """Do it; `schedules` are some that the learner has found or was told of."""
    problem, settings, table = _kept(task)
    table.put(schedules)
    return replace(run(problem, table, settings, work), asked=table.taken_asked())


@lru_cache(maxsize=1)
def _kept(task: bytes) -> tuple[Problem, Settings, ScheduleTable]:
    # From the learner, which started this process or joined its Ray.
    problem, settings, saved = pickle.loads(task)
    table = problem.table()
    table.restore(saved)
    table.taken_asked()  # the learner knows
    return problem, settings, table
