"""Plans as action rows: those that seed a training, and the best plan so far. Pure.

An untrained policy meets nothing but noise; seeds show the critics what whole classes of plans are worth. The
best plan is known at any time, and judged on arrivals that it was not met on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from stageloom.planner.learning.maddpg.replay import Floats, Transitions
from stageloom.planner.tournament.score import Score, improves
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import actions_of, combine_blocks
from stageloom.shared.policy.maddpg.space import Space


class Candidates:
    """Plans that were evaluated, and the best of them."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.best: tuple[tuple[float, ...], Score] | None = None
        """A plan by its action row, with its worth when it was evaluated."""
        self._top: Score | None = None  # the most throughput of any
        self._seen: set[str] = set()

    def judged(self, actions: tuple[float, ...], worth: Score) -> bool:
        """Take in a plan's worth; whether it is the best so far."""
        self._seen.add(self._key(actions))
        top = self._top or worth
        self._top = max(top, worth, key=lambda score: score.throughput_per_s)
        if self.best is not None and not improves(worth, self.best[1], top):
            return False
        self.best = actions, worth
        return True

    def promising(self, kept: Transitions, rewards: Floats, count: int) -> Iterator[tuple[float, ...]]:
        """Plans met in training and not yet evaluated, those with the highest rewards first.

        `rewards`: of agent 0 [transitions]. Each is handed out once.
        """
        for place in np.argsort(-rewards, kind="stable"):
            if count < 1:
                return
            actions = tuple(kept.actions[place].tolist())
            key = self._key(actions)
            if kept.ran[place] and key not in self._seen:
                self._seen.add(key)
                count -= 1
                yield actions

    def saved(self) -> dict[str, Any]:
        best = None if self.best is None else [list(self.best[0]), self.best[1].plain()]
        top = None if self._top is None else self._top.plain()
        return {"best": best, "top": top, "seen": sorted(self._seen)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was."""
        self._seen = set(saved["seen"])
        self._top = None if saved["top"] is None else Score(**saved["top"])
        if saved["best"] is not None:
            actions, worth = saved["best"]
            self.best = tuple(actions), Score(**worth)

    def _key(self, actions: Sequence[float]) -> str:
        """Equal for rows that stand for about the same plan: intervals within a twentieth of their range."""
        launcher, scheduler = actions[: self.space.num_models], actions[self.space.num_models :]
        paces = [round(20 * action) for action in launcher]
        rows = [[tuple(member) for member in row] for row in combine_blocks(self.space, scheduler).combined]
        return f"{sorted(rows)} {paces}"


Rows = list[tuple[Member, ...]]


def seeds(space: Space) -> dict[str, tuple[float, ...]]:
    """Action rows by name: every way to combine below, launched as fast as possible and as tasks arrive.

    - alone: every block by itself (sequential);
    - aligned: the i-th blocks of different models (POS; IOS's joint graphs);
    - abreast: blocks as far through their models as each other, as many as H allows (all together);
    - pipelined: neighbouring blocks of one model (its tasks in flight run side by side);
    - replicas: one block of all replicas of a model (TOP's self-acceleration).
    """
    abreast = sorted(range(space.bins), key=space.bin_of_start.__getitem__)
    ways: dict[str, Rows] = {
        "alone": [(member,) for member in space.members],
        "aligned": _parts(space, _grouped(space, lambda member: (member.block, member.replica))),
        "abreast": _parts(space, [[space.members[place] for place in abreast]]),
        "pipelined": _parts(space, _grouped(space, lambda member: (member.model, member.replica))),
        "replicas": _parts(space, _grouped(space, lambda member: (member.model, member.block))),
    }
    names: dict[tuple[float, ...], str] = {}
    for (name, rows), (pace, launch) in product(ways.items(), (("fast", 0.0), ("paced", 1.0))):
        actions = (launch,) * space.num_models + actions_of(space, rows)
        names.setdefault(actions, f"{name}, {pace}")
    return {name: actions for actions, name in names.items()}


def _grouped(space: Space, key: Callable[[Member], tuple[int, int]]) -> Iterable[list[Member]]:
    groups: dict[tuple[int, int], list[Member]] = {}
    for member in space.members:
        groups.setdefault(key(member), []).append(member)
    return groups.values()


def _parts(space: Space, rows: Iterable[list[Member]]) -> Rows:
    most = space.members_max
    return [tuple(sorted(row[at : at + most])) for row in rows for at in range(0, len(row), most)]
