"""Transitions with raw figures, the replay buffer, and what a step is worth (TOP, equation 2).

    r_0 = exp(a u* - b mean_j(l_j*) - c v*),    r_i = exp(a u* - b l_i* - c v*)    i = 1..W

u: utilisation, l: latency per model, v: variance over the queues; starred: z-scores. Ours: mean and
deviation of the z-scores are those of the transitions before the first update and stay so (*frozen*): with
moving ones equal steps would be worth different amounts, and the replay would hold rewards of all of them.
A z-score ends at 5 to either side.
The buffer keeps raw figures instead of rewards. The paper's superblock never ran, has no figures, and a
reward of 0 (`ran` is False).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageloom.planner.learning.maddpg.settings import Gain, MaddpgSettings, Scale
from stageloom.planner.twin.window import Window
from stageloom.shared.policy.queues import variance

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

FIGURES_BEFORE_LATENCY = 3
_LEAST_SPREAD = 1e-6
_LEAST_LATENCY_S = 1e-6
_FAR = 5.0
"""Standard deviations beyond which a term counts as so far: a device that was busy all through the first
transitions has next to no spread of its utilisation, and one that is idle once would be worth e^1000."""


def step_figures(window: Window, service_s: Sequence[float]) -> tuple[float, ...]:
    """The raw figures of a window: utilisation, throughput per second, variance of queued work over the
    queues (s^2, mean over the glances), latency in seconds per model. [FIGURES_BEFORE_LATENCY + W]

    `service_s`: device seconds of a task, per model; 1 counts tasks.

    A model's latency is the mean of its completed tasks, or what Little's law makes of those that wait,
    whichever is longer: a queue that is never served must not look fast.
    """
    queued = [[queue.queued for queue in glance.queues] for glance in window.glances]
    latency_s = []
    for model, one in enumerate(window.models):
        waiting = fsum(row[model] for row in queued) / len(queued)
        known_s = fsum(one.latencies_s) / len(one.latencies_s) if one.latencies_s else 0.0
        latency_s.append(max(known_s, window.seconds * waiting / max(one.submitted, 1)))
    work = [variance([tasks * one_s for tasks, one_s in zip(row, service_s, strict=True)]) for row in queued]
    completed = sum(model.ended.completed for model in window.models)
    return window.utilisation, completed / window.seconds, fsum(work) / len(work), *latency_s


@dataclass(frozen=True)
class Normaliser:
    """Means and spreads of the terms of equation 2, taken once."""

    mean: Doubles  # [2 + W]: gain, variance, latency per model
    spread: Doubles

    @classmethod
    def of(cls, rows: Doubles, settings: MaddpgSettings) -> "Normaliser":
        """From raw figures [transitions, FIGURES_BEFORE_LATENCY + W]."""
        terms = _terms(rows, settings)
        return cls(terms.mean(axis=0), np.maximum(terms.std(axis=0), _LEAST_SPREAD))

    def scores(self, rows: Doubles, settings: MaddpgSettings) -> Doubles:
        """The starred terms. [transitions, 2 + W]"""
        found: Doubles = np.clip((_terms(rows, settings) - self.mean) / self.spread, -_FAR, _FAR)
        return found

    def rewards(self, rows: Doubles, excess: Doubles, settings: MaddpgSettings) -> Floats:
        """Equation 2 for all agents. `excess`: share of the blocks beyond H. [transitions, W + 1]"""
        scores = self.scores(rows, settings)
        gain, queues, latency = scores[:, :1], scores[:, 1:2], scores[:, 2:]
        latency = np.concatenate([latency.mean(axis=1, keepdims=True), latency], axis=1)
        worth = np.exp(settings.a * gain - settings.b * latency - settings.c * queues)
        worth *= 1.0 - settings.superblock_penalty * excess[:, None]
        found: Floats = worth.astype(np.float32)
        return found

    def saved(self) -> dict[str, Any]:
        return {"mean": self.mean.tolist(), "spread": self.spread.tolist()}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> "Normaliser":
        return cls(np.array(saved["mean"], np.float64), np.array(saved["spread"], np.float64))


def _terms(rows: Doubles, settings: MaddpgSettings) -> Doubles:
    gain = rows[:, 1:2] if settings.gain is Gain.THROUGHPUT else rows[:, 0:1]
    queues = np.log1p(rows[:, 2:3]) if settings.log_variance else rows[:, 2:3]
    latency = rows[:, FIGURES_BEFORE_LATENCY:]
    if settings.latency is Scale.LOG:
        latency = np.log(np.maximum(latency, _LEAST_LATENCY_S))
    return np.concatenate([gain, queues, latency], axis=1)


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
        """Append transitions; the oldest leave a full buffer."""
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
