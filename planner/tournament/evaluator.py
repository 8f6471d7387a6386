"""How good a plan is on a simulated device: the same arrivals for every plan, from empty queues on.

A worker searches a candidate's plan and evaluates it, or evaluates a plan again; all it needs travels as
plain values. Both twins give the same results, so the amount of work decides which one simulates: the
reference twin takes about 0.1 ms a step, the compiled one a second until its kernels are loaded, and half a
minute where they were never compiled. Without numba there is no compiled one.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from stageloom.planner.cluster.packed import Packed
from stageloom.planner.tournament.refinement import NeighbourJob
from stageloom.planner.tournament.score import Score, figures_of, score_of
from stageloom.planner.twin.arrivals import Process, entered_anywhere
from stageloom.planner.twin.compiled.compile_cache import is_compiled
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import MakeDevice, TargetDevice
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.search.job import SearchJob, run_search

log = logging.getLogger(__name__)

_STEPS_LOADING: Final = 5_000
_STEPS_COMPILING: Final = 100_000
"""Steps from which the compiled twin is faster: with kernels compiled ahead, and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What every plan has to run: `windows` of `window_s` after `warm_up_s` that do not count."""

    seeds: tuple[int, ...]
    warm_up_s: float = 1.0
    window_s: float = 1.0
    windows: int = 10

    @property
    def simulated_s(self) -> float:
        """Seconds of the device for one plan."""
        return len(self.seeds) * (self.warm_up_s + self.window_s * self.windows)


def evaluate(
    bound: BoundPlan, make_device: MakeDevice, settings: EvaluationSettings, service_s: Sequence[float]
) -> Score:
    """The score of one plan that stays; `service_s`: device seconds of one task alone, per model."""
    return score_of([_figures(bound, make_device(seed), settings, service_s) for seed in settings.seeds])


def _figures(
    bound: BoundPlan, device: TargetDevice, settings: EvaluationSettings, service_s: Sequence[float]
) -> Score:
    device.deploy(bound)
    device.run(settings.warm_up_s)
    return figures_of([device.run(settings.window_s) for _ in range(settings.windows)], service_s)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A device and what arrives there, by model."""

    times: StepTimes
    arrivals: Mapping[str, Process]
    graphs: Mapping[Digest, Graph]
    service_s: tuple[float, ...]  # per model, in the plans' order

    def evaluate(self, plan: Plan, settings: EvaluationSettings) -> Score:
        """The score of a plan here.

        Raises:
            PlanError: the plan is not legal for these graphs.
        """
        bound = bind(plan, self.graphs)
        steps = settings.simulated_s * sum(
            self.arrivals[model.plan.name].mean_per_s * len(model.blocks) for model in bound.models
        )
        if find_spec("numba") is not None and steps > (_STEPS_LOADING if is_compiled() else _STEPS_COMPILING):
            try:
                return evaluate(bound, self._compiled, settings, self.service_s)
            except PlanError as error:
                log.info("simulated by the reference twin: %s", error)
        return evaluate(bound, self._reference, settings, self.service_s)

    def _compiled(self, seed: int) -> TargetDevice:
        from stageloom.planner.twin.compiled.twin import CompiledTwin

        return CompiledTwin(self.times, entered_anywhere(self.arrivals, seed), seed=seed)

    def _reference(self, seed: int) -> TargetDevice:
        from stageloom.planner.twin.reference import Twin

        return Twin(self.times, entered_anywhere(self.arrivals, seed), seed=seed)


def evaluate_candidate(
    job: SearchJob | NeighbourJob | Plan, scenario: Packed[Scenario], settings: EvaluationSettings
) -> tuple[Plan, Score, float]:
    """A candidate's plan, its score, and how many seconds the search for it took: none for a plan that is
    there.

    Raises:
        SettingError, PlanError: as `run_search`, `NeighbourJob.plan` and `Scenario.evaluate`.
    """
    began_s = time.monotonic()
    if isinstance(job, SearchJob):
        plan = run_search(job, time.monotonic)
    else:
        plan = job.plan() if isinstance(job, NeighbourJob) else job
    search_s = time.monotonic() - began_s
    return plan, scenario.value.evaluate(plan, settings), search_s


def evaluate_again(plan: Plan, scenario: Packed[Scenario], settings: EvaluationSettings) -> Score:
    """The score of a plan.

    Raises:
        PlanError: as `Scenario.evaluate`.
    """
    return scenario.value.evaluate(plan, settings)
