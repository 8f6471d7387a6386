"""How attempts at plans go on: the core's rules, as functions from a state to the next. Pure.

An attempt is at the desired plan or at one that was made here; both go the same way. A plan is *proven* here
once it was compared and committed in the environment that is (power mode, executor versions, precision; its
artifacts are part of its digest), whatever its launch intervals were. A plan that was ordered, was the first
or ran guarded on an idle device was compared with nothing. A proven plan needs no trial, nor does one that
changes launch intervals only: both are activated under a guard.
"""

from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Final, TypeAlias

from msgspec import UNSET, structs

from stageloom.edge_agent.lifecycle.events import PlanStaged
from stageloom.edge_agent.lifecycle.states import (
    UNDONE,
    VERDICTS,
    LinkState,
    PlanAttempt,
    Proven,
    RunnablePlan,
    TransitionCause,
)
from stageloom.shared.engine.trial import (
    NO_LOAD,
    UNDECIDED,
    TrialRecord,
    TrialResult,
    Verdict,
    found_at_boot,
)
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Activation, Desired, DeviceState
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.plan import decode_plan
from stageloom.shared.text import bounded

HELD_MOST: Final = 64
"""Fewer changes than these of what is reported are not on disk: a start counts that many on, so that
`revision` rises over the device's life."""

MAX_PROVEN: Final = 64
MAX_JUDGED_IN: Final = 16
MAX_BARRED: Final = 32
"""Digests of plans and of structures that failed here, remembered until the environment changes."""

MAX_ABANDONED: Final = 3
"""So often a trial may end without a verdict and begin again."""

VERDICT_CAUSES: Final = {
    Verdict.COMMIT: TransitionCause.TRIAL_WON,
    Verdict.REJECT: TransitionCause.TRIAL_LOST,
    Verdict.REFUSED: TransitionCause.TRIAL_LOST,
    Verdict.NO_GAIN: TransitionCause.TRIAL_EVEN,
    Verdict.ABANDONED: TransitionCause.TRIAL_ABANDONED,
}

Changed: TypeAlias = tuple[LinkState, tuple[TrialEnded, ...]]
"""A new state, and what telemetry says of it."""


class Way(str, Enum):
    """What decides about a plan, as `TrialEnded.how` spells it."""

    NOW = "now"  # ordered, by an operator or by a re-plan that goes back to what ran
    FIRST = "first"  # nothing comparable runs
    PROVEN = "proven"
    GUARD = "guard"  # it changes launch intervals only
    IDLE = "idle"  # no load to compare under; `guard` in telemetry
    TRIAL = "trial"
    OUTPUTS = "outputs"  # a new version whose outputs were compared with those of the one before

    @property
    def guarded(self) -> bool:
        """It is activated without a trial, and goes if tasks wait longer under it."""
        return self in (Way.PROVEN, Way.GUARD, Way.IDLE)

    @property
    def proves(self) -> bool:
        """A plan that it commits has been compared with another one under load."""
        return self in (Way.PROVEN, Way.TRIAL)


def is_guarded(attempt: PlanAttempt) -> bool:
    """See `Way.guarded`."""
    return bool(attempt.way) and Way(attempt.way).guarded


# -- what is known of plans ---------------------------------------------------------------------------------


def is_proven(state: LinkState, plan: RunnablePlan) -> bool:
    """Whether it was compared and committed here, in the environment that is."""
    return Proven(structure_of(plan), state.environment) in state.proven


@lru_cache(maxsize=8)
def structure_of(plan: RunnablePlan) -> Digest:
    """The plan but for its launch intervals; itself where it does not decode, so that it is no other's."""
    try:
        return decode_plan(plan.wire, plan.ref.digest).structure
    except PlanError:
        return plan.ref.digest


def proven_with(state: LinkState, plan: RunnablePlan, *, holds: bool) -> tuple[Proven, ...]:
    """The set after this plan was committed, or after it failed; the newest last."""
    this = Proven(structure_of(plan), state.environment)
    others = tuple(proven for proven in state.proven if proven != this)
    return (*others, this)[-MAX_PROVEN:] if holds else others


