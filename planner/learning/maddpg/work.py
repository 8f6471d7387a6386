"""What a worker is asked for, and how it does it: pure functions of picklable values, on devices of its own.

collect(problem, table, settings, Collect(...))   -> Transitions      one episode, for the replay
evaluate(problem, table, settings, Evaluate(...)) -> Score         of a plan or a policy
run(problem, table, settings, work)               -> Done          either, with the schedules found on the way
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from stageloom.planner.learning.maddpg.environment import Environment, Step, clipped_row
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.replay import Transitions
from stageloom.planner.learning.maddpg.rewards import Floats
from stageloom.planner.learning.maddpg.schedules import Entry, ScheduleTable
from stageloom.planner.learning.maddpg.settings import Settings
from stageloom.planner.tournament.score import Score, SeedFigures, figures_of, score_of
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.book import BlockKey
from stageloom.shared.policy.maddpg.network import MaddpgNetwork

Weights: TypeAlias = Mapping[str, Floats]
"""As `Learner.policy_weights` gives them."""


@dataclass(frozen=True, kw_only=True)
class Collect:
    """An episode of `steps` steps from empty queues. Actions are the policy's, or `rows` in turn."""

    number: int  # of the work, within its training
    seed: int  # of arrivals and noise
    steps: int
    weights: Weights | None = None
    rows: tuple[tuple[float, ...], ...] = ()
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """A policy without noise, or one action row held; `seeds` are of arrivals, each from empty queues."""

    number: int
    name: str
    seeds: tuple[int, ...]
    steps: int
    weights: Weights | None = None
    row: tuple[float, ...] = ()


Work: TypeAlias = Collect | Evaluate


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a piece of work."""

    found: Transitions | Score
    schedules: Mapping[BlockKey, Entry]  # that the worker's table lacked before
    asked: Mapping[tuple[Member, ...], int] = field(default_factory=dict)
    """How often the worker's own table was asked for which combined block, where it is not the course's."""


def run(problem: Problem, table: ScheduleTable, settings: Settings, work: Work) -> Done:
    """Do it."""
    found: Transitions | Score
    if isinstance(work, Collect):
        found = collect(problem, table, settings, work)
    else:
        found = evaluate(problem, table, settings, work)
    return Done(found=found, schedules=table.taken_new())


def collect(problem: Problem, table: ScheduleTable, settings: Settings, work: Collect) -> Transitions:
    """One episode."""
    random = np.random.default_rng([work.seed, 1])
    network = None if work.weights is None else MaddpgNetwork(work.weights, problem.space.agents)
    environment = Environment(problem, table, settings, work.seed)
    states, steps = [environment.state], []
    for at in range(work.steps):
        if network is None:
            actions = np.array(work.rows[at % len(work.rows)], np.float32)
        else:
            actions = network.actions(states[-1])
        steps.append(environment.step(noisy(actions, work.noise, settings.noise_share, random)))
        states.append(steps[-1].state)
    return Transitions(
        states=np.stack(states[:-1]),
        actions=np.array([step.executed for step in steps], np.float32),
        figures=np.array([step.figures for step in steps], np.float64),
        excess=np.array([step.excess for step in steps], np.float64),
        ran=np.array([step.ran for step in steps], np.bool_),
        following=np.stack(states[1:]),
    )


def evaluate(problem: Problem, table: ScheduleTable, settings: Settings, work: Evaluate) -> Score:
    """All seeds; the first step of each, when queues are empty and nothing is in flight, does not count."""
    network = None if work.weights is None else MaddpgNetwork(work.weights, problem.space.agents)
    figures = []
    for seed in work.seeds:
        environment = Environment(problem, table, settings, seed, thorough=True)
        steps: list[Step] = []
        for _ in range(work.steps + 1):
            actions = work.row if network is None else clipped_row(network.actions(environment.state))
            steps.append(environment.step(actions))
        figures.append(_figures(problem, settings, steps[1:]))
    return score_of(figures)


def noisy(actions: Floats, noise: float, share: float, random: np.random.Generator) -> tuple[float, ...]:
    """Some of the actions with Gaussian noise on them, within [0, 1]."""
    chosen = random.random(len(actions)) < share
    return clipped_row(actions + chosen * random.normal(0.0, noise, len(actions)))


def _figures(problem: Problem, settings: Settings, steps: Sequence[Step]) -> SeedFigures:
    """Of one seed's steps; one that never ran served nothing for as long."""
    windows = [step.window for step in steps if step.window is not None]
    idle_s = (len(steps) - len(windows)) * settings.step_s
    return figures_of(windows, problem.service_s, idle_s=idle_s)
