"""A plan by a tournament on the device's twin, for a budget and no scheduler.

The twin's times and the arrivals come from the store where it has them; the reply says where they are from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import fsum
from typing import Final, NamedTuple

import msgspec

from stageloom.planner.api.jobs import Job
from stageloom.planner.cluster.interface import SearchPool, search
from stageloom.planner.plan_search import limits_text, record, scheduler_key, search_job
from stageloom.planner.replan.predict import evaluation_of, predict
from stageloom.planner.schema import plan as schema
from stageloom.planner.schema.explanation import EvaluationVerdict, PlanEvaluation
from stageloom.planner.split_search import EOP, Entrants
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import add_plan_anyhow
from stageloom.planner.store.store import ReadStore, Store
from stageloom.planner.store.telemetry import newest_telemetry
from stageloom.planner.tournament.candidates import PlanCandidate, plan_candidates
from stageloom.planner.tournament.evaluator import Scenario
from stageloom.planner.tournament.refinement import Refinement
from stageloom.planner.tournament.runner import TournamentProgress, TournamentResult, TournamentRun
from stageloom.planner.tournament.score import Score
from stageloom.planner.twin.arrivals import Poisson, Process, require_all
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.replay import counted_arrivals
from stageloom.planner.twin.stored import base_device, stored_times
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.clock import Clock
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Limits
from stageloom.shared.text import counted

RECORDED_S: Final = 60.0
"""Seconds of a device's newest telemetry that say what arrives."""

ASSUMED_LOAD: Final = 0.8
"""Load where nothing says what arrives, as a share of what one plain instance after another can do."""

_DECIDES: Final = (
    *("policy", "combination", "members_max", "lanes"),
    *("step_choice", "wait", "wait_timeout_s"),
    *("further_executors", "resources", "lane_resources", "placement"),
)
_DECIDES_OF_MODELS: Final = (
    *("partition", "cuts", "executors", "resources"),
    *("replicas", "batch", "batch_max_delay_s"),
)
_GIVE_RATES: Final = "give each model an entry in [[rates]] of a plan file"
_TEXT_MAX: Final = 512
_FAILURES_MAX: Final = 256


class StoredScenario(NamedTuple):
    """A scenario, and in a few words where its times and its arrivals are from."""

    scenario: Scenario
    twin: str
    arrivals: str


def create(
    store: Store,
    pool: SearchPool,
    clock: Clock,
    request: schema.PlanCreateRequest,
    job: Job,
    splits: Entrants,
) -> schema.PlanReply:
    """Run a tournament; keep its plan, and a row per plan that was evaluated.

    Plans with `splits` are never the one that is there at once; nothing is left to search for them, so they
    are evaluated next.

    Raises:
        InputError: as `search_job` and `stored_scenario`; a field is set that candidates decide.
    """
    began_s = clock.monotonic_s()
    budget_s = request.budget_s or 0.0
    _check(request)
    basis = replace(search_job(store, request), budget_s=None)  # whose checks know that policies compete
    limited = request.r is not None or request.s is not None
    candidates = plan_candidates(
        basis.models,
        basis.costs,
        executor=basis.executor,
        limits=Limits(r=request.r, s=request.s) if limited else TOP_LIMITS,
        rules=basis.rules,
        searches=True,
    )
    first_one, *others = candidates
    ready = [
        PlanCandidate(policy=EOP, partition=one.name, job=replace(basis, scheduler=EOP), ready=one.plan)
        for one in splits.candidates
    ]
    candidates = (first_one, *ready, *others)
    first = search(candidates[0].job)
    graphs = {model.artifact: model.graph for model in basis.models}
    stored = stored_scenario(store, request.device, bind(first, graphs), graphs, request.rates)
    if splits.candidates:
        stored = _knowing(stored, splits)
    run = TournamentRun(
        candidates,
        first,
        stored.scenario,
        pool,
        clock,
        budget_s=budget_s,
        refinement=Refinement(graphs, basis.costs, candidates[0].job.limits),
        watch=partial(_tell, job),
    )
    job.when_cancelled(run.stop)  # it ends with its best so far
    result = run.to_end()
    search_s = clock.monotonic_s() - began_s
    winner = result.outcome.candidate
    candidate, plan = result.candidates[winner], result.plans[winner]
    name = request.plan or plan.digest[:12]
    info, renamed = store.write(add_plan_anyhow, name, plan, candidate.policy)
    limits = candidate.job.limits
    searched = msgspec.structs.replace(request, scheduler=candidate.job.scheduler, r=limits.r, s=limits.s)
    costs = replace(basis.costs, parts=splits.parts)
    rows = _considered(result, graphs, costs)
    record(store, request.device, scheduler_key(searched), plan, graphs, rows)
    contest = _info(stored, result, search_s)
    return schema.PlanReply(plan=info, search_s=search_s, known=renamed, contest=contest)