def barred(state: LinkState, *failed: Digest) -> LinkState:
    """No attempt at these plans or structures is made here again in this environment."""
    return structs.replace(state, barred=(*state.barred, *failed)[-MAX_BARRED:])


_STANDS: Final = "only measurements were asked for; of the plan: "


def standing(reason: str) -> str:
    """The reason of a generation that only asks for measurements, after this was said of the plan."""
    return _STANDS + without_loss(reason).removeprefix(_STANDS)


_TO_FETCH: Final = "last-known-good waits for artifacts that are fetched again; of the plan: "
_UNNAMED: Final = (
    "last-known-good has lost artifacts that the desired plan does not name, push a plan; of the plan: "
)


def with_loss(reason: str, *, named: bool) -> str:
    """A verdict's reason while artifacts of last-known-good are lost; `named`: they are sent again."""
    return bounded((_TO_FETCH if named else _UNNAMED) + without_loss(reason))


def without_loss(reason: str) -> str:
    """A verdict's reason itself."""
    return reason.removeprefix(_TO_FETCH).removeprefix(_UNNAMED)


def only_measures(state: LinkState, desired: Desired) -> bool:
    """Whether the newer value only asks for measurements or names another policy, its plan being judged.

    Such a request takes a generation of its own; trying a rejected plan again with each would never end. The
    same plan without a new request was pushed again by someone who wants it tried again.
    """
    known = state.desired
    if known is None or state.state not in VERDICTS:
        return False
    same = (known.plan_digest, known.activation, known.compare_outputs) == (
        desired.plan_digest,
        desired.activation,
        desired.compare_outputs,
    )
    policy = known.policy != desired.policy
    asked = {profile.request for profile in known.profiles}
    new = any(profile.request not in asked for profile in desired.profiles)
    stage = desired.stage_profile is not None and desired.stage_profile != known.stage_profile
    return same and (new or stage or policy)


# -- from staged on -----------------------------------------------------------------------------------------


def way_of(state: LinkState, attempt: PlanAttempt, staged: PlanStaged) -> Way | None:
    """How the staged plan comes to run; None: not at all, as only a plan that was made here."""
    proven = is_proven(state, attempt.plan)
    if attempt.local:
        if staged.starves or (staged.control is None and not proven):
            return None
    elif state.desired is not None and state.desired.activation is Activation.NOW:
        return Way.NOW
    elif staged.control is None:
        return Way.FIRST if tolerance_of(state, staged) is None else Way.OUTPUTS
    if proven:
        return Way.PROVEN
    return Way.GUARD if staged.intervals_only else Way.TRIAL


def tolerance_of(state: LinkState, staged: PlanStaged) -> float | None:
    """Within what outputs are to agree; None where they are not to be compared, or no version is new."""
    asked = state.desired.compare_outputs if state.desired is not None else UNSET
    return None if asked is UNSET or not staged.versions else asked


def compares(state: LinkState, attempt: PlanAttempt, staged: PlanStaged | None = None) -> Way:
    """What the trial of an attempt compares; `staged` tells until it has begun."""
    if attempt.state is DeviceState.TRIAL or staged is None:
        return Way.OUTPUTS if attempt.way == Way.OUTPUTS.value else Way.TRIAL
    return Way.OUTPUTS if way_of(state, attempt, staged) is Way.OUTPUTS else Way.TRIAL


UNCOMPARED: Final = (
    "no plan runs here whose outputs could be compared with this one's;"
    " push it again once one runs, or without --compare-outputs"
)


def uncompared(state: LinkState, attempt: PlanAttempt, staged: PlanStaged) -> bool:
    """Whether a comparison of outputs was asked for, and the plan to compare with does not run.

    A device that has had no plan yet has nothing that the new one could differ from.
    """
    asked = state.desired is not None and state.desired.compare_outputs is not UNSET
    good = state.last_good
    other = good is not None and good.ref.digest != attempt.plan.ref.digest
    return asked and other and staged.alone and not attempt.local


