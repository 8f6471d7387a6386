"""The states of a plan on the device, desired or made there: the legal steps, and what is durable."""

from enum import Enum
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from stageloom.shared.engine.trial import TrialRecord
from stageloom.shared.messages.base import Count, DigestText, Epoch, Generation, Line, PlanBytes, ShortText
from stageloom.shared.messages.control import (
    ArtifactNeed,
    Desired,
    DeviceState,
    Origin,
)
from stageloom.shared.text import bounded


class TransitionCause(str, Enum):
    """What moves a plan on."""

    DESIRED = "desired"  # a newer (epoch, generation) arrived
    MEASURE = "measure"  # it only asks for measurements: what was found about its plan stands
    NOTHING_TO_DO = "nothing_to_do"  # no plan is named, or the named one is committed and runs
    ARTIFACTS_MISSING = "artifacts_missing"
    VERIFIED = "verified"
    REFUSED = "refused"  # does not decode, is not legal, or cannot be prepared
    STAGED = "staged"
    TRIAL_BEGINS = "trial_begins"
    TRIAL_WON = "trial_won"
    TRIAL_LOST = "trial_lost"
    TRIAL_EVEN = "trial_even"
    TRIAL_ABANDONED = "trial_abandoned"  # for no fault of the plan's
    ACTIVATE = "activate"  # proven, ordered, or nothing to compare with: straight under probation
    PROBATION_PASSED = "probation_passed"
    PROBATION_FAILED = "probation_failed"
    RESTORE_FAILED = "restore_failed"  # last-known-good no longer runs
    BOOT = "boot"  # found in this state when the agent started
    BOOT_AGAIN = "boot_again"  # found under probation a second time
    ENVIRONMENT = "environment"  # another power mode or executor version: no verdict or guard of before holds
    NOT_NOW = (
        "not_now"  # of a plan made here: nothing comparable runs, or more tasks arrive than it would admit
    )


S = DeviceState
C = TransitionCause
OVER: Final = None
"""After an attempt at a plan that was made here: it leaves no state, whatever came of it."""
NEVER: Final = False
"""There is no such step."""

After: TypeAlias = DeviceState | Literal[False] | None

