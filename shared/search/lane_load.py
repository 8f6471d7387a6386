"""What becomes of tasks that arrive at lanes: a small simulation, to compare a dozen plans within a second.

A lane runs one step at a time and is never interrupted. A step is a block of a model, of one task or of a
batch of tasks that began together. The task that is due first goes first, or the one that came first. It is
the engine without its slots: replicas bound how many steps of a model run at a time, and steps that run
beside each other slow each other down by a constant.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final

_SAMPLED: Final = 8
"""At every so-manieth arrival the queues are looked at: Poisson arrivals see averages over time."""

_LATER_S: Final = 1e9
"""Tasks without a deadline go after those with one, in the order in which they came."""


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

    Those that came before `begin_s` wait when it begins. `by_deadline`: the earliest deadline goes first, and
    what can no longer end in time when its turn comes is given up; else the order is that of arrival, and a
    task is given up when its time is over. Each other busy lane adds `beside` of a step's time to it.
    O(tasks * blocks * (models * blocks + log lanes)).
    """
    first = list(accumulate((len(one.blocks_s) for one in models), initial=0))
    model_of = [index for index, one in enumerate(models) for _ in one.blocks_s]
    step_s = [taken for one in models for taken in one.blocks_s]
    rest_s = [rest for one in models for rest in list(accumulate(reversed(one.blocks_s)))[::-1]]
    last = [begin + len(one.blocks_s) - 1 for begin, one in zip(first, models, strict=False)]
    more = [1.0 if one.total_s <= 0.0 else one.each_more_s / one.total_s for one in models]
    patience = [one.deadline_s for one in models]
    free = [one.at_once for one in models]
    batches = [one.batch for one in models]
    rooms = [one.room for one in models]
    totals = [one.total_s for one in models]
    due = [at + patience[model] for at, model in arrivals]
    rank = [
        end if by_deadline and end < math.inf else _LATER_S * by_deadline + at
        for end, (at, _) in zip(due, arrivals, strict=True)
    ]
    ends = [math.inf] * len(arrivals)
    together: dict[int, list[int]] = {}  # by the first task of a batch the others
    queues: list[deque[int]] = [deque() for _ in step_s]
    nonempty: set[int] = set()
    running: list[tuple[float, int, int]] = []  # end, task, stage
    idle, task, found_waiting, looked, oldest_s, variance = lanes, 0, 0, 0, 0.0, 0.0
    count, never = len(arrivals), math.inf
    next_s = max(arrivals[0][0], begin_s) if count else never
    while running or next_s < never:
        if running and running[0][0] <= next_s:
            now, ended, stage = heappop(running)
            idle += 1
            model = model_of[stage]
            free[model] += 1
            if stage == last[model]:
                ends[ended] = now
                for other in together.pop(ended, ()):
                    ends[other] = now
            else:
                queues[stage + 1].append(ended)
                nonempty.add(stage + 1)
        else:
            now, model = next_s, arrivals[task][1]
            if nonempty:
                found_waiting += 1
            if not task % _SAMPLED:
                looked += 1
                if nonempty:
                    counts = [len(queues[at]) for at in first[:-1]]
                    variance += _variance([n * one for n, one in zip(counts, totals, strict=True)])
            stage = first[model]
            if len(queues[stage]) < rooms[model]:
                queues[stage].append(task)
                nonempty.add(stage)
            task += 1
            next_s = max(arrivals[task][0], begin_s) if task < count else never
            if next_s == now and now == begin_s:
                continue  # of what waited from before all is there when the first step begins
        while idle and nonempty:
            chosen, best = -1, never
            for stage in nonempty:
                if free[model_of[stage]]:
                    head = queues[stage][0]
                    at = rank[head]
                    if chosen < 0 or at < best or (at == best and head < queues[chosen][0]):
                        chosen, best = stage, at
            if chosen < 0:
                break
            queue = queues[chosen]
            current = queue.popleft()
            if not queue:
                nonempty.discard(chosen)
            model = model_of[chosen]
            slow = 1.0 + beside * (lanes - idle)
            begins = chosen == first[model]
            if begins and now - arrivals[current][0] > oldest_s:
                oldest_s = now - arrivals[current][0]
            if now + (rest_s[chosen] * slow if by_deadline else 0.0) >= due[current]:
                together.pop(current, None)  # what travels with it came later, but is as late
                continue
            if begins and batches[model] > 1 and queue:
                others = [queue.popleft() for _ in range(min(batches[model] - 1, len(queue)))]
                together[current] = others
                if not queue:
                    nonempty.discard(chosen)
            seconds = step_s[chosen] * slow
            if current in together:
                seconds *= 1.0 + more[model] * len(together[current])
            heappush(running, (now + seconds, current, chosen))
            free[model] -= 1
            idle -= 1
    return Served(ends, found_waiting / max(count, 1), oldest_s, variance / max(looked, 1))


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((one - mean) ** 2 for one in values) / len(values)
