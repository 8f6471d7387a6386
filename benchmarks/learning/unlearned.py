"""Searches for a plan that learn nothing, for the same number of evaluations as a training. Pure.

Each is given how plans are scored (`judge`, of an action row), how many may be scored, and a generator; it
scores exactly that many (`best_seed`: the seeds alone) and answers with the best plan that it met, as an
action row. All but `uniform` begin as a training does: with the seeds of
`stageloom.planner.learning.maddpg.candidates`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cmp_to_key
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.work import clipped_row, noisy
from stageloom.planner.tournament.score import Score, better
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import actions_of, combine_blocks
from stageloom.shared.policy.maddpg.space import Space

ActionRow: TypeAlias = tuple[float, ...]
Judge: TypeAlias = Callable[[ActionRow], Score]
Search: TypeAlias = Callable[[Space, Judge, int, np.random.Generator], tuple[ActionRow, Score]]

POPULATION: Final = 10
ELITE: Final = 3
LAUNCHER_SPREAD: Final = 0.1
"""Of `cross_entropy`: rows of a generation, those that the next follows from, and the first deviation of the
launcher's actions. That of a block's action is one interval."""


def best_seed(
    space: Space, judge: Judge, evaluations: int, rng: np.random.Generator
) -> tuple[ActionRow, Score]:
    """The best plan that a training starts with."""
    return _best(judge, seeds(space).values(), evaluations)


def uniform(
    space: Space, judge: Judge, evaluations: int, rng: np.random.Generator
) -> tuple[ActionRow, Score]:
    """Action rows drawn evenly from [0, 1]."""
    rows = (clipped_row(rng.random(space.action_width)) for _ in range(evaluations))
    return _best(judge, rows, evaluations)


def near_seed(
    space: Space, judge: Judge, evaluations: int, rng: np.random.Generator
) -> tuple[ActionRow, Score]:
    """The best seed with the noise of a training's first episodes on it, drawn anew for every plan."""
    usual = MaddpgSettings()
    row, score = best_seed(space, judge, evaluations, rng)
    start, left = np.asarray(row, np.float32), evaluations - len(seeds(space))
    for _ in range(left):
        drawn = noisy(start, usual.noise, usual.noise_share, rng)
        row, score = _better_of((row, score), (drawn, judge(drawn)))
    return row, score


def cross_entropy(
    space: Space, judge: Judge, evaluations: int, rng: np.random.Generator
) -> tuple[ActionRow, Score]:
    """The cross-entropy method (de Boer et al. 2005): rows are drawn from independent normal distributions,
    whose means and deviations become those of the best rows of each generation; from the best seed on."""
    best = best_seed(space, judge, evaluations, rng)
    mean = np.asarray(best[0])
    spread = np.full(space.action_width, 1.0 / space.bins)
    spread[: space.num_models] = LAUNCHER_SPREAD
    left = evaluations - len(seeds(space))
    while left > 0:
        rows = [clipped_row(rng.normal(mean, spread)) for _ in range(min(POPULATION, left))]
        left -= len(rows)
        ranked = sorted(((row, judge(row)) for row in rows), key=cmp_to_key(_worse_last))
        elite = np.array([row for row, _ in ranked[:ELITE]])
        mean, spread = elite.mean(axis=0), elite.std(axis=0)
        best = _better_of(best, ranked[0])
    return best


def local_search(
    space: Space, judge: Judge, evaluations: int, rng: np.random.Generator
) -> tuple[ActionRow, Score]:
    """From the best seed to a better neighbour, and so on: one block joins another combined block or leaves
    its own, or one model is launched at another pace."""
    best = best_seed(space, judge, evaluations, rng)
    for _ in range(evaluations - len(seeds(space))):
        row = neighbour(space, best[0], rng)
        best = _better_of(best, (row, judge(row)))
    return best


def neighbour(space: Space, row: ActionRow, rng: np.random.Generator) -> ActionRow:
    """A plan that differs in the place of one block, or in the pace of one model; each equally likely."""
    launcher = list(row[: space.num_models])
    place = int(rng.integers(space.action_width))
    if place < space.num_models:
        launcher[place] = float(rng.random())
        return (*launcher, *row[space.num_models :])
    member = space.members[place - space.num_models]
    combined = combine_blocks(space, row[space.num_models :]).combined
    (own,) = (members for members in combined if member in members)
    others = [members for members in combined if member not in members]
    targets: list[tuple[Member, ...]] = [members for members in others if len(members) < space.members_max]
    if len(own) > 1:
        others.append(tuple(one for one in own if one != member))
        targets.append(())
    if not targets:  # every other combined block is full, and this one is alone
        return neighbour(space, row, rng)
    target = targets[int(rng.integers(len(targets)))]
    moved = [members for members in others if members != target]
    return (*launcher, *actions_of(space, [*moved, tuple(sorted((*target, member)))]))


SEARCHES: Final[Mapping[str, Search]] = MappingProxyType(
    {
        "best seed": best_seed,
        "uniform": uniform,
        "noise on the best seed": near_seed,
        "cross-entropy": cross_entropy,
        "local search": local_search,
    }
)

_Scored: TypeAlias = tuple[ActionRow, Score]


def _best(judge: Judge, rows: Iterable[ActionRow], evaluations: int) -> _Scored:
    scored = [(row, judge(row)) for row, _ in zip(rows, range(evaluations), strict=False)]
    found = scored[0]
    for other in scored[1:]:
        found = _better_of(found, other)
    return found


def _better_of(held: _Scored, other: _Scored) -> _Scored:
    return other if better(other[1], held[1]) else held


def _worse_last(one: _Scored, other: _Scored) -> int:
    return int(better(other[1], one[1])) - int(better(one[1], other[1]))