def _knowing(stored: StoredScenario, splits: Entrants) -> StoredScenario:
    """The scenario with what parts of operators cost."""
    times = stored.scenario.times
    known = StepTimes(times.device, replace(times.costs, parts=splits.parts))
    return stored._replace(scenario=replace(stored.scenario, times=known))


def _tell(job: Job, progress: TournamentProgress) -> None:
    score = progress.score
    text = f"best so far {progress.best}" if score else "the first plan is being evaluated"
    if score and progress.neighbours is not None:
        text = f"refining {progress.best}: {counted(progress.neighbours, 'neighbour')}"
    job.progress(
        text,
        done=progress.done,
        size=progress.size,
        figures={"throughput_per_s": score.throughput_per_s, "p99_s": score.p99_s} if score else None,
    )


def _check(request: schema.PlanCreateRequest) -> None:
    plain = schema.PlanCreateRequest(models=request.models)
    fixed = [name for name in _DECIDES if getattr(request, name) != getattr(plain, name)]
    for choice in request.models:
        usual = schema.ModelOptions(model=choice.model)
        fixed += [
            f"{name} of {choice.model}"
            for name in _DECIDES_OF_MODELS
            if getattr(choice, name) != getattr(usual, name)
        ]
    if fixed:
        raise InputError(
            f"policies and schedulers compete for the budget, and each decides {fixed[0].replace('_', ' ')}",
            remedy="leave that out, or name the --scheduler or --policy that is meant",
        )


def _considered(
    result: TournamentResult, graphs: Mapping[Digest, Graph], costs: CostTable
) -> list[PlanEvaluation]:
    """A row per plan that was evaluated, in the order of time; the winner's in any case, and last.

    Of neighbours those that were the best so far: there may be hundreds of others.
    """
    evaluated, winner = result.tournament.evaluated, result.outcome.candidate
    led = {improvement.candidate for improvement in result.tournament.curve}
    rows = []
    others = (number for number in evaluated if number != winner and number in result.plans)
    for number in (*others, winner):
        plan, candidate = result.plans[number], result.candidates[number]
        limits = limits_text(candidate.job.limits) if number == winner else ""  # for its plan file
        row = evaluation_of(
            plan,
            EvaluationVerdict.FOUND
            if number == winner
            else EvaluationVerdict.LED
            if number in led
            else EvaluationVerdict.LOST,
            scheduler=candidate.name + limits,
            how="contest",
            prediction=predict(plan, graphs, costs, ()),
            search_s=result.search_s.get(number),
        )
        if number in evaluated:
            at_s, score = evaluated[number]
            row = msgspec.structs.replace(
                row, judged_at_s=at_s, throughput_per_s=score.throughput_per_s, p99_s=score.p99_s
            )
        rows.append(row)
    return rows


