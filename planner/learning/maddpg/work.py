"""What a worker is asked for, and the environment that it runs in (TOP, V-B). No torch.

collect(problem, table, settings, Collect(...))   -> Transitions   one episode, for the replay
evaluate(problem, table, settings, Evaluate(...)) -> Score         of a plan or a policy
run(problem, table, settings, work)               -> WorkResult    either, with the schedules found on the way
rollout(task, work, schedules)                    -> WorkResult    the same in a process of its own

A step of the environment turns an action row into a plan, runs the device, and gives samples. All values are
picklable. A process keeps its problem, and its schedules with it, from one piece of work to the next; one
that is new to the training begins with the schedules that there were when the run began.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from stageloom.planner.learning.maddpg.problem import Problem, ScheduleEntry, ScheduleTable
from stageloom.planner.learning.maddpg.replay import (
    FIGURES_BEFORE_LATENCY,
    Doubles,
    Floats,
    Transitions,
    step_figures,
)
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Superblocks
from stageloom.planner.tournament.score import Score, figures_of, score_of
from stageloom.planner.twin.window import Window
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.decide import BlockKey, Decision, plan_of, read_actions
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, state_of
from stageloom.shared.policy.queues import PolicySample, deviations, progress_bits


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """The result of an action row."""

    executed: tuple[float, ...]  # what was run, or what was asked for where it was not [action_width]
    figures: tuple[float, ...]  # raw [FIGURES_BEFORE_LATENCY + W]; zeros where nothing ran
    excess: float  # share of the blocks beyond H
    ran: bool
    window: Window | None
    state: Floats  # after the step [state_width]


class Environment:
    """A device with its arrivals, from empty queues on.

    `thorough`: schedules are searched for where they are not known, and not just made quickly.
    """

    def __init__(
        self,
        problem: Problem,
        table: ScheduleTable,
        settings: MaddpgSettings,
        seed: int,
        *,
        thorough: bool = False,
    ) -> None:
        self._thorough = thorough
        self._problem, self._table, self._settings = problem, table, settings
        self._device = problem.make_device(seed)
        self._samples: tuple[PolicySample, ...] = ()
        self._running: object = None  # what of a decision the running plan follows from

    @property
    def state(self) -> Floats:
        """What the policy sees; all zeros at first. [state_width]"""
        return state_of(self._problem.space, self._samples)

    def step(self, actions: Sequence[float]) -> EnvironmentStep:
        """Run the plan of an action row for `MaddpgSettings.step_s`."""
        space, settings = self._problem.space, self._settings
        asked = combine_blocks(space, actions[space.num_models :])
        if asked.excess and settings.superblocks is Superblocks.PAPER:
            nothing = (0.0,) * (FIGURES_BEFORE_LATENCY + space.num_models)
            return EnvironmentStep(
                tuple(actions), nothing, asked.excess / space.bins, False, None, self.state
            )
        problem = self._problem
        _, intervals = decision = read_actions(space, actions, problem.loads, problem.template.lanes)
        if (asked.combined, intervals) != self._running:
            self._device.deploy(bound_decision(problem, self._table, decision, thorough=self._thorough))
            self._running = asked.combined, intervals
        every_s = settings.step_s / space.samples
        window = self._device.run(
            settings.step_s, sample_at_s=[every_s * (at + 1) for at in range(space.samples)]
        )
        self._samples = samples_of(window.glances, self._problem.service_s)
        executed = (*actions[: space.num_models], *asked.executed)
        figures = step_figures(window, self._problem.service_s)
        return EnvironmentStep(executed, figures, asked.excess / space.bins, True, window, self.state)


def bound_plan(problem: Problem, table: ScheduleTable, actions: Sequence[float]) -> BoundPlan:
    """The plan of an action row, under the problem's mean load, its schedules searched for."""
    decision = read_actions(problem.space, actions, problem.loads, problem.template.lanes)
    return bound_decision(problem, table, decision, thorough=True)


def bound_decision(
    problem: Problem, table: ScheduleTable, decision: Decision, *, thorough: bool
) -> BoundPlan:
    """The plan of a decision, as `stageloom.shared.bound.bind` has it, without checking again what was
    checked."""
    combination, intervals = decision
    combined = tuple(table.bound(members, thorough=thorough) for members in combination.combined)
    plan = plan_of(problem.template, intervals, [one.plan for one in combined])
    pairs = zip(problem.bound_models, plan.models, strict=True)
    return BoundPlan(plan, tuple(replace(bound, plan=model) for bound, model in pairs), combined)