def without_load(state: LinkState, attempt: PlanAttempt, idle: TrialResult) -> TrialResult:
    """What comes of an attempt at a plan on a device that a trial found idle.

    A re-plan's plan answers a load that has stopped: what runs is kept for when it comes back.
    """
    needs_load = not attempt.local and state.desired is not None and state.desired.needs_load is True
    return replace(idle, verdict=Verdict.NO_GAIN, reason=NO_LOAD) if needs_load else idle


def activated(
    state: LinkState, attempt: PlanAttempt, way: Way, control: Digest | None, now_us: int, reason: str = ""
) -> Changed:
    """The staged plan goes under probation without a trial."""
    record = _record(state, attempt, control, now_us)
    moved = state.advanced(attempt, TransitionCause.ACTIVATE, reason, record=record, way=way.value)
    after = structs.replace(moved, active=attempt.plan.ref)
    if attempt.local or way is not Way.PROVEN:
        return after, ()
    result = TrialResult(verdict=Verdict.COMMIT, reason="it was committed here before")
    return after, _row(attempt, way, record, result, now_us)


def decided(
    state: LinkState,
    attempt: PlanAttempt,
    result: TrialResult,
    now_us: int,
    way: Way,
    *,
    control: Digest | None = None,
    cause: TransitionCause | None = None,
) -> Changed:
    """The trial ended, or was refused before its record was there. `cause`: other than the verdict's."""
    if not attempt.local:
        result = _tried_again(state, result)
    record = attempt.record or _record(state, attempt, control, now_us)
    rows = _row(attempt, way, record, result, now_us)
    cause = cause or VERDICT_CAUSES[result.verdict]
    if result.verdict is Verdict.COMMIT:
        kept = record if attempt.local else None
        moved = state.advanced(attempt, cause, result.reason, record=kept, way=way.value)
        return structs.replace(moved, active=attempt.plan.ref), rows
    after = state.advanced(attempt, cause, result.reason, record=None, way="")
    if result.verdict is not Verdict.ABANDONED:
        lost = (attempt.plan.ref.digest, structure_of(attempt.plan))
        return barred(after, *lost) if attempt.local else after, rows
    return after if attempt.local else structs.replace(after, abandoned=state.abandoned + 1), rows


def _tried_again(state: LinkState, decided: TrialResult) -> TrialResult:
    """An abandoned trial, or its last one: then the plan is rejected as undecided."""
    if decided.verdict is not Verdict.ABANDONED or state.abandoned + 1 < MAX_ABANDONED:
        return decided
    reason = f"{UNDECIDED}{MAX_ABANDONED} trials, the last abandoned: {decided.reason}"
    return replace(decided, verdict=Verdict.REJECT, reason=reason)


# -- how an attempt ends ------------------------------------------------------------------------------------


def passed(state: LinkState, attempt: PlanAttempt, now_us: int) -> Changed:
    """Probation passed: the plan is last-known-good, and proven if it was compared."""
    proves = not attempt.way or Way(attempt.way).proves
    after = structs.replace(
        state.advanced(attempt, TransitionCause.PROBATION_PASSED, record=None),
        last_good=attempt.plan,
        planned=attempt.planned if attempt.local else None,
        proven=proven_with(state, attempt.plan, holds=True) if proves else state.proven,
    )
    reason = "neither p99 nor the oldest age worsened" if is_guarded(attempt) else "probation passed"
    if attempt.way == Way.IDLE.value:
        reason = "there was no load to compare under: it ran guarded, and is not proven"
    return after, _end_row(attempt, TrialResult(verdict=Verdict.COMMIT, reason=reason), now_us)


def failed(
    state: LinkState,
    attempt: PlanAttempt,
    reason: str,
    now_us: int,
    cause: TransitionCause = TransitionCause.PROBATION_FAILED,
) -> Changed:
    """It ran under probation and is not to run again; last-known-good does."""
    # Under new launch intervals alone it failed for them, not for what was proven.
    guard = attempt.way == Way.GUARD.value
    after = structs.replace(
        state.advanced(attempt, cause, reason, record=None),
        active=state.last_good.ref if state.last_good else None,
        proven=state.proven if guard else proven_with(state, attempt.plan, holds=False),
    )
    if attempt.local:
        tried = (structure_of(attempt.plan),) if attempt.way == Way.TRIAL.value else ()
        after = barred(after, attempt.plan.ref.digest, *tried)
    return after, _end_row(attempt, TrialResult(verdict=Verdict.REJECT, reason=reason), now_us)


