"""Rivals' plans and learned policies on one device under one workload, by the same arrivals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem, ScheduleTable
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.train import polish
from stageloom.planner.learning.maddpg.work import Environment, bound_plan, clipped_row
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, better, figures_of, score_of
from stageloom.shared.bound import bind
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.job import run_search

CHOICE_SEEDS = (1_000_001, 1_000_002, 1_000_003)
"""Arrivals by which plans are chosen,"""

RECHECK_SEEDS = tuple(range(3_000_001, 3_000_009))
"""those by which the best learned plan and the best rival are compared once more,"""

FRESH_SEEDS = (2_000_001, 2_000_002, 2_000_003, 2_000_004, 2_000_005)
"""and those by which what was chosen is measured."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A plan that takes part, and what it is worth on either arrivals."""

    planner: str  # the policy or scheduler
    partition: str
    plan: Plan
    chosen_by: Score
    fresh: Score
    search_s: float

    def row(self) -> dict[str, Any]:
        """For the report."""
        return {"planner": self.planner, "partition": self.partition, **rounded(self.fresh)}


def rivals(
    problem: Problem,
    models: Sequence[ModelChoice],
    course: EvaluationSettings,
    fresh: EvaluationSettings,
    told: Callable[[str], None],
) -> list[Contestant]:
    """Every rival under its best partition, by the arrivals of `course`."""
    best: dict[str, Contestant] = {}
    for entrant in plan_candidates(models, problem.costs, executor=problem.template.executor):
        began_s = time.perf_counter()
        plan = run_search(entrant.job, time.monotonic)
        search_s = time.perf_counter() - began_s
        worth = judged(problem, plan, course)
        told(f"{entrant.name}: {worth.throughput_per_s:.1f} tasks/s")
        held = best.get(entrant.policy)
        if held is None or better(worth, held.chosen_by):
            best[entrant.policy] = Contestant(
                planner=entrant.policy,
                partition=entrant.partition,
                plan=plan,
                chosen_by=worth,
                fresh=worth,
                search_s=search_s,
            )
    return [replace(one, fresh=judged(problem, one.plan, fresh)) for one in best.values()]


def seeds_worth(problem: Problem, course: EvaluationSettings) -> dict[str, Score]:
    """Every unlearned candidate that a training starts from, by its name.

    A seed's schedules are searched for as long as those of the best learned plan, so that what remains
    between the two is what was learned.
    """
    table = problem.table()
    found = {}
    for name, actions in seeds(problem.space).items():
        polish(problem, table, actions)
        bound = bound_plan(problem, table, actions)
        found[name] = evaluate(bound, problem.make_device, course, problem.service_s)
    return found


def judged(problem: Problem, plan: Plan, course: EvaluationSettings) -> Score:
    """The worth of a plan that stays."""
    return evaluate(bind(plan, problem.graphs), problem.make_device, course, problem.service_s)


def judged_policy(
    problem: Problem,
    table: ScheduleTable,
    settings: MaddpgSettings,
    networks: Sequence[MaddpgNetwork],
    course: EvaluationSettings,
) -> Score:
    """The worth of policies that choose the plan anew for every window; spreads are over them, too."""
    figures = []
    steps = replace(settings, step_s=course.window_s)
    for network in networks:
        for seed in course.seeds:
            environment = Environment(problem, table, steps, seed, thorough=True)
            windows = []
            for _ in range(course.windows + round(course.warm_up_s / course.window_s)):
                step = environment.step(clipped_row(network.actions(environment.state)))
                if step.window is not None:
                    windows.append(step.window)
            figures.append(figures_of(windows[-course.windows :], problem.service_s))
    return score_of(figures)


def rounded(worth: Score) -> dict[str, Any]:
    """The figures as a row has them; times in ms."""
    return {
        "throughput_per_s": round(worth.throughput_per_s, 3),
        "throughput_spread": round(worth.throughput_spread, 3),
        "utilisation": round(worth.utilisation, 4),
        "utilisation_spread": round(worth.utilisation_spread, 4),
        "queue_variance": float(f"{worth.queue_variance:.4g}"),
        "queue_variance_spread": float(f"{worth.queue_variance_spread:.4g}"),
        "variance_growth_per_s": float(f"{worth.variance_growth:.4g}"),
        "p99_ms": round(worth.p99_s * 1e3, 3),
        "p99_spread_ms": round(worth.p99_spread * 1e3, 3),
        "met": round(worth.met, 4),
    }
