"""The states of a desired plan on the device, and of one made there: every step that is legal."""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta, Struct, structs

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
    ENVIRONMENT = "environment"  # another power mode or executor version: a verdict no longer holds
    NOT_NOW = (
        "not_now"  # of a plan made here: nothing comparable runs, or more tasks arrive than it would admit
    )


S = DeviceState
C = TransitionCause

TRANSITIONS: Final[dict[tuple[DeviceState | None, TransitionCause], DeviceState]] = {
    (None, C.DESIRED): S.RECEIVED,
    (S.RECEIVED, C.DESIRED): S.RECEIVED,
    (S.RECEIVED, C.NOTHING_TO_DO): S.COMMITTED,
    (S.RECEIVED, C.ARTIFACTS_MISSING): S.WAITING,
    (S.RECEIVED, C.VERIFIED): S.VERIFIED,
    (S.RECEIVED, C.REFUSED): S.REJECTED,
    (S.RECEIVED, C.BOOT): S.RECEIVED,
    (S.WAITING, C.DESIRED): S.RECEIVED,
    (S.WAITING, C.VERIFIED): S.VERIFIED,
    (S.WAITING, C.REFUSED): S.REJECTED,
    (S.WAITING, C.BOOT): S.RECEIVED,
    (S.VERIFIED, C.DESIRED): S.RECEIVED,
    (S.VERIFIED, C.ARTIFACTS_MISSING): S.WAITING,
    (S.VERIFIED, C.STAGED): S.STAGED,
    (S.VERIFIED, C.REFUSED): S.REJECTED,
    (S.VERIFIED, C.BOOT): S.RECEIVED,
    (S.STAGED, C.DESIRED): S.RECEIVED,
    (S.STAGED, C.TRIAL_BEGINS): S.TRIAL,
    (S.STAGED, C.ACTIVATE): S.PROBATION,
    (S.STAGED, C.REFUSED): S.REJECTED,
    (S.STAGED, C.TRIAL_LOST): S.REJECTED,
    (S.STAGED, C.TRIAL_EVEN): S.NO_GAIN,
    (S.STAGED, C.TRIAL_ABANDONED): S.VERIFIED,
    (S.STAGED, C.BOOT): S.RECEIVED,
    (S.TRIAL, C.DESIRED): S.RECEIVED,
    (S.TRIAL, C.TRIAL_WON): S.PROBATION,
    (S.TRIAL, C.TRIAL_LOST): S.REJECTED,
    (S.TRIAL, C.TRIAL_EVEN): S.NO_GAIN,
    (S.TRIAL, C.TRIAL_ABANDONED): S.VERIFIED,
    (S.TRIAL, C.BOOT): S.REJECTED,
    (S.PROBATION, C.DESIRED): S.RECEIVED,
    (S.PROBATION, C.PROBATION_PASSED): S.COMMITTED,
    (S.PROBATION, C.PROBATION_FAILED): S.ROLLED_BACK,
    (S.PROBATION, C.BOOT): S.RECEIVED,
    (S.PROBATION, C.BOOT_AGAIN): S.ROLLED_BACK,
    (S.COMMITTED, C.DESIRED): S.RECEIVED,
    (S.COMMITTED, C.RESTORE_FAILED): S.ROLLED_BACK,
    (S.COMMITTED, C.ARTIFACTS_MISSING): S.WAITING,
    (S.COMMITTED, C.BOOT): S.COMMITTED,
    (S.REJECTED, C.DESIRED): S.RECEIVED,
    (S.REJECTED, C.MEASURE): S.REJECTED,
    (S.REJECTED, C.ENVIRONMENT): S.RECEIVED,
    (S.REJECTED, C.BOOT): S.REJECTED,
    (S.NO_GAIN, C.DESIRED): S.RECEIVED,
    (S.NO_GAIN, C.MEASURE): S.NO_GAIN,
    (S.NO_GAIN, C.ENVIRONMENT): S.RECEIVED,
    (S.NO_GAIN, C.BOOT): S.NO_GAIN,
    (S.ROLLED_BACK, C.DESIRED): S.RECEIVED,
    (S.ROLLED_BACK, C.MEASURE): S.ROLLED_BACK,
    (S.ROLLED_BACK, C.ENVIRONMENT): S.RECEIVED,
    (S.ROLLED_BACK, C.BOOT): S.ROLLED_BACK,
}

