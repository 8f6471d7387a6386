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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.table import LEARNED_PLAN, SEED
from stageloom.planner.contest.entrants import entrants
from stageloom.planner.contest.judge import Course, judge
from stageloom.planner.contest.worth import Worth, better, figures_of, surely_better, worth_of
from stageloom.planner.learning.maddpg.environment import Environment, bound_plan, clipped_row
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.schedules import ScheduleTable
from stageloom.planner.learning.maddpg.seeds import seeds
from stageloom.planner.learning.maddpg.settings import Settings
from stageloom.planner.learning.maddpg.train import Trained, polish, train
from stageloom.planner.learning.maddpg.twins import TwinDevices
from stageloom.planner.twin.arrivals import Periodic, Process
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.errors import UnavailableError
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.policy.maddpg.checkpoint import decode
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
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
    chosen_by: Worth
    fresh: Worth
    search_s: float

    def row(self) -> dict[str, Any]:
        return {"planner": self.planner, "partition": self.partition, **rounded(self.fresh)}


def rivals(
    problem: Problem,
    models: Sequence[ModelChoice],
    course: Course,
    fresh: Course,
    told: Callable[[str], None],
) -> list[Contestant]:
    """Every rival under its best partition, by the arrivals of `course`."""
    best: dict[str, Contestant] = {}
    for entrant in entrants(models, problem.costs, executor=problem.template.executor):
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


def seeds_worth(problem: Problem, course: Course) -> dict[str, Worth]:
    """Every unlearned candidate that a training starts from, by its name.

    A seed's schedules are searched for as long as those of the best learned plan, so that what remains
    between the two is what was learned.
    """
    table = problem.table()
    found = {}
    for seed in seeds(problem.space):
        polish(problem, table, seed.actions)
        bound = bound_plan(problem, table, seed.actions)
        found[seed.name] = judge(bound, problem.make_device, course, problem.service_s)
    return found


def judged(problem: Problem, plan: Plan, course: Course) -> Worth:
    return judge(bind(plan, problem.graphs), problem.make_device, course, problem.service_s)


def judged_policy(
    problem: Problem,
    table: ScheduleTable,
    settings: Settings,
    networks: Sequence[MaddpgNetwork],
    course: Course,
) -> Worth:
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
    return worth_of(figures)


def rounded(worth: Worth) -> dict[str, Any]:
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
    settings: Settings,
    seeds: Sequence[int],
    *,
    budget_s: float,
    folder: Path,
    told: Callable[[str], None],
) -> list[Trained]:
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


QUEUE = QueuePlan(max_tasks=4096)
"""Deep enough that nothing is refused within an evaluation: a queue that grows is seen to grow."""

INTERFERENCE = (0.5, 1.5)
WINDOWS = 10
CHOICE, RECHECK, FRESH = (
    Course(seeds=arrivals, windows=WINDOWS) for arrivals in (CHOICE_SEEDS, RECHECK_SEEDS, FRESH_SEEDS)
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is spent on one pair."""

    seeds: tuple[int, ...] = (1, 2, 3)
    budget_s: float = 600.0  # of all trainings of the pair together
    settings: Settings = field(default_factory=Settings)


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
    course: Course,
) -> Problem:
    """The structure that is learned on: the one on which a plan that nobody learned is worth most."""
    best: tuple[Worth, Problem] | None = None
    for structure in structures(rival, models):
        problem = problem_of(device, workload, models, structure)
        table = problem.table()
        for seed in seeds(problem.space):
            worth = judge(
                bound_plan(problem, table, seed.actions), problem.make_device, course, problem.service_s
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
    problem: Problem, found: Sequence[Trained], settings: Settings, choice: Course, fresh: Course
) -> tuple[Worth, Worth]:
    """All seeds' policies on either arrivals, with schedules searched for as their trainings do."""
    table = problem.table()
    networks = [decode(one.checkpoint).network for one in found]
    return (
        judged_policy(problem, table, settings, networks, choice),
        judged_policy(problem, table, settings, networks, fresh),
    )


def _learned(problem: Problem, one: Trained, choice: Course, fresh: Course) -> Contestant:
    return Contestant(
        planner=LEARNED_PLAN,
        partition="",
        plan=one.plan,
        chosen_by=judged(problem, one.plan, choice),
        fresh=judged(problem, one.plan, fresh),
        search_s=one.train_s,
    )


def _planner(
    problem: Problem, against: Sequence[Contestant], learned: Sequence[Contestant], recheck: Course
) -> Contestant:
    """The best rival's plan, or the best learned one if it is surely better by arrivals that chose neither.

    What was chosen among many by a few arrivals looks better by these than it is.
    """
    rival, found = (_best(those, lambda one: one.chosen_by) for those in (against, learned))
    sure = surely_better(*(judged(problem, one.plan, recheck) for one in (found, rival)))
    return found if sure else rival


def _best(those: Sequence[Contestant], worth: Callable[[Contestant], Worth]) -> Contestant:
    found = those[0]
    for one in those[1:]:
        if better(worth(one), worth(found)):
            found = one
    return found


def _over(one: Worth, other: Worth) -> float:
    return round(one.throughput_per_s / other.throughput_per_s, 4)


def _training(one: Trained) -> dict[str, Any]:
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
    course: Course,
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
