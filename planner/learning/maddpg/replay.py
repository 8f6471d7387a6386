"""The replay buffer: the newest transitions, with raw figures instead of rewards.

A transition of the paper's superblock, which never ran, has no figures: its reward is 0 (`ran` is False).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageloom.planner.learning.maddpg.rewards import Doubles, Floats

_ARRAYS = ("states", "actions", "figures", "excess", "ran", "following")


@dataclass(frozen=True)
class Transitions:
    """Some transitions, one per row, in the order in which they happened."""

    states: Floats  # [count, state_width]
    actions: Floats  # executed ones [count, action_width]
    figures: Doubles  # raw [count, FIGURES_BEFORE_LATENCY + W]
    excess: Doubles  # share of the blocks beyond H [count]
    ran: NDArray[np.bool_]  # [count]
    following: Floats  # states after [count, state_width]

    def __len__(self) -> int:
        return len(self.states)


class Replay:
    """A ring of transitions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.added = 0  # ever
        self._arrays: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, new: Transitions) -> None:
        """Take in; the oldest leave."""
        if not self._arrays:
            self._arrays = {
                name: np.zeros((self.capacity, *getattr(new, name).shape[1:]), getattr(new, name).dtype)
                for name in _ARRAYS
            }
        places = (self.added + np.arange(len(new))) % self.capacity
        for name in _ARRAYS:
            self._arrays[name][places] = getattr(new, name)
        self.added += len(new)

    def take(self, places: NDArray[np.int64]) -> Transitions:
        """The transitions at these places, below `len`."""
        return Transitions(**{name: self._arrays[name][places] for name in _ARRAYS})

    def everything(self) -> Transitions:
        """All that is kept."""
        return self.take(np.arange(len(self)))

    def saved(self) -> dict[str, Any]:
        """Arrays as they lie, and the count."""
        kept = {name: self._arrays[name][: len(self)] for name in _ARRAYS if self._arrays}
        return {"added": self.added, "arrays": kept}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was."""
        self._arrays = {
            name: np.zeros((self.capacity, *values.shape[1:]), values.dtype)
            for name, values in saved["arrays"].items()
        }
        for name, values in saved["arrays"].items():
            self._arrays[name][: len(values)] = values
        self.added = saved["added"]
