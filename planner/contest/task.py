"""What a worker does for a contest: search an entrant's plan and judge it, or judge a plan again.

All a worker needs travels as plain values. Both twins say the same, so which one simulates is decided by the
work and by what is there: the reference one takes some 0.1 ms a step, the compiled one a second until its
kernels are loaded, and half a minute where they were never compiled.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stageloom.planner.contest.judge import Course, judge
from stageloom.planner.contest.worth import Worth
from stageloom.planner.twin.arrivals import Process, entered_anywhere
from stageloom.planner.twin.compiled.compile_cache import is_compiled
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import TargetDevice
from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.search.job import SearchJob, run_search

log = logging.getLogger(__name__)

_WORTH_LOADING: Final = 5_000
_WORTH_COMPILING: Final = 100_000
"""Steps: where the kernels were compiled ahead, and where they were not."""


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
            PlanError: the plan is not legal for these graphs.
        """
        bound = bind(plan, self.graphs)
        steps = course.simulated_s * sum(
            self.arrivals[model.plan.name].mean_per_s * len(model.blocks) for model in bound.models
        )
        if steps > (_WORTH_LOADING if is_compiled() else _WORTH_COMPILING):
            try:
                return judge(bound, self._compiled, course, self.service_s)
            except PlanError as error:
                log.info("simulated by the reference twin: %s", error)
        return judge(bound, self._reference, course, self.service_s)

    def _compiled(self, seed: int) -> TargetDevice:
        from stageloom.planner.twin.compiled.twin import CompiledTwin

        return CompiledTwin(self.times, entered_anywhere(self.arrivals, seed), seed=seed)

    def _reference(self, seed: int) -> TargetDevice:
        from stageloom.planner.twin.reference import Twin

        return Twin(self.times, entered_anywhere(self.arrivals, seed), seed=seed)


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
