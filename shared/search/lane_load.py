"""What becomes of tasks that arrive at lanes: a small simulation, to compare a dozen plans within a second.

A lane runs one step at a time and is never interrupted. A step is a block of a model, of one task or of a
batch of tasks that began together. The task that is due first goes first, one without a deadline by its
patience and its model's turn (`stageloom.shared.engine.patience`); or the one that came first. It is the
engine without its slots: replicas bound how many steps of a model run at a time, and steps that run beside
each other slow each other down by a constant.

Where a model is *express*, there is one lane more for the steps of such models, and for these alone. It has
no core of its own: while all lanes are busy, what they run is interrupted for as long as such a step takes.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final

from stageloom.shared.engine.patience import PATIENCE_S, next_turn_s

BESIDE: Final = 0.1
"""What a step takes longer for each other busy lane, where nothing tells."""

_SAMPLED: Final = 8
"""At every so-manieth arrival the queues are looked at: Poisson arrivals see averages over time."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as lanes see it: seconds of each of its blocks, one after the other, and a task's patience."""

    blocks_s: tuple[float, ...]
    deadline_s: float = math.inf  # from a task's arrival
    weight: float = 1.0  # of its tasks among all
    at_once: int = 1 << 30  # steps of it at a time at most
    batch: int = 1  # tasks of a step at most
    each_more_s: float = 0.0  # of all blocks, for each further task of a batch
    room: int = 1 << 30  # tasks that may wait for their first block; the newest is refused
    express: bool = False  # its steps run in the express lane

    @property
    def total_s(self) -> float:
        """Of one task."""
        return math.fsum(self.blocks_s)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of the tasks, and what an arriving one found.

    `ends_s` [num_arrivals]: when each ended, infinity where it was given up or refused. `waiting_share`: of
    the arrivals that found a task waiting. `oldest_age_s`: the longest that a task waited to begin or to be
    given up. `variance_s2`: of queued work over the models, the mean over time.
    """

    ends_s: list[float]
    waiting_share: float
    oldest_age_s: float
    variance_s2: float


def serve(
    models: Sequence[ServedModel],
    lanes: int,
    arrivals: Sequence[tuple[float, int]],
    *,
    by_deadline: bool = True,
    beside: float = 0.0,
    begin_s: float = -math.inf,
) -> Served:
    """Let tasks arrive: instants in seconds, ascending, each with its model.

    Those that came before `begin_s` wait when it begins. `by_deadline`: what is due first goes first, and
    what can no longer end in time when its turn comes is given up; else the order is that of arrival, and a
    task is given up when its time is over. Each other busy lane adds `beside` of a step's time to it.
    O(tasks * blocks * (models * blocks + log lanes)).
    """
    world = _Lanes(models, lanes, arrivals, by_deadline, beside)
    running, nonempty = world.running, world.nonempty
    task, found_waiting, variance, never = 0, 0, 0.0, math.inf
    count = len(arrivals)
    next_s = max(arrivals[0][0], begin_s) if count else never
    while running or next_s < never:
        if running and running[0][0] <= next_s:
            now = world.end()
        else:
            now = next_s
            if nonempty:
                found_waiting += 1
                if not task % _SAMPLED:
                    variance += world.variance()
            world.arrive(task, arrivals[task][1])
            task += 1
            next_s = max(arrivals[task][0], begin_s) if task < count else never
            if next_s == now and now == begin_s:
                continue  # of what waited from before all is there when the first step begins
        while nonempty and (world.idle or world.express_idle) and (stage := world.chosen()) >= 0:
            world.begin(stage, now)
    looked = -(-count // _SAMPLED)
    return Served(world.ends_s, found_waiting / max(count, 1), world.oldest_s, variance / max(looked, 1))


class _Lanes:
    """Who waits for which step, what runs, and the order of those that wait. A *stage* is a model's block."""

    __slots__ = (
        *("arrivals", "batches", "beside", "by_deadline", "due_s", "ends_s", "express", "express_idle"),
        *("first", "free", "idle", "in_express"),
        *("lanes", "last", "model_of", "more", "nonempty", "oldest_s", "queues", "rank_s"),
        *("rest_s", "rooms", "running", "share", "step_s", "together", "totals_s", "turn_s"),
    )

    def __init__(
        self,
        models: Sequence[ServedModel],
        lanes: int,
        arrivals: Sequence[tuple[float, int]],
        by_deadline: bool,
        beside: float,
    ) -> None:
        self.lanes = self.idle = lanes
        self.arrivals, self.by_deadline, self.beside = arrivals, by_deadline, beside
        self.first = list(accumulate((len(one.blocks_s) for one in models), initial=0))  # stage of a model
        self.last = [end - 1 for end in self.first[1:]]
        self.model_of = [index for index, one in enumerate(models) for _ in one.blocks_s]
        self.step_s = [taken for one in models for taken in one.blocks_s]
        self.rest_s = [rest for one in models for rest in [*accumulate(reversed(one.blocks_s))][::-1]]
        self.totals_s = [one.total_s for one in models]
        self.more = [1.0 if one.total_s <= 0.0 else one.each_more_s / one.total_s for one in models]
        self.free = [one.at_once for one in models]
        self.batches = [one.batch for one in models]
        self.rooms = [one.room for one in models]
        self.share = lanes / max(len(models), 1)  # of the lanes, a model's where all want them
        self.express = [one.express for one in models]
        self.express_idle = any(self.express)
        self.in_express = -1  # the task in the express lane
        self.turn_s = {
            stage: -math.inf
            for stage, one in zip(self.first, models, strict=False)
            if by_deadline and one.deadline_s == math.inf
        }
        wanted_s = [PATIENCE_S if one.deadline_s == math.inf else one.deadline_s for one in models]
        self.due_s = [at + models[model].deadline_s for at, model in arrivals]
        self.rank_s = [at + wanted_s[model] if by_deadline else at for at, model in arrivals]
        self.ends_s = [math.inf] * len(arrivals)
        self.together: dict[int, list[int]] = {}  # by the first task of a batch the others
        self.queues: list[deque[int]] = [deque() for _ in self.step_s]
        self.nonempty: set[int] = set()
        self.running: list[tuple[float, int, int]] = []  # end, task, stage
        self.oldest_s = 0.0

    def arrive(self, task: int, model: int) -> None:
        """A task waits for its first step, or is refused."""
        stage = self.first[model]
        queue = self.queues[stage]
        if len(queue) < self.rooms[model]:
            queue.append(task)
            self.nonempty.add(stage)

    def end(self) -> float:
        """The step that ends first; returns when."""
        now, ended, stage = heappop(self.running)
        if ended == self.in_express:
            self.in_express, self.express_idle = -1, True
        else:
            self.idle += 1
        model = self.model_of[stage]
        self.free[model] += 1
        if stage == self.last[model]:
            self.ends_s[ended] = now
            for other in self.together.pop(ended, ()):
                self.ends_s[other] = now
        else:
            self.queues[stage + 1].append(ended)
            self.nonempty.add(stage + 1)
        return now

    def chosen(self) -> int:
        """The stage whose first task goes next; -1: no model may run another step."""
        found, best, first = -1, math.inf, 0
        turn_s = self.turn_s
        for stage in self.nonempty:
            model = self.model_of[stage]
            if self.free[model] and (self.express_idle if self.express[model] else self.idle):
                head = self.queues[stage][0]
                at = self.rank_s[head]
                if turn_s and turn_s.get(stage, at) > at:
                    at = turn_s[stage]
                if at < best or (at == best and head < first):
                    found, best, first = stage, at, head
        return found

    def begin(self, stage: int, now: float) -> None:
        """Run the first task of a stage, or give it up where it cannot end in time."""
        queue, model = self.queues[stage], self.model_of[stage]
        task = queue.popleft()
        slow = 1.0 + self.beside * (self.lanes - self.idle)
        if stage == self.first[model]:
            if now - self.arrivals[task][0] > self.oldest_s:
                self.oldest_s = now - self.arrivals[task][0]
        if now + (self.rest_s[stage] * slow if self.by_deadline else 0.0) < self.due_s[task]:
            seconds = self.step_s[stage] * slow
            if self.batches[model] > 1:
                seconds *= self._gather(stage, task)
            if stage in self.turn_s:
                self._take_turn(stage, task, now)
            if self.express[model]:
                self._take_express(task, seconds)
            else:
                self.idle -= 1
            heappush(self.running, (now + seconds, task, stage))
            self.free[model] -= 1
        else:
            self.together.pop(task, None)  # what travels with it came later, but is as late
        if not queue:
            self.nonempty.discard(stage)

    def _take_express(self, task: int, seconds: float) -> None:
        """A task goes into the express lane; where no core is idle, all lanes give alike what it takes."""
        self.in_express, self.express_idle = task, False
        if not self.idle:
            later_s = seconds / self.lanes
            self.running[:] = [(end + later_s, other, at) for end, other, at in self.running]  # still a heap

    def _gather(self, stage: int, task: int) -> float:
        """A batch begins with a task at its first step; returns what its step takes over that of one."""
        queue, model = self.queues[stage], self.model_of[stage]
        if stage == self.first[model] and queue:
            others = min(self.batches[model] - 1, len(queue))
            self.together[task] = [queue.popleft() for _ in range(others)]
        return 1.0 + self.more[model] * len(self.together.get(task, ()))

    def _take_turn(self, stage: int, task: int, now: float) -> None:
        """A task without a deadline is launched: it keeps its rank, and its model's turn is over."""
        model, turn_s = self.model_of[stage], self.turn_s[stage]
        self.rank_s[task] = max(self.rank_s[task], turn_s)
        spacing_s = self.rest_s[stage] / self.share
        if self.batches[model] > 1:
            spacing_s *= 1.0 + self.more[model] * len(self.together.get(task, ()))
        self.turn_s[stage] = next_turn_s(turn_s, now, spacing_s, PATIENCE_S)

    def variance(self) -> float:
        """Of queued work over the models, as it is now."""
        work_s = [
            len(self.queues[first]) * total
            for first, total in zip(self.first[:-1], self.totals_s, strict=True)
        ]
        mean = sum(work_s) / len(work_s)
        return sum((one - mean) ** 2 for one in work_s) / len(work_s)
