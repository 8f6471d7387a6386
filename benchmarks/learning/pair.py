"""One device under one workload: rivals, trainings, the planner's choice, and other interference.

Workloads are TOP's table II on the twin's device files, and the same scaled to each device. Rivals' plans
and learned policies are judged by the same arrivals. Several seeds of one training run side by side, each
in a process of its own; what was begun goes on.
"""

import json
import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.table import LEARNED_PLAN, SEED
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.train import MaddpgResult, polish, train
from stageloom.planner.learning.maddpg.work import Environment, bound_plan, clipped_row
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, better, figures_of, score_of, surely_better
from stageloom.planner.twin.arrivals import Periodic, Process
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.errors import UnavailableError
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.policy.maddpg.checkpoint import decode
from stageloom.shared.search.compose import ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

MEMBERS_MAX: Final = {"nano": 2, "tx2": 2, "xavier_nx": 3, "a100": 4}
"""Devices with TOP's H (section VI-B)."""

MIX: Final = (("inception_v3", 30.0), ("resnet50", 60.0), ("squeezenet_bypass", 120.0))
SINGLE: Final = ("inception_v3", 240.0)
_FASTER: Final = {"a100": 2.0}
"""TOP doubles the rates on its server."""

JITTER: Final = 0.2
"""Of the period: sensors that sample at a fixed frequency, but not with one clock."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tasks per second of each model, periodic with jitter."""

    name: str
    rates: tuple[tuple[str, float], ...]

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.rates)

    def arrivals(self) -> dict[str, Process]:
        return {name: Periodic(rate_per_s=rate, jitter_s=JITTER / rate) for name, rate in self.rates}


def workloads(device: DeviceFile, times: StepTimes, models: Sequence[ModelChoice]) -> tuple[Workload, ...]:
    """The paper's mix; the same mix at 0.8 and at 1.1 of the device's capacity; one model alone.

    Capacity is what the device serves one operator after another, whole models, without a gap.
    """
    faster = _FASTER.get(device.name, 1.0)
    paper = tuple((name, rate * faster) for name, rate in MIX)
    capacity = 1.0 / fsum(
        rate * whole_s(times, model) for (_, rate), model in zip(paper, models, strict=True)
    )
    return (
        Workload(name="paper", rates=paper),
        *(
            Workload(
                name=f"capacity_{share}",
                rates=tuple((name, share * capacity * rate) for name, rate in paper),
            )
            for share in (0.8, 1.1)
        ),
        Workload(name="single", rates=((SINGLE[0], SINGLE[1] * faster),)),
    )


def whole_s(times: StepTimes, model: ModelChoice) -> float:
    """Seconds of one task of a model, uncut, one operator after another."""
    bound = bind(compose([model]), {model.artifact: model.graph})
    return times.of_plan(bound).step(0, 1, (1,)).seconds


QUEUE = QueuePlan(max_tasks=4096)
"""Deep enough that nothing is refused within an evaluation: a queue that grows is seen to grow."""

INTERFERENCE = (0.5, 1.5)
CHOICE = EvaluationSettings(seeds=(1_000_001, 1_000_002, 1_000_003), windows=10)
"""Arrivals by which plans are chosen,"""

RECHECK = EvaluationSettings(seeds=tuple(range(3_000_001, 3_000_009)), windows=10)
"""those by which the best learned plan and the best rival are compared once more,"""

FRESH = EvaluationSettings(seeds=(2_000_001, 2_000_002, 2_000_003, 2_000_004, 2_000_005), windows=10)
"""and those by which what was chosen is measured."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A plan that takes part, and what it is worth on either arrivals."""

    planner: str  # the policy or scheduler
    partition: str
    plan: Plan
    chosen_by: Score
    fresh: Score


