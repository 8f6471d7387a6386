"""What a worker does for a contest: search an entrant's plan and judge it, or judge a plan again.

All a worker needs travels as plain values. Which twin it simulates on is decided by the work: the compiled
one takes half a minute where its kernels were never compiled, the reference one some 0.1 ms a step.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from planner.contest.judge import Course, judge
from planner.contest.worth import Worth
from planner.twin.arrivals import Process, entered_anywhere
from planner.twin.interface import Device, MakeDevice
from planner.twin.times import StepTimes
from shared.bound import BoundPlan, bind
from shared.graph import Graph
from shared.ids import Digest
from shared.plan import Plan
from shared.search.job import SearchJob, run_search

_WORTH_COMPILED: Final = 100_000  # steps


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A device and what arrives there, by model."""

    times: StepTimes
    arrivals: Mapping[str, Process]
    graphs: Mapping[Digest, Graph]
    service_s: tuple[float, ...]  # per model, in the plans' order

    def judge(self, plan: Plan, course: Course) -> Worth:
        """The worth of a plan here.

        Raises:
            PlanError: the plan is not legal for these graphs, or too large for the twin.
        """
        bound = bind(plan, self.graphs)
        return judge(bound, self._maker(bound, course), course, self.service_s)

    def _maker(self, bound: BoundPlan, course: Course) -> MakeDevice:
        blocks = {model.plan.name: len(model.blocks) for model in bound.models}
        a_second = sum(process.mean_per_s * blocks[name] for name, process in self.arrivals.items())
        return partial(self._device, a_second * course.simulated_s > _WORTH_COMPILED)

    def _device(self, compiled: bool, seed: int) -> Device:
        arrivals = entered_anywhere(self.arrivals, seed)
        if compiled:
            from planner.twin.compiled.twin import CompiledTwin

            return CompiledTwin(self.times, arrivals, seed=seed)
        from planner.twin.reference import Twin

        return Twin(self.times, arrivals, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """An entrant's plan, what it is worth, and how long the search for it took."""

    plan: Plan
    worth: Worth
    search_s: float


def enter(job: SearchJob, scene: Scene, course: Course) -> Entered:
    """Search and judge.

    Raises:
        SettingError, PlanError: as `run_search` and `Scene.judge`.
    """
    began_s = time.monotonic()
    plan = run_search(job, time.monotonic)
    search_s = time.monotonic() - began_s
    return Entered(plan=plan, worth=scene.judge(plan, course), search_s=search_s)


def judge_again(plans: Mapping[int, Plan], scene: Scene, course: Course) -> dict[int, Worth]:
    """The worth of plans, by the same keys.

    Raises:
        PlanError: as `Scene.judge`.
    """
    return {entrant: scene.judge(plan, course) for entrant, plan in plans.items()}
