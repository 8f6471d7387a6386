"""Plans that the device made itself, beside the desired one. Pure; states in, states and actions out.

A trigger fires, and a moment later come the plans that answer it, best first. The first that the desired
value's autonomy allows and that did not fail here is tried if nothing else is and the planner does not
answer: at once while it is away, after `wait_s` while it is connected. The attempt goes the way of a desired
plan, so that a crash at any point is found at boot: verified, staged, then under the guard where it is proven
or differs in launch intervals alone, else on trial, for which autonomy must be full.

What comes of it: a plan that passes is last-known-good with origin local, and is told to the planner until
the desired value changes. The planner adopts it by desiring the same digest, or desires another plan, which
is then tried against it. That may be during the probation already, which it ends: then the plan made here
runs on, and is told once a session, so that the planner knows what its device runs. So does another power
mode, in which the desired plan is tried again; there the plan made here is told if that loses. One that fails
is not tried again in this environment; one that lost its trial is not tried again under other launch
intervals either.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from stageloom.edge_agent.lifecycle.attempts import is_proven, structure_of
from stageloom.edge_agent.lifecycle.states import (
    AttemptId,
    LinkState,
    PlanAttempt,
    Planned,
    PlanRef,
    RunnablePlan,
)
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.control import Autonomy, DeviceState, Origin

_SETTLED: Final = frozenset(
    {DeviceState.COMMITTED, DeviceState.REJECTED, DeviceState.NO_GAIN, DeviceState.ROLLED_BACK}
)


@dataclass(frozen=True)
class _Offer:
    """What a trigger asks for, while `attempt` was the newest desired value and `good` last-known-good."""

    cause: str
    attempt: AttemptId
    good: RunnablePlan | None
    due_s: float  # while the planner is connected
    asked: bool = False  # whoever runs this device wants it to plan alone; else autonomy says
    plans: tuple[RunnablePlan, ...] = ()  # best first; none before they are made


class LocalPlans:
    """What is not durable: the offer, and when the planner was told."""

    def __init__(self, *, wait_s: float, again_s: float) -> None:
        self._wait_s = wait_s
        self._again_s = again_s
        self._offer: _Offer | None = None
        self._told_s = float("-inf")
        self._delay_s = again_s
        self._ended: PlanAttempt | None = None  # the last; its plan may run on
        self._ended_told = False

    # -- from the offer to the attempt ----------------------------------------------------------------------

    def alarm(self, cause: str, state: LinkState, now_s: float) -> None:
        """A trigger fired; what an earlier one asked for is withdrawn."""
        self._offer = _Offer(cause, state.attempt, state.last_good, now_s + self._wait_s)

    def made(self, plans: tuple[RunnablePlan, ...]) -> None:
        """The plans that answer the newest trigger, best first."""
        if self._offer is not None:
            self._offer = replace(self._offer, plans=plans)

    def measured(self, plan: RunnablePlan, cause: str, state: LinkState) -> None:
        """The device found a better plan by measuring, as whoever runs it alone asked for."""
        self._offer = _Offer(cause, state.attempt, state.last_good, float("-inf"), asked=True, plans=(plan,))

    def begin(
        self,
        state: LinkState,
        *,
        connected: bool,
        present: Container[Digest],
        now_s: float,
    ) -> LinkState | None:
        """The state with an attempt at what was offered; None while there is nothing to try."""
        offer, attempt = self._offer, state.attempt
        if offer is None or not offer.plans or (connected and now_s < offer.due_s):
            return None
        if state.local is not None or (state.state is not None and state.state not in _SETTLED):
            if offer.attempt != attempt:
                self._offer = None  # the planner has answered
            return None
        self._offer = None
        if offer.attempt != attempt or offer.good != state.last_good:
            return None  # also what was made while a plan was on trial that has won: it is the one before
        best = next((plan for plan in offer.plans if _may_run(state, plan, present, asked=offer.asked)), None)
        if best is None:
            return None
        rest = offer.plans[offer.plans.index(best) + 1 :]
        self._offer = replace(offer, plans=rest)  # should this one not come to run
        counter = state.local_counter + 1
        plan = structs.replace(best, ref=PlanRef(best.ref.digest, Origin.LOCAL, counter))
        planned = Planned(epoch=attempt[0], generation=attempt[1], cause=offer.cause)
        local = PlanAttempt(plan=plan, planned=planned, state=DeviceState.RECEIVED)
        return structs.replace(state, local=local, local_counter=counter)

    def prepared(self) -> None:
        """The attempt at the best plan is past the point where a worse one would follow it."""
        self._offer = None

    def ended(self, attempt: PlanAttempt) -> None:
        """The attempt is over, for whatever reason."""
        self._ended, self._ended_told = attempt, False

    # -- towards the planner --------------------------------------------------------------------------------

    def connected(self) -> None:
        """A new session: tell it."""
        self._told_s, self._delay_s = float("-inf"), self._again_s
        self._ended_told = False

    def message(self, state: LinkState, boot: int, now_s: float) -> control.LocalPlan | None:
        """What to tell the planner now, on a session that stands; more rarely while it does not answer."""
        good, planned = state.last_good, state.planned
        if (ended := self._ended) is not None and _runs_on(state, ended) and not self._ended_told:
            self._ended_told = True
            return _told(ended.plan, ended.planned, boot)
        if good is None or planned is None or state.local is not None or state.active != good.ref:
            return None
        if (planned.epoch, planned.generation) != state.attempt or now_s - self._told_s < self._delay_s:
            return None
        if self._told_s > float("-inf"):
            self._delay_s = min(2 * self._delay_s, 60.0)
        self._told_s = now_s
        return _told(good, planned, boot)


def _told(plan: RunnablePlan, planned: Planned, boot: int) -> control.LocalPlan:
    return control.LocalPlan(
        boot=boot,
        epoch=planned.epoch,
        generation=planned.generation,
        local_counter=plan.ref.local_counter,
        plan_digest=plan.ref.digest,
        plan=plan.wire,
        artifacts=plan.artifacts,
        cause=planned.cause,
    )


def _runs_on(state: LinkState, ended: PlanAttempt) -> bool:
    """Whether its plan runs without having passed. Under the value that it was made under it is adopted: only
    once that has been tried again, in another environment, and lost."""
    passed = state.last_good is not None and state.last_good.ref == ended.plan.ref
    made_under = (ended.planned.epoch, ended.planned.generation)
    told = made_under < state.attempt or state.state in (DeviceState.REJECTED, DeviceState.NO_GAIN)
    return state.active == ended.plan.ref and told and not passed


def _runs(state: LinkState, plan: RunnablePlan) -> bool:
    """Whether it is last-known-good but for its launch intervals."""
    return state.last_good is not None and structure_of(plan) == structure_of(state.last_good)


def _may_run(state: LinkState, plan: RunnablePlan, present: Container[Digest], *, asked: bool) -> bool:
    """Whether a plan made here may be tried: granted, not what runs, whole, and not failed before."""
    digest, proven = plan.ref.digest, is_proven(state, plan)
    match state.desired.autonomy if state.desired else Autonomy.OFF:
        case Autonomy.OFF if not asked:
            return False
        case Autonomy.PROVEN if not (proven or _runs(state, plan)):
            return False
    if digest in state.barred or (structure_of(plan) in state.barred and not proven):
        return False
    if state.active is not None and digest == state.active.digest:
        return False
    return all(need.digest in present for need in plan.artifacts)
