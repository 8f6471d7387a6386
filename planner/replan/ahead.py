"""Finds plans for load regimes that recur on a device, before they come again.

`look_ahead` reads a store and judges by the clock that it is given; it runs in a process of its own, beside
the planner's. For a regime that nothing is known of, candidates are judged as for an alarm: the newest one,
with the regime's arrivals in place of its own, and no queue. It says what deadlines there are, and what tasks
take.
"""

import logging
from dataclasses import dataclass, replace
from typing import Final

from stageloom.planner.cluster.interface import search
from stageloom.planner.replan.decide import decide
from stageloom.planner.replan.observing import ahead, library, observe
from stageloom.planner.replan.policy import Observation, PlainPolicy
from stageloom.planner.replan.recurring import (
    MINUTE_US,
    ArrivalMinute,
    RegimeVisit,
    recurring,
    visits,
)
from stageloom.planner.replan.regimes import NEAR, RegimeRate, distance
from stageloom.planner.schema.replan import Proposer
from stageloom.planner.store.fruitless import measured_us
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry_history import telemetry_history
from stageloom.planner.telemetry import Width
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import RowKind, TaskCounters
from stageloom.shared.plan import Plan
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.trigger import Cause
from stageloom.shared.search.job import SearchJob

log = logging.getLogger(__name__)

MEMORY_US: Final = 14 * 86_400_000_000
"""What came before is no sign of what comes."""

_MOST_ENTRIES: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class ArrivalHistory:
    """A device's visits, oldest first, up to a moment of its clock."""

    visits: tuple[RegimeVisit, ...] = ()
    until_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAhead:
    """The plan that is expected to be best under such arrivals.

    `chance`: of a gain over the one that it was compared with; None where it is that one.
    """

    environment: str
    rates: tuple[RegimeRate, ...]
    plan: Plan
    scheduler: str
    chance: float | None


def look_ahead(
    store: ReadStore, device: DeviceId, replan: int, known: ArrivalHistory, now_us: int
) -> tuple[ArrivalHistory, FoundAhead | None]:
    """The history with what arrived since, and a plan for the recurring regime that lasts longest of those
    that nothing is known of; None where there is none, or where too little is known to judge plans.

    `replan`: the device's newest one.

    Raises:
        InputError: as `observe`.
    """
    seen = observe(store, device, replan, now_us)
    service_s = {load.model: load.service_s for load in seen.loads}
    minutes = arrival_minutes(store, device, max(known.until_us, now_us - MEMORY_US))
    until_us = minutes[-1].at_us + MINUTE_US if minutes else known.until_us
    history = ArrivalHistory(visits(known.visits, minutes, service_s), until_us)
    if not all(service_s.values()) or seen.settings.proposer is Proposer.LEARNED:
        return history, None
    since_us = store.read(measured_us, device, seen.environment, seen.costs_key)
    answered = [one.rates for one in library(store, seen)]
    answered += [one.rates for one in ahead(store, seen, since_us)]
    for regime in recurring(history.visits, service_s, now_us - MEMORY_US):
        if all(distance(rates, regime.rates) > NEAR for rates in answered):
            return history, _found(under(seen, regime.rates), regime.rates)
    return history, None


def arrival_minutes(store: ReadStore, device: DeviceId, since_us: int) -> list[ArrivalMinute]:
    """Whole minutes from a moment on in which tasks came, oldest first; the newest is not over yet."""
    entries, _ = store.read(
        telemetry_history,
        device,
        [RowKind.TASK_COUNTERS],
        by=Width.MINUTE,
        since_us=since_us,
        limit=_MOST_ENTRIES,
    )
    found: dict[int, dict[str, int]] = {}
    for entry in reversed(entries):
        if entry.width_s == Width.MINUTE.value and isinstance(entry.data, TaskCounters):
            tasks = found.setdefault(entry.at_us, {})
            tasks[entry.data.model] = tasks.get(entry.data.model, 0) + entry.data.submitted
    return [ArrivalMinute(at_us, found[at_us]) for at_us in sorted(found)[:-1]]


def under(seen: Observation, rates: tuple[RegimeRate, ...]) -> Observation:
    """The same device with other arrivals, which have come for long, and nothing queued."""
    by_model = {one.model: one.arrivals_per_s for one in rates}
    loads = tuple(
        Load(
            model=load.model,
            arrivals_per_s=by_model[load.model],
            service_s=load.service_s,
            queued=0,
            usual_per_s=by_model[load.model],
            deadline_s=load.deadline_s,
        )
        for load in seen.loads
    )
    return replace(seen, cause=Cause.REGIME.value, loads=loads)


def _found(seen: Observation, rates: tuple[RegimeRate, ...]) -> FoundAhead | None:
    """Candidates of all kinds but trained ones, judged on the arrivals; None where that cannot be done."""
    if seen.scene(1) is None:
        return None
    policy = PlainPolicy()
    searched = [(job, _plan(job)) for job in policy.searches(seen)]
    found = [(job, plan) for job, plan in searched if plan is not None]
    proposals = [*policy.at_once(seen), *policy.arranged(seen), *policy.after(seen, found)]
    decision = decide(seen, proposals)
    best = decision.proposal if decision.judged else None
    row = next((one for one in decision.evaluations if best and one.plan == best.plan.digest), None)
    return FoundAhead(
        environment=seen.environment,
        rates=rates,
        plan=best.plan if best else seen.incumbent,
        scheduler=(best.scheduler or best.how.value) if best else "incumbent",
        chance=row.chance if row is not None else None,
    )


def _plan(job: SearchJob) -> Plan | None:
    try:
        return search(job)
    except StageloomError as error:  # such as a partition that the wait rule does not allow
        log.info("a search found nothing: %s", error)
        return None
