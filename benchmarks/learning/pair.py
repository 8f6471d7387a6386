"""One device under one workload: what arrives, the problem that is learned on, and rivals' plans.

Workloads are TOP's table II on the twin's device files, and the same scaled to each device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum
from typing import Any, Final, NamedTuple

from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.stored import OTHER_MEMBERS, TOP_MEMBERS
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, best_of
from stageloom.planner.twin.arrivals import Counted, Periodic, Process
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.search.compose import ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

MIX: Final = (("inception_v3", 30.0), ("resnet50", 60.0), ("squeezenet_bypass", 120.0))
_FASTER: Final = {"a100": 2.0}
"""TOP doubles the rates on its server."""

JITTER: Final = 0.2
"""Of the period: sensors that sample at a fixed frequency, but not with one clock."""

SWAP_S: Final = 4.0
"""Seconds after which a load that swaps has the other mix."""

QUEUE: Final = QueuePlan(max_tasks=4096)
"""Deep enough that nothing is refused within an evaluation: a queue that grows is seen to grow."""

CHOICE: Final = EvaluationSettings(seeds=(1_000_001, 1_000_002, 1_000_003), windows=10)
"""Arrivals by which rivals' plans are chosen."""


class Contestant(NamedTuple):
    """A plan that takes part; `partition` is that of a rival."""

    planner: str
    plan: Plan
    chosen_by: Score
    partition: str = ""


Workload = dict[str, Process]
"""What arrives of each model."""


def workloads(device: DeviceFile, times: StepTimes, models: Sequence[ModelChoice]) -> dict[str, Workload]:
    """The paper's mix; the same mix at 0.8 and at 1.1 of the device's capacity; and a load that swaps between
    the mix and its reverse, each at 1.1, every `SWAP_S`.

    Capacity is what the device serves one operator after another, whole models, without a gap.
    """
    faster = _FASTER.get(device.name, 1.0)
    paper = {name: rate * faster for name, rate in MIX}
    taken_s = {model.name: whole_s(times, model) for model in models}

    def of_capacity(share: float, mix: dict[str, float]) -> dict[str, float]:
        capacity = share / fsum(rate * taken_s[name] for name, rate in mix.items())
        return {name: capacity * rate for name, rate in mix.items()}

    reverse = dict(zip(paper, reversed(paper.values()), strict=True))
    return {
        "paper": _periodic(paper),
        **{f"capacity_{share}": _periodic(of_capacity(share, paper)) for share in (0.8, 1.1)},
        "swapping": _swapping(of_capacity(1.1, paper), of_capacity(1.1, reverse)),
    }


def _periodic(rates: dict[str, float]) -> Workload:
    return {name: Periodic(rate_per_s=rate, jitter_s=JITTER / rate) for name, rate in rates.items()}


def _swapping(first: dict[str, float], second: dict[str, float]) -> Workload:
    """As many tasks as each mix makes of its time, evenly drawn within; a seed enters it anywhere."""
    return {
        name: Counted(
            spans=tuple(
                (at * SWAP_S, (at + 1) * SWAP_S, round(mix[name] * SWAP_S))
                for at, mix in enumerate((first, second))
            ),
            length_s=2 * SWAP_S,
        )
        for name in first
    }


def whole_s(times: StepTimes, model: ModelChoice) -> float:
    """Seconds of one task of a model, uncut, one operator after another."""
    bound = bind(compose([model]), {model.artifact: model.graph})
    return times.of_plan(bound).step(0, 1, (1,)).seconds


def problem_of(
    device: DeviceFile, workload: Workload, models: Sequence[ModelChoice], structure: Plan | None = None
) -> Problem:
    """What is learned: combined blocks and launch intervals of the structure, by default the papers' blocks.

    A structure is all of a plan that is not learned: cuts, replicas, batches, lanes and rules.
    """
    costs = CostTable(rates=device.rates())
    template = structure or compose([replace(model, partition="paper") for model in models], costs=costs)
    return Problem.of(
        template,
        device_class=f"twin {device.name}",
        graphs={model.artifact: model.graph for model in models},
        costs=costs,
        arrivals_per_s=[process.mean_per_s for process in workload.values()],
        make_device=TwinDevices(device, costs, workload),
        members_max=TOP_MEMBERS.get(device.name, OTHER_MEMBERS),
    )


def judged(problem: Problem, plan: Plan, course: EvaluationSettings) -> Score:
    return evaluate(bind(plan, problem.graphs), problem.make_device, course, problem.service_s)


def rivals(
    problem: Problem,
    models: Sequence[ModelChoice],
    told: Callable[[str], None],
    names: Sequence[str] = (),
) -> list[Contestant]:
    """Every rival, or those of these names, under its best partition, by the arrivals that choose."""
    found: dict[str, list[Contestant]] = {}
    executor = problem.template.executor
    for candidate in plan_candidates(models, problem.costs, executor=executor, policy_names=names):
        plan = run_search(candidate.job, time.monotonic)
        score = judged(problem, plan, CHOICE)
        told(f"{candidate.name}: {score.throughput_per_s:.1f} tasks/s")
        own = Contestant(candidate.policy, plan, score, candidate.partition)
        found.setdefault(candidate.policy, []).append(own)
    return [best_contestant(own) for own in found.values()]


def structures(rival: Plan, models: Sequence[ModelChoice]) -> list[Plan]:
    """What may be learned on: the best rival's structure, and the same over the papers' blocks."""
    finer = [
        replace(
            choice,
            partition="paper",
            replicas=model.replicas,
            batch=model.batch,
            batch_max_delay_us=model.batch_max_delay_us,
        )
        for model, choice in zip(rival.models, models, strict=True)
    ]
    cut_finer = compose(finer, lanes=rival.lanes, executor=rival.executor, rules=Rules.of(rival))
    same = [model.cuts for model in cut_finer.models] == [model.cuts for model in rival.models]
    return [rival] if same else [rival, cut_finer]


def best_contestant(contestants: Sequence[Contestant]) -> Contestant:
    """By the arrivals that choose."""
    return contestants[best_of([one.chosen_by for one in contestants])]


def columns(score: Score) -> dict[str, Any]:
    """The figures as a row has them; times in ms."""
    return {
        "throughput_per_s": round(score.throughput_per_s, 3),
        "throughput_spread": round(score.throughput_spread, 3),
        "utilisation": round(score.utilisation, 4),
        "queue_variance": float(f"{score.queue_variance:.4g}"),
        "variance_growth_per_s": float(f"{score.variance_growth:.4g}"),
        "p99_ms": round(score.p99_s * 1e3, 3),
        "p99_spread_ms": round(score.p99_spread * 1e3, 3),
        "met": round(score.met, 4),
    }