def rivals(problem: Problem, models: Sequence[ModelChoice], told: Callable[[str], None]) -> list[Contestant]:
    """Every rival under its best partition, by the arrivals that choose."""
    best: dict[str, Contestant] = {}
    for entrant in plan_candidates(models, problem.costs, executor=problem.template.executor):
        plan = run_search(entrant.job, time.monotonic)
        worth = judged(problem, plan, CHOICE)
        told(f"{entrant.name}: {worth.throughput_per_s:.1f} tasks/s")
        held = best.get(entrant.policy)
        if held is None or better(worth, held.chosen_by):
            best[entrant.policy] = Contestant(
                planner=entrant.policy,
                partition=entrant.partition,
                plan=plan,
                chosen_by=worth,
                fresh=worth,
            )
    return [replace(rival, fresh=judged(problem, rival.plan, FRESH)) for rival in best.values()]


def seeds_worth(problem: Problem) -> dict[str, Score]:
    """Every unlearned candidate that a training starts from, by its name, on fresh arrivals.

    A seed's schedules are searched for as long as those of the best learned plan, so that what remains
    between the two is what was learned.
    """
    table = problem.table()
    worth = {}
    for name, actions in seeds(problem.space).items():
        polish(problem, table, actions)
        worth[name] = judged(problem, bound_plan(problem, table, actions).plan, FRESH)
    return worth


def judged(problem: Problem, plan: Plan, course: EvaluationSettings) -> Score:
    return evaluate(bind(plan, problem.graphs), problem.make_device, course, problem.service_s)


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


_LEAST_LEFT_S = 20.0


