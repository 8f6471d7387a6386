"""A device whose best plan is known: steps of several members cost a fixed factor of what they cost alone.

Two models of two blocks each on one lane. Work is fluid: every window the device serves queues and arrivals
in proportion, at the seconds that a task costs under the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.twin.window import ModelWindow, Window
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import Counts, ModelQueue, QueueSnapshot
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT, RIGHT = model("left", DIAMOND, cuts=[2]), model("right", CHAIN, cuts=[1])
GRAPHS = dict([LEFT, RIGHT])
BLOCK_S = 0.01
COSTS = CostTable(
    measured_s={
        (artifact, OpId(op)): 2 * BLOCK_S / len(graph.operators)
        for artifact, graph in (LEFT, RIGHT)
        for op in range(len(graph.operators))
    }
)
ARRIVALS_PER_S = (35.0, 25.0)  # 1.2 device seconds a second where every block runs alone


def served(submitted: int, ended: Counts, latencies_s: tuple[float, ...]) -> ModelWindow:
    """One model during a window."""
    return ModelWindow(
        name="", submitted=submitted, ended=ended, queued=0, busy_s=0.0, latencies_s=latencies_s
    )


def window_of(
    seconds: float, models: tuple[ModelWindow, ...], utilisation: float, glances: tuple[QueueSnapshot, ...]
) -> Window:
    """A window of which only this is known."""
    return Window(
        plan=Digest(""),
        began_s=0.0,
        seconds=seconds,
        busy_s=0.0,
        used_s=utilisation * seconds,
        models=models,
        steps=(),
        glances=glances,
        open_before=0,
        open_after=0,
    )


class ToyDevice:
    """`factor`: seconds of a step of two members over those of both alone."""

    def __init__(self, factor: float, seed: int) -> None:
        self._factor = factor
        self._random = np.random.default_rng(seed)
        self._queued = np.zeros(2)
        self._task_s = np.zeros(2)
        self.deployed: list[BoundPlan] = []

    def deploy(self, bound: BoundPlan) -> None:
        self.deployed.append(bound)
        self._task_s = np.zeros(2)
        for block in bound.plan.combined:
            for member in block.members:
                self._task_s[member.model] += BLOCK_S * (self._factor if len(block.members) > 1 else 1.0)

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        arrived = self._random.poisson(np.array(ARRIVALS_PER_S) * seconds)
        waiting = self._queued + arrived
        need_s = float(waiting @ self._task_s)
        done_now = np.floor(waiting * min(seconds / need_s, 1.0))
        before, self._queued = self._queued, waiting - done_now
        latency_s = self._task_s + (before + self._queued) / 2 / np.maximum(done_now / seconds, 1.0)
        return window_of(
            seconds,
            tuple(
                served(int(came), Counts(completed=int(done)), (float(took_s),) * int(done))
                for came, done, took_s in zip(arrived, done_now, latency_s, strict=True)
            ),
            min(need_s / seconds, 1.0),
            tuple(self._glance() for _ in sample_at_s or (seconds,)),
        )

    def _glance(self) -> QueueSnapshot:
        queues = tuple(
            ModelQueue(name, 0, int(queued), 0.0, 2, int(self._random.integers(4)))
            for name, queued in zip(("left", "right"), self._queued, strict=True)
        )
        return QueueSnapshot(0.0, None, None, queues)


@dataclass(frozen=True)
class ToyDevices:
    """Makes toys."""

    factor: float

    def __call__(self, seed: int) -> ToyDevice:
        return ToyDevice(self.factor, seed)


def problem(factor: float = 0.6) -> Problem:
    """Two models of two blocks; combining two of any pays where the factor is below 1."""
    choices = [
        ModelChoice(name=graph.name, artifact=artifact, graph=graph, partition="base")
        for artifact, graph in (LEFT, RIGHT)
    ]
    return Problem.of(
        compose(choices),
        device_class="toy",
        graphs=GRAPHS,
        costs=COSTS,
        arrivals_per_s=ARRIVALS_PER_S,
        make_device=ToyDevices(factor),
        samples=2,
    )


SMALL = MaddpgSettings(
    transitions=80,
    learn_from=20,
    replay=64,
    batch=16,
    actors=(16, 12),
    critics=(32, 24, 16),
    actor_after=10,
    episode_steps=10,
    validate_every=30,
    validation_steps=3,
)
"""Trains in about a second."""
