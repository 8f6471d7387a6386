"""Plans that did not gain on a device lately, and so are not tried there again yet; part of a transaction."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import and_, bindparam, func, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.alarm_loads import loads_of
from stageloom.planner.replan.regimes import NEAR, RegimeRate, distance, usual_rates
from stageloom.planner.store.regimes import known_structures
from stageloom.planner.store.tables import AlarmRow, GenerationRow, ReplanRow
from stageloom.planner.store.verdict_arrivals import MOVED_ALARM
from stageloom.shared.engine.trial import NO_LOAD
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm, DeviceState
from stageloom.shared.policy.plain import Load

_AGAINST: Final = (DeviceState.REJECTED.value, DeviceState.NO_GAIN.value, DeviceState.ROLLED_BACK.value)

_BARRED: Final = (
    select(
        ReplanRow.digest,
        ReplanRow.structure,
        ReplanRow.control,
        ReplanRow.outcome,
        ReplanRow.pairs,
        func.coalesce(MOVED_ALARM, AlarmRow.body).label("body"),
    )
    .join(
        AlarmRow,
        and_(
            AlarmRow.device == ReplanRow.device,
            AlarmRow.boot == ReplanRow.boot,
            AlarmRow.number == ReplanRow.number,
        ),
    )
    .join(
        GenerationRow,
        and_(
            GenerationRow.device == ReplanRow.device,
            GenerationRow.epoch == ReplanRow.epoch,
            GenerationRow.generation == ReplanRow.generation,
        ),
    )
    .where(
        ReplanRow.device == bindparam("of"),
        ReplanRow.environment == bindparam("there"),
        ReplanRow.outcome.in_(_AGAINST),
        GenerationRow.state.in_(_AGAINST),
        ReplanRow.digest.is_not(None),
        ~ReplanRow.reason.startswith(NO_LOAD),
        ReplanRow.begun_at_us >= bindparam("since_us"),
    )
    .order_by(ReplanRow.replan.desc())
)


def barred_plans(
    session: Session, device: DeviceId, environment: str, since_us: int, loads: Sequence[Load]
) -> list[tuple[Digest, Digest]]:
    """(plan, structure) of the re-plans that did not gain on this device, newest first.

    What a trial compared holds for arrivals like those that it met: the plan that gains nothing by day may be
    the one for the night. A plan that was rolled back, or that failed before any pair of windows said
    something, is barred under all. One of which its device said nothing in the end is not barred: something
    newer was desired while it was on its way or on trial. Nor is one for which no load came. Of a plan that
    differed from the one that ran in launch intervals alone nothing but its digest is barred: its structure
    was compared with none.
    """
    now = usual_rates(loads)
    asked = {"of": device, "there": environment, "since_us": since_us}
    rows = session.connection().execute(_BARRED, asked).all()
    ran = known_structures(session, {row.control for row in rows if row.control})
    return [
        (Digest(row.digest), _structure(row, ran))
        for row in rows
        if row.outcome == "rolled_back" or not row.pairs or distance(_met(row.body), now) <= NEAR
    ]


def _structure(row: Any, ran: Mapping[str, Digest]) -> Digest:
    only_paced = row.structure is None or row.structure == ran.get(row.control)
    return Digest(row.digest if only_paced else row.structure)


def _met(alarm: bytes) -> tuple[RegimeRate, ...]:
    return usual_rates(loads_of(msgspec.msgpack.decode(alarm, type=Alarm)))
