"""How a staged plan comes to run, and what a trial leaves behind: the core's rules about it. Pure.

A plan is *proven* here once it was committed in the environment that is (power mode, executor versions,
precision; its artifacts are part of its digest), whatever its launch intervals were. A proven plan needs no
trial, nor does one that changes launch intervals only: both are activated under a guard.
"""

from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import structs

from stageloom.edge_agent.lifecycle.events import PlanStaged, TrialDecided
from stageloom.edge_agent.lifecycle.states import VERDICTS, LinkState, Proven, RunnablePlan, TransitionCause
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict, found_at_boot
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Activation, Desired, DeviceState
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.plan import decode_plan
from stageloom.shared.text import bounded

MAX_PROVEN: Final = 64
MAX_ABANDONED: Final = 3
"""So often a trial may end without a verdict and begin again."""


VERDICT_CAUSES: Final = {
    Verdict.COMMIT: TransitionCause.TRIAL_WON,
    Verdict.REJECT: TransitionCause.TRIAL_LOST,
    Verdict.REFUSED: TransitionCause.TRIAL_LOST,
    Verdict.NO_GAIN: TransitionCause.TRIAL_EVEN,
    Verdict.ABANDONED: TransitionCause.TRIAL_ABANDONED,
}


class Way(str, Enum):
    """What decides about a plan, as `TrialEnded.how` spells it."""

    NOW = "now"  # an operator's order
    FIRST = "first"  # nothing comparable runs
    PROVEN = "proven"
    GUARD = "guard"  # it changes launch intervals only
    TRIAL = "trial"

    @property
    def guarded(self) -> bool:
        """It is activated without a trial, and goes if tasks wait longer under it."""
        return self in (Way.PROVEN, Way.GUARD)


def way_of(state: LinkState, staged: PlanStaged) -> Way:
    """How the staged plan comes to run."""
    desired = state.desired
    if desired is not None and desired.activation is Activation.NOW:
        return Way.NOW
    if staged.control is None:
        return Way.FIRST
    if state.candidate is not None and is_proven(state, state.candidate):
        return Way.PROVEN
    return Way.GUARD if staged.intervals_only else Way.TRIAL


def only_measures(state: LinkState, desired: Desired) -> bool:
    """Whether the newer value only asks for measurements or names another policy, its plan being judged.

    Such a request takes a generation of its own; trying a rejected plan again with each would never end. The
    same plan without a new request was pushed again by someone who wants it tried again.
    """
    known = state.desired
    if known is None or state.state not in VERDICTS:
        return False
    same = (known.plan_digest, known.activation) == (desired.plan_digest, desired.activation)
    policy = known.policy != desired.policy
    asked = {one.request for one in known.profiles}
    new = any(one.request not in asked for one in desired.profiles)
    stage = desired.stage_profile is not None and desired.stage_profile != known.stage_profile
    return same and (new or stage or policy)


def proven(state: LinkState, *, holds: bool) -> tuple[Proven, ...]:
    """The set after the desired plan was committed, or after it failed; the newest last."""
    return proven_with(state, state.candidate, holds=holds) if state.candidate else state.proven


def is_proven(state: LinkState, plan: RunnablePlan) -> bool:
    """Whether it was committed here, in the environment that is."""
    return Proven(structure_of(plan), state.environment) in state.proven


@lru_cache(maxsize=8)
def structure_of(plan: RunnablePlan) -> Digest:
    """The plan but for its launch intervals; itself where it does not decode, so that it is no other's."""
    try:
        return decode_plan(plan.wire, plan.ref.digest).structure
    except PlanError:
        return plan.ref.digest


def proven_with(state: LinkState, plan: RunnablePlan, *, holds: bool) -> tuple[Proven, ...]:
    """The same for any plan."""
    this = Proven(structure_of(plan), state.environment)
    others = tuple(one for one in state.proven if one != this)
    return (*others, this)[-MAX_PROVEN:] if holds else others


def tried_again(state: LinkState, decided: TrialResult) -> TrialResult:
    """An abandoned trial, or its last one: then the plan is rejected as undecided."""
    if decided.verdict is not Verdict.ABANDONED or state.abandoned + 1 < MAX_ABANDONED:
        return decided
    reason = f"undecided after {MAX_ABANDONED} trials, the last abandoned: {decided.reason}"
    return replace(decided, verdict=Verdict.REJECT, reason=reason)


class Changed(NamedTuple):
    """A new state, and what telemetry says of it."""

    state: LinkState
    rows: tuple[TrialEnded, ...] = ()


def decided(state: LinkState, event: TrialDecided, now_us: int) -> Changed:
    """The trial ended, or was refused."""
    result = tried_again(state, event.result)
    moved = structs.replace(state.moved(VERDICT_CAUSES[result.verdict], result.reason), trial=None)
    if result.verdict is Verdict.ABANDONED:
        moved = structs.replace(moved, abandoned=state.abandoned + 1)
    elif result.verdict is Verdict.COMMIT:
        candidate = state.candidate
        moved = structs.replace(moved, active=candidate.ref if candidate else None, way=Way.TRIAL.value)
    record = state.trial or record_of(state, event.control, now_us)
    return Changed(moved, _row(state, Way.TRIAL, record, result, now_us))