def _info(stored: StoredScenario, result: TournamentResult, ended_s: float) -> schema.TournamentInfo:
    """Its course. The first plan may be evaluated on fresh arrivals alone, at the end."""
    tournament, outcome, candidates = result.tournament, result.outcome, result.candidates
    led = {improvement.candidate for improvement in tournament.curve}

    def figures(number: int, score: Score) -> schema.TournamentFigures:
        candidate = candidates[number]
        return schema.TournamentFigures(
            name=candidate.name,
            policy=candidate.policy,
            parent="" if candidate.parent is None else candidate.parent.name,
            move="" if candidate.move is None else candidate.move.value,
            at_s=tournament.evaluated[number][0] if number in tournament.evaluated else ended_s,
            throughput_per_s=score.throughput_per_s,
            p99_s=score.p99_s,
            utilisation=score.utilisation,
            met=score.met,
            led=number in led,
        )

    return schema.TournamentInfo(
        winner=candidates[outcome.candidate].name,
        twin=stored.twin,
        arrivals=stored.arrivals[:_TEXT_MAX],
        judged=tuple(
            figures(number, score)
            for number, (_, score) in tournament.evaluated.items()
            if number in candidates
        ),
        failed=tuple(
            schema.TournamentFailure(name=candidates[number].name, reason=reason)
            for number, reason in islice(tournament.failures.items(), _FAILURES_MAX)
        ),
        left=tournament.left,
        neighbours=tournament.neighbours,
        fresh=tuple(figures(number, score) for number, score in outcome.fresh.items()),
        unchecked=outcome.unchecked[:_TEXT_MAX],
    )


def stored_scenario(
    store: ReadStore,
    device: DeviceId | None,
    first: BoundPlan,
    graphs: Mapping[Digest, Graph],
    rates: Sequence[schema.ArrivalRate],
) -> StoredScenario:
    """The scenario for plans of the models of `first`, a plan of single blocks with one task each.

    Raises:
        InputError: no twin of the device can be made, or only some models' arrivals are known.
    """
    base = _base(store, device, first.plan.executor.name)
    if device is not None:
        times, twin = stored_times(store, device, first, base)
    else:
        times = StepTimes.derived(base, first.plan.executor.precision)
        twin = f"assumed, since no device was named: {base.title}"
    service_s = _service_s(times, first)
    names = [model.name for model in first.plan.models]
    arrivals, text = _arrivals(store, device, names, rates, service_s)
    scenario = Scenario(times=times, arrivals=arrivals, graphs=graphs, service_s=service_s)
    return StoredScenario(scenario, twin, text)


def _base(store: ReadStore, device: DeviceId | None, executor: str) -> DeviceFile:
    """The device file that a twin begins with.

    Raises:
        InputError: there is no such device, or the executor needs a GPU that no device file is for.
    """
    device_class = "" if device is None else store.read(device_info, device).device_class
    try:
        return base_device(device_class, executor)
    except InputError as error:
        cause = error.cause if device_class else f"{executor} needs a GPU, and no device says which"
        remedy = "name a --scheduler or --policy: a tournament needs a twin of the GPU"
        raise InputError(cause, remedy=remedy) from error


def _service_s(times: StepTimes, first: BoundPlan) -> tuple[float, ...]:
    """Device seconds of one task alone, per model."""
    steps = times.of_plan(first)
    return tuple(
        fsum(
            steps.step(index, 1, (1,)).seconds
            for index, block in enumerate(first.combined)
            if block.members[0].model == model
        )
        for model in range(len(first.plan.models))
    )


def _arrivals(
    store: ReadStore,
    device: DeviceId | None,
    names: Sequence[str],
    rates: Sequence[schema.ArrivalRate],
    service_s: Sequence[float],
) -> tuple[Mapping[str, Process], str]:
    """Processes by model, and where they are from."""
    if rates:
        given = {rate.model: Poisson(rate_per_s=rate.per_s) for rate in rates}
        require_all(given, names, _GIVE_RATES)
        text = ", ".join(f"{name} {given[name].mean_per_s:g}/s" for name in names)
        return given, f"poisson: {text}"
    recorded_us = round(RECORDED_S * 1e6)
    rows = (
        []
        if device is None
        else store.read(newest_telemetry, device, [RowKind.TASK_COUNTERS], recorded_us)[0]
    )
    if any(getattr(row.data, "model", None) in names and row.data.submitted for row in rows):  # type: ignore[union-attr]
        counted = counted_arrivals(rows, names)
        require_all(counted, names, _GIVE_RATES)
        return counted, f"the last {counted[names[0]].length_s:.0f} s of {device}"
    per_s = ASSUMED_LOAD / fsum(service_s)
    text = f"assumed, as none were given or counted: poisson, {per_s:.3g}/s of each model"
    return {name: Poisson(rate_per_s=per_s) for name in names}, text
