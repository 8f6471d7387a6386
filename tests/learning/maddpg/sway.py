"""A device on which the best plan depends on the queues, and a network that answers accordingly.

Two models of two blocks each, as in `tests.learning.maddpg.toy`. A plan that combines the two blocks of one
model alone serves that one's tasks faster, at no loss of the other. No seed does that: each leaves the cost
of a task as it is. So whoever hurries the model with the longer queue beats every seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stageloom.planner.learning.maddpg.held_out import held_out
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.twin.arrivals import ArrivalStream, Process
from stageloom.planner.twin.window import Window
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import Counts, ModelQueue, QueueSnapshot
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import actions_of
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.policy.maddpg.space import Space
from tests.learning.maddpg.toy import BLOCK_S, problem, served, window_of
from tests.policy.maddpg.cases import arrays

NAMES = ("left", "right")
LEFT_FIRST = ((Member(0, 0, 0), Member(0, 0, 1)), (Member(1, 0, 0),), (Member(1, 0, 1),))
RIGHT_FIRST = ((Member(0, 0, 0),), (Member(0, 0, 1),), (Member(1, 0, 0), Member(1, 0, 1)))


class SwayDevice:
    """`first`: seconds of a task of the model that a plan hurries, over those of any other."""

    def __init__(
        self, first: float, arrivals: Mapping[str, Process], seed: int, seen: list[BoundPlan]
    ) -> None:
        self._first, self._seen = first, seen
        self._streams = [
            ArrivalStream(arrivals[name], np.random.default_rng([seed, at])) for at, name in enumerate(NAMES)
        ]
        self._now_s = 0.0
        self._queued = np.zeros(2)
        self._task_s = np.full(2, 2 * BLOCK_S)

    def deploy(self, bound: BoundPlan) -> None:
        self._seen.append(bound)
        hurried = [
            block.members[0].model
            for block in bound.plan.combined
            if len(block.members) == 2 and block.members[0].model == block.members[1].model
        ]
        self._task_s = np.full(2, 2 * BLOCK_S)
        if len(hurried) == 1:
            self._task_s[hurried[0]] *= self._first

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        self._now_s += seconds
        arrived = np.array([stream.until(self._now_s).size for stream in self._streams])
        waiting = self._queued + arrived
        need_s = float(waiting @ self._task_s)
        done_now = np.floor(waiting * min(seconds / need_s, 1.0)) if need_s else waiting
        before, self._queued = self._queued, waiting - done_now
        latency_s = self._task_s + (before + self._queued) / 2 / np.maximum(done_now / seconds, 1.0)
        queues = tuple(
            ModelQueue(name, 0, int(queued), 0.0, 2, 0)
            for name, queued in zip(NAMES, self._queued, strict=True)
        )
        glance = QueueSnapshot(0.0, None, None, queues)
        return window_of(
            seconds,
            tuple(
                served(int(came), Counts(completed=int(done)), (float(took_s),) * int(done))
                for came, done, took_s in zip(arrived, done_now, latency_s, strict=True)
            ),
            min(need_s / seconds, 1.0),
            (glance,) * len(sample_at_s or (seconds,)),
        )


@dataclass(frozen=True)
class SwayDevices:
    """Makes them; `seen` has what was deployed on any."""

    first: float
    arrivals: Mapping[str, Process]
    seen: list[BoundPlan] = field(default_factory=list)

    def __call__(self, seed: int) -> SwayDevice:
        return SwayDevice(self.first, self.arrivals, seed, self.seen)


def loads(first: float = 0.7, seen: list[BoundPlan] | None = None) -> dict[str, Problem]:
    """The held-out loads of such a device."""
    kept = [] if seen is None else seen
    return held_out(problem(), lambda arrivals: SwayDevices(first, arrivals, kept))


def rows(space: Space) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Action rows that hurry the left model and the right one. [action_width] each"""
    launch = (0.01,) * space.num_models
    return launch + actions_of(space, LEFT_FIRST), launch + actions_of(space, RIGHT_FIRST)


def swaying(space: Space) -> MaddpgNetwork:
    """Hurries the model with the longer queue; the left one where they are equal.

    Two hidden units give a step of the newest deviation d of the left queue, with slope k: relu(k d + 1) less
    relu(k d) is 1 from d = 0 on and 0 below -1 / k.
    """
    slope = 1000.0
    left, right = (np.log(np.array(row) / (1.0 - np.array(row))) for row in rows(space))
    numbers = {name: np.zeros_like(values) for name, values in arrays(space, hidden=(2, 2)).items()}
    newest = space.state_width - space.num_models
    at = 0
    for agent, count in enumerate(space.agents):
        numbers[f"actor.{agent}.0.weight"][:, newest] = slope
        numbers[f"actor.{agent}.0.bias"][:] = (1.0, 0.0)
        numbers[f"actor.{agent}.1.weight"][:] = np.eye(2)
        step = (left - right)[at : at + count]
        numbers[f"actor.{agent}.2.weight"][:] = np.stack([step, -step], axis=1)
        numbers[f"actor.{agent}.2.bias"][:] = right[at : at + count]
        at += count
    return MaddpgNetwork(numbers, space.agents)