TRANSITIONS: Final[dict[tuple[DeviceState | None, TransitionCause], tuple[After, After]]] = {
    # state, cause: the state of the desired plan after it, that of a plan made here
    (None, C.DESIRED): (S.RECEIVED, NEVER),
    (S.RECEIVED, C.DESIRED): (S.RECEIVED, OVER),
    (S.RECEIVED, C.NOTHING_TO_DO): (S.COMMITTED, NEVER),
    (S.RECEIVED, C.ARTIFACTS_MISSING): (S.WAITING, NEVER),
    (S.RECEIVED, C.VERIFIED): (S.VERIFIED, S.VERIFIED),
    (S.RECEIVED, C.REFUSED): (S.REJECTED, OVER),
    (S.RECEIVED, C.BOOT): (S.RECEIVED, OVER),
    (S.RECEIVED, C.ENVIRONMENT): (NEVER, OVER),
    (S.RECEIVED, C.RESTORE_FAILED): (NEVER, OVER),
    (S.WAITING, C.DESIRED): (S.RECEIVED, NEVER),
    (S.WAITING, C.VERIFIED): (S.VERIFIED, NEVER),
    (S.WAITING, C.REFUSED): (S.REJECTED, NEVER),
    (S.WAITING, C.BOOT): (S.RECEIVED, NEVER),
    (S.VERIFIED, C.DESIRED): (S.RECEIVED, OVER),
    (S.VERIFIED, C.ARTIFACTS_MISSING): (S.WAITING, NEVER),
    (S.VERIFIED, C.STAGED): (S.STAGED, S.STAGED),
    (S.VERIFIED, C.REFUSED): (S.REJECTED, OVER),
    (S.VERIFIED, C.BOOT): (S.RECEIVED, OVER),
    (S.VERIFIED, C.ENVIRONMENT): (NEVER, OVER),
    (S.VERIFIED, C.RESTORE_FAILED): (NEVER, OVER),
    (S.STAGED, C.DESIRED): (S.RECEIVED, OVER),
    (S.STAGED, C.TRIAL_BEGINS): (S.TRIAL, S.TRIAL),
    (S.STAGED, C.ACTIVATE): (S.PROBATION, S.PROBATION),
    (S.STAGED, C.REFUSED): (S.REJECTED, OVER),
    (S.STAGED, C.TRIAL_LOST): (S.REJECTED, OVER),
    (S.STAGED, C.TRIAL_EVEN): (S.NO_GAIN, OVER),
    (S.STAGED, C.TRIAL_ABANDONED): (S.VERIFIED, OVER),
    (S.STAGED, C.BOOT): (S.RECEIVED, OVER),
    (S.STAGED, C.ENVIRONMENT): (NEVER, OVER),
    (S.STAGED, C.RESTORE_FAILED): (NEVER, OVER),
    (S.STAGED, C.NOT_NOW): (NEVER, OVER),
    (S.TRIAL, C.DESIRED): (S.RECEIVED, OVER),
    (S.TRIAL, C.TRIAL_WON): (S.PROBATION, S.PROBATION),
    (S.TRIAL, C.TRIAL_LOST): (S.REJECTED, OVER),
    (S.TRIAL, C.TRIAL_EVEN): (S.NO_GAIN, OVER),
    (S.TRIAL, C.TRIAL_ABANDONED): (S.VERIFIED, OVER),
    (S.TRIAL, C.BOOT): (S.REJECTED, OVER),
    (S.TRIAL, C.ENVIRONMENT): (NEVER, OVER),
    (S.TRIAL, C.RESTORE_FAILED): (NEVER, OVER),
    (S.PROBATION, C.DESIRED): (S.RECEIVED, OVER),
    (S.PROBATION, C.PROBATION_PASSED): (S.COMMITTED, OVER),
    (S.PROBATION, C.PROBATION_FAILED): (S.ROLLED_BACK, OVER),
    (S.PROBATION, C.BOOT): (S.RECEIVED, OVER),
    (S.PROBATION, C.BOOT_AGAIN): (S.ROLLED_BACK, NEVER),
    (S.PROBATION, C.ENVIRONMENT): (S.RECEIVED, OVER),
    (S.PROBATION, C.RESTORE_FAILED): (NEVER, OVER),
    (S.COMMITTED, C.DESIRED): (S.RECEIVED, NEVER),
    (S.COMMITTED, C.RESTORE_FAILED): (S.ROLLED_BACK, NEVER),
    (S.COMMITTED, C.ARTIFACTS_MISSING): (S.WAITING, NEVER),
    (S.COMMITTED, C.BOOT): (S.COMMITTED, NEVER),
    (S.REJECTED, C.DESIRED): (S.RECEIVED, NEVER),
    (S.REJECTED, C.MEASURE): (S.REJECTED, NEVER),
    (S.REJECTED, C.ENVIRONMENT): (S.RECEIVED, NEVER),
    (S.REJECTED, C.BOOT): (S.REJECTED, NEVER),
    (S.NO_GAIN, C.DESIRED): (S.RECEIVED, NEVER),
    (S.NO_GAIN, C.MEASURE): (S.NO_GAIN, NEVER),
    (S.NO_GAIN, C.ENVIRONMENT): (S.RECEIVED, NEVER),
    (S.NO_GAIN, C.BOOT): (S.NO_GAIN, NEVER),
    (S.ROLLED_BACK, C.DESIRED): (S.RECEIVED, NEVER),
    (S.ROLLED_BACK, C.MEASURE): (S.ROLLED_BACK, NEVER),
    (S.ROLLED_BACK, C.ENVIRONMENT): (S.RECEIVED, NEVER),
    (S.ROLLED_BACK, C.BOOT): (S.ROLLED_BACK, NEVER),
}

UNDONE: Final = frozenset({S.RECEIVED, S.WAITING, S.VERIFIED, S.STAGED})
"""Nothing of the plan ran yet: a start finds any of these as `received`, and so they are the same on disk."""

OPEN: Final = UNDONE | {S.TRIAL, S.PROBATION}
"""Something is still to be done about the plan."""

VERDICTS: Final = frozenset({S.REJECTED, S.NO_GAIN, S.ROLLED_BACK})
"""Final for (generation, environment)."""


def step(state: DeviceState | None, cause: TransitionCause, *, local: bool = False) -> DeviceState | None:
    """The state of an attempt after `cause`; None: it is over, as only that at a plan made here can be.

    Raises:
        RuntimeError: the step is not in the table; the core is wrong.
    """
    after = TRANSITIONS.get((state, cause), (NEVER, NEVER))[local]
    if after is False:
        name, whose = "nothing" if state is None else state.value, " of a plan made here" if local else ""
        raise RuntimeError(f"no step{whose} from {name} by {cause.value}")
    return after


AttemptId: TypeAlias = tuple[int, int]
"""Epoch and generation of the desired plan; `LOCAL_EPOCH` and the local counter of one that was made here."""

LOCAL_EPOCH: Final = -1


class PlanRef(Struct, frozen=True):
    """A plan that runs, and where it came from."""

    digest: DigestText
    origin: Origin
    local_counter: Count = 0


class RunnablePlan(Struct, frozen=True):
    """Everything it takes to run a plan without the planner: last-known-good is one of these."""

    ref: PlanRef
    wire: PlanBytes
    artifacts: tuple[ArtifactNeed, ...]


