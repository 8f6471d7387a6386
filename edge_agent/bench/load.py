"""Arrivals of tasks and their deadlines, as arrays. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

DEADLINE_FACTOR: Final = 5.0
LEAST_DEADLINE_S: Final = 0.020
IN_TIME_SHARE: Final = 0.95
GRID_STEP: Final = 0.05


@dataclass(frozen=True)
class ArrivalWindow:
    """Tasks that arrive in one window: per task its instant and its model, per model its deadline."""

    at_s: Array  # [tasks] float64, ascending, from the window's begin
    model: Array  # [tasks] int64, index of the model
    deadline_s: Array  # [models] float64, from a task's arrival; inf for none

    @property
    def tasks(self) -> int:
        return len(self.at_s)

    def due_s(self) -> Array:
        """Per task, when its result is worthless [tasks] float64, from the window's begin."""
        due: Array = self.at_s + self.deadline_s[self.model]
        return due

    @property
    def last_s(self) -> float:
        """When the last task has arrived, and none that has a deadline can still be in time."""
        due_s = self.due_s()
        return float(np.max(np.where(np.isfinite(due_s), due_s, self.at_s), initial=0.0))


def deadlines_s(
    service_s: Mapping[str, float],
    *,
    factor: float = DEADLINE_FACTOR,
    least_s: float = LEAST_DEADLINE_S,
    given_s: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Per model `factor` times its best service time and at least `least_s`, unless one is given."""
    given = given_s or {}
    return {name: given.get(name, max(factor * taken, least_s)) for name, taken in service_s.items()}


def rate_per_s(index: int) -> float:
    """The rate at a place of the grid, on which neighbours differ by 5 %; place 0 is one task a second."""
    return (1.0 + GRID_STEP) ** index


def rate_index(wanted_per_s: float) -> int:
    """The place on the grid next to a rate."""
    return round(float(np.log(wanted_per_s) / np.log1p(GRID_STEP)))


def poisson_window(
    weights: Sequence[float], rate_per_s: float, seconds: float, deadline_s: Sequence[float], seed: int
) -> ArrivalWindow:
    """Poisson arrivals of all models together; each task is of a model by the weights' proportion.

    One seed gives the same sequence of models at every rate, and the same gaps, scaled by the rate: two rates
    then differ by the rate and not by chance.
    """
    rng = np.random.default_rng(seed)
    share = np.asarray(weights, np.float64)
    most = 64 + int(2.0 * rate_per_s * seconds)
    gaps_rng, models_rng = rng.spawn(2)
    at = np.cumsum(gaps_rng.exponential(1.0, most)) / rate_per_s
    models = models_rng.choice(len(share), size=most, p=share / share.sum())
    within = at < seconds
    return ArrivalWindow(at[within], models[within], np.asarray(deadline_s, np.float64))


def mixed_models(weights: Sequence[float], seed: int, tasks: int = 512) -> list[int]:
    """Models of tasks that follow each other without end, by the weights' proportion.

    Each model's tasks are spread evenly, every one of them at random within its own stretch: any part of the
    sequence has the mix but for a task or two, so contestants that come to count different parts compare.
    """
    share = np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.ceil(share * tasks).astype(np.int64)
    rng = np.random.default_rng(seed)
    at = [(np.arange(n) + rng.random(n)) / own for n, own in zip(counts, share, strict=True) if n]
    order = np.argsort(np.concatenate(at))[:tasks]
    return [int(model) for model in np.repeat(np.arange(len(share)), counts)[order]]


@dataclass(frozen=True)
class WindowResult:
    """What became of a window's tasks."""

    model: Array  # [tasks] int64
    latency_s: Array  # [tasks] float64, from arrival to result; nan where there was none
    in_time: Array  # [tasks] bool, the result was there before the deadline

    def counts(self, models: int) -> tuple[Array, Array]:
        """Per model its tasks, and those in time: two arrays [models] of integers."""
        return (
            np.bincount(self.model, minlength=models),
            np.bincount(self.model[self.in_time], minlength=models),
        )


def judge(window: ArrivalWindow, ended_s: Array) -> WindowResult:
    """From when each task's result was there ([tasks] float64 from the window's begin, nan for none).

    A result at its deadline is late.
    """
    in_time = np.less(ended_s, window.due_s())  # never where there is no result
    return WindowResult(window.model, ended_s - window.at_s, in_time)