def refused(state: LinkState, attempt: PlanAttempt, reason: str) -> LinkState:
    """It never ran: it does not decode, is not legal, or cannot be prepared."""
    after = state.advanced(attempt, TransitionCause.REFUSED, reason)
    return barred(after, attempt.plan.ref.digest) if attempt.local else after


def superseded(state: LinkState, now_us: int, reason: str = "a newer plan is desired") -> Changed:
    """The desired plan is to be tried: the attempt at a plan made here ends, and what runs runs on."""
    rows: tuple[TrialEnded, ...] = ()
    for attempt in reversed(state.attempts):
        rows += _abandoned(state, attempt, reason, now_us)
    return state if state.local is None else state.advanced(state.local, TransitionCause.DESIRED), rows


def environment_changed(state: LinkState, environment: str, now_us: int) -> Changed:
    """Verdicts hold for one environment; what is compared in another is no comparison.

    What last-known-good made tasks wait is what a guard compares with, so that runs again, and the attempt at
    the plan begins anew; not in an environment in which there was a verdict on the desired plan before.
    """
    reason = "the environment changed"
    after = structs.replace(state, environment=environment, barred=())
    judged_in = () if state.judged_in is UNSET else state.judged_in
    if state.state in VERDICTS:
        others = tuple(one for one in judged_in if one != state.environment)
        judged_in = (*others, state.environment)[-MAX_JUDGED_IN:]
        after = structs.replace(after, judged_in=judged_in)
    if state.state in VERDICTS and environment not in judged_in:
        after, rows = superseded(after, now_us, reason)
        after = after.moved(TransitionCause.ENVIRONMENT, f"tried again: {reason}")
        return structs.replace(after, probation_boots=0, abandoned=0), rows
    rows = ()
    for attempt in state.attempts:
        # What is proven, and so may be tried here at all, depends on the environment, too.
        begun = attempt.state in UNDONE if attempt.local else attempt.state is DeviceState.STAGED
        if begun or attempt.state is DeviceState.TRIAL:
            rows += _abandoned(state, attempt, reason, now_us)
            cause = TransitionCause.ENVIRONMENT if attempt.local else TransitionCause.TRIAL_ABANDONED
            after = after.advanced(attempt, cause, reason, record=None, way="")
            after = after if attempt.local else structs.replace(after, abandoned=0)
        elif attempt.state is DeviceState.PROBATION and is_guarded(attempt) and state.last_good is not None:
            rows += _end_row(attempt, TrialResult(verdict=Verdict.ABANDONED, reason=reason), now_us)
            after = after.advanced(
                attempt, TransitionCause.ENVIRONMENT, f"tried again: {reason}", record=None
            )
            after = structs.replace(after, active=state.last_good.ref)
            after = after if attempt.local else structs.replace(after, probation_boots=0)
    if after.state in UNDONE and environment in judged_in:
        after = after.moved(TransitionCause.REFUSED, "it had a verdict in this environment before")
    return after, rows


def lost_local_plan(state: LinkState) -> LinkState | None:
    """A local last-known-good does not run any more: back to the desired plan, if that was committed.

    None where last-known-good is no local plan.
    """
    good, desired = state.last_good, state.candidate
    if good is None or state.planned is None or state.state is not DeviceState.COMMITTED or desired is None:
        return None
    if state.local is not None:
        state = state.advanced(state.local, TransitionCause.RESTORE_FAILED)
    back = structs.replace(state, last_good=desired, active=desired.ref, planned=None)
    return barred(back, good.ref.digest)


# -- at boot ------------------------------------------------------------------------------------------------


