"""What is known and expected of load regimes of a device, for people; part of a transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.regimes import NEAR, RegimeRate, distance
from stageloom.planner.schema.replan import RegimeInfo, RegimeLoad
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.expected import expected_regimes
from stageloom.planner.store.regimes import known_regimes
from stageloom.planner.store.tables import PlanRow
from stageloom.shared.ids import DeviceId
from stageloom.shared.plan import Plan


def regime_infos(session: Session, device: DeviceId) -> list[RegimeInfo]:
    """What re-plans of a device would know now, in its environment and under its costs of today.

    First what was proven, newest first; then what is expected for arrivals that nothing was proven for.

    Raises:
        InputError: there is no such device.
    """
    info = device_info(session, device)
    since_us = calibration_of(session, device).at_us
    known = known_regimes(session, device, info.device_class, since_us)
    expected = [
        one
        for one in expected_regimes(session, device, info.device_class, since_us)
        if all(distance(entry.rates, one.rates) > NEAR for entry in known)
    ]
    plans = {one.winner.digest for one in known} | {one.plan.digest for one in expected}
    named = session.execute(
        select(PlanRow.digest, func.min(PlanRow.name))
        .where(PlanRow.digest.in_(plans))
        .group_by(PlanRow.digest)
    )
    names: dict[str, str] = {digest: name for digest, name in named}

    def shown(rates: Sequence[RegimeRate], plan: Plan, **found: Any) -> RegimeInfo:
        return RegimeInfo(
            loads=tuple(
                RegimeLoad(model=rate.model, arrivals_per_s=rate.arrivals_per_s, service_s=rate.service_s)
                for rate in rates
            ),
            plan=names.get(plan.digest, ""),
            digest=plan.digest,
            active=plan.digest == info.report.active,
            **found,
        )

    return [
        *(shown(one.rates, one.winner, proven_at_us=one.at_us) for one in known),
        *(shown(one.rates, one.plan, expected_at_us=one.found_us, chance=one.chance) for one in expected),
    ]
