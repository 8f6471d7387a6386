"""Every scheduler on models of the store: what each finds, in any process, beside what a device measured."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul

from stageloom.planner.replan.predict import block_costs
from stageloom.planner.schema.replan import TrialInfo
from stageloom.planner.schema.scheduler import ComparedScheduler
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import step_times
from stageloom.planner.store.trials import trial_infos
from stageloom.shared.bound import bind
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import Plan
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.comparison import Block, Standing, Subject, judged, optimum_s, standing
from stageloom.shared.search.interface import Budget
from stageloom.shared.search.job import SearchJob, run_search
from stageloom.shared.search.registry import added_schedulers, require_scheduler, schedulers
from stageloom.shared.text import bounded


@dataclass(frozen=True, slots=True)
class FoundSchedules:
    """A scheduler's schedules, one per combined block, and how long it searched."""

    scheduler: str
    schedules: tuple[Schedule, ...]
    search_s: float


def known_schedulers(names: Sequence[str]) -> list[str]:
    """The schedulers that are asked for; without a name all, those of other distributions last.

    Raises:
        SettingError: there is none of that name.
    """
    for name in names:
        require_scheduler(name)
    return list(dict.fromkeys(names or (*schedulers(), *added_schedulers().usable)))


# -- what takes long: functions for a pool ----------------------------------------------------------------


def optimum_of(job: SearchJob) -> float | None:
    """Seconds of the cheapest stages of the job's combined blocks; None: not known within the budget."""
    return optimum_s(_blocks(job), job.limits, Budget(), runs_of(outline(job)))


def searched(job: SearchJob, name: str, known_s: float | None, checkpoint: bytes) -> Standing:
    """What a scheduler makes of the job's combined blocks; `known_s` is what `optimum_of` found."""
    return standing(_subject(job, known_s), name, job.limits, Budget(), time.perf_counter, checkpoint)


def judged_as(job: SearchJob, found: Sequence[FoundSchedules]) -> list[Standing]:
    """The standings of schedules that are known, under the job's costs."""
    of = _subject(job, optimum_of(job))
    return [judged(of, known.scheduler, known.schedules, job.limits, known.search_s) for known in found]


def _subject(job: SearchJob, known_s: float | None) -> Subject:
    name = "+".join(choice.name for choice in job.models)
    return Subject(name, _blocks(job), known_s, runs_of(outline(job)))


def _blocks(job: SearchJob) -> tuple[Block, ...]:
    """The combined blocks of the job's models; which blocks those are no scheduler decides."""
    bound = bind(outline(job), {choice.artifact: choice.graph for choice in job.models})
    return tuple(
        (combined.graph, block_costs(bound, index, job.costs))
        for index, combined in enumerate(bound.combined)
    )


def runs_of(plan: Plan) -> tuple[float, ...]:
    """Per combined block its runs for one task of each model: those of the member that runs most often.

    Replicas take turns, and a batch shares a run. A member that runs less often is counted too often.
    """
    per_task = [1.0 / (model.replicas * model.batch) for model in plan.models]
    return tuple(max(per_task[member.model] for member in block.members) for block in plan.combined)


def outline(job: SearchJob) -> Plan:
    """The job's plan with every block one operator after another, which takes no search."""
    return run_search(replace(job, scheduler="sequential", budget_s=None), time.monotonic)


# -- beside what the store knows --------------------------------------------------------------------------


def compared(
    store: ReadStore, plain: Plan, found: Iterable[Standing], device: DeviceId | None
) -> tuple[ComparedScheduler, ...]:
    """A row per standing, the cheapest first; `plain` is the outline of the plans that they make."""
    steps_us: dict[tuple[Digest, int], float] = {}
    trials: dict[str, TrialInfo] = {}
    if device is not None:
        steps_us = store.read(step_times, device)
        for trial in store.read(trial_infos, device):
            if trial.candidate is not None:
                trials.setdefault(trial.candidate, trial)
    rows = [_row(made, with_schedules(plain, made.schedules), steps_us, trials) for made in found]
    return tuple(sorted(rows, key=lambda row: row.predicted_ms))


def with_schedules(plain: Plan, schedules: Sequence[Schedule]) -> Plan:
    """The plan with these schedules, as a search for it would have made it."""
    combined = tuple(
        replace(block, schedule=schedule) for block, schedule in zip(plain.combined, schedules, strict=True)
    )
    return replace(plain, combined=combined)


def _row(
    made: Standing, plan: Plan, steps_us: Mapping[tuple[Digest, int], float], trials: Mapping[str, TrialInfo]
) -> ComparedScheduler:
    taken = [steps_us.get((plan.digest, index)) for index in range(len(plan.combined))]
    known = [us for us in taken if us is not None]
    shape = made.shape
    return ComparedScheduler(
        models=bounded(made.subject),
        scheduler=made.scheduler,
        plan=plan.digest,
        predicted_ms=1e3 * made.predicted_s,
        bound_ms=1e3 * made.bound_s,
        optimum_ms=None if made.optimum_s is None else 1e3 * made.optimum_s,
        over_bound=made.over_bound,
        over_optimum=made.over_optimum,
        search_ms=1e3 * made.search_s,
        stages=shape.stages,
        groups_max=shape.groups_max,
        streams_max=shape.streams_max,
        measured_ms=None if None in taken else 1e-3 * sum(map(mul, known, runs_of(plan))),
        trial=trials.get(plan.digest),
    )
