"""Plans found ahead of a load regime, and which devices to look ahead for; parts of transactions."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
from sqlalchemy import and_, delete, func, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.replan.regimes import NEAR, ExpectedRegime, RegimeRate, distance
from stageloom.planner.store.database import now_us
from stageloom.planner.store.plans import keep_plan
from stageloom.planner.store.regimes import known_plan
from stageloom.planner.store.tables import DeviceRow, ExpectedRegimeRow, ReplanRow, ReplanSettingRow
from stageloom.shared.ids import DeviceId
from stageloom.shared.plan import Plan

MOST: Final = 32
"""Regimes of a device that a plan is kept for; the oldest ones go."""

_Rates = tuple[RegimeRate, ...]


def keep_expected(
    session: Session,
    device: DeviceId,
    environment: str,
    rates: Sequence[RegimeRate],
    plan: Plan,
    scheduler: str,
    chance: float | None,
) -> None:
    """Keep what is expected to be best under such arrivals, in place of what was for arrivals like them.

    `chance`: of a gain over the plan it was compared with; None where it is that plan.
    """
    known = _rows(session, device, environment)
    near = [row for row in known if distance(_decoded(row.loads), rates) <= NEAR]
    kept = [row for row in known if row not in near]
    gone = [row.number for row in [*near, *kept[MOST - 1 :]]]
    session.execute(delete(ExpectedRegimeRow).where(ExpectedRegimeRow.number.in_(gone)))
    keep_plan(session, plan, scheduler)
    session.add(
        ExpectedRegimeRow(
            device=device,
            environment=environment,
            plan=plan.digest,
            chance=chance,
            loads=msgspec.msgpack.encode(tuple(rates)),
            found_at_us=now_us(session),
        )
    )


def expected_regimes(
    session: Session, device: DeviceId, environment: str, since_us: int = 0
) -> list[ExpectedRegime]:
    """What was found ahead for a device in an environment since a moment, newest first."""
    found = []
    for row in _rows(session, device, environment):
        plan = known_plan(session, row.plan) if row.found_at_us >= since_us else None
        if plan is not None:
            found.append(ExpectedRegime(_decoded(row.loads), plan, row.chance, row.found_at_us))
    return found


@lru_cache(maxsize=1024)
def _decoded(loads: bytes) -> _Rates:
    return msgspec.msgpack.decode(loads, type=_Rates)


def _rows(session: Session, device: DeviceId, environment: str) -> list[ExpectedRegimeRow]:
    return list(
        session.scalars(
            select(ExpectedRegimeRow)
            .where(ExpectedRegimeRow.device == device, ExpectedRegimeRow.environment == environment)
            .order_by(ExpectedRegimeRow.found_at_us.desc(), ExpectedRegimeRow.number.desc())
        )
    )


def replanned_devices(session: Session, heard_since_us: int) -> list[tuple[DeviceId, int]]:
    """Devices with re-planning on, heard of since, each with the newest re-plan of what it is now."""
    on = func.coalesce(ReplanSettingRow.enabled, ReplanSettings().enabled).is_(True)
    rows = session.execute(
        select(DeviceRow.name, func.max(ReplanRow.replan))
        .join(
            ReplanRow,
            and_(ReplanRow.device == DeviceRow.name, ReplanRow.environment == DeviceRow.device_class),
        )
        .outerjoin(ReplanSettingRow, ReplanSettingRow.device == DeviceRow.name)
        .where(DeviceRow.revoked.is_(False), DeviceRow.last_seen_us >= heard_since_us, on)
        .group_by(DeviceRow.name)
        .order_by(DeviceRow.name)
    )
    return [(DeviceId(name), replan) for name, replan in rows]
