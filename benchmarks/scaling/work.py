"""What is spread: a contest of plans as `plan create --budget` runs it, and a training of MADDPG."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from benchmarks.learning.pair import problem_of, workloads
from benchmarks.refined import Listed
from benchmarks.scaling.timed_pool import Taken, TimedPool, nothing
from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.train import train
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.tournament.runner import TournamentRun
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.clock import SystemClock
from stageloom.shared.search.compose import ModelChoice

_ENDLESS_S: Final = 3600.0
_NOTHING: Final = 400
_SEED: Final = 1


class Spread(NamedTuple):
    """One run on a pool."""

    wall_s: float
    driver_s: float  # processor time of this process
    taken: list[Taken]

    @property
    def work_s(self) -> float:
        """Processor time of all tasks."""
        return sum(one.cpu_s for one in self.taken)

    @property
    def between_s(self) -> float:
        """On one worker, per task: seconds in which none ran, as the driver computes and tasks are sent."""
        return max(self.wall_s - sum(one.wall_s for one in self.taken), 0.0) / len(self.taken)


def spread(pool: SearchPool, work: Callable[[SearchPool], object]) -> Spread:
    """Do it, and note what it takes."""
    timed = TimedPool(pool)
    cpu_s, began_s = time.process_time(), time.monotonic()
    work(timed)
    return Spread(time.monotonic() - began_s, time.process_time() - cpu_s, timed.taken)


def handover_s(pool: SearchPool) -> float:
    """Seconds that a task without work takes of the whole pool, when the pool always has the next ones."""
    for future in [pool.submit(nothing, number) for number in range(4 * pool.workers)]:
        future.result()
    began_s = time.monotonic()
    for future in [pool.submit(nothing, number) for number in range(_NOTHING)]:
        future.result()
    return (time.monotonic() - began_s) / _NOTHING


def contest(listed: Listed, settings: EvaluationSettings) -> Callable[[SearchPool], object]:
    """Every listed plan evaluated, then the best once more; plans were searched before."""

    def work(pool: SearchPool) -> object:
        first = listed.candidates[0].ready
        assert first is not None
        again = replace(settings, seeds=tuple(seed + 1_000 for seed in settings.seeds))
        return TournamentRun(
            listed.candidates,
            first,
            listed.scenario,
            pool,
            SystemClock(),
            budget_s=_ENDLESS_S,
            choice=settings,
            fresh=again,
        ).to_end()

    return work


def training_problem(listed: Listed) -> Problem:
    """A training on the same device, under 1.1 of its capacity."""
    device = listed.scenario.times.device
    models = [replace(one, partition="whole") for one in _models(listed)]
    load = workloads(device, StepTimes(device, listed.costs), models)["capacity_1.1"]
    return problem_of(device, load, models)


def _models(listed: Listed) -> tuple[ModelChoice, ...]:
    return listed.candidates[0].job.models


def training(problem: Problem, settings: MaddpgSettings) -> Callable[[SearchPool], object]:
    """A short one from beginning to end."""
    return lambda pool: train(problem, settings, _SEED, clock=time.monotonic, pool=pool)
