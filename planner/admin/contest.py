"""`stageloom plan create` without a scheduler: rivals and searches compete, and what came of it is kept."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from stageloom.planner.admin.contests import Contests, Held
from stageloom.planner.admin.scene import Staged, stage
from stageloom.planner.admin.search import scheduler_key, search_job
from stageloom.planner.cluster.run import search
from stageloom.planner.contest.entrants import Entrant, entrants
from stageloom.planner.contest.worth import Worth
from stageloom.planner.costs.records import found_schedules
from stageloom.planner.replan.predict import EvaluationVerdict, PlanEvaluation, evaluation_of, predict
from stageloom.planner.store.store import Store
from stageloom.shared.bound import bind
from stageloom.shared.clock import Clock
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages import admin
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Limits

_DECIDES: Final = (
    *("policy", "combination", "members_max", "lanes"),
    *("step_choice", "wait", "wait_timeout_s", "optimistic"),
)
_DECIDES_OF_MODELS: Final = ("partition", "replicas", "batch", "batch_max_delay_s")


def create(
    store: Store, contests: Contests, clock: Clock, request: admin.PlanCreateRequest
) -> admin.PlanReply:
    """Hold a contest, keep its plan and what was looked at.

    Raises:
        InputError: as `search_job` and `stage`; no budget; something is asked for that entrants decide.
    """
    began_s = clock.monotonic_s()
    if request.budget_s is None:
        raise InputError("a contest needs a budget", remedy="give --budget")
    _check(request)
    basis = search_job(store, msgspec.structs.replace(request, budget_s=None, scheduler="sequential"))
    limited = request.r is not None or request.s is not None
    taking_part = entrants(
        basis.models,
        basis.costs,
        executor=basis.executor,
        limits=Limits(r=request.r, s=request.s) if limited else TOP_LIMITS,
        rules=basis.rules,
        searches=True,
    )
    first = search(taking_part[0].job)
    graphs = {model.artifact: model.graph for model in basis.models}
    staged = stage(store, request.device, bind(first, graphs), graphs, request.rates)
    held = contests.hold(taking_part, first, staged.scene, budget_s=request.budget_s, ticket=request.ticket)
    return _keep(store, request, taking_part, staged, held, basis.costs, clock.monotonic_s() - began_s)


def _check(request: admin.PlanCreateRequest) -> None:
    """What entrants decide is not to be asked for, too."""
    plain = admin.PlanCreateRequest(models=request.models)
    asked = [name for name in _DECIDES if getattr(request, name) != getattr(plain, name)]
    for choice in request.models:
        usual = admin.ModelChoice(model=choice.model)
        asked += [
            f"{name} of {choice.model}"
            for name in _DECIDES_OF_MODELS
            if getattr(choice, name) != getattr(usual, name)
        ]
    if asked:
        raise InputError(
            f"policies and schedulers compete for the budget, and each decides {asked[0].replace('_', ' ')}",
            remedy="leave that out, or name the --scheduler or --policy that is meant",
        )


def _keep(
    store: Store,
    request: admin.PlanCreateRequest,
    taking_part: tuple[Entrant, ...],
    staged: Staged,
    held: Held,
    costs: CostTable,
    took_s: float,
) -> admin.PlanReply:
    winner = held.outcome.entrant
    entrant, plan = taking_part[winner], held.plans[winner]
    info = store.add_plan(request.plan or plan.digest[:12], plan, entrant.policy)
    graphs = staged.scene.graphs
    device_class = "" if request.device is None else store.device(request.device).device_class
    if request.device is not None:
        limits = entrant.job.limits
        searched = msgspec.structs.replace(request, scheduler=entrant.job.scheduler, r=limits.r, s=limits.s)
        key = store.calibration(request.device).costs_key
        store.keep_schedules(key, scheduler_key(searched), found_schedules(plan, graphs))
    rows = _looked_at(taking_part, held, graphs, costs)
    store.keep_considered(rows, device_class=device_class, device=request.device)
    return admin.PlanReply(plan=info, search_s=took_s, contest=_told(taking_part, staged, held))


def _looked_at(
    taking_part: tuple[Entrant, ...], held: Held, graphs: Mapping[Digest, Graph], costs: CostTable
) -> list[PlanEvaluation]:
    """A row per plan that was judged, in the order of time; the winner's in any case, and last."""
    led = {point.entrant for point in held.contest.curve}
    winner = held.outcome.entrant
    order = [entrant for entrant in held.contest.judged if entrant != winner]
    rows = []
    for entrant in (*order, winner):
        lost = EvaluationVerdict.LED if entrant in led else EvaluationVerdict.LOST
        plan = held.plans[entrant]
        row = evaluation_of(
            plan,
            EvaluationVerdict.FOUND if entrant == winner else lost,
            scheduler=taking_part[entrant].name,
            how="contest",
            prediction=predict(plan, graphs, costs, ()),
            search_s=held.search_s.get(entrant),
        )
        if entrant in held.contest.judged:
            at_s, worth = held.contest.judged[entrant]
            row = replace(row, judged_at_s=at_s, throughput_per_s=worth.throughput_per_s, p99_s=worth.p99_s)
        rows.append(row)
    return rows


def _told(taking_part: tuple[Entrant, ...], staged: Staged, held: Held) -> admin.ContestInfo:
    contest, outcome = held.contest, held.outcome
    led = {point.entrant for point in contest.curve}
    names = [entrant.name for entrant in taking_part]
    return admin.ContestInfo(
        winner=names[outcome.entrant],
        twin=staged.twin,
        arrivals=staged.arrivals[:512],
        judged=tuple(
            _figures(names[entrant], at_s, worth, entrant in led)
            for entrant, (at_s, worth) in contest.judged.items()
        ),
        failed=tuple(
            admin.ContestFailure(name=names[entrant], reason=reason)
            for entrant, reason in contest.failures.items()
        ),
        left=len(taking_part) - contest.done,
        fresh=tuple(
            _figures(names[entrant], contest.judged[entrant][0], worth, entrant in led)
            for entrant, worth in outcome.fresh.items()
        ),
        unchecked=outcome.unchecked[:512],
    )


def _figures(name: str, at_s: float, worth: Worth, led: bool) -> admin.ContestFigures:
    return admin.ContestFigures(
        name=name,
        at_s=at_s,
        throughput_per_s=worth.throughput_per_s,
        p99_s=worth.p99_s,
        utilisation=worth.utilisation,
        met=worth.met,
        led=led,
    )