def trained(
    problem: Problem,
    settings: MaddpgSettings,
    seeds: Sequence[int],
    *,
    budget_s: float,
    folder: Path,
    told: Callable[[str], None],
) -> list[MaddpgResult]:
    """One training per seed, all at once, within about `budget_s` of this machine's time together.

    The folder keeps each training's state and result: called again it goes on where it was.

    Raises:
        UnavailableError: a training ended without a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "problem.pickle").write_bytes(pickle.dumps((problem, settings)))
    processes = {
        seed: multiprocessing.get_context("spawn").Process(
            target=_train, args=(folder, seed, budget_s), name=f"training-{seed}"
        )
        for seed in seeds
        if not (folder / f"{seed}.trained").exists()
    }
    for process in processes.values():
        process.start()
    try:
        for seed, process in processes.items():
            process.join()
            told(f"seed {seed}: {'ended without a result' if process.exitcode else 'trained'}")
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    found = []
    for seed in seeds:
        file = folder / f"{seed}.trained"
        if not file.exists():
            raise UnavailableError(
                f"the training with seed {seed} ended without a result", remedy=f"see {folder}; run it again"
            )
        found.append(pickle.loads(file.read_bytes()))  # written by this benchmark
    return found


def _train(folder: Path, seed: int, budget_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its trainings itself
    problem, settings = pickle.loads((folder / "problem.pickle").read_bytes())
    state, spent = folder / f"{seed}.state", folder / f"{seed}.seconds"
    before_s = float(spent.read_text()) if spent.exists() else 0.0
    began_s = time.monotonic()

    def save(raw: bytes) -> None:
        _write(state, raw)
        _write(spent, str(before_s + time.monotonic() - began_s).encode())

    result = train(
        problem,
        settings,
        seed,
        clock=time.monotonic,
        budget_s=max(budget_s, before_s + _LEAST_LEFT_S),
        state=state.read_bytes() if state.exists() else None,
        spent_s=before_s,
        save=save,
    )
    _write(folder / f"{seed}.trained", pickle.dumps(result))


def _write(path: Path, raw: bytes) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_bytes(raw)
    fresh.replace(path)


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
        plans.append(compose(finer, lanes=rival.lanes, executor=rival.executor, rules=Rules.of(rival)))
    return tuple(plans)


def chosen_problem(
    device: DeviceFile, workload: Workload, models: Sequence[ModelChoice], rival: Plan
) -> Problem:
    """The structure that is learned on: the one on which a plan that nobody learned is worth most."""
    best: tuple[Score, Problem] | None = None
    for structure in structures(rival, models):
        problem = problem_of(device, workload, models, structure)
        table = problem.table()
        for actions in seeds(problem.space).values():
            worth = judged(problem, bound_plan(problem, table, actions).plan, CHOICE)
            if best is None or better(worth, best[0]):
                best = worth, problem
    assert best is not None
    return best[1]


def run_pair(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    effort: Effort | None,
    *,
    folder: Path,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """The rows and figures of one pair; from its file where it was done before.

    Without an effort rivals and seeds alone, which need no training.
    """
    file = folder / ("untrained.json" if effort is None else "pair.json")
    folder.mkdir(parents=True, exist_ok=True)
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text())
        return kept
    against = rivals(problem_of(device, workload, models), models, told)
    problem = chosen_problem(device, workload, models, _best(against, lambda rival: rival.chosen_by).plan)
    where = {"device": device.name, "workload": workload.name}
    # The partition that a policy is learned on.
    offered = dict(models[0].graph.partitions)
    partition = next(name for name, cuts in offered.items() if cuts == problem.template.models[0].cuts)
    rows: list[dict[str, Any]] = [
        {**where, "planner": rival.planner, "partition": rival.partition, **rounded(rival.fresh)}
        for rival in against
    ]
    rows += [
        {**where, "planner": SEED, "of": name, "partition": partition, **rounded(worth)}
        for name, worth in seeds_worth(problem).items()
    ]
    pair: dict[str, Any] = {"rows": rows, "trainings": [], "interference": []}
    if effort is not None:
        trainings = trained(
            problem, effort.settings, effort.seeds, budget_s=effort.budget_s, folder=folder, told=told
        )
        planner = _planner(problem, against, trainings)
        rival = _best(against, lambda rival: rival.fresh)
        told(f"planner: {planner.planner}; best rival: {rival.planner}")
        policies = rounded(judged_policies(problem, effort.settings, trainings))
        rows += [
            {**where, "planner": "maddpg", "partition": partition, **policies},
            {**where, "planner": "planner", "of": planner.planner, **rounded(planner.fresh)},
        ]
        pair["trainings"] = [_training(training) for training in trainings]
        pair["interference"] = [
            _other_interference(device, workload, models, factor, planner.plan, rival.plan)
            for factor in INTERFERENCE
        ]
    file.write_text(json.dumps(pair))
    return pair


def _planner(
    problem: Problem, against: Sequence[Contestant], trainings: Sequence[MaddpgResult]
) -> Contestant:
    """The best rival's plan, or the best learned one if it is surely better by arrivals that chose neither.

    What was chosen among many by a few arrivals looks better by these than it is.
    """
    learned = [
        Contestant(
            planner=LEARNED_PLAN,
            partition="",
            plan=training.plan,
            chosen_by=judged(problem, training.plan, CHOICE),
            fresh=judged(problem, training.plan, FRESH),
        )
        for training in trainings
    ]
    rival, best = (_best(those, lambda entrant: entrant.chosen_by) for those in (against, learned))
    sure = surely_better(*(judged(problem, entrant.plan, RECHECK) for entrant in (best, rival)))
    return best if sure else rival


def _best(those: Sequence[Contestant], worth: Callable[[Contestant], Score]) -> Contestant:
    best = those[0]
    for entrant in those[1:]:
        if better(worth(entrant), worth(best)):
            best = entrant
    return best


def _training(training: MaddpgResult) -> dict[str, Any]:
    return {
        "train_s": round(training.train_s, 1),
        "transitions": training.transitions,
        "updates": training.updates,
        "ended": training.ended,
        "curve": [
            [progress.transitions, progress.policy.throughput_per_s, progress.best.throughput_per_s]
            for progress in training.history
        ],
    }


def _other_interference(
    device: DeviceFile,
    workload: Workload,
    models: Sequence[ModelChoice],
    factor: float,
    planner: Plan,
    rival: Plan,
) -> dict[str, Any]:
    """The same plans where groups and lanes disturb each other less or more than was planned for."""
    other = replace(
        device,
        groups_interference=device.groups_interference * factor,
        lanes_interference=device.lanes_interference * factor,
    )
    problem = problem_of(other, workload, models)
    chosen, beaten = (judged(problem, plan, FRESH) for plan in (planner, rival))
    ratio = round(chosen.throughput_per_s / beaten.throughput_per_s, 4)
    return {"factor": factor, "planner_over_best_rival": ratio, **rounded(chosen)}
