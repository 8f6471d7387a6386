"""Who does a training's work: this process, or rollout actors of a pool, with one learner here."""

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final, Protocol

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.learning.maddpg.course import Course
from stageloom.planner.learning.maddpg.rollout import rollout, task_of
from stageloom.planner.learning.maddpg.schedules import Entry
from stageloom.planner.learning.maddpg.work import Done, Evaluate, Work, run
from stageloom.shared.errors import UnavailableError
from stageloom.shared.policy.maddpg.book import BlockKey
from stageloom.shared.policy.maddpg.decide import read_actions

LOST_MOST: Final = 2
"""Times per worker that work may be lost with nothing done between: more is no accident."""


class Workers(Protocol):
    """Takes as much work as there is room for, and hands back results in the order in which they come."""

    @property
    def room(self) -> int:
        """Pieces of work that can be given now."""
        ...

    def give(self, work: Work) -> None:
        """Begin, or remember to begin."""
        ...

    def take(self) -> tuple[Work, Done | None]:
        """Wait for a result; None for work whose worker was killed.

        Raises:
            UnavailableError: workers die again and again.
        """
        ...


class Here:
    """This process, one piece of work after another, with the course's own schedules."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._given: list[Work] = []

    @property
    def room(self) -> int:
        """See `Workers`."""
        return 1 - len(self._given)

    def give(self, work: Work) -> None:
        """See `Workers`."""
        self._given.append(work)

    def take(self) -> tuple[Work, Done | None]:
        """See `Workers`."""
        work, course = self._given.pop(), self._course
        return work, run(course.problem, course.table, course.settings, work)


class Actors:
    """The processes of a pool, on this machine or on Ray's."""

    def __init__(self, course: Course, pool: SearchPool) -> None:
        self._course, self._pool = course, pool
        self._task = task_of(course.problem, course.settings, course.table)
        self._given: dict[Future[Done], Work] = {}
        self._lost = 0  # since the last result

    @property
    def room(self) -> int:
        """See `Workers`."""
        return self._pool.workers - len(self._given)

    def give(self, work: Work) -> None:
        """See `Workers`."""
        future = self._pool.submit(rollout, self._task, work, self._known(work))
        self._given[future] = work

    def take(self) -> tuple[Work, Done | None]:
        """See `Workers`."""
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
                    remedy="find what kills them (memory?), use fewer --workers, give the command again",
                ) from error
            return work, None
        self._lost = 0
        return work, done

    def _known(self, work: Work) -> Mapping[BlockKey, Entry]:
        """Schedules of the plan that is to be evaluated, as good as anyone found them."""
        if not isinstance(work, Evaluate) or work.weights is not None:
            return {}
        course = self._course
        problem, table = course.problem, course.table
        decision = read_actions(problem.space, work.row, problem.loads, problem.template.lanes)
        keys = (table.blocks.key(members) for members in decision.combination.combined)
        return {key: table.entries[key] for key in keys if key in table.entries}
