"""The best plan so far: anytime, and judged on arrivals that it was not met on. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stageloom.planner.learning.maddpg.replay import Transitions
from stageloom.planner.learning.maddpg.rewards import Floats
from stageloom.planner.tournament.score import Score, better
from stageloom.shared.policy.maddpg.decide import Decision, read_actions
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan by its action row, with what it was worth when it was looked at."""

    actions: tuple[float, ...]
    worth: Score


@dataclass
class Candidates:
    """Plans that were looked at."""

    space: Space
    loads: Sequence[Load]
    lanes: int = 1
    best: Candidate | None = None
    _seen: set[str] = field(default_factory=set)

    def judged(self, actions: tuple[float, ...], worth: Score) -> bool:
        """Take in a plan's worth; whether it is the best so far."""
        self._seen.add(self._key(actions))
        if self.best is not None and not better(worth, self.best.worth):
            return False
        self.best = Candidate(actions, worth)
        return True

    def promising(self, kept: Transitions, rewards: Floats, count: int) -> Iterator[tuple[float, ...]]:
        """Plans met in training that nobody looked at yet, those with the highest rewards first.

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
        """Plain values."""
        best = None if self.best is None else [list(self.best.actions), self.best.worth.plain()]
        return {"best": best, "seen": sorted(self._seen)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was."""
        self._seen = set(saved["seen"])
        if saved["best"] is not None:
            actions, worth = saved["best"]
            self.best = Candidate(tuple(actions), Score(**worth))

    def _key(self, actions: Sequence[float]) -> str:
        """Equal for rows that stand for about the same plan: intervals within a twentieth of their range."""
        decision: Decision = read_actions(self.space, actions, self.loads, self.lanes)
        paces = [round(20 * action) for action in actions[: self.space.num_models]]
        rows = [[tuple(member) for member in row] for row in decision.combination.combined]
        return f"{sorted(rows)} {paces}"
