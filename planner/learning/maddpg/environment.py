"""One step of TOP's decision process (V-B): an action row becomes a plan, the device runs, samples follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.rewards import FIGURES_BEFORE_LATENCY, Doubles, Floats, figures_of
from stageloom.planner.learning.maddpg.schedules import ScheduleTable
from stageloom.planner.learning.maddpg.settings import Settings, Superblocks
from stageloom.planner.twin.window import Window
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.policy.maddpg.combining import combine_blocks
from stageloom.shared.policy.maddpg.decide import Decision, plan_of, read_actions
from stageloom.shared.policy.maddpg.features import state_of
from stageloom.shared.policy.queues import deviations
from stageloom.shared.policy.samples import Sample, progress_bits


@dataclass(frozen=True, slots=True)
class Step:
    """What came of an action row."""

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
        settings: Settings,
        seed: int,
        *,
        thorough: bool = False,
    ) -> None:
        self._thorough = thorough
        self._problem, self._table, self._settings = problem, table, settings
        self._device = problem.make_device(seed)
        self._samples: tuple[Sample, ...] = ()
        self._running: object = None  # what of a decision the running plan follows from

    @property
    def state(self) -> Floats:
        """What the policy sees; all zeros at first. [state_width]"""
        return state_of(self._problem.space, self._samples)

    def step(self, actions: Sequence[float]) -> Step:
        """Carry out an action row for `Settings.step_s`."""
        space, settings = self._problem.space, self._settings
        asked = combine_blocks(space, actions[space.num_models :])
        if asked.excess and settings.superblocks is Superblocks.PAPER:
            nothing = (0.0,) * (FIGURES_BEFORE_LATENCY + space.num_models)
            return Step(tuple(actions), nothing, asked.excess / space.bins, False, None, self.state)
        decision = read_actions(space, actions, self._problem.loads, self._problem.template.lanes)
        plan = decision.combination.combined, decision.intervals_us
        if plan != self._running:
            bound = bound_decision(self._problem, self._table, decision, thorough=self._thorough)
            self._device.deploy(bound)
            self._running = plan
        every_s = settings.step_s / space.samples
        window = self._device.run(
            settings.step_s, sample_at_s=[every_s * (at + 1) for at in range(space.samples)]
        )
        self._samples = samples_of(window.glances, self._problem.service_s)
        executed = (*actions[: space.num_models], *asked.executed)
        figures = figures_of(window, self._problem.service_s)
        return Step(executed, tuple(figures.row()), asked.excess / space.bins, True, window, self.state)


def bound_plan(problem: Problem, table: ScheduleTable, actions: Sequence[float]) -> BoundPlan:
    """The plan of an action row, under the problem's mean load, its schedules searched for."""
    decision = read_actions(problem.space, actions, problem.loads, problem.template.lanes)
    return bound_decision(problem, table, decision, thorough=True)


def bound_decision(
    problem: Problem, table: ScheduleTable, decision: Decision, *, thorough: bool
) -> BoundPlan:
    """The plan of a decision, as `stageloom.shared.bound.bind` has it, without checking again what was
    checked."""
    combined = tuple(table.bound(members, thorough=thorough) for members in decision.combination.combined)
    plan = plan_of(problem.template, decision, [one.plan for one in combined])
    pairs = zip(problem.bound_models, plan.models, strict=True)
    return BoundPlan(plan, tuple(replace(bound, plan=model) for bound, model in pairs), combined)


def samples_of(glances: Sequence[QueueSnapshot], service_s: Sequence[float]) -> tuple[Sample, ...]:
    """Glances as the policy reads them (equation 1), deviations in seconds of queued work."""
    found = []
    for glance in glances:
        queued_s = [queue.queued * one_s for queue, one_s in zip(glance.queues, service_s, strict=True)]
        progress = tuple(progress_bits((queue.progress,), queue.blocks) for queue in glance.queues)
        found.append(Sample(progress, deviations(queued_s)))
    return tuple(found)


def clipped_row(actions: Sequence[float] | Floats | Doubles) -> tuple[float, ...]:
    """An action row within [0, 1], of plain numbers in single precision."""
    row: list[float] = np.clip(np.asarray(actions, np.float32), 0.0, 1.0).tolist()
    return tuple(row)
