"""One device under one workload: rivals, trainings, the planner's choice, and other interference."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.learning.contestants import (
    CHOICE_SEEDS,
    FRESH_SEEDS,
    RECHECK_SEEDS,
    Contestant,
    judged,
    judged_policy,
    rivals,
    rounded,
    seeds_worth,
)
from benchmarks.learning.training import trained
from benchmarks.learning.verdict import LEARNED_PLAN, SEED
from benchmarks.learning.workloads import MEMBERS_MAX, Workload
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.train import MaddpgResult
from stageloom.planner.learning.maddpg.work import bound_plan
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, better, surely_better
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import TwinDevices
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.policy.maddpg.checkpoint import decode
from stageloom.shared.search.compose import ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable

QUEUE = QueuePlan(max_tasks=4096)
"""Deep enough that nothing is refused within an evaluation: a queue that grows is seen to grow."""

INTERFERENCE = (0.5, 1.5)
WINDOWS = 10
CHOICE, RECHECK, FRESH = (
    EvaluationSettings(seeds=arrivals, windows=WINDOWS)
    for arrivals in (CHOICE_SEEDS, RECHECK_SEEDS, FRESH_SEEDS)
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is spent on one pair."""

    seeds: tuple[int, ...] = (1, 2, 3)
    budget_s: float = 600.0  # of all trainings of the pair together
    settings: MaddpgSettings = field(default_factory=MaddpgSettings)


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
        arrivals_per_s=[rate for _, rate in workload.rates],
        make_device=TwinDevices(device, costs, workload.arrivals()),
        members_max=MEMBERS_MAX[device.name],
    )


def structures(rival: Plan, models: Sequence[ModelChoice]) -> tuple[Plan, ...]:
    """What may be learned on: the best rival's structure, and the same over the papers' blocks."""
    plans = [rival]
    if any(
        model.cuts != dict(choice.graph.partitions)["paper"]
        for model, choice in zip(rival.models, models, strict=True)
    ):
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
        rules = Rules(
            run_ahead=rival.run_ahead,
            step_choice=rival.step_choice,
            wait=rival.wait,
            wait_timeout_us=rival.wait_timeout_us,
            max_skips=rival.max_skips,
            barrier=rival.barrier,
        )
        plans.append(compose(finer, lanes=rival.lanes, executor=rival.executor, rules=rules))
    return tuple(plans)


def chosen_problem(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    rival: Plan,
    course: EvaluationSettings,
) -> Problem:
    """The structure that is learned on: the one on which a plan that nobody learned is worth most."""
    best: tuple[Score, Problem] | None = None
    for structure in structures(rival, models):
        problem = problem_of(device, workload, models, structure)
        table = problem.table()
        for actions in seeds(problem.space).values():
            worth = evaluate(
                bound_plan(problem, table, actions), problem.make_device, course, problem.service_s
            )
            if best is None or better(worth, best[0]):
                best = worth, problem
    assert best is not None
    return best[1]


