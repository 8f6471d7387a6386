"""One device under one workload: rivals, trainings, and the planner's choice.

Workloads are TOP's table II on the twin's device files, and the same scaled to each device. Rivals' plans
and learned policies are judged by the same arrivals.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import fsum
from multiprocessing import get_context
from typing import Any, Final, NamedTuple

from benchmarks.learning.table import LEARNED_PLAN, SEED
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.stored import OTHER_MEMBERS, TOP_MEMBERS
from stageloom.planner.learning.maddpg.train import MaddpgResult, polish, train
from stageloom.planner.learning.maddpg.work import Environment, bound_plan, clipped_row
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, better, figures_of, score_of, surely_better
from stageloom.planner.twin.arrivals import Counted, Periodic, Process
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.policy.maddpg.checkpoint import decode
from stageloom.shared.search.compose import ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

MIX: Final = (("inception_v3", 30.0), ("resnet50", 60.0), ("squeezenet_bypass", 120.0))
SINGLE: Final = ("inception_v3", 240.0)
_FASTER: Final = {"a100": 2.0}
"""TOP doubles the rates on its server."""

JITTER: Final = 0.2
"""Of the period: sensors that sample at a fixed frequency, but not with one clock."""

SWAP_S: Final = 4.0
"""Seconds after which a load that swaps has the other mix."""

QUEUE: Final = QueuePlan(max_tasks=4096)
"""Deep enough that nothing is refused within an evaluation: a queue that grows is seen to grow."""

CHOICE: Final = EvaluationSettings(seeds=(1_000_001, 1_000_002, 1_000_003), windows=10)
"""Arrivals by which plans are chosen,"""

RECHECK: Final = EvaluationSettings(seeds=tuple(range(3_000_001, 3_000_009)), windows=10)
"""those by which the best learned plan and the best rival are compared once more,"""

FRESH: Final = EvaluationSettings(seeds=tuple(range(2_000_001, 2_000_006)), windows=10)
"""and those by which what was chosen is measured."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is spent on the trainings of one pair."""

    seeds: tuple[int, ...] = (1, 2, 3)
    budget_s: float = 600.0  # of each, all at once
    settings: MaddpgSettings = field(default_factory=MaddpgSettings)


class Contestant(NamedTuple):
    """A plan that takes part; `partition` is that of a rival."""

    planner: str
    plan: Plan
    chosen_by: Score
    partition: str = ""


Workload = dict[str, Process]
"""What arrives of each model."""