LOCAL_TRANSITIONS: Final[dict[tuple[DeviceState, TransitionCause], DeviceState | None]] = {
    (S.RECEIVED, C.VERIFIED): S.VERIFIED,
    (S.RECEIVED, C.REFUSED): None,
    (S.RECEIVED, C.DESIRED): None,
    (S.RECEIVED, C.RESTORE_FAILED): None,
    (S.RECEIVED, C.BOOT): None,
    (S.VERIFIED, C.STAGED): S.STAGED,
    (S.VERIFIED, C.NOT_NOW): None,
    (S.VERIFIED, C.REFUSED): None,
    (S.VERIFIED, C.DESIRED): None,
    (S.VERIFIED, C.RESTORE_FAILED): None,
    (S.VERIFIED, C.BOOT): None,
    (S.STAGED, C.ACTIVATE): S.PROBATION,
    (S.STAGED, C.TRIAL_BEGINS): S.TRIAL,
    (S.STAGED, C.TRIAL_LOST): None,
    (S.STAGED, C.TRIAL_EVEN): None,
    (S.STAGED, C.TRIAL_ABANDONED): None,
    (S.STAGED, C.REFUSED): None,
    (S.STAGED, C.ENVIRONMENT): None,
    (S.STAGED, C.DESIRED): None,
    (S.STAGED, C.RESTORE_FAILED): None,
    (S.STAGED, C.BOOT): None,
    (S.TRIAL, C.TRIAL_WON): S.PROBATION,
    (S.TRIAL, C.TRIAL_LOST): None,
    (S.TRIAL, C.TRIAL_EVEN): None,
    (S.TRIAL, C.TRIAL_ABANDONED): None,
    (S.TRIAL, C.ENVIRONMENT): None,
    (S.TRIAL, C.DESIRED): None,
    (S.TRIAL, C.RESTORE_FAILED): None,
    (S.TRIAL, C.BOOT): None,
    (S.PROBATION, C.PROBATION_PASSED): None,
    (S.PROBATION, C.PROBATION_FAILED): None,
    (S.PROBATION, C.DESIRED): None,
    (S.PROBATION, C.RESTORE_FAILED): None,
    (S.PROBATION, C.BOOT): None,
}
"""The attempt at a plan that was made on the device; None: it is over."""

UNDONE: Final = frozenset({S.RECEIVED, S.WAITING, S.VERIFIED, S.STAGED})
"""Nothing of the plan ran yet: a start finds any of these as `received`, and so they are the same on disk."""

VERDICTS: Final = frozenset({S.REJECTED, S.NO_GAIN, S.ROLLED_BACK})
"""Final for (generation, environment)."""


def step(state: DeviceState | None, cause: TransitionCause) -> DeviceState:
    """The state after `cause`.

    Raises:
        RuntimeError: the step is not in the table; the core is wrong.
    """
    try:
        return TRANSITIONS[state, cause]
    except KeyError:
        name = "nothing" if state is None else state.value
        raise RuntimeError(f"no step from {name} by {cause.value}") from None


def local_step(state: DeviceState, cause: TransitionCause) -> DeviceState | None:
    """The state of a local attempt after `cause`; None: it is over.

    Raises:
        RuntimeError: the step is not in the table; the core is wrong.
    """
    try:
        return LOCAL_TRANSITIONS[state, cause]
    except KeyError:
        raise RuntimeError(f"no step of a plan made here from {state.value} by {cause.value}") from None


Attempt = tuple[int, int]


LOCAL_EPOCH: Final = -1
"""The epoch of attempts at plans made here; they are numbered by the local counter."""


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
    """Why a plan was made here, and which desired value was the newest then."""

    epoch: Epoch
    generation: Generation
    cause: ShortText


class LocalAttempt(Struct, frozen=True, kw_only=True):
    """A plan made here that is being tried: received, verified, staged, then under probation.

    `record` is there from before it first runs, `way` says what decides about it.
    """

    plan: RunnablePlan
    planned: Planned
    state: DeviceState
    record: TrialRecord | None = None
    way: ShortText = ""  # a value of stageloom.edge_agent.lifecycle.trials.Way

    @property
    def attempt(self) -> Attempt:
        """What the plan manager knows it by."""
        return (LOCAL_EPOCH, self.plan.ref.local_counter)

    def moved(self, cause: TransitionCause) -> "LocalAttempt":
        """One step on.

        Raises:
            RuntimeError: the step is not in the table of local states, or ends the attempt.
        """
        state = local_step(self.state, cause)
        if state is None:
            raise RuntimeError(f"an attempt at a plan made here is over by {cause.value}")
        return structs.replace(self, state=state)


class Proven(Struct, frozen=True):
    """A plan but for its launch intervals (`Plan.structure`) that was committed, and the environment then."""

    structure: DigestText
    environment: ShortText


class LinkState(Struct, frozen=True, kw_only=True):
    """What survives a restart. `revision` counts changes of what is reported, over the device's life.

    `trial` is there from before a candidate first runs until the verdict: found at boot, it means that the
    agent stopped in the middle. `way` says what decides about the plan under probation. `planned` is set
    while last-known-good was made here; `barred` plans were, and failed in this environment.
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
    way: ShortText = ""  # a value of stageloom.edge_agent.lifecycle.trials.Way
    proven: tuple[Proven, ...] = ()
    local_counter: Count = 0
    answered: tuple[Count, ...] = ()
    local: LocalAttempt | None = None
    planned: Planned | None = None
    barred: Annotated[tuple[DigestText, ...], Meta(max_length=64)] = ()

    @property
    def attempt(self) -> Attempt:
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

    def moved(self, cause: TransitionCause, reason: str) -> "LinkState":
        """One step on.

        Raises:
            RuntimeError: the step is not in the table of states.
        """
        return structs.replace(self, state=step(self.state, cause), reason=bounded(reason))

    def without_local(self, cause: TransitionCause) -> "LinkState":
        """The attempt at a plan made here is over; nothing else changes.

        Raises:
            RuntimeError: the cause does not end it.
        """
        if self.local is not None and local_step(self.local.state, cause) is not None:
            raise RuntimeError(f"an attempt at a plan made here goes on after {cause.value}")
        return structs.replace(self, local=None)
