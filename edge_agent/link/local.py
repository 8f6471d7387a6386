"""Plans that the device made itself, beside the desired one. Pure; states in, states and actions out.

A trigger offers a plan. It is tried if the desired value's autonomy allows it, nothing else is being tried
and the planner does not answer: at once while it is away, after `wait_s` while it is connected. The attempt
goes the way of a desired plan (verified, staged, under guarded probation), so that a crash at any point is
found at boot. It is never on trial: a plan made here differs in launch intervals, or is proven.

What comes of it: a plan that passes is last-known-good with origin local, and is told to the planner until
the desired value changes. The planner adopts it by desiring the same digest, or desires another plan, which
is then tried against it. One that fails is not tried again in this environment.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

import msgspec

from edge_agent.link import events as ev
from edge_agent.link.trials import Changed, Way, is_proven, proven_with
from shared.engine.trial import TrialRecord, TrialResult, Verdict
from shared.ids import Digest
from shared.messages import control
from shared.messages.control import Autonomy, DeviceState, Origin
from shared.messages.telemetry import TrialEnded

_BARRED: Final = 16  # digests remembered
_SETTLED: Final = frozenset(
    {DeviceState.COMMITTED, DeviceState.REJECTED, DeviceState.NO_GAIN, DeviceState.ROLLED_BACK}
)


@dataclass(frozen=True)
class _Offer:
    """A plan that a trigger asks for, while `attempt` was the newest desired value."""

    plan: ev.RunnablePlan
    cause: str
    attempt: ev.Attempt
    due_s: float  # while the planner is connected


class LocalPlans:
    """What is not durable: the offer, what was asked of the plan manager, when the planner was told."""

    def __init__(self, *, wait_s: float, again_s: float) -> None:
        self._wait_s = wait_s
        self._again_s = again_s
        self._offer: _Offer | None = None
        self._asked: tuple[ev.Attempt, DeviceState] | None = None
        self._told_s = float("-inf")
        self._delay_s = again_s

    # -- from the offer to the attempt ----------------------------------------------------------------------

    def offer(self, raised: ev.AlarmRaised, attempt: ev.Attempt, now_s: float) -> None:
        """A trigger fired; a newer offer replaces an older one, and no plan withdraws it."""
        plan = raised.local
        self._offer = None if plan is None else _Offer(plan, raised.cause, attempt, now_s + self._wait_s)

    def begin(
        self,
        state: ev.LinkState,
        attempt: ev.Attempt,
        *,
        connected: bool,
        present: Container[Digest],
        now_s: float,
    ) -> ev.LinkState | None:
        """The state with an attempt at what was offered; None while there is nothing to try."""
        offer = self._offer
        if offer is None or (connected and now_s < offer.due_s):
            return None
        if state.local is not None or state.state not in _SETTLED:
            if offer.attempt != attempt:
                self._offer = None  # the planner has answered
            return None
        self._offer = None
        autonomy = state.desired.autonomy if state.desired else Autonomy.OFF
        digest = offer.plan.ref.digest
        active = state.active.digest if state.active else None
        if (
            offer.attempt != attempt
            or autonomy is Autonomy.OFF
            or (autonomy is Autonomy.PROVEN and not is_proven(state, offer.plan))
            or digest in state.barred
            or digest == active
            or any(need.digest not in present for need in offer.plan.artifacts)
        ):
            return None
        counter = state.local_counter + 1
        plan = msgspec.structs.replace(offer.plan, ref=ev.PlanRef(digest, Origin.LOCAL, counter))
        planned = ev.Planned(epoch=attempt[0], generation=attempt[1], cause=offer.cause)
        local = ev.LocalAttempt(plan=plan, planned=planned, state=DeviceState.RECEIVED)
        return msgspec.structs.replace(state, local=local, local_counter=counter)

    def step(self, state: ev.LinkState) -> tuple[ev.LinkState, list[ev.Action]]:
        """What the attempt still lacks; asked once, until `forget`."""
        local = state.local
        if local is None:
            return state, []
        if local.state is DeviceState.STAGED:
            # The record is on disk before the plan runs: a crash from here on is found at boot.
            local = msgspec.structs.replace(local, state=DeviceState.PROBATION)
            state = msgspec.structs.replace(state, local=local, active=local.plan.ref)
        asked = (local.attempt, local.state)
        if asked == self._asked:
            return state, []
        self._asked = asked
        match local.state:
            case DeviceState.RECEIVED:
                return state, [ev.VerifyPlan(local.attempt, local.plan)]
            case DeviceState.VERIFIED:
                return state, [ev.StagePlan(local.attempt, local.plan)]
            case _:
                return state, [ev.ActivatePlan(local.attempt, local.plan, guarded=True)]

    def forget(self) -> None:
        """What was asked of the plan manager is lost, or its record did not reach the disk."""
        self._asked = None

    # -- towards the planner --------------------------------------------------------------------------------

    def connected(self) -> None:
        """A new session: tell it."""
        self._told_s, self._delay_s = float("-inf"), self._again_s

    def message(
        self, state: ev.LinkState, attempt: ev.Attempt, boot: int, now_s: float
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


def outcome(state: ev.LinkState, event: ev.Outcome, now_us: int) -> Changed | None:
    """What the plan manager says of the local attempt; None if it says nothing of one that goes on."""
    local = state.local
    if local is None or event.attempt != local.attempt:
        return None
    match event, local.state:
        case ev.PlanVerified(), DeviceState.RECEIVED:
            verified = msgspec.structs.replace(local, state=DeviceState.VERIFIED)
            return Changed(msgspec.structs.replace(state, local=verified))
        case ev.PlanStaged(), DeviceState.VERIFIED:
            return Changed(_staged(state, local, event, now_us))
        case ev.ProbationPassed(), DeviceState.PROBATION:
            passed = msgspec.structs.replace(
                state,
                local=None,
                last_good=local.plan,
                planned=local.planned,
                proven=proven_with(state, local.plan, holds=True),
            )
            kept = TrialResult(verdict=Verdict.COMMIT, reason="neither p99 nor the oldest age worsened")
            return Changed(passed, _row(local, kept, now_us))
        case ev.PlanRefused(), DeviceState.RECEIVED | DeviceState.VERIFIED | DeviceState.STAGED:
            return Changed(_barred(state, local.plan.ref.digest))
        case ev.ProbationFailed(), DeviceState.PROBATION:
            return _failed(state, local, event.reason, now_us)
    return None


def at_boot(state: ev.LinkState, now_us: int) -> Changed:
    """An attempt found at boot is over; if its plan ran, it may be what stopped the agent."""
    if state.local is None:
        return Changed(state)
    if state.local.state is not DeviceState.PROBATION:
        return Changed(msgspec.structs.replace(state, local=None))
    return _failed(state, state.local, "the agent stopped while the plan made here was tried", now_us)


def abandoned(state: ev.LinkState) -> tuple[ev.LinkState, list[ev.Action]]:
    """A newer desired value ends the attempt; what runs runs on, and the desired plan is tried against it."""
    if state.local is None:
        return state, []
    return msgspec.structs.replace(state, local=None), [ev.AbandonPlan(state.local.attempt)]


def adopted(state: ev.LinkState, plan: ev.RunnablePlan) -> tuple[ev.LinkState, list[ev.Action]]:
    """The planner desires what was planned here and runs: it is the planner's from now on."""
    if state.planned is None:
        return state, []
    state = msgspec.structs.replace(state, active=plan.ref, last_good=plan, planned=None)
    return state, [ev.RestorePlan(plan)]


