"""What MADDPG's training gains: every method on one problem, with equal evaluations and the same arrivals.

An evaluation is `WINDOWS` simulated windows of 1 s: an episode of a training, or a plan or a policy that is
held for as long over two seeds of arrivals, from empty queues. A method answers with a plan that it chose by
arrivals that all methods see, or, where it trained one, with the policy if that did better on these; answers
are judged on fresh arrivals, which differ from seed to seed and are the same for all methods.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from benchmarks.learning.deciding import WAYS, Arms, Choose, Log, Way, arms_of, best_pair
from benchmarks.learning.pair import (
    Workload,
    best_contestant,
    columns,
    judged,
    problem_of,
    rivals,
    structures,
)
from benchmarks.learning.unlearned import SEARCHES, ActionRow, Best, Search, best_seed
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.course import VALIDATION_SEED, TrainingCourse
from stageloom.planner.learning.maddpg.problem import Problem, ScheduleTable
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Start
from stageloom.planner.learning.maddpg.work import (
    Collect,
    Evaluate,
    Weights,
    Work,
    bound_plan,
    collect,
    evaluate,
    run,
)
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.tournament.score import Score, better
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.space import IntervalMap
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.gpg import gpg
from stageloom.shared.search.interface import Scheduler

WINDOWS: Final = 20
USUAL: Final = MaddpgSettings(validation_steps=9)
"""A training whose evaluations of plans are as long as its episodes: 2 seeds of 1 + 9 steps, 20 steps."""

RIVAL: Final = "best rival"
RIVAL_SEED: Final = "best seed of the rival's cut"
OUTSIDE: Final = (RIVAL, RIVAL_SEED)
TRAINING: Final = "training"
BEST_PAIR: Final = "best pair of plans"
"""No method: what a policy could gain that tells two kinds of load apart, by the arrivals that judge."""

QUICK_RIVALS: Final = (
    *("sequential", "instances", "batching", "proportional", "round_robin"),
    *("ios", "opara", "nimble"),
)
"""Rivals whose plans are found in seconds; those of joint graphs of whole models take minutes."""

FRESH_SEEDS: Final = 5
FRESH_STEPS: Final = 10
_FRESH_FIRST: Final = 3_000_000_000
"""Arrivals that judge an answer, of each seed, and windows of each."""


class Cell(NamedTuple):
    """A device under a load: what is to be found, and plans from elsewhere that it has to compete with."""

    device: str
    load: str
    problem: Problem
    structure: str  # of the problem's plans, for people
    outside: Mapping[str, tuple[str, Plan]]
    """By name what it is and the plan: of the best rival, and of the best seed where models stay cut as the
    rival cuts them."""


class Answer(NamedTuple):
    """What a method found, with its scores on the arrivals that chose."""

    problem: Problem
    settings: MaddpgSettings  # how its plans are run
    table: ScheduleTable
    row: ActionRow
    score: Score
    evaluations: int
    weights: Weights | None = None  # of the policy, where one was trained
    policy: Score | None = None
    transitions: int = 0
    updates: int = 0
    decides: tuple[Arms, Choose] | None = None  # of a policy that chooses among known plans


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to an answer. `headline`: it is needed for what learning gains, the others say why."""

    headline: bool
    answer: Callable[[Problem, int, int], Answer]  # of problem, evaluations and seed


def searched(search: Search, problem: Problem, evaluations: int, seed: int) -> Answer:
    """A search without learning.

    Raises:
        RuntimeError: it wants more evaluations than it was given.
    """
    table, used = problem.table(), 0

    def judge(row: ActionRow) -> Score:
        nonlocal used
        if used == evaluations:
            raise RuntimeError(f"{search.__name__} wants more than {evaluations} evaluations")
        used += 1
        return evaluate(problem, table, USUAL, _validation(USUAL, row))

    best = Best(judge)
    search(problem.space, best, evaluations, np.random.default_rng([seed, 0x5345]))
    assert best.held is not None
    return Answer(problem, USUAL, table, *best.held, used)


def trained(
    settings: MaddpgSettings, problem: Problem, evaluations: int, seed: int, *, as_printed: bool = False
) -> Answer:
    """A training that is as long as its evaluations allow; what is left over validates more of what it met.

    `as_printed`: intervals in seconds and deviations in tasks.
    """
    if as_printed:
        space = replace(problem.space, interval_map=IntervalMap.PAPER, deviation_scale=0.0)
        problem = replace(problem, space=space)
    length = transitions_within(settings, evaluations, len(seeds(problem.space)) if settings.seeded else 1)
    usual = min(settings.learn_from, MaddpgSettings.of_length(length).learn_from)
    settings = replace(settings, transitions=length, learn_from=usual)
    course, used = TrainingCourse(problem, settings, seed), 0
    while (work := course.next_work()) is not None and not (course.settled and isinstance(work, Evaluate)):
        used += evaluations_of(work)
        course.take(work, run(problem, course.table, settings, work))
    _spend(course, evaluations - used)
    best = course.candidates.best
    assert best is not None
    return Answer(
        problem=problem,
        settings=settings,
        table=course.table,
        row=best[0],
        score=best[1],
        evaluations=max(used, evaluations),
        weights=course.policy_weights,
        policy=course.policy,
        transitions=course.transitions,
        updates=course.learner.updates,
    )


