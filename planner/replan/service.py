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
from typing import Final

from planner.admin.fleet import Fleet
from planner.cluster.interface import SearchPool
from planner.cluster.run import search
from planner.replan.decide import Decision, decide, without_search
from planner.replan.learned import LearnedPolicy
from planner.replan.observation import Observation
from planner.replan.observing import observe, without_costs
from planner.replan.policy import How, Policy, Proposal
from planner.replan.settings import Note
from planner.store.store import Store
from shared.clock import Clock
from shared.errors import StageloomError
from shared.ids import DeviceId
from shared.plan import Plan
from shared.search.job import SearchJob

log = logging.getLogger(__name__)

PROFILE_BUDGET_S: Final = 20.0
PROFILE_WAIT_S: Final = 60.0
"""A device measures only with empty queues: one that is never idle is planned with estimates."""

_POLL_S: Final = 0.1
_SLOW: Final = 4  # devices that wait for a search or a profile at the same time


class Replanner:
    """Serves from `start` to `close`. Into `due` go re-plans as alarms begin them; it takes from there."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        pool: SearchPool,
        clock: Clock,
        due: "queue.SimpleQueue[tuple[DeviceId, int] | None]",
        *,
        policy: Policy | None = None,
        profile_wait_s: float = PROFILE_WAIT_S,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._pool = pool
        self._clock = clock
        self._policy = policy or LearnedPolicy()
        self._profile_wait_s = profile_wait_s
        self._queue = due
        self._stopping = threading.Event()
        self._slow = ThreadPoolExecutor(_SLOW, thread_name_prefix="replan-search")
        self._thread = threading.Thread(target=self._run, name="replan", daemon=True)

    def start(self) -> None:
        """Take up what a stopped planner left, then serve."""
        for device, replan in self._store.unfinished_replans():
            self._queue.put((device, replan))
        self._thread.start()

    def close(self) -> None:
        """Stop; a re-plan that has pushed nothing yet is taken up by the next planner."""
        self._stopping.set()
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._slow.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            device, replan = item
            self._guarded(device, replan, self._fast)

    def _guarded(self, device: DeviceId, replan: int, step: Callable[[DeviceId, int], None]) -> None:
        try:
            step(device, replan)
        except StageloomError as error:
            self._nothing(device, replan, str(error))
        except Exception as error:
            if self._stopping.is_set():
                return
            log.exception("device_id=%s replan=%d failed", device, replan)
            self._nothing(device, replan, f"the re-planner failed: {type(error).__name__}; see the log")

    def _fast(self, device: DeviceId, replan: int) -> None:
        seen = observe(self._store, device, replan, self._clock.wall_us())
        decision = without_search(seen, self._policy.at_once(seen))
        if decision is not None:
            self._carry_out(seen, replan, decision)
        else:
            self._slow.submit(self._guarded, device, replan, self._search)

    def _search(self, device: DeviceId, replan: int) -> None:
        self._profile_first(device, replan)
        seen = observe(self._store, device, replan, self._clock.wall_us())
        found = self._found(self._policy.searches(seen))
        if self._stopping.is_set():
            return
        proposals = [*self._policy.at_once(seen), *self._policy.after(seen, found)]
        decision = decide(seen, proposals)
        remark = self._policy.remark(seen)
        if remark:
            decision = replace(decision, reason=f"{decision.reason}; {remark}")
        self._carry_out(seen, replan, decision)

    def _profile_first(self, device: DeviceId, replan: int) -> None:
        """Have a device measure models whose costs are unknown or stale; go on after a while regardless."""
        names = without_costs(self._store, replan, self._clock.wall_us())
        if not names:
            return
        requests, desired = self._store.request_profile(device, names, budget_s=PROFILE_BUDGET_S)
        self._fleet.desired_changed(device, desired)
        give_up_s = self._clock.monotonic_s() + self._profile_wait_s
        while self._store.open_profiles(requests) and self._clock.monotonic_s() < give_up_s:
            if self._stopping.wait(_POLL_S):
                return

    def _found(self, jobs: Sequence[SearchJob]) -> list[tuple[SearchJob, Plan]]:
        futures: list[Future[Plan]] = [self._pool.submit(search, job) for job in jobs]
        pending = set(futures)
        while pending and not self._stopping.is_set():
            _, pending = wait_for(pending, timeout=_POLL_S)
        for future in pending:
            future.cancel()
        plans = [(job, _plan(future)) for job, future in zip(jobs, futures, strict=True)]
        return [(job, plan) for job, plan in plans if plan is not None]

    def _carry_out(self, seen: Observation, replan: int, decision: Decision) -> None:
        proposal = decision.proposal
        if proposal is None:
            self._nothing(seen.device, replan, decision.reason)
            self._keep_considered(seen, replan, decision)
            return
        note = Note(structure=proposal.plan.structure, how=proposal.how.value, predicted=decision.predicted)
        desired = self._store.push_replan(
            seen.device,
            replan,
            proposal.plan,
            scheduler=_scheduler(proposal),
            above=seen.desired,
            note=note,
        )
        if desired is None:
            self._nothing(seen.device, replan, "something newer was desired meanwhile")
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

    def _keep_considered(self, seen: Observation, replan: int, decision: Decision) -> None:
        """After the push: nobody waits for it, and a push waits for nothing that only explains it."""
        self._store.keep_considered(
            decision.considered, device_class=seen.environment, device=seen.device, replan=replan
        )

    def _nothing(self, device: DeviceId, replan: int, reason: str) -> None:
        log.info("device_id=%s replan=%d ends with no gain: %s", device, replan, reason)
        self._store.end_replan(replan, reason)


def _scheduler(proposal: Proposal) -> str:
    return proposal.scheduler or {How.PROVEN: "proven", How.INTERVALS: "intervals"}[proposal.how]


def _plan(ending: Future[Plan]) -> Plan | None:
    try:
        return ending.result()
    except CancelledError:
        return None
    except StageloomError as error:  # such as a partition that the wait rule does not allow
        log.info("a search found nothing: %s", error)
        return None