def at_boot(found: LinkState, now_us: int) -> Changed:
    """The state to go on from, and the rows of trials that the stop has ended.

    A trial may be what stopped the agent, so its candidate is rejected. So may a plan under probation; the
    desired one gets a second chance, since power cuts are more frequent than plans that take the agent down.
    """
    good = found.last_good
    state = structs.replace(found, active=good.ref if good is not None else None)
    rows: tuple[TrialEnded, ...] = ()
    if found.state in UNDONE:
        state = structs.replace(state, revision=state.revision + HELD_MOST)
    for attempt in found.attempts:
        state, ended = _found(state, attempt, now_us)
        rows += ended
    if found.state is not None and found.candidate is None:
        state = state.moved(TransitionCause.BOOT, found.reason)
    return structs.replace(state, abandoned=0, trial=None), rows


def _found(state: LinkState, attempt: PlanAttempt, now_us: int) -> Changed:
    if attempt.state is DeviceState.TRIAL:
        record = attempt.record or _record(state, attempt, None, now_us)
        way, ended = compares(state, attempt), found_at_boot(record)
        return decided(state, attempt, ended, now_us, way, cause=TransitionCause.BOOT)
    if attempt.state is not DeviceState.PROBATION:
        return state.advanced(attempt, TransitionCause.BOOT, state.reason), ()
    if attempt.local:
        reason = "the agent stopped while the plan made here was tried"
        return failed(state, attempt, reason, now_us, TransitionCause.BOOT)
    if state.probation_boots:
        reason = "the agent stopped twice while it was under probation"
        return failed(state, attempt, reason, now_us, TransitionCause.BOOT_AGAIN)
    reason = "the agent stopped while it was under probation"
    moved = state.advanced(attempt, TransitionCause.BOOT, reason)
    return structs.replace(moved, probation_boots=1), ()


# -- telemetry ----------------------------------------------------------------------------------------------


def _record(state: LinkState, attempt: PlanAttempt, control: Digest | None, now_us: int) -> TrialRecord:
    """What is compared with what, where, and since when."""
    return TrialRecord(
        candidate=attempt.plan.ref.digest,
        control=control or Digest(""),
        environment=state.environment,
        began_us=now_us,
    )


def _abandoned(state: LinkState, attempt: PlanAttempt, reason: str, now_us: int) -> tuple[TrialEnded, ...]:
    """What telemetry says where something matters more than the trial that runs, if one does."""
    if attempt.state is not DeviceState.TRIAL or attempt.record is None:
        return ()
    result = TrialResult(verdict=Verdict.ABANDONED, reason=reason)
    return _row(attempt, compares(state, attempt), attempt.record, result, now_us)


def _end_row(attempt: PlanAttempt, result: TrialResult, now_us: int) -> tuple[TrialEnded, ...]:
    """What a plan came to that nothing was said of before its probation ended.

    Of the winner of a trial it was said, and of a desired plan that is proven; the planner learns from the
    others which plans are proven here. That a plan made here has failed is said in any case.
    """
    told = attempt.way in ("", Way.TRIAL.value, Way.OUTPUTS.value) or (
        attempt.way == Way.PROVEN.value and not attempt.local
    )
    if attempt.record is None or (told and not (attempt.local and result.verdict is Verdict.REJECT)):
        return ()
    return _row(attempt, Way(attempt.way), attempt.record, result, now_us)


def _row(
    attempt: PlanAttempt, way: Way, record: TrialRecord, result: TrialResult, now_us: int
) -> tuple[TrialEnded, ...]:
    low, high = result.interval if result.interval else (None, None)
    row = TrialEnded(
        attempt.planned.epoch,
        attempt.planned.generation,
        attempt.plan.ref.origin,
        (Way.GUARD if way is Way.IDLE else way).value,
        result.verdict.value,
        attempt.plan.ref.digest,
        record.control or None,
        result.ratio,
        low,
        high,
        result.pairs,
        record.began_us,
        now_us,
        bounded(result.reason),
        result.figure.value if result.figure is not None else "",
        result.latency_ratio,
        result.busy_ratio,
        result.outputs,
        record.environment,
    )
    return (row,)
