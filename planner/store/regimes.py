"""Which plan won a trial on a device under which arrivals; every function is one part of a transaction."""

from collections.abc import Collection
from functools import lru_cache
from typing import Final

import msgspec
from sqlalchemy import ColumnElement, and_, delete, exists, func, not_, or_, select, tuple_
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import StoredRow
from stageloom.planner.replan.alarm_loads import loads_of
from stageloom.planner.replan.regimes import KnownRegime, RegimeRate, usual_rates
from stageloom.planner.store.tables import AlarmRow, GenerationRow, PlanRow, RegimeRow, ReplanRow, TrialRow
from stageloom.planner.store.verdict_arrivals import MOVED_ALARM
from stageloom.shared.engine.trial import UNDECIDED, TrialConfig, Verdict
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm, DeviceState
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.plan import Plan, decode_plan

_MOST: Final = 200
_ROUNDED_US: Final = 100  # of a decision that is stored in milliseconds after its alarm
_ENTRIES: Final = {Verdict.COMMIT.value: True, Verdict.REJECT.value: False, Verdict.NO_GAIN.value: False}
"""Of the verdicts that compared: whether the candidate won."""

_LOOKED_AT: Final = TrialConfig().min_pairs
"""With fewer pairs no gain means that time was up before anything was compared."""

_ROLLED_BACK: Final = or_(
    ReplanRow.outcome == DeviceState.ROLLED_BACK.value,
    and_(
        ReplanRow.outcome == DeviceState.COMMITTED.value,
        select(GenerationRow.position)
        .where(
            GenerationRow.device == ReplanRow.device,
            GenerationRow.epoch == ReplanRow.epoch,
            GenerationRow.generation == ReplanRow.generation,
            GenerationRow.state == DeviceState.ROLLED_BACK.value,
        )
        .correlate(ReplanRow)
        .exists(),
    ),
)
"""Of a re-plan: its plan failed under probation, or was committed and did not start any more later, which its
outcome does not tell."""

_decoded = lru_cache(maxsize=256)(decode_plan)


def keep_regime(session: Session, replan: ReplanRow, row: StoredRow, ended: TrialEnded) -> None:
    """Note who won a re-plan's trial; nothing where nothing was compared, or a plan is not known here."""
    if not _compared(ended) or ended.control is None:
        return
    candidate, control = known_plan(session, ended.candidate), known_plan(session, ended.control)
    alarm = _met(session, replan)
    if candidate is None or control is None or alarm is None or candidate.structure == control.structure:
        return
    won, lost = (candidate, control) if _ENTRIES[ended.verdict] else (control, candidate)
    session.merge(
        RegimeRow(
            device=replan.device,
            boot=row.boot,
            sequence=row.sequence,
            environment=replan.environment,
            won=won.digest,
            won_structure=won.structure,
            lost_structure=lost.structure,
            replaced=control.digest if won is candidate else None,
            loads=msgspec.msgpack.encode(usual_rates(loads_of(alarm))),
            at_us=replan.begun_at_us + round(1e3 * (replan.trigger_to_decision_ms or 0.0)),
        )
    )


def _compared(ended: TrialEnded) -> bool:
    """Whether the verdict says which plan is better: not where trials ended before that was looked at."""
    if ended.how != "trial" or not ended.pairs or ended.verdict not in _ENTRIES:
        return False
    if ended.verdict == Verdict.NO_GAIN.value:
        return ended.pairs >= _LOOKED_AT
    return not ended.reason.startswith(UNDECIDED)


def _met(session: Session, replan: ReplanRow) -> Alarm | None:
    """The alarm with the arrivals that the verdict on a re-plan's plan is about."""
    found = session.execute(
        select(AlarmRow.body, MOVED_ALARM)
        .join(
            ReplanRow,
            and_(
                AlarmRow.device == ReplanRow.device,
                AlarmRow.boot == ReplanRow.boot,
                AlarmRow.number == ReplanRow.number,
            ),
        )
        .where(ReplanRow.replan == replan.replan)
    ).first()
    return None if found is None else msgspec.msgpack.decode(found[1] or found[0], type=Alarm)


def known_plan(session: Session, digest: str) -> Plan | None:
    """The plan with a digest; None where it is not known here."""
    wire = session.scalar(select(PlanRow.wire).where(PlanRow.digest == digest).limit(1))
    return None if wire is None else _decoded(wire, Digest(digest))


def known_structures(session: Session, digests: Collection[str]) -> dict[str, Digest]:
    """The structures of those of these plans that are known here, by digest."""
    if not digests:
        return {}
    rows = session.execute(select(PlanRow.digest, PlanRow.wire).where(PlanRow.digest.in_(digests)))
    return {digest: _decoded(wire, Digest(digest)).structure for digest, wire in rows}


