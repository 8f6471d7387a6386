"""How much load some lanes carry within deadlines: good enough to compare plans where no load is known.

Tasks of several models arrive at random (Poisson), the one of the earliest deadline goes first, and what can
no longer end in time when its turn comes is given up: `step_choice=deadline` as the engine has it, with a
replica for each lane (`stageloom.shared.search.lane_load`).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Final

from stageloom.shared.search.lane_load import ServedModel, serve

IN_TIME_SHARE: Final = 0.95
"""Of each model's tasks, within the deadline."""

TASKS: Final = 3000
_HALVINGS: Final = 7
_SEED: Final = 20240


def load_within_deadlines(
    models: Sequence[ServedModel],
    lanes: int,
    *,
    tasks: int = TASKS,
    at_least: float = 0.0,
    beside: float = 0.0,
) -> float:
    """Tasks a second of all models together, the most of which 95 % of each model's are in time.

    0 where it is less than `at_least`, which one rate tells. `beside`: of a step's time, for each other busy
    lane.
    Every call draws the same arrivals, scaled to the rate: two plans differ by what they are, not by chance.
    O(tasks * log tasks) for each of seven rates.
    """
    low, high = 0.0, most_load(models, lanes)
    if at_least > 0.0 and (at_least >= high or not _holds(models, lanes, at_least, tasks, beside)):
        return 0.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if _holds(models, lanes, middle, tasks, beside):
            low = middle
        else:
            high = middle
    return low


def most_load(models: Sequence[ServedModel], lanes: int) -> float:
    """Tasks a second that no answer exceeds: what lanes compute, and a fifth more, as some may be late."""
    weights = math.fsum(one.weight for one in models)
    return 1.2 * lanes * weights / math.fsum(one.weight * one.total_s for one in models)


def _holds(models: Sequence[ServedModel], lanes: int, rate_per_s: float, tasks: int, beside: float) -> bool:
    arrivals = _arrivals(tuple(one.weight for one in models), tasks)
    arriving = [(at / rate_per_s, model) for at, model in arrivals]
    shares = shares_in_time(models, lanes, arriving, beside=beside)
    return min(shares) >= IN_TIME_SHARE


@lru_cache(maxsize=16)
def _arrivals(weights: tuple[float, ...], tasks: int) -> tuple[tuple[float, int], ...]:
    """Instants at a rate of one task a second, and the model of each task; drawn by weight."""
    random = Random(_SEED)
    instants = accumulate(random.expovariate(1.0) for _ in range(tasks))
    return tuple(zip(instants, random.choices(range(len(weights)), weights, k=tasks), strict=True))


def shares_in_time(
    models: Sequence[ServedModel],
    lanes: int,
    arrivals: Sequence[tuple[float, int]],
    *,
    beside: float = 0.0,
) -> list[float]:
    """By model the share of its tasks that end before their deadline; 1 where it has none.

    `arrivals`: instants in seconds, ascending, each with its model.
    """
    came, in_time = [0] * len(models), [0] * len(models)
    ends_s = serve(models, lanes, arrivals, beside=beside).ends_s
    for (at, model), end in zip(arrivals, ends_s, strict=True):
        came[model] += 1
        in_time[model] += end < at + models[model].deadline_s
    return [done / all_of if all_of else 1.0 for done, all_of in zip(in_time, came, strict=True)]
