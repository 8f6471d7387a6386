"""Verdicts of trials: rows as devices report them, and which plans they prove; parts of a transaction."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec.structs import asdict
from sqlalchemy import and_, bindparam, select
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import StoredRow
from stageloom.planner.schema.outputs import OutputsInfo
from stageloom.planner.schema.plan import HistoryEntry
from stageloom.planner.schema.replan import TrialInfo
from stageloom.planner.schema.webhook import WebhookEvent
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import LOCAL
from stageloom.planner.store.regimes import keep_regime, known_structures, rolled_back_structures
from stageloom.planner.store.rows import known_device, message_of
from stageloom.planner.store.tables import (
    DeviceRow,
    GenerationRow,
    ReplanRow,
    TrialRow,
)
from stageloom.planner.store.tried_replans import PENDING
from stageloom.planner.store.verdict_arrivals import ON_THE_WAY_US
from stageloom.planner.store.webhooks import tell_webhooks, told_of
from stageloom.shared.engine.trial import Verdict
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import DeviceState, Origin
from stageloom.shared.messages.telemetry import PlanActivated, TrialEnded

_TRIALS: Final = 1000

_COMPARED: Final = ("trial", "proven")

TRIAL_AGE: Final = (TrialRow.epoch, TrialRow.generation, TrialRow.decided_us)
"""The order of one device's trials. Its clock, which may be set, tells only those of one generation apart."""

_NEWEST_FIRST: Final = tuple(column.desc() for column in TRIAL_AGE)

_VERDICTS: Final = (
    select(
        TrialRow.candidate,
        TrialRow.verdict,
        TrialRow.how,
        TrialRow.epoch,
        TrialRow.generation,
        GenerationRow.state,
    )
    .outerjoin(
        GenerationRow,
        and_(
            GenerationRow.device == TrialRow.device,
            GenerationRow.epoch == TrialRow.epoch,
            GenerationRow.generation == TrialRow.generation,
            GenerationRow.digest == TrialRow.candidate,
        ),
    )
    .where(TrialRow.device == bindparam("of"), TrialRow.environment == bindparam("there"))
    .order_by(*_NEWEST_FIRST)
    .limit(_TRIALS)
)


def _of_generation(session: Session, device: DeviceId, epoch: int, generation: int) -> ReplanRow | None:
    """The re-plan that pushed a generation."""
    if not generation:
        return None
    return session.scalar(
        select(ReplanRow).where(
            ReplanRow.device == device, ReplanRow.epoch == epoch, ReplanRow.generation == generation
        )
    )


def store_trial_row(session: Session, device: DeviceId, row: StoredRow) -> None:
    """Note a row about a trial or an activation; a repeat changes nothing."""
    if isinstance(row.data, TrialEnded):
        _trial_ended(session, device, row, row.data)
    elif isinstance(row.data, PlanActivated):
        replan = _of_generation(session, device, row.data.epoch, row.data.generation)
        if replan is not None and replan.digest == row.data.plan and replan.trigger_to_active_ms is None:
            replan.trigger_to_active_ms = _after_alarm_us(session, replan, row.at_us) / 1e3


def _after_alarm_us(session: Session, replan: ReplanRow, at_us: int) -> int:
    """How long after its re-plan's alarm something was, by the device's clock; by the planner's, which has
    heard of both, where the device's was set in between."""
    told_us, heard_us = at_us - replan.at_us, now_us(session) - replan.begun_at_us
    return told_us if 0 <= told_us <= heard_us + ON_THE_WAY_US else max(heard_us, 0)