def known_regimes(
    session: Session, device: DeviceId, environment: str, since_us: int = 0
) -> list[KnownRegime]:
    """The library of a device in an environment, newest first: entries since a moment by the planner's clock.

    A winner that was rolled back on the device after it won is not among them, whoever pushed it, be it here
    or where it is not known in which environment. Nor is one that was under the probation after its trial, or
    since: that re-plan is decided when the trial ends, and rolled back after that. Launch intervals that were
    rolled back say nothing of the structure that ran under them, as on the device.
    """
    others = _rolled_back_for_others(session, device)
    found = session.execute(
        select(RegimeRow.won, RegimeRow.lost_structure, RegimeRow.replaced, RegimeRow.loads, RegimeRow.at_us)
        .where(
            RegimeRow.device == device,
            RegimeRow.environment == environment,
            RegimeRow.at_us >= since_us,
            not_(_lost_by_replan(session, device)),
        )
        .order_by(RegimeRow.at_us.desc(), RegimeRow.boot, RegimeRow.sequence.desc())
        .limit(_MOST)
    )
    rows = [
        row
        for row in found
        if all(others.get((row.won, where), 0) <= row.at_us for where in (environment, ""))
    ]
    named = {digest for row in rows for digest in (row.won, row.replaced) if digest is not None}
    plans = {digest: known_plan(session, digest) for digest in named}
    return [
        KnownRegime(
            rates=msgspec.msgpack.decode(row.loads, type=tuple[RegimeRate, ...]),
            winner=plan,
            lost=Digest(row.lost_structure),
            at_us=row.at_us,
            replaced=plans.get(row.replaced),
        )
        for row in rows
        if (plan := plans[row.won]) is not None
    ]


def delete_rolled_back(session: Session, device: DeviceId, most: int) -> int:
    """Delete at most so many entries of a device's library that do not count, while the rows that tell so are
    there; returns how many. One stays if it is not known in which environment its winner was rolled back."""
    others = _rolled_back_for_others(session, device)
    by_replan = _lost_by_replan(session, device).label("by_replan")
    key = (RegimeRow.boot, RegimeRow.sequence)
    rows = session.execute(
        select(*key, RegimeRow.won, RegimeRow.environment, RegimeRow.at_us, by_replan).where(
            RegimeRow.device == device
        )
    )
    gone = [
        (row.boot, row.sequence)
        for row in rows
        if row.by_replan or others.get((row.won, row.environment), 0) > row.at_us
    ][:most]
    if gone:
        session.execute(
            delete(RegimeRow)
            .where(RegimeRow.device == device, tuple_(*key).in_(gone))
            .execution_options(synchronize_session=False)
        )
    return len(gone)


def _lost_by_replan(session: Session, device: DeviceId) -> ColumnElement[bool]:
    """Of an entry of a device's library: its winner was rolled back since for a re-plan."""
    decided_us = ReplanRow.begun_at_us + 1000.0 * func.coalesce(ReplanRow.trigger_to_decision_ms, 0.0)
    return exists().where(
        ReplanRow.replan.in_(_rolled_back(session, device)),
        ReplanRow.environment == RegimeRow.environment,
        ReplanRow.structure == RegimeRow.won_structure,
        decided_us > RegimeRow.at_us - _ROUNDED_US,
    )


def _rolled_back_for_others(session: Session, device: DeviceId) -> dict[tuple[str, str], int]:
    """Of plans that somebody else than a re-plan pushed and that were rolled back, when it pushed them last,
    by digest and environment: the one in which alone the device tried the generation, empty if none is."""
    found = session.execute(
        select(
            GenerationRow.digest,
            GenerationRow.decided_at_us,
            func.min(TrialRow.environment).label("first"),
            func.max(TrialRow.environment).label("last"),
        )
        .outerjoin(
            TrialRow,
            and_(
                TrialRow.device == GenerationRow.device,
                TrialRow.candidate == GenerationRow.digest,
                TrialRow.epoch == GenerationRow.epoch,
                TrialRow.generation == GenerationRow.generation,
            ),
        )
        .where(
            GenerationRow.device == device,
            GenerationRow.decided_by != "replan",
            GenerationRow.digest.is_not(None),
            GenerationRow.state == DeviceState.ROLLED_BACK.value,
        )
        .group_by(GenerationRow.position)
        .order_by(GenerationRow.decided_at_us)
    )
    return {
        (row.digest, row.first if row.first is not None and row.first == row.last else ""): row.decided_at_us
        for row in found
    }


def rolled_back_structures(
    session: Session, device: DeviceId, environment: str
) -> dict[Digest, tuple[int, int]]:
    """Structures of re-plans' plans that were rolled back, each with the newest (epoch, generation) that was.

    Without those that had the plan that ran before with other launch intervals.
    """
    rows = session.execute(
        select(ReplanRow.structure, ReplanRow.epoch, ReplanRow.generation)
        .where(ReplanRow.replan.in_(_rolled_back(session, device)), ReplanRow.environment == environment)
        .order_by(ReplanRow.replan)
    )
    return {Digest(structure): (epoch, number) for structure, epoch, number in rows if structure is not None}


def _rolled_back(session: Session, device: DeviceId) -> list[int]:
    """Re-plans that were rolled back, but for those that had pushed the plan that ran with other launch
    intervals."""
    rows = session.execute(
        select(ReplanRow.replan, ReplanRow.structure, ReplanRow.control).where(
            ReplanRow.device == device, _ROLLED_BACK
        )
    ).all()
    ran = known_structures(session, {row.control for row in rows if row.control is not None})
    return [row.replan for row in rows if row.structure != ran.get(row.control, "")]
