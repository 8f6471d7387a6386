"""How much load some lanes carry within deadlines: a small simulation, good enough to compare plans.

Tasks of several models arrive at random (Poisson), the one of the earliest deadline goes first, no step is
interrupted, and what can no longer end in time when its turn comes is given up: `step_choice=deadline` as
the engine has it, without slots and without replicas, of which there is one for each lane.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import Final

IN_TIME_SHARE: Final = 0.95
"""Of each model's tasks, within the deadline."""

TASKS: Final = 3000
_HALVINGS: Final = 7
_SEED: Final = 20240


@dataclass(frozen=True)
class ServedModel:
    """A model as lanes see it: seconds of each of its blocks, one after the other, and a task's patience."""

    blocks_s: tuple[float, ...]
    deadline_s: float  # from a task's arrival
    weight: float = 1.0  # of its tasks among all

    @property
    def total_s(self) -> float:
        """Of one task."""
        return math.fsum(self.blocks_s)


def load_within_deadlines(models: Sequence[ServedModel], lanes: int, *, tasks: int = TASKS) -> float:
    """Tasks a second of all models together, the most of which 95 % of each model's are in time.

    Every call draws the same arrivals, scaled to the rate: two plans differ by what they are, not by chance.
    O(tasks * log tasks) for each of seven rates.
    """
    weights = sum(one.weight for one in models)
    most = lanes * weights / math.fsum(one.weight * one.total_s for one in models)
    low, high = 0.0, 1.2 * most
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if _holds(models, lanes, middle, tasks):
            low = middle
        else:
            high = middle
    return low


def _holds(models: Sequence[ServedModel], lanes: int, rate_per_s: float, tasks: int) -> bool:
    arrivals = _arrivals(tuple(one.weight for one in models), tasks)
    shares = shares_in_time(models, lanes, [(at / rate_per_s, model) for at, model in arrivals])
    return min(shares) >= IN_TIME_SHARE


@lru_cache(maxsize=16)
def _arrivals(weights: tuple[float, ...], tasks: int) -> tuple[tuple[float, int], ...]:
    """Instants at a rate of one task a second, and the model of each task; drawn by weight."""
    random = Random(_SEED)
    instants = accumulate(random.expovariate(1.0) for _ in range(tasks))
    return tuple(zip(instants, random.choices(range(len(weights)), weights, k=tasks), strict=True))


def shares_in_time(
    models: Sequence[ServedModel], lanes: int, arrivals: Sequence[tuple[float, int]]
) -> list[float]:
    """By model the share of its tasks that end before their deadline; 1 where it has none.

    `arrivals`: instants in seconds, ascending, each with its model.
    """
    rests = [list(accumulate(reversed(one.blocks_s)))[::-1] for one in models]
    blocks = [one.blocks_s for one in models]
    came, in_time = [0] * len(models), [0] * len(models)
    waiting: list[tuple[float, int, int, int]] = []  # deadline, order, model, block
    running: list[tuple[float, int, int, int, float]] = []  # end, order, model, block, deadline
    idle, order = lanes, 0
    upcoming = iter([*arrivals, (math.inf, 0)])
    next_s, model = next(upcoming)
    while running or next_s < math.inf:
        if running and running[0][0] <= next_s:
            now, _, ended, block, due_s = heappop(running)
            idle += 1
            if block + 1 < len(blocks[ended]):
                heappush(waiting, (due_s, order, ended, block + 1))
            else:
                in_time[ended] += now < due_s
        else:
            now = next_s
            came[model] += 1
            heappush(waiting, (now + models[model].deadline_s, order, model, 0))
            next_s, model = next(upcoming)
        order += 1
        while idle and waiting:
            due_s, _, chosen, block = heappop(waiting)
            if now + rests[chosen][block] < due_s:
                heappush(running, (now + blocks[chosen][block], order, chosen, block, due_s))
                order += 1
                idle -= 1
    return [done / all_of if all_of else 1.0 for done, all_of in zip(in_time, came, strict=True)]