def activated(state: LinkState, staged: PlanStaged, way: Way, now_us: int) -> Changed:
    """The staged plan goes under probation without a trial."""
    candidate = state.candidate
    record = record_of(state, staged.control, now_us)
    moved = structs.replace(
        state.moved(TransitionCause.ACTIVATE, ""),
        active=candidate.ref if candidate else None,
        way=way.value,
        trial=record,
    )
    if way is not Way.PROVEN:
        return Changed(moved)
    result = TrialResult(verdict=Verdict.COMMIT, reason="it was committed here before")
    return Changed(moved, _row(state, way, record, result, now_us))


def committed(state: LinkState, now_us: int) -> Changed:
    """Probation passed: the plan is last-known-good, and proven."""
    moved = structs.replace(
        state.moved(TransitionCause.PROBATION_PASSED, ""),
        last_good=state.candidate,
        planned=None,
        proven=proven(state, holds=True),
        trial=None,
    )
    reason = "neither p99 nor the oldest age worsened" if state.way == Way.GUARD.value else "probation passed"
    return Changed(moved, _end_row(state, TrialResult(verdict=Verdict.COMMIT, reason=reason), now_us))


def rolled_back(state: LinkState, reason: str, now_us: int) -> Changed:
    """Probation failed: last-known-good runs again."""
    moved = structs.replace(
        state.moved(TransitionCause.PROBATION_FAILED, reason),
        active=state.last_good.ref if state.last_good else None,
        # Under new launch intervals alone it failed for them, not for what was proven.
        proven=state.proven if state.way == Way.GUARD.value else proven(state, holds=False),
        trial=None,
    )
    return Changed(moved, _end_row(state, TrialResult(verdict=Verdict.REJECT, reason=reason), now_us))


def abandoned(state: LinkState, reason: str, now_us: int) -> tuple[TrialEnded, ...]:
    """What telemetry says where something matters more than the trial that runs, if one does."""
    if state.state is not DeviceState.TRIAL or state.trial is None:
        return ()
    return _row(state, Way.TRIAL, state.trial, TrialResult(verdict=Verdict.ABANDONED, reason=reason), now_us)


def environment_changed(state: LinkState, environment: str, now_us: int) -> Changed:
    """Verdicts hold for one environment; what is compared in another is no comparison."""
    there = structs.replace(state, environment=environment, barred=())
    if state.state in VERDICTS:
        there = there.moved(TransitionCause.ENVIRONMENT, "tried again: the environment changed")
        return Changed(structs.replace(there, probation_boots=0, abandoned=0))
    if state.state not in (DeviceState.STAGED, DeviceState.TRIAL):
        return Changed(there)
    reason = "the environment changed"
    moved = structs.replace(there.moved(TransitionCause.TRIAL_ABANDONED, reason), abandoned=0, trial=None)
    return Changed(moved, abandoned(state, reason, now_us))


def found_in_trial(state: LinkState, now_us: int) -> Changed:
    """At boot: the candidate may be what stopped the agent, so it is rejected."""
    record = state.trial or record_of(state, None, now_us)
    result = found_at_boot(record)
    moved = structs.replace(
        state.moved(TransitionCause.BOOT, result.reason),
        active=state.last_good.ref if state.last_good else None,
        trial=None,
    )
    return Changed(moved, _row(state, Way.TRIAL, record, result, now_us))


def record_of(state: LinkState, control: Digest | None, now_us: int) -> TrialRecord:
    """What is compared with what, where, and since when."""
    candidate = state.desired.plan_digest if state.desired else None
    return TrialRecord(
        candidate=candidate or Digest(""),
        control=control or Digest(""),
        environment=state.environment,
        began_us=now_us,
    )


def _end_row(state: LinkState, result: TrialResult, now_us: int) -> tuple[TrialEnded, ...]:
    """What a plan came to that nothing was said of before its probation ended.

    Of a proven one and of the winner of a trial it was said; the planner learns from the others, too, which
    plans are proven here.
    """
    told = state.way in ("", Way.PROVEN.value, Way.TRIAL.value)
    return () if told or state.trial is None else _row(state, Way(state.way), state.trial, result, now_us)


def _row(
    state: LinkState, way: Way, record: TrialRecord, result: TrialResult, now_us: int
) -> tuple[TrialEnded, ...]:
    candidate = state.candidate
    if candidate is None:
        return ()
    low, high = result.interval if result.interval else (None, None)
    row = TrialEnded(
        *state.attempt,
        candidate.ref.origin,
        way.value,
        result.verdict.value,
        candidate.ref.digest,
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