def run_pair(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    effort: Effort,
    *,
    folder: Path,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """The rows and figures of one pair; from its file where it was done before."""
    if (kept := _kept(folder / "pair.json")) is not None:
        return kept
    problem, against = _before_training(device, workload, models, told)
    found = trained(
        problem,
        effort.settings,
        effort.seeds,
        budget_s=effort.budget_s,
        folder=folder,
        told=told,
    )
    policy_chosen, policy_fresh = _policies(problem, found, effort.settings, CHOICE, FRESH)
    learned = [_learned(problem, one, CHOICE, FRESH) for one in found]
    best_rival = _best(against, lambda one: one.fresh)
    planner = _planner(problem, against, learned, RECHECK)
    told(f"planner: {planner.planner}; best rival: {best_rival.planner}")
    where = {"device": device.name, "workload": workload.name}
    partition = _cuts(problem, models)
    rows = [
        *_rows_before_training(where, problem, against, partition),
        {**where, "planner": "maddpg", "partition": partition, **rounded(policy_fresh)},
        {**where, "planner": "planner", "of": planner.planner, **rounded(planner.fresh)},
    ]
    pair = {
        "rows": rows,
        "policy_when_chosen": rounded(policy_chosen),
        "trainings": [_training(one) for one in found],
        "interference": [
            _other_interference(device, workload, models, factor, planner, best_rival, FRESH)
            for factor in INTERFERENCE
        ],
    }
    (folder / "pair.json").write_text(json.dumps(pair))
    return pair


def run_untrained(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    *,
    folder: Path,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """The rows of one pair that need no training, rivals and seeds; from its file where it was done."""
    if (kept := _kept(folder / "untrained.json")) is not None:
        return kept
    problem, against = _before_training(device, workload, models, told)
    where = {"device": device.name, "workload": workload.name}
    rows = _rows_before_training(where, problem, against, _cuts(problem, models))
    pair = {"rows": rows, "trainings": [], "interference": []}
    (folder / "untrained.json").write_text(json.dumps(pair))
    return pair


def _kept(file: Path) -> dict[str, Any] | None:
    file.parent.mkdir(parents=True, exist_ok=True)
    return json.loads(file.read_text()) if file.exists() else None


def _before_training(
    device: DeviceFile, workload: Workload, models: Sequence[ModelChoice], told: Callable[[str], None]
) -> tuple[Problem, list[Contestant]]:
    """The problem to learn, over the structure that is worth most without learning, and the rivals."""
    against = rivals(problem_of(device, workload, models), models, CHOICE, FRESH, told)
    rival = _best(against, lambda one: one.chosen_by).plan
    return chosen_problem(device, workload, models, rival, CHOICE), against


def _rows_before_training(
    where: Mapping[str, str], problem: Problem, against: Sequence[Contestant], partition: str
) -> list[dict[str, Any]]:
    return [
        *({**where, **one.row()} for one in against),
        *(
            {**where, "planner": SEED, "of": name, "partition": partition, **rounded(worth)}
            for name, worth in seeds_worth(problem, FRESH).items()
        ),
    ]


def _cuts(problem: Problem, models: Sequence[ModelChoice]) -> str:
    """The name of the partition that a policy was learned on."""
    offered = dict(models[0].graph.partitions)
    return next(name for name, cuts in offered.items() if cuts == problem.template.models[0].cuts)


def _policies(
    problem: Problem,
    found: Sequence[MaddpgResult],
    settings: MaddpgSettings,
    choice: EvaluationSettings,
    fresh: EvaluationSettings,
) -> tuple[Score, Score]:
    """All seeds' policies on either arrivals, with schedules searched for as their trainings do."""
    table = problem.table()
    networks = [decode(one.checkpoint).network for one in found]
    return (
        judged_policy(problem, table, settings, networks, choice),
        judged_policy(problem, table, settings, networks, fresh),
    )


def _learned(
    problem: Problem, one: MaddpgResult, choice: EvaluationSettings, fresh: EvaluationSettings
) -> Contestant:
    return Contestant(
        planner=LEARNED_PLAN,
        partition="",
        plan=one.plan,
        chosen_by=judged(problem, one.plan, choice),
        fresh=judged(problem, one.plan, fresh),
        search_s=one.train_s,
    )


def _planner(
    problem: Problem,
    against: Sequence[Contestant],
    learned: Sequence[Contestant],
    recheck: EvaluationSettings,
) -> Contestant:
    """The best rival's plan, or the best learned one if it is surely better by arrivals that chose neither.

    What was chosen among many by a few arrivals looks better by these than it is.
    """
    rival, found = (_best(those, lambda one: one.chosen_by) for those in (against, learned))
    sure = surely_better(*(judged(problem, one.plan, recheck) for one in (found, rival)))
    return found if sure else rival


def _best(those: Sequence[Contestant], worth: Callable[[Contestant], Score]) -> Contestant:
    found = those[0]
    for one in those[1:]:
        if better(worth(one), worth(found)):
            found = one
    return found


def _over(one: Score, other: Score) -> float:
    return round(one.throughput_per_s / other.throughput_per_s, 4)


def _training(one: MaddpgResult) -> dict[str, Any]:
    return {
        "train_s": round(one.train_s, 1),
        "transitions": one.transitions,
        "updates": one.updates,
        "ended": one.ended,
        "curve": [
            [progress.transitions, progress.policy.throughput_per_s, progress.best.throughput_per_s]
            for progress in one.history
        ],
    }


def _other_interference(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    factor: float,
    planner: Contestant,
    best_rival: Contestant,
    course: EvaluationSettings,
) -> dict[str, Any]:
    """The same plans where groups and lanes disturb each other less or more than was planned for."""
    other = replace(
        device,
        groups_interference=device.groups_interference * factor,
        lanes_interference=device.lanes_interference * factor,
    )
    problem = problem_of(other, workload, models)
    chosen, rival = (judged(problem, one.plan, course) for one in (planner, best_rival))
    return {"factor": factor, "planner_over_best_rival": _over(chosen, rival), **rounded(chosen)}