class Planned(Struct, frozen=True, kw_only=True):
    """The desired value that is tried, or that was the newest when a plan was made here, and why it was."""

    epoch: Epoch
    generation: Generation
    cause: ShortText = ""


class PlanAttempt(Struct, frozen=True, kw_only=True):
    """A plan on its way from `received` to what comes of it: the desired one, or one that was made here.

    `record` is there from before it first runs, `way` says what decides about it.
    """

    plan: RunnablePlan
    planned: Planned
    state: DeviceState
    record: TrialRecord | None = None
    way: ShortText = ""  # a value of stageloom.edge_agent.lifecycle.attempts.Way

    @property
    def local(self) -> bool:
        """The plan was made here."""
        return self.plan.ref.origin is Origin.LOCAL

    @property
    def id(self) -> AttemptId:
        """What the plan manager knows it by."""
        if self.local:
            return (LOCAL_EPOCH, self.plan.ref.local_counter)
        return (self.planned.epoch, self.planned.generation)


class Proven(Struct, frozen=True):
    """A plan but for its launch intervals (`Plan.structure`) that was committed, and the environment then."""

    structure: DigestText
    environment: ShortText


class LinkState(Struct, frozen=True, kw_only=True):
    """What survives a restart. `revision` counts changes of what is reported, over the device's life.

    `trial` is there from before a candidate first runs until the verdict: found at boot, it means that the
    agent stopped in the middle. `way` says what decides about the plan on trial or under probation. `planned`
    is set while last-known-good was made here; `barred` plans were, and failed in this environment.
    `judged_in` are other environments in which there was a verdict on the desired plan.
    """

    revision: Count = 0
    desired: Desired | None = None
    state: DeviceState | None = None
    reason: Line = ""
    environment: ShortText = ""
    active: PlanRef | None = None
    last_good: RunnablePlan | None = None
    probation_boots: Count = 0
    trial: TrialRecord | None = None
    abandoned: Count = 0  # trials of this generation that ended without a verdict
    way: ShortText = ""  # a value of stageloom.edge_agent.lifecycle.attempts.Way
    proven: tuple[Proven, ...] = ()
    local_counter: Count = 0
    answered: tuple[Count, ...] = ()
    local: PlanAttempt | None = None
    planned: Planned | None = None
    barred: Annotated[tuple[DigestText, ...], Meta(max_length=64)] = ()
    judged_in: tuple[ShortText, ...] | UnsetType = UNSET

    @property
    def attempt(self) -> AttemptId:
        """What the desired plan is tried for."""
        return (self.desired.epoch, self.desired.generation) if self.desired else (0, 0)

    @property
    def candidate(self) -> RunnablePlan | None:
        """The plan that is desired."""
        if self.desired is None or self.desired.plan_digest is None:
            return None
        ref = PlanRef(self.desired.plan_digest, Origin.PLANNER)
        return RunnablePlan(ref, self.desired.plan, self.desired.artifacts)

    def same_at_start(self, other: "LinkState") -> bool:
        """A start that found either would go on alike: nothing of the desired plan ran yet, in both."""
        if self.state not in UNDONE or other.state not in UNDONE:
            return False
        undone = {"state": DeviceState.RECEIVED, "reason": "", "revision": 0, "abandoned": 0}
        return bool(structs.replace(self, **undone) == structs.replace(other, **undone))

    @property
    def attempts(self) -> tuple[PlanAttempt, ...]:
        """At the desired plan, and at one that was made here."""
        plan, desired, local = self.candidate, self.desired, self.local
        at_local = () if local is None else (local,)
        if plan is None or desired is None or self.state is None:
            return at_local
        planned = Planned(epoch=desired.epoch, generation=desired.generation)
        at_desired = PlanAttempt(
            plan=plan, planned=planned, state=self.state, record=self.trial, way=self.way
        )
        return (at_desired, *at_local)

    def moved(self, cause: TransitionCause, reason: str) -> "LinkState":
        """The desired value one step on, whether or not it names a plan.

        Raises:
            RuntimeError: the step is not in the table of states.
        """
        return structs.replace(self, state=step(self.state, cause), reason=bounded(reason))

    def advanced(
        self, attempt: PlanAttempt, cause: TransitionCause, reason: str = "", **fields: object
    ) -> "LinkState":
        """`attempt` one step on, with other values of its `record` and `way`; `reason` is the desired plan's.

        Raises:
            RuntimeError: the step is not in the table of states.
        """
        after = step(attempt.state, cause, local=attempt.local)
        if after is None:
            return structs.replace(self, local=None)
        tried = structs.replace(attempt, state=after, **fields)
        if attempt.local:
            return structs.replace(self, local=tried)
        return structs.replace(self, state=after, reason=bounded(reason), trial=tried.record, way=tried.way)
