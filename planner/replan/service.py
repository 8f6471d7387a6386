"""Carries re-plans out: reads what a policy needs, has searches run elsewhere, pushes what was decided.

One thread takes alarms and does what needs no search, a proven plan above all, within milliseconds. What
waits for a search or a profile goes to a few threads of its own. Dispatch only hands alarms over.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from typing import Final

from stageloom.planner.api.context import FleetLink, desiring
from stageloom.planner.cluster.interface import SearchPool, search
from stageloom.planner.costs.records import found_schedules
from stageloom.planner.replan.background import ScheduleSearches
from stageloom.planner.replan.backoff import not_again_yet
from stageloom.planner.replan.decide import (
    NOTHING_BETTER,
    ReplanDecision,
    asked_alone,
    by_regime,
    by_return,
    decide,
    rearranged,
    without_search,
)
from stageloom.planner.replan.learned import SEARCHED, LearnedPolicy
from stageloom.planner.replan.observing import (
    ahead,
    library,
    observe,
    recalibration,
    with_losses,
    without_costs,
)
from stageloom.planner.replan.policy import Observation, PlainPolicy, Proposal, ReplanSettings
from stageloom.planner.replan.regimes import expected_plan, has_won, known_winner, returning_plan
from stageloom.planner.store.costs import keep_schedules, renew_costs
from stageloom.planner.store.fruitless import fruitless_searches
from stageloom.planner.store.predictions import keep_considered
from stageloom.planner.store.profiles import open_requests, request_profile, request_stage_profile
from stageloom.planner.store.regimes import known_structures
from stageloom.planner.store.replan_pushes import awaits_trial, is_trying, push_replan
from stageloom.planner.store.replans import (
    BEING_TRIED,
    NEWER_DESIRED,
    OVERDUE_US,
    OVERTAKEN,
    TOLD_ONCE,
    begun_replan,
    end_overdue,
    end_replan,
    unfinished_replans,
)
from stageloom.planner.store.store import Store
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import MAX_PROFILED, Activation
from stageloom.shared.plan import Plan
from stageloom.shared.policy.trigger import Cause
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.job import BlockJob, SearchJob
from stageloom.shared.search.registry import schedulers
from stageloom.shared.stage_string import to_string

log = logging.getLogger(__name__)

PROFILE_BUDGET_S: Final = 20.0
STAGE_BUDGET_S: Final = 10.0
STORE_AGAIN_S: Final = 5.0  # after a store that was away
PROFILE_WAIT_S: Final = 60.0
"""A device measures only with empty queues: one that is never idle is planned with estimates."""

_REPORTED_S: Final = 1.0
"""An alarm that an attempt held up comes as soon as that ends, and may be there before the report of it."""

_POLL_S: Final = 0.1
_LONGEST_S: Final = 600.0
"""Seconds after which a re-plan ends a search by another package's scheduler, which may never end. They
count from when it is asked for. Stageloom's own end by their budget, however long they wait for a worker."""
_SLOW: Final = 4  # devices that wait for a search or a profile at the same time


