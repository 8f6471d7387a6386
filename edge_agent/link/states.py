"""The states of a desired plan on the device, and of one made there: every step that is legal."""

from enum import Enum
from typing import Final

from stageloom.shared.messages.control import DeviceState


class Cause(str, Enum):
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
C = Cause

TRANSITIONS: Final[dict[tuple[DeviceState | None, Cause], DeviceState]] = {
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

LOCAL_TRANSITIONS: Final[dict[tuple[DeviceState, Cause], DeviceState | None]] = {
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


def step(state: DeviceState | None, cause: Cause) -> DeviceState:
    """The state after `cause`.

    Raises:
        RuntimeError: the step is not in the table; the core is wrong.
    """
    try:
        return TRANSITIONS[state, cause]
    except KeyError:
        name = "nothing" if state is None else state.value
        raise RuntimeError(f"no step from {name} by {cause.value}") from None


def local_step(state: DeviceState, cause: Cause) -> DeviceState | None:
    """The state of a local attempt after `cause`; None: it is over.

    Raises:
        RuntimeError: the step is not in the table; the core is wrong.
    """
    try:
        return LOCAL_TRANSITIONS[state, cause]
    except KeyError:
        raise RuntimeError(f"no step of a plan made here from {state.value} by {cause.value}") from None
