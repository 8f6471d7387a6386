"""Searches for a plan that learn nothing, for the same number of evaluations as a training. Pure.

Each is given what scores plans and holds the best of them, how many may be scored, and a generator; it scores
exactly that many (`best_seed`: the seeds alone). A plan is an action row. All but `uniform` begin with the
seeds of `stageloom.planner.learning.maddpg.candidates`, as a training does.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.work import clipped_row, noisy
from stageloom.planner.tournament.score import Score, best_first, improves
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import actions_of, combine_blocks
from stageloom.shared.policy.maddpg.space import Space

ActionRow: TypeAlias = tuple[float, ...]
Judge: TypeAlias = Callable[[ActionRow], Score]
Search: TypeAlias = Callable[[Space, "Best", int, np.random.Generator], None]

POPULATION: Final = 10
ELITE: Final = 3
LAUNCHER_SPREAD: Final = 0.1
"""Of `cross_entropy`: rows of a generation, those that the next follows from, and the first deviation of the
launcher's actions. That of a block's action is one interval."""


class Best:
    """The best plan so far, of those that `judge` scores."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._top: Score | None = None  # the most throughput of any
        self.held: tuple[ActionRow, Score] | None = None

    def judged(self, row: ActionRow) -> Score:
        """Score a plan, and hold it if it improves on the best."""
        score = self._judge(row)
        top = self._top or score
        self._top = max(top, score, key=lambda one: one.throughput_per_s)
        if self.held is None or improves(score, self.held[1], top):
            self.held = row, score
        return score

    @property
    def row(self) -> ActionRow:
        """Of the best."""
        assert self.held is not None, "nothing was scored"
        return self.held[0]


def best_seed(space: Space, best: Best, evaluations: int, rng: np.random.Generator) -> None:
    """The plans that a training starts with, as far as `evaluations` go."""
    for row in list(seeds(space).values())[:evaluations]:
        best.judged(row)


def uniform(space: Space, best: Best, evaluations: int, rng: np.random.Generator) -> None:
    """Action rows drawn evenly from [0, 1]."""
    for _ in range(evaluations):
        best.judged(clipped_row(rng.random(space.action_width)))


def near_seed(space: Space, best: Best, evaluations: int, rng: np.random.Generator) -> None:
    """The best seed with the noise of a training's first episodes on it, drawn anew for every plan."""
    usual = MaddpgSettings()
    best_seed(space, best, evaluations, rng)
    start = np.asarray(best.row, np.float32)
    for _ in range(evaluations - len(seeds(space))):
        best.judged(noisy(start, usual.noise, usual.noise_share, rng))


def cross_entropy(space: Space, best: Best, evaluations: int, rng: np.random.Generator) -> None:
    """The cross-entropy method (de Boer et al. 2005): rows are drawn from independent normal distributions,
    whose means and deviations become those of the best rows of each generation; from the best seed on."""
    best_seed(space, best, evaluations, rng)
    mean = np.asarray(best.row)
    spread = np.full(space.action_width, 1.0 / space.bins)
    spread[: space.num_models] = LAUNCHER_SPREAD
    left = evaluations - len(seeds(space))
    while left > 0:
        rows = [clipped_row(rng.normal(mean, spread)) for _ in range(min(POPULATION, left))]
        left -= len(rows)
        scores = [best.judged(row) for row in rows]
        elite = np.array([rows[place] for place in best_first(scores)[:ELITE]])
        mean, spread = elite.mean(axis=0), elite.std(axis=0)


def local_search(space: Space, best: Best, evaluations: int, rng: np.random.Generator) -> None:
    """From the best seed to a better neighbour, and so on: one block joins another combined block or leaves
    its own, or one model is launched at another pace."""
    best_seed(space, best, evaluations, rng)
    for _ in range(evaluations - len(seeds(space))):
        best.judged(neighbour(space, best.row, rng))


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