def samples_of(glances: Sequence[QueueSnapshot], service_s: Sequence[float]) -> tuple[PolicySample, ...]:
    """Glances as the policy reads them (equation 1), deviations in seconds of queued work."""
    found = []
    for glance in glances:
        queued_s = [queue.queued * one_s for queue, one_s in zip(glance.queues, service_s, strict=True)]
        progress = tuple(progress_bits((queue.progress,), queue.blocks) for queue in glance.queues)
        found.append(PolicySample(progress, deviations(queued_s)))
    return tuple(found)


def clipped_row(actions: Sequence[float] | Floats | Doubles) -> tuple[float, ...]:
    """An action row within [0, 1], of plain numbers in single precision."""
    row: list[float] = np.clip(np.asarray(actions, np.float32), 0.0, 1.0).tolist()
    return tuple(row)


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
    uniform: float = 0.0  # share of the steps whose actions are uniform


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
class WorkResult:
    """The result of a piece of work."""

    found: Transitions | Score
    schedules: Mapping[BlockKey, ScheduleEntry]  # that the worker's table lacked before
    asked: Mapping[tuple[Member, ...], int] = field(default_factory=dict)
    """How often the worker's own table was asked for which combined block, where it is not the course's."""


def run(problem: Problem, table: ScheduleTable, settings: MaddpgSettings, work: Work) -> WorkResult:
    """Do it."""
    found: Transitions | Score
    if isinstance(work, Collect):
        found = collect(problem, table, settings, work)
    else:
        found = evaluate(problem, table, settings, work)
    return WorkResult(found=found, schedules=table.taken_new())


def collect(problem: Problem, table: ScheduleTable, settings: MaddpgSettings, work: Collect) -> Transitions:
    random = np.random.default_rng([work.seed, 1])
    network = None if work.weights is None else MaddpgNetwork(work.weights, problem.space.agents)
    environment = Environment(problem, table, settings, work.seed)
    states, steps = [environment.state], []
    for at in range(work.steps):
        if network is None:
            actions = np.array(work.rows[at % len(work.rows)], np.float32)
        else:
            actions = network.actions(states[-1])
        if work.uniform and random.random() < work.uniform:
            steps.append(environment.step(clipped_row(random.random(problem.space.action_width))))
        else:
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


def evaluate(problem: Problem, table: ScheduleTable, settings: MaddpgSettings, work: Evaluate) -> Score:
    """All seeds; the first step of each, when queues are empty and nothing is in flight, does not count."""
    network = None if work.weights is None else MaddpgNetwork(work.weights, problem.space.agents)
    figures = []
    for seed in work.seeds:
        environment = Environment(problem, table, settings, seed, thorough=True)
        steps: list[EnvironmentStep] = []
        for _ in range(work.steps + 1):
            actions = work.row if network is None else clipped_row(network.actions(environment.state))
            steps.append(environment.step(actions))
        figures.append(_figures(problem, settings, steps[1:]))
    return score_of(figures)


def noisy(actions: Floats, noise: float, share: float, random: np.random.Generator) -> tuple[float, ...]:
    """Some of the actions with Gaussian noise on them, within [0, 1]."""
    chosen = random.random(len(actions)) < share
    return clipped_row(actions + chosen * random.normal(0.0, noise, len(actions)))


def _figures(problem: Problem, settings: MaddpgSettings, steps: Sequence[EnvironmentStep]) -> Score:
    """Of one seed's steps; one that never ran served nothing for as long."""
    windows = [step.window for step in steps if step.window is not None]
    idle_s = (len(steps) - len(windows)) * settings.step_s
    return figures_of(windows, problem.service_s, idle_s=idle_s)


def task_of(problem: Problem, settings: MaddpgSettings, table: ScheduleTable, run_id: str = "") -> bytes:
    """What all work of a run has in common; a process keeps the problem of equal bytes.

    `table` is where its own begins: a run that goes on goes on with the schedules that it had. `run_id`
    tells runs apart: what a process found for another one, this one's learner was not told.
    """
    return pickle.dumps((problem, settings, table.saved(), run_id))


def rollout(task: bytes, work: Work, schedules: Mapping[BlockKey, ScheduleEntry]) -> WorkResult:
    """Run work in a process of its own; `schedules` are some that the learner knows."""
    problem, settings, table = _kept(task)
    table.put(schedules)
    return replace(run(problem, table, settings, work), asked=table.taken_asked())


@lru_cache(maxsize=1)
def _kept(task: bytes) -> tuple[Problem, MaddpgSettings, ScheduleTable]:
    # From the learner, which started this process or joined its Ray.
    problem, settings, saved, _ = pickle.loads(task)
    table = problem.table()
    table.restore(saved)
    table.taken_asked()  # the learner knows
    return problem, settings, table
