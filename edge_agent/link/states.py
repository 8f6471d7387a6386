"""The states of a desired plan on the device, and every step between them that is legal."""

from enum import Enum
from typing import Final

from shared.messages.control import DeviceState


class Cause(str, Enum):
    """What moves a desired plan on."""

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
    RESTORE_FAILED = "restore_failed"  # the committed plan no longer runs
    BOOT = "boot"  # found in this state when the agent started
    BOOT_AGAIN = "boot_again"  # found under probation a second time
    ENVIRONMENT = "environment"  # another power mode or executor version: a verdict no longer holds


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
