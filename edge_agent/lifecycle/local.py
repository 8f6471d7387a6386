"""Plans that the device made itself, beside the desired one. Pure; states in, states and actions out.

A trigger fires, and a moment later come the plans that answer it, best first. The first that the desired
value's autonomy allows and that did not fail here is tried if nothing else is and the planner does not
answer: at once while it is away, after `wait_s` while it is connected. The attempt goes the way of a desired
plan, so that a crash at any point is found at boot: verified, staged, then under the guard where it is proven
or differs in launch intervals alone, else on trial, for which autonomy must be full.

What comes of it: a plan that passes is last-known-good with origin local, and is told to the planner until
the desired value changes. The planner adopts it by desiring the same digest, or desires another plan, which
is then tried against it. One that fails is not tried again in this environment; one that lost its trial is
not tried again under other launch intervals either.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from stageloom.edge_agent.lifecycle.events import PlanStaged
from stageloom.edge_agent.lifecycle.states import (
    UNDONE,
    Attempt,
    LinkState,
    LocalAttempt,
    Planned,
    PlanRef,
    RunnablePlan,
    TransitionCause,
)
from stageloom.edge_agent.lifecycle.trials import (
    VERDICT_CAUSES,
    Changed,
    Way,
    found_in_trial,
    is_proven,
    proven_with,
    structure_of,
)
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict, found_at_boot
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.control import Autonomy, DeviceState, Origin
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.text import bounded

_BARRED: Final = 32  # digests of plans and of structures remembered
_SETTLED: Final = frozenset(
    {DeviceState.COMMITTED, DeviceState.REJECTED, DeviceState.NO_GAIN, DeviceState.ROLLED_BACK}
)


@dataclass(frozen=True)
class _Offer:
    """What a trigger asks for, while `attempt` was the newest desired value."""

    cause: str
    attempt: Attempt
    due_s: float  # while the planner is connected
    plans: tuple[RunnablePlan, ...] = ()  # best first; none before they are made


class LocalPlans:
    """What is not durable: the offer, what was asked of the plan manager, when the planner was told."""

    def __init__(self, *, wait_s: float, again_s: float) -> None:
        self._wait_s = wait_s
        self._again_s = again_s
        self._offer: _Offer | None = None
        self._asked: tuple[Attempt, DeviceState] | None = None
        self._told_s = float("-inf")
        self._delay_s = again_s

    # -- from the offer to the attempt ----------------------------------------------------------------------

    def alarm(self, cause: str, attempt: Attempt, now_s: float) -> None:
        """A trigger fired; what an earlier one asked for is withdrawn."""
        self._offer = _Offer(cause, attempt, now_s + self._wait_s)

    def made(self, plans: tuple[RunnablePlan, ...]) -> None:
        """The plans that answer the newest trigger, best first."""
        if self._offer is not None:
            self._offer = replace(self._offer, plans=plans)

    def begin(
        self,
        state: LinkState,
        attempt: Attempt,
        *,
        connected: bool,
        present: Container[Digest],
        now_s: float,
    ) -> LinkState | None:
        """The state with an attempt at what was offered; None while there is nothing to try."""
        offer = self._offer
        if offer is None or not offer.plans or (connected and now_s < offer.due_s):
            return None
        if state.local is not None or state.state not in _SETTLED:
            if offer.attempt != attempt:
                self._offer = None  # the planner has answered
            return None
        self._offer = None
        if offer.attempt != attempt:
            return None
        found = next((one for one in offer.plans if _may_run(state, one, present)), None)
        if found is None:
            return None
        rest = offer.plans[offer.plans.index(found) + 1 :]
        self._offer = replace(offer, plans=rest)  # should this one not come to run
        counter = state.local_counter + 1
        plan = structs.replace(found, ref=PlanRef(found.ref.digest, Origin.LOCAL, counter))
        planned = Planned(epoch=attempt[0], generation=attempt[1], cause=offer.cause)
        local = LocalAttempt(plan=plan, planned=planned, state=DeviceState.RECEIVED)
        return structs.replace(state, local=local, local_counter=counter)

    def due(self, local: LocalAttempt) -> bool:
        """Whether the plan manager is to be asked for this state of the attempt; once, until `forget`."""
        asked = (local.attempt, local.state)
        if asked == self._asked:
            return False
        self._asked = asked
        if local.state not in (DeviceState.RECEIVED, DeviceState.VERIFIED):
            self._offer = None
        return True

    def forget(self) -> None:
        """What was asked of the plan manager is lost, or its record did not reach the disk."""
        self._asked = None

    # -- towards the planner --------------------------------------------------------------------------------

    def connected(self) -> None:
        """A new session: tell it."""
        self._told_s, self._delay_s = float("-inf"), self._again_s

    def message(
        self, state: LinkState, attempt: Attempt, boot: int, now_s: float
    ) -> control.LocalPlan | None:
        """What to tell the planner now, on a session that stands; more rarely while it does not answer."""
        good, planned = state.last_good, state.planned
        if good is None or planned is None or state.local is not None or state.active != good.ref:
            return None
        if (planned.epoch, planned.generation) != attempt or now_s - self._told_s < self._delay_s:
            return None
        if self._told_s > float("-inf"):
            self._delay_s = min(2 * self._delay_s, 60.0)
        self._told_s = now_s
        return control.LocalPlan(
            boot=boot,
            epoch=planned.epoch,
            generation=planned.generation,
            local_counter=good.ref.local_counter,
            plan_digest=good.ref.digest,
            plan=good.wire,
            artifacts=good.artifacts,
            cause=planned.cause,
        )


def _may_run(state: LinkState, plan: RunnablePlan, present: Container[Digest]) -> bool:
    """Whether a plan made here may be tried: granted, not what runs, whole, and not failed before."""
    digest, proven = plan.ref.digest, is_proven(state, plan)
    match state.desired.autonomy if state.desired else Autonomy.OFF:
        case Autonomy.OFF:
            return False
        case Autonomy.PROVEN if not proven:
            return False
    if digest in state.barred or (structure_of(plan) in state.barred and not proven):
        return False
    if state.active is not None and digest == state.active.digest:
        return False
    return all(need.digest in present for need in plan.artifacts)


def verified(state: LinkState) -> LinkState:
    """The plan decodes and is legal."""
    local = state.local
    if local is None or local.state is not DeviceState.RECEIVED:
        return state
    return structs.replace(state, local=local.moved(TransitionCause.VERIFIED))


def staged(state: LinkState, answer: PlanStaged, now_us: int) -> LinkState:
    """How it comes to run: under the guard, on trial, or not at all where nothing comparable runs."""
    local = state.local
    if local is None or local.state is not DeviceState.VERIFIED:
        return state
    if is_proven(state, local.plan):
        way = Way.PROVEN
    elif answer.control is None:
        return state.without_local(TransitionCause.NOT_NOW)
    else:
        way = Way.GUARD if answer.intervals_only else Way.TRIAL
    if answer.starves:
        return state.without_local(TransitionCause.NOT_NOW)
    record = TrialRecord(
        candidate=local.plan.ref.digest,
        control=answer.control or Digest(""),
        environment=state.environment,
        began_us=now_us,
    )
    local = structs.replace(local.moved(TransitionCause.STAGED), way=way.value, record=record)
    return structs.replace(state, local=local)


def activated(state: LinkState) -> LinkState:
    """A staged plan that needs no trial goes under probation."""
    local = state.local
    if local is None or local.state is not DeviceState.STAGED or local.way == Way.TRIAL.value:
        return state
    return structs.replace(state, local=local.moved(TransitionCause.ACTIVATE), active=local.plan.ref)


def trial_begins(state: LinkState, record: TrialRecord) -> LinkState:
    """The candidate runs once the record is durable."""
    local = state.local
    if local is None or local.state is not DeviceState.STAGED:
        return state
    return structs.replace(
        state, local=structs.replace(local.moved(TransitionCause.TRIAL_BEGINS), record=record)
    )


def decided(state: LinkState, result: TrialResult, now_us: int) -> Changed:
    """The trial ended, or was refused. One without a verdict says nothing of the plan."""
    local = state.local
    if local is None or local.state not in (DeviceState.STAGED, DeviceState.TRIAL):
        return Changed(state)
    return _decided(state, local, result, VERDICT_CAUSES[result.verdict], now_us)


def passed(state: LinkState, now_us: int) -> Changed:
    """Probation passed: the plan is last-known-good."""
    local = state.local
    if local is None or local.state is not DeviceState.PROBATION:
        return Changed(state)
    good = structs.replace(
        state.without_local(TransitionCause.PROBATION_PASSED),
        last_good=local.plan,
        planned=local.planned,
        proven=proven_with(state, local.plan, holds=True),
    )
    if local.way == Way.TRIAL.value:
        return Changed(good)  # its verdict was told
    kept = TrialResult(verdict=Verdict.COMMIT, reason="neither p99 nor the oldest age worsened")
    return Changed(good, _row(local, kept, now_us))


def failed(state: LinkState, reason: str, now_us: int) -> Changed:
    """The plan cannot be prepared, or did not outlive probation."""
    local = state.local
    if local is None or local.state is DeviceState.TRIAL:
        return Changed(state)
    if local.state is DeviceState.PROBATION:
        return _failed(state, local, reason, TransitionCause.PROBATION_FAILED, now_us)
    return Changed(_barred(state.without_local(TransitionCause.REFUSED), local.plan.ref.digest))


def attempt_at_boot(state: LinkState, now_us: int) -> Changed:
    """An attempt found at boot is over; if its plan ran, it may be what stopped the agent."""
    local = state.local
    if local is None:
        return Changed(state)
    if local.state is DeviceState.TRIAL and local.record is not None:
        return _decided(state, local, found_at_boot(local.record), TransitionCause.BOOT, now_us)
    if local.state is not DeviceState.PROBATION:
        return Changed(state.without_local(TransitionCause.BOOT))
    reason = "the agent stopped while the plan made here was tried"
    return _failed(state, local, reason, TransitionCause.BOOT, now_us)


def superseded(state: LinkState, now_us: int) -> Changed:
    """A newer value is desired: the attempt ends, and what runs runs on."""
    return _abandoned(state, "a newer plan is desired", TransitionCause.DESIRED, now_us)


def environment_changed(state: LinkState, now_us: int) -> Changed:
    """What is compared in another environment is no comparison."""
    local = state.local
    if local is None or local.state not in (DeviceState.STAGED, DeviceState.TRIAL):
        return Changed(state)
    return _abandoned(state, "the environment changed", TransitionCause.ENVIRONMENT, now_us)


def _abandoned(state: LinkState, reason: str, cause: TransitionCause, now_us: int) -> Changed:
    local = state.local
    if local is None:
        return Changed(state)
    rows: tuple[TrialEnded, ...] = ()
    if local.state is DeviceState.TRIAL:
        rows = _row(local, TrialResult(verdict=Verdict.ABANDONED, reason=reason), now_us)
    return Changed(state.without_local(cause), rows)


def lost(state: LinkState) -> LinkState | None:
    """A local last-known-good does not run any more: back to the desired plan, if that was committed.

    None where last-known-good is no local plan.
    """
    good, desired = state.last_good, state.candidate
    if good is None or state.planned is None or state.state is not DeviceState.COMMITTED or desired is None:
        return None
    over = state.without_local(TransitionCause.RESTORE_FAILED)
    back = structs.replace(over, last_good=desired, active=desired.ref, planned=None)
    return _barred(back, good.ref.digest)


def _decided(
    state: LinkState, local: LocalAttempt, result: TrialResult, cause: TransitionCause, now_us: int
) -> Changed:
    """The trial ended, or was refused. One without a verdict says nothing of the plan."""
    rows = _row(local, result, now_us)
    match result.verdict:
        case Verdict.COMMIT:
            won = local.moved(cause)
            return Changed(structs.replace(state, local=won, active=local.plan.ref), rows)
        case Verdict.ABANDONED:
            return Changed(state.without_local(cause), rows)
    proven = proven_with(state, local.plan, holds=False)
    lost = structs.replace(state.without_local(cause), proven=proven)
    return Changed(_barred(lost, local.plan.ref.digest, structure_of(local.plan)), rows)


def _failed(
    state: LinkState, local: LocalAttempt, reason: str, cause: TransitionCause, now_us: int
) -> Changed:
    """It ran and is not to run again; last-known-good does."""
    digest = local.plan.ref.digest
    good = state.last_good
    tried = (digest, structure_of(local.plan)) if local.way == Way.TRIAL.value else (digest,)
    back = structs.replace(
        _barred(state.without_local(cause), *tried),
        active=good.ref if good else None,
        proven=state.proven if local.way == Way.GUARD.value else proven_with(state, local.plan, holds=False),
    )
    return Changed(back, _row(local, TrialResult(verdict=Verdict.REJECT, reason=reason), now_us))


def _barred(state: LinkState, *failed: Digest) -> LinkState:
    """No attempt at these plans or structures again in this environment."""
    return structs.replace(state, barred=(*state.barred, *failed)[-_BARRED:])


def _row(local: LocalAttempt, result: TrialResult, now_us: int) -> tuple[TrialEnded, ...]:
    record = local.record
    if record is None:
        return ()
    low, high = result.interval if result.interval else (None, None)
    row = TrialEnded(
        local.planned.epoch,
        local.planned.generation,
        Origin.LOCAL,
        local.way,
        result.verdict.value,
        local.plan.ref.digest,
        record.control or None,
        result.ratio,
        low,
        high,
        result.pairs,
        record.began_us,
        now_us,
        bounded(result.reason),
    )
    return (row,)


HELD_MOST: Final = 64
"""Fewer changes than these of what is reported are not on disk: a start counts that many on, so that
`revision` rises over the device's life."""


def at_boot(found: LinkState, now_us: int) -> Changed:
    """The state to go on from, and the rows of trials that the stop has ended.

    A trial may be what stopped the agent, so its candidate is rejected. So may a plan under probation; it
    gets a second chance, since power cuts are more frequent than plans that take the agent down.
    """
    good = found.last_good
    active = good.ref if good is not None else None
    state, local_rows = attempt_at_boot(structs.replace(found, active=active), now_us)
    rows: tuple[TrialEnded, ...] = ()
    if found.state in UNDONE:
        state = structs.replace(state, revision=state.revision + HELD_MOST)
    if found.state is DeviceState.PROBATION and found.probation_boots:
        state = state.moved(
            TransitionCause.BOOT_AGAIN, "the agent stopped twice while it was under probation"
        )
    elif found.state is DeviceState.PROBATION:
        state = state.moved(TransitionCause.BOOT, "the agent stopped while it was under probation")
        state = structs.replace(state, probation_boots=1)
    elif found.state is DeviceState.TRIAL:
        state, rows = found_in_trial(state, now_us)
    elif found.state is not None:
        state = state.moved(TransitionCause.BOOT, found.reason)
    return Changed(structs.replace(state, abandoned=0, trial=None), (*rows, *local_rows))