def workloads(device: DeviceFile, times: StepTimes, models: Sequence[ModelChoice]) -> dict[str, Workload]:
    """The paper's mix; the same mix at 0.8 and at 1.1 of the device's capacity; one model alone; and a load
    that swaps between the mix and its reverse, each at 1.1, every `SWAP_S`.

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
        "single": _periodic({SINGLE[0]: SINGLE[1] * faster}),
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
    best: dict[str, Contestant] = {}
    executor = problem.template.executor
    for candidate in plan_candidates(models, problem.costs, executor=executor, policy_names=names):
        plan = run_search(candidate.job, time.monotonic)
        score = judged(problem, plan, CHOICE)
        told(f"{candidate.name}: {score.throughput_per_s:.1f} tasks/s")
        held = best.get(candidate.policy)
        if held is None or better(score, held.chosen_by):
            best[candidate.policy] = Contestant(candidate.policy, plan, score, candidate.partition)
    return list(best.values())


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


def chosen_problem(
    device: DeviceFile, workload: Workload, models: Sequence[ModelChoice], rival: Plan
) -> Problem:
    """The structure that is learned on: the one on which a plan that nobody learned is worth most."""
    best: tuple[Score, Problem] | None = None
    for structure in structures(rival, models):
        problem = problem_of(device, workload, models, structure)
        table = problem.table()
        for actions in seeds(problem.space).values():
            score = judged(problem, bound_plan(problem, table, actions).plan, CHOICE)
            if best is None or better(score, best[0]):
                best = score, problem
    assert best is not None
    return best[1]


def seed_scores(problem: Problem) -> dict[str, Score]:
    """Every unlearned candidate that a training starts from, by its name, on fresh arrivals.

    A seed's schedules are searched for as long as those of the best learned plan, so that what remains
    between the two is what was learned.
    """
    table = problem.table()
    scores = {}
    for name, actions in seeds(problem.space).items():
        polish(problem, table, actions)
        scores[name] = judged(problem, bound_plan(problem, table, actions).plan, FRESH)
    return scores


def trained(problem: Problem, effort: Effort) -> list[MaddpgResult]:
    """One training per seed, each in a process of its own, all at once."""
    with ProcessPoolExecutor(len(effort.seeds), mp_context=get_context("spawn")) as pool:
        trainings = [
            pool.submit(train, problem, effort.settings, seed, clock=time.monotonic, budget_s=effort.budget_s)
            for seed in effort.seeds
        ]
        return [training.result() for training in trainings]


def judged_policies(problem: Problem, settings: MaddpgSettings, trainings: Sequence[MaddpgResult]) -> Score:
    """The worth of policies that choose the plan anew for every window; spreads are over them, too.

    Schedules are searched for as their trainings do.
    """
    table, figures = problem.table(), []
    steps = replace(settings, step_s=FRESH.window_s)
    for network in [decode(training.checkpoint).network for training in trainings]:
        for seed in FRESH.seeds:
            environment = Environment(problem, table, steps, seed, thorough=True)
            windows = []
            for _ in range(FRESH.windows + round(FRESH.warm_up_s / FRESH.window_s)):
                step = environment.step(clipped_row(network.actions(environment.state)))
                if step.window is not None:
                    windows.append(step.window)
            figures.append(figures_of(windows[-FRESH.windows :], problem.service_s))
    return score_of(figures)


def chosen(problem: Problem, against: Sequence[Contestant], trainings: Sequence[MaddpgResult]) -> Contestant:
    """The planner's answer: the best rival, or the best learned plan if it is surely better by arrivals that
    chose neither. What was chosen among many by a few arrivals looks better by these than it is."""
    learned = [
        Contestant(LEARNED_PLAN, training.plan, judged(problem, training.plan, CHOICE))
        for training in trainings
    ]
    rival, best = best_of(against), best_of(learned)
    sure = surely_better(*(judged(problem, contestant.plan, RECHECK) for contestant in (best, rival)))
    return best if sure else rival


def best_of(contestants: Sequence[Contestant]) -> Contestant:
    best = contestants[0]
    for contestant in contestants[1:]:
        if better(contestant.chosen_by, best.chosen_by):
            best = contestant
    return best


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


def run_pair(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    effort: Effort | None,
    told: Callable[[str], None],
) -> tuple[list[dict[str, Any]], float]:
    """The rows of one pair, and the longest training's seconds; without an effort rivals and seeds alone."""
    base = problem_of(device, workload, models)
    against = rivals(base, models, told)
    problem = chosen_problem(device, workload, models, best_of(against).plan)
    offered = dict(models[0].graph.partitions)
    partition = next(name for name, cuts in offered.items() if cuts == problem.template.models[0].cuts)
    rows = [
        {"planner": rival.planner, "partition": rival.partition, **columns(judged(base, rival.plan, FRESH))}
        for rival in against
    ]
    for name, score in seed_scores(problem).items():
        rows.append({"planner": SEED, "of": name, "partition": partition, **columns(score)})
    if effort is None:
        return rows, 0.0
    trainings = trained(problem, effort)
    planner = chosen(problem, against, trainings)
    told(f"planner: {planner.planner}")
    policies = judged_policies(problem, effort.settings, trainings)
    rows += [
        {"planner": "maddpg", "partition": partition, **columns(policies)},
        {"planner": "planner", "of": planner.planner, **columns(judged(problem, planner.plan, FRESH))},
    ]
    return rows, max(training.train_s for training in trainings)