def deciding(way: Way, problem: Problem, evaluations: int, seed: int) -> Answer:
    """Plans from a local search with half of the evaluations, and a policy that learned to choose among them;
    the last evaluation validates it."""
    rng = np.random.default_rng([seed, 0x4445])
    arms, score = searched_arms(problem, evaluations // 2, rng)

    def ask(choose: Choose) -> Log:
        return arms.episode(choose, int(rng.integers(1 << 31)), WINDOWS)

    episodes = evaluations - evaluations // 2 - 1
    choose = way(arms, ask, episodes, rng)
    by = _validation(USUAL, arms.rows[0])
    return Answer(
        problem=problem,
        settings=USUAL,
        table=arms.table,
        row=arms.rows[0],
        score=score,
        evaluations=evaluations,
        policy=arms.score(choose, by.seeds, by.steps),
        transitions=WINDOWS * episodes,
        decides=(arms, choose),
    )


def searched_arms(problem: Problem, evaluations: int, rng: np.random.Generator) -> tuple[Arms, Score]:
    """Plans to choose among, and the score of the best by the arrivals that choose."""
    table = problem.table()

    def judge(row: ActionRow) -> Score:
        return evaluate(problem, table, USUAL, _validation(USUAL, row))

    return arms_of(problem, table, USUAL, judge, evaluations, rng)


def evaluations_of(work: Work) -> int:
    """How many evaluations a piece of a training's work is, begun ones in full."""
    windows = work.steps if isinstance(work, Collect) else len(work.seeds) * (work.steps + 1)
    return -(-windows // WINDOWS)


def transitions_within(settings: MaddpgSettings, evaluations: int, firsts: int) -> int:
    """The longest training that needs no more evaluations, of at least one episode.

    `firsts`: plans that it evaluates before it begins.
    """
    length, step = settings.episode_steps, settings.episode_steps
    while _needed(settings, length + step, firsts) <= evaluations:
        length += step
    return length


def _needed(settings: MaddpgSettings, transitions: int, firsts: int) -> int:
    """Evaluations of a training's first plans, first policy, episodes and validations, at most."""
    usual = min(settings.learn_from, MaddpgSettings.of_length(transitions).learn_from)
    validations = last = 0
    for done in range(settings.episode_steps, transitions + 1, settings.episode_steps):
        if done >= usual and (done == transitions or done >= last + settings.validate_every):
            validations, last = validations + 1, done
    episodes = transitions // settings.episode_steps
    start = int(settings.start is Start.BEST_SEED)
    return firsts + start + episodes + validations * (1 + settings.candidates)


def _spend(course: TrainingCourse, left: int) -> None:
    """Evaluate so many more of the plans met in training; where none is new, meet others."""
    problem, settings, learner = course.problem, course.settings, course.learner
    while left > 0:
        rows: list[ActionRow] = []
        if learner.ready:
            kept = learner.replay.everything()
            rows = list(course.candidates.promising(kept, learner.rewards(kept)[:, 0], left))
        for row in rows:
            score = evaluate(problem, course.table, settings, _validation(settings, row))
            course.candidates.judged(row, score)
        left -= len(rows)
        if not rows:
            episode = Collect(
                number=0,
                seed=course.seed * 100_000 + 50_000 + left,
                steps=settings.episode_steps,
                weights=learner.policy_weights(),
                noise=settings.noise_end,
            )
            learner.add(collect(problem, course.table, settings, episode))
            left -= 1


def _validation(settings: MaddpgSettings, row: ActionRow) -> Evaluate:
    """As a training evaluates a plan, on the arrivals that it does so by."""
    by = tuple(VALIDATION_SEED + at for at in range(settings.validation_seeds))
    return Evaluate(number=0, name="", seeds=by, steps=settings.validation_steps, row=row)


def with_stages(
    scheduler: Scheduler,
    answer: Callable[[Problem, int, int], Answer],
    problem: Problem,
    evaluations: int,
    seed: int,
) -> Answer:
    """A method's answer where another scheduler finds the stages of combined blocks."""
    return answer(replace(problem, scheduler=scheduler), evaluations, seed)


_PRINTED: Final = replace(MaddpgSettings.paper(step_s=1.0), validation_steps=USUAL.validation_steps)

METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {
        **{
            name: Method(headline=True, answer=partial(searched, search)) for name, search in SEARCHES.items()
        },
        "actors frozen": Method(
            headline=True,
            answer=partial(trained, replace(USUAL, updates_per_transition=0.0)),
        ),
        TRAINING: Method(headline=True, answer=partial(trained, USUAL)),
        "stages by GPG": Method(headline=False, answer=partial(with_stages, gpg, partial(trained, USUAL))),
        "without pull": Method(headline=False, answer=partial(trained, replace(USUAL, pull=0.0))),
        "random start": Method(
            headline=False,
            answer=partial(trained, replace(USUAL, start=Start.PAPER, seeded=False)),
        ),
        "TOP as printed": Method(
            headline=False,
            answer=partial(trained, replace(_PRINTED, printed_critic=True), as_printed=True),
        ),
        "TOP, y - Q": Method(headline=False, answer=partial(trained, _PRINTED, as_printed=True)),
        **{name: Method(headline=False, answer=partial(deciding, way)) for name, way in WAYS.items()},
    }
)
"""By name, the best rival aside."""


def cell_of(
    device: DeviceFile,
    load: str,
    workload: Workload,
    models: Sequence[ModelChoice],
) -> Cell:
    """The problem of the papers' blocks, on the instances and lanes of the best quick rival."""
    base = problem_of(device, workload, models)
    rival = best_contestant(rivals(base, models, lambda line: None, QUICK_RIVALS))
    as_cut, *finer = structures(rival.plan, models)
    problem = problem_of(device, workload, models, (finer or [as_cut])[0])
    plan = problem.template
    replicas, batches = (
        ",".join(str(getattr(model, name)) for model in plan.models) for name in ("replicas", "batch")
    )
    blocks = ",".join(map(str, problem.space.blocks))
    structure = f"{blocks} blocks, {replicas} replicas, batches of {batches}, {plan.lanes} lanes"
    outside = {
        RIVAL: (f"{rival.planner}, {rival.partition}", rival.plan),
        RIVAL_SEED: best_seed_plan(problem_of(device, workload, models, as_cut)),
    }
    return Cell(device.name, load, problem, structure, outside)


def best_seed_plan(problem: Problem) -> tuple[str, Plan]:
    """The best of a problem's seeds by the arrivals that choose, by name."""
    answer = searched(best_seed, problem, len(seeds(problem.space)), 0)
    (name,) = (name for name, row in seeds(problem.space).items() if row == answer.row)
    return name, bound_plan(problem, answer.table, answer.row).plan


def attributed(cell: Cell, name: str, evaluations: int, seed: int) -> dict[str, Any]:
    """The row of one method and seed in a cell."""
    torch.set_num_threads(1)
    fresh = tuple(_FRESH_FIRST + 1000 * seed + at for at in range(FRESH_SEEDS))
    about = {"device": cell.device, "load": cell.load, "method": name, "seed": seed}
    if name in cell.outside:
        settings, (of, plan) = EvaluationSettings(seeds=fresh, windows=FRESH_STEPS), cell.outside[name]
        score = judged(cell.problem, plan, settings)
        return {**about, "of": of, "beside": cell.structure, **columns(score)}
    if name == BEST_PAIR:
        arms, _ = searched_arms(cell.problem, evaluations // 2, np.random.default_rng([seed, 0x4445]))
        pair, score = best_pair(arms, fresh, FRESH_STEPS)
        return {**about, "of": f"plans {pair[0]} and {pair[1]}", **columns(score)}
    began_s = time.process_time()
    answer = METHODS[name].answer(cell.problem, evaluations, seed)
    cpu_s = time.process_time() - began_s
    look = Evaluate(number=0, name="", seeds=fresh, steps=FRESH_STEPS, row=answer.row)
    score, policy = evaluate(answer.problem, answer.table, answer.settings, look), None
    if answer.policy is not None:
        policy = _policy_score(answer, look)
        score = policy if better(answer.policy, answer.score) else score
    return {
        **about,
        "of": "policy" if score is policy else "plan",
        "evaluations": answer.evaluations,
        "transitions": answer.transitions,
        "updates": answer.updates,
        "cpu_s": round(cpu_s, 1),
        **columns(score),
        **({} if policy is None else {f"policy_{key}": value for key, value in columns(policy).items()}),
    }


def _policy_score(answer: Answer, look: Evaluate) -> Score:
    if answer.decides is not None:
        arms, choose = answer.decides
        return arms.score(choose, look.seeds, look.steps)
    look = replace(look, weights=answer.weights)
    return evaluate(answer.problem, answer.table, answer.settings, look)