def _trial_ended(session: Session, device: DeviceId, row: StoredRow, ended: TrialEnded) -> None:
    environment = ended.environment
    if not environment:  # of an agent that does not tell it: the class of now, which may be another by then
        owner = session.get(DeviceRow, device)
        environment = owner.device_class if owner is not None else ""
    outputs = asdict(ended.outputs) if ended.outputs is not None else None
    if session.get(TrialRow, (device, row.boot, row.sequence)) is None:
        told = {**told_of(WebhookEvent.VERDICT, ended), "outputs": outputs}
        tell_webhooks(session, WebhookEvent.VERDICT, device, told)
    session.merge(
        TrialRow(
            device=device,
            boot=row.boot,
            sequence=row.sequence,
            **{
                **asdict(ended),
                "environment": environment,
                "origin": ended.origin.value,
                "outputs": outputs,
            },
        )
    )
    replan = _of_generation(session, device, ended.epoch, ended.generation)
    if replan is not None and replan.digest == ended.candidate and not _ended_elsewhere(replan, ended):
        replan.how = ended.how
        replan.ratio, replan.ratio_low, replan.ratio_high = ended.ratio, ended.ratio_low, ended.ratio_high
        replan.pairs, replan.figure = ended.pairs, ended.figure
        if ended.verdict != Verdict.ABANDONED.value:
            replan.trigger_to_decision_ms = _after_alarm_us(session, replan, ended.decided_us) / 1e3
        replan.environment = ended.environment or replan.environment  # what is found out holds for that
        keep_regime(session, replan, row, ended)


def _ended_elsewhere(replan: ReplanRow, ended: TrialEnded) -> bool:
    """Whether a re-plan was decided in another environment than that in which its plan was tried again."""
    decided = replan.outcome != PENDING and replan.trigger_to_decision_ms is not None
    return decided and ended.environment not in ("", replan.environment)


def trial_infos(session: Session, device: DeviceId, *, limit: int = 1000) -> list[TrialInfo]:
    """The device's trials, newest first.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    rows = session.scalars(
        select(TrialRow).where(TrialRow.device == device).order_by(*_NEWEST_FIRST).limit(limit)
    )
    return [_trial_info(row) for row in rows]


def _trial_info(row: TrialRow) -> TrialInfo:
    outputs = None if row.outputs is None else msgspec.convert(row.outputs, OutputsInfo)
    return message_of(TrialInfo, row, outputs=outputs)


def trial_of(entry: HistoryEntry, trials: Sequence[TrialInfo]) -> TrialInfo | None:
    """What a generation came to, of its device's trials, newest first; None where it was not tried.

    A device tells what it tries by itself under the generation that is desired meanwhile. That is no trial of
    this one, but of the later one by which the planner adopts the winner.
    """
    at = entry.epoch, entry.generation
    for trial in trials:
        under = trial.epoch, trial.generation
        if trial.origin == Origin.LOCAL.value:
            its = entry.decided_by == LOCAL and under < at
        else:
            its = under == at
        if its and trial.candidate == entry.digest:
            return trial
    return None


def newest_trials(
    session: Session, plans: Iterable[Digest], environment: str, device: DeviceId | None
) -> dict[str, TrialInfo]:
    """Per plan its newest trial on the device; without one there the last on a device of its class, by
    their clocks. Plans that were tried nowhere are absent."""
    rows = session.scalars(
        select(TrialRow)
        .where(TrialRow.environment == environment, TrialRow.candidate.in_(list(plans)))
        .order_by(*_NEWEST_FIRST)
    )
    newest: dict[tuple[str, str], TrialRow] = {}
    for row in rows:
        newest.setdefault((row.candidate, row.device), row)
    ranked = sorted(newest.values(), key=lambda row: (row.device == device, row.decided_us))
    return {row.candidate: _trial_info(row) for row in ranked}


def committed_plans(session: Session, device: DeviceId, environment: str) -> list[Digest]:
    """Plans whose newest trial on this device in this environment committed, newest first.

    A plan that was ordered, was the first or passed a guard was compared with nothing: that is no trial. If
    it failed there, that counts. So does that it was rolled back after its trial, be it long after it was
    committed, or a plan that a re-plan pushed since which differs in launch intervals alone.
    """
    rows = session.connection().execute(_VERDICTS, {"of": device, "there": environment})
    newest: dict[Digest, tuple[int, int] | None] = {}
    for row in rows:
        committed = row.verdict == "commit" and row.state != DeviceState.ROLLED_BACK.value
        if not committed or row.how in _COMPARED:
            newest.setdefault(Digest(row.candidate), (row.epoch, row.generation) if committed else None)
    proven = {plan: at for plan, at in newest.items() if at is not None}
    rolled_back = rolled_back_structures(session, device, environment) if proven else {}
    if not rolled_back:
        return list(proven)
    structures = known_structures(session, proven)
    return [
        plan
        for plan, at in proven.items()
        if plan not in structures or at > rolled_back.get(structures[plan], (0, -1))
    ]