class Replanner:
    """Serves from `start` to `close`. Into `due` go re-plans as alarms begin them; it takes from there."""

    def __init__(
        self,
        store: Store,
        fleet: FleetLink,
        pool: SearchPool,
        clock: Clock,
        due: "queue.SimpleQueue[tuple[DeviceId, int] | None]",
        *,
        policy: PlainPolicy | None = None,
        profile_wait_s: float = PROFILE_WAIT_S,
        store_again_s: float = STORE_AGAIN_S,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._policy = policy or LearnedPolicy()
        self._profile_wait_s = profile_wait_s
        self._store_again_s = store_again_s
        self._queue = due
        self._stopping = threading.Event()
        self._schedules = ScheduleSearches(pool, self._keep_schedule)
        self.pool = self._schedules.foreground
        """For searches that a caller waits for; background searches pause meanwhile."""
        self._newest: dict[DeviceId, int] = {}  # re-plan
        self._searched_with: dict[DeviceId, ReplanSettings] = {}
        self._slow = ThreadPoolExecutor(_SLOW, thread_name_prefix="replan-search")
        self._thread = threading.Thread(target=self._run, name="replan", daemon=True)

    def start(self) -> None:
        """Take up what a stopped planner left a moment ago, then serve."""
        self._store.write(end_overdue)
        for device, replan in self._store.read(unfinished_replans):
            self._queue.put((device, replan))
        self._schedules.start()
        self._thread.start()

    def close(self) -> None:
        """Stop; a re-plan that has pushed nothing yet is taken up by the next planner."""
        self._stopping.set()
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._slow.shutdown(cancel_futures=True)
        self._schedules.close()

    @property
    def idle(self) -> bool:
        """No re-plan looks for a plan, and nobody searches."""
        return self._schedules.idle and not self._store.read(unfinished_replans)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            device, replan = item
            if replan != self._newest.get(device):  # an alarm that comes again names its re-plan again
                self._guarded(device, replan, self._fast)

    def _put_back(self, device: DeviceId, replan: int) -> None:
        """Have the queue take a re-plan once more."""
        if self._newest.get(device) == replan:
            del self._newest[device]
        self._queue.put((device, replan))

    def _guarded(self, device: DeviceId, replan: int, step: Callable[[DeviceId, int], None]) -> None:
        try:
            step(device, replan)
            return
        except StageloomError as error:
            reason = str(error)
        except Exception as error:
            if self._stopping.is_set():
                return
            log.exception("device_id=%s replan=%d failed", device, replan)
            reason = f"the re-planner failed: {type(error).__name__}; see the log"
        try:
            self._nothing(device, replan, reason)
        except StageloomError as error:  # the store is away, which may be why it failed: later it may not
            log.warning("device_id=%s replan=%d waits for the store: %s", device, replan, error)
            if not self._stopping.wait(self._store_again_s):
                self._put_back(device, replan)

    def _fast(self, device: DeviceId, replan: int) -> None:
        newest = self._newest[device] = max(replan, self._newest.get(device, replan))
        if replan < newest:  # it waited for a store that was away
            self._nothing(device, replan, OVERTAKEN)
        elif self._store.read(awaits_trial, device, replan):
            begun = self._store.read(begun_replan, replan)
            once = begun is not None and begun.alarm.cause in TOLD_ONCE
            until_s = self._clock.monotonic_s() + (OVERDUE_US / 1e6 if once else 0.0)
            self._slow.submit(self._guarded, device, replan, partial(self._after_anothers, until_s=until_s))
        else:
            self._answer(device, replan)

    def _after_anothers(self, device: DeviceId, replan: int, *, until_s: float) -> None:
        """What an operator has the device try is left alone; its end may be about to be told.

        An alarm that is told once is answered when the trial has ended. Until then the re-plan goes to the
        end of the line again and again, as others wait for a search. A drift that is overtaken in it renews
        costs.
        """
        self._wait_while(lambda: self._store.read(awaits_trial, device, replan), _REPORTED_S)
        if not self._store.read(awaits_trial, device, replan):
            self._answer(device, replan)
        elif self._clock.monotonic_s() >= until_s:
            self._nothing(device, replan, "the device tries a plan that was pushed by others")
        elif not self._is_over(device, replan):
            self._slow.submit(self._guarded, device, replan, partial(self._after_anothers, until_s=until_s))
        elif not self._stopping.is_set():  # else the next planner takes it up
            self._recalibrate(device, replan)

    def _answer(self, device: DeviceId, replan: int) -> None:
        now_us = self._clock.wall_us()
        seen = observe(self._store, device, replan, now_us)
        # A device that drifted has other costs by now, and another plan may suit it better than a proven one.
        drifted = seen.cause == Cause.DRIFT.value
        at_once = self._policy.at_once(seen)
        decision = None
        if not drifted and asked_alone(seen, at_once):
            decision = without_search(seen, at_once)
        elif not drifted:
            known = library(self._store, seen)
            decision = by_regime(seen, known_winner(seen, known))
            seen = with_losses(self._store, seen, known, now_us)
            decision = decision or without_search(
                seen, at_once, expected_plan(seen, ahead(self._store, seen))
            )
            decision = decision or by_return(seen, returning_plan(seen, known), won_here=has_won(seen, known))
        if decision is not None:
            self._carry_out(seen, replan, decision, self._policy.remark(seen))
        else:
            self._slow.submit(self._guarded, device, replan, self._search)

    def _observe(self, device: DeviceId, replan: int) -> Observation:
        """What a policy sees, with what lost here to the plan that runs."""
        now_us = self._clock.wall_us()
        seen = observe(self._store, device, replan, now_us)
        return with_losses(self._store, seen, library(self._store, seen), now_us)

    def _search(self, device: DeviceId, replan: int) -> None:
        if not self._is_over(device, replan):  # it waited for its turn
            if self._rearrange(device, replan) or self._ends_without_search(device, replan):
                return
            self._profile_first(device, replan)
        drifted = self._recalibrate(device, replan)  # of one that was overtaken, too: a drift is told once
        if self._is_over(device, replan):
            return
        seen = self._observe(device, replan)
        found = self._found(device, replan, self._policy.searches(seen))
        if self._is_over(device, replan):
            return
        at_once = self._policy.at_once(seen)
        arranged = () if asked_alone(seen, at_once) else self._policy.arranged(seen)
        proposals = [*at_once, *arranged, *self._policy.after(seen, found)]
        decision = decide(seen, proposals)
        best = decision.proposal
        in_vain = best is not None and best.plan.structure == seen.incumbent.structure
        remarks = (NOTHING_BETTER if in_vain else "", drifted, self._policy.remark(seen))
        self._carry_out(seen, replan, decision, "; ".join(remark for remark in remarks if remark))
        for scheduler in dict.fromkeys(job.scheduler for job, _ in found):
            plans = [plan for job, plan in found if job.scheduler == scheduler]
            for plan in plans:
                schedules = found_schedules(plan, seen.graphs)
                self._store.write(keep_schedules, seen.costs_key, scheduler, schedules)

    def _rearrange(self, device: DeviceId, replan: int) -> bool:
        """Push another way to share the cores, if one is likely to gain; after a drift times are others."""
        seen = self._observe(device, replan)
        at_once = self._policy.at_once(seen)
        if seen.cause == Cause.DRIFT.value or asked_alone(seen, at_once):
            return False
        decision = rearranged(seen, [*at_once, *self._policy.arranged(seen)])
        if decision is not None:
            self._carry_out(seen, replan, decision, self._policy.remark(seen))
        return decision is not None

    def _ends_without_search(self, device: DeviceId, replan: int) -> bool:
        """Leave a search out that found nothing to try a while ago: its device may need the cores."""
        now_us = self._clock.wall_us()
        seen = self._observe(device, replan)
        if self._searched_with.setdefault(device, seen.settings) != seen.settings:  # an operator asks anew
            self._searched_with[device] = seen.settings
            return False
        earlier = self._store.read(
            fruitless_searches,
            *(device, seen.environment, seen.incumbent.structure, seen.costs_key),
            seen.costs_since_us,
        )
        reason = not_again_yet(seen, earlier, now_us)
        if not reason:
            return False
        decision = decide(seen, self._policy.at_once(seen))
        if decision.proposal is None:
            decision = replace(decision, reason=reason)
        self._carry_out(seen, replan, decision, self._policy.remark(seen))
        return True

    def _profile_first(self, device: DeviceId, replan: int) -> None:
        """Have a device measure models whose costs are unknown or stale, for `profile_wait_s` at most.

        What an earlier re-plan, or somebody else, has asked for and not been told yet is not asked for again.
        """
        names = without_costs(self._store, replan, self._clock.wall_us())
        if not names:
            return
        with desiring(self._fleet, device):
            requests, desired = self._store.write(
                request_profile, device, names, budget_s=PROFILE_BUDGET_S, unless_open=True
            )
        self._fleet.desired_changed(device, desired)
        self._wait_while(lambda: bool(self._store.read(open_requests, requests)), self._profile_wait_s)

    def _recalibrate(self, device: DeviceId, replan: int) -> str:
        """Renew the costs of a device that has drifted; returns a remark for the re-plan's record.

        The device is asked for a profile of the parts of its plan that telemetry does not cover.
        """
        found = recalibration(self._store, device, replan, self._clock.wall_us())
        if found is None:
            return ""
        plan, ratio, renewal, newest_us = found
        self._store.write(renew_costs, device, renewal, plan.executor, ratio=ratio, steps_since_us=newest_us)
        then = "the costs of its class hold again" if renewal is None else "it has costs of its own"
        remark = f"its steps took {ratio:.2f} of what was planned, so {then}"
        log.info("device_id=%s replan=%d recalibrated: %s", device, replan, remark)
        unseen = renewal.unseen if renewal is not None else ()
        if unseen:
            with desiring(self._fleet, device):
                request, desired = self._store.write(
                    request_stage_profile,
                    device,
                    plan.digest,
                    combined_blocks=unseen if len(unseen) <= MAX_PROFILED else (),
                    budget_s=STAGE_BUDGET_S,
                )
            self._fleet.desired_changed(device, desired)
            self._wait_while(lambda: bool(self._store.read(open_requests, [request])), self._profile_wait_s)
        return remark

    def _wait_while(self, asked: Callable[[], bool], seconds: float) -> None:
        """Until a device has answered, or so long."""
        give_up_s = self._clock.monotonic_s() + seconds
        while asked() and self._clock.monotonic_s() < give_up_s:
            if self._stopping.wait(_POLL_S):
                return

    def _is_over(self, device: DeviceId, replan: int) -> bool:
        """Nothing more is to be done for it: a newer one overtook it, or the planner ends."""
        return self._stopping.is_set() or self._newest.get(device, replan) != replan

    def _found(
        self, device: DeviceId, replan: int, jobs: Sequence[SearchJob]
    ) -> list[tuple[SearchJob, Plan]]:
        end_s, own = self._clock.monotonic_s() + _LONGEST_S, schedulers()

        def goes_on(job: SearchJob) -> bool:
            if self._is_over(device, replan):
                return False
            return job.scheduler in own or self._clock.monotonic_s() < end_s

        return plans_found(self.pool, jobs, goes_on)

    def _carry_out(self, seen: Observation, replan: int, decision: ReplanDecision, remark: str) -> None:
        self._schedules.want(seen.costs_key, self._policy.missing(seen))
        proposal = decision.proposal
        weighed = seen.incumbent.digest
        if proposal is None:
            if self._runs_another(seen, replan):
                self._put_back(seen.device, replan)
                return
            self._nothing(seen.device, replan, decision.reason, remark, weighed=weighed)
            self._keep_considered(seen, replan, decision)
            return
        if self._store.read(is_trying, seen.device, replan, proposal.plan.structure):
            self._nothing(seen.device, replan, BEING_TRIED, remark, weighed=weighed)
            return
        with desiring(self._fleet, seen.device):
            desired = self._store.write(
                push_replan,
                seen.device,
                replan,
                proposal.plan,
                runs=weighed,
                scheduler=_scheduler(proposal),
                above=seen.desired,
                how=proposal.how.value,
                predicted=decision.predicted,
                remark="; ".join(filter(None, (decision.reason if decision.judged else "", remark))),
                fitting=self._policy.fitting(seen, proposal.plan),
                activation=Activation.NOW if decision.at_once else Activation.TRIAL,
            )
        if desired is None and self._goes_on(seen, replan, proposal.plan):
            self._put_back(seen.device, replan)
            return
        if desired is None:
            self._nothing(seen.device, replan, NEWER_DESIRED, remark, weighed=weighed)
            return
        self._fleet.desired_changed(seen.device, desired)
        log.info(
            "device_id=%s replan=%d pushed %s as generation %d.%d: %s",
            seen.device,
            replan,
            proposal.plan.digest[:12],
            desired.epoch,
            desired.generation,
            decision.reason,
        )
        self._keep_considered(seen, replan, decision)

    def _goes_on(self, seen: Observation, replan: int, found: Plan) -> bool:
        """Whether something newer is desired that leaves the re-plan its reason: a measurement, not a plan.

        Or nothing newer, but the device runs another plan than the one that others were weighed against. Or
        any plan, where arrivals moved, which is told once: they are answered when that has been tried. Launch
        intervals that the device gave itself meanwhile are no other plan, unless intervals are all that was
        found.
        """
        begun = self._store.read(begun_replan, replan)
        if begun is None:
            return False
        moved = seen.cause == Cause.REGIME.value
        if begun.desired == seen.desired:
            another = begun.runs not in (None, seen.incumbent.digest)
            return another or (moved and self._store.read(awaits_trial, seen.device, replan))
        incumbent, newest = seen.incumbent, begun.desired_plan
        if moved or newest == incumbent.digest:
            return True
        if newest is None or found.structure == incumbent.structure:
            return False
        return self._store.read(known_structures, [newest]).get(newest) == incumbent.structure

    def _runs_another(self, seen: Observation, replan: int) -> bool:
        """Whether nothing was weighed against what the device runs by now. With other launch intervals alone
        it is no other plan: nothing was better than its structure."""
        begun = self._store.read(begun_replan, replan)
        runs = None if begun is None else begun.runs
        if runs is None or runs == seen.incumbent.digest:
            return False
        return self._store.read(known_structures, [runs]).get(runs) != seen.incumbent.structure

    def _keep_considered(self, seen: Observation, replan: int, decision: ReplanDecision) -> None:
        """After the push: nobody waits for it, and a push waits for nothing that only explains it."""
        self._store.write(
            keep_considered,
            decision.evaluations,
            device_class=seen.environment,
            device=seen.device,
            replan=replan,
        )

    def _keep_schedule(self, costs_key: str, job: BlockJob, found: StageSchedule) -> None:
        kept = {(job.combined_block, job.batch): to_string(found)}
        self._store.write(keep_schedules, costs_key, SEARCHED, kept)

    def _nothing(
        self, device: DeviceId, replan: int, reason: str, remark: str = "", *, weighed: Digest | None = None
    ) -> None:
        log.info("device_id=%s replan=%d ends with no gain: %s", device, replan, reason)
        self._store.write(end_replan, replan, reason, remark, weighed=weighed)


def _scheduler(proposal: Proposal) -> str:
    return proposal.scheduler or proposal.how.value


def plans_found(
    pool: SearchPool, jobs: Sequence[SearchJob], goes_on: Callable[[SearchJob], bool]
) -> list[tuple[SearchJob, Plan]]:
    """What searches found; one that has not ended when `goes_on` says no of it is cancelled."""
    futures: list[Future[Plan]] = [pool.submit(search, job) for job in jobs]
    pending = set(futures)
    while pending:
        wait_for(pending, timeout=_POLL_S)
        pending = {future for future in pending if not future.done()}  # `wait_for` keeps cancelled ones
        for job, future in zip(jobs, futures, strict=True):
            if future in pending and not goes_on(job) and future.cancel():
                log.info("a search by the scheduler %s has not ended, and is cancelled", job.scheduler)
    plans = [(job, _plan(future)) for job, future in zip(jobs, futures, strict=True)]
    return [(job, plan) for job, plan in plans if plan is not None]


def _plan(ending: Future[Plan]) -> Plan | None:
    try:
        return ending.result()
    except CancelledError:
        return None
    except StageloomError as error:  # such as a partition that the wait rule does not allow
        log.info("a search found nothing: %s", error)
        return None