def lost(state: ev.LinkState) -> ev.LinkState | None:
    """A local last-known-good does not run any more: back to the desired plan, if that was committed.

    None where last-known-good is no local plan.
    """
    good, desired = state.last_good, state.candidate
    if good is None or state.planned is None or state.state is not DeviceState.COMMITTED or desired is None:
        return None
    back = msgspec.structs.replace(state, last_good=desired, active=desired.ref, planned=None)
    return _barred(back, good.ref.digest)


def _staged(state: ev.LinkState, local: ev.LocalAttempt, staged: ev.PlanStaged, now_us: int) -> ev.LinkState:
    """How it comes to run: under the guard, or not at all, since only the planner's plans are on trial."""
    digest = local.plan.ref.digest
    if is_proven(state, local.plan):
        way = Way.PROVEN
    elif staged.control is not None and staged.intervals_only:
        way = Way.GUARD
    else:
        return msgspec.structs.replace(state, local=None)
    if staged.starves:
        return msgspec.structs.replace(state, local=None)
    record = TrialRecord(
        candidate=digest,
        control=staged.control or Digest(""),
        environment=state.environment,
        began_us=now_us,
    )
    local = msgspec.structs.replace(local, state=DeviceState.STAGED, way=way.value, record=record)
    return msgspec.structs.replace(state, local=local)


def _failed(state: ev.LinkState, local: ev.LocalAttempt, reason: str, now_us: int) -> Changed:
    """It ran and is not to run again; last-known-good does."""
    digest = local.plan.ref.digest
    good = state.last_good
    back = msgspec.structs.replace(
        _barred(state, digest),
        active=good.ref if good else None,
        proven=state.proven if local.way == Way.GUARD.value else proven_with(state, local.plan, holds=False),
    )
    return Changed(back, _row(local, TrialResult(verdict=Verdict.REJECT, reason=reason), now_us))


def _barred(state: ev.LinkState, digest: Digest) -> ev.LinkState:
    """No attempt, and none at this plan again in this environment."""
    return msgspec.structs.replace(state, local=None, barred=(*state.barred, digest)[-_BARRED:])


def _row(local: ev.LocalAttempt, result: TrialResult, now_us: int) -> tuple[TrialEnded, ...]:
    record = local.record
    if record is None:
        return ()
    row = TrialEnded(
        local.planned.epoch,
        local.planned.generation,
        Origin.LOCAL,
        local.way,
        result.verdict.value,
        local.plan.ref.digest,
        record.control or None,
        None,
        None,
        None,
        0,
        record.began_us,
        now_us,
        result.reason[:512],
    )
    return (row,)
