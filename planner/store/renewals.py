"""Costs of a device's own: made from those that held for it when it drifted, given up when it is back.

One device's hot summer must not spoil what its class shares, so what it measures from then on is kept under a
key of its own. Every function is one part of a transaction.
"""

from typing import Final

import msgspec
from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from stageloom.planner.costs.drift import Renewal
from stageloom.planner.costs.records import Calibration
from stageloom.planner.store.calibrations import calibration, calibration_of
from stageloom.planner.store.devices import add_event, known_device
from stageloom.planner.store.stages import executor_key, stage_text
from stageloom.planner.store.tables import CalibrationRow, OperatorCostRow, ScheduleRow, StageCostRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest, OpId
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.schedule import Stage
from stageloom.shared.search.costs import MeasuredStage, combined_digest

_MOST: Final = 500  # rows of one statement


def renew(
    session: Session,
    device: DeviceId,
    found: Renewal | None,
    executor: ExecutorOptions,
    *,
    ratio: float,
    steps_since_us: int,
    now_us: int,
) -> Calibration:
    """Give a device the costs that a drift was found to make of those that held; None: its class's.

    Raises:
        InputError: there is no such device.
    """
    device_class = known_device(session, device).device_class
    before = calibration(session, device, device_class).costs_key
    own = _own_key(device, device_class)
    if found is None:
        _forget(session, own)
    else:
        _scale(session, before, own, found)
        for stage in found.stages:
            session.merge(_stage_row(device, own, stage, executor))
    row = session.merge(
        CalibrationRow(
            device=device,
            environment=device_class,
            costs_key=device_class if found is None else own,
            ratio=ratio,
            steps_since_us=steps_since_us,
            at_us=now_us,
        )
    )
    then = "the costs of its class hold again" if found is None else "it has costs of its own"
    add_event(session, now_us, device, "recalibrated", f"steps took {ratio:.2f} of what was planned: {then}")
    return calibration_of(device_class, row)


def _own_key(device: DeviceId, device_class: str) -> str:
    """No device class begins like this, and a device has one in every environment."""
    return f"own:{digest_bytes([device_class.encode()])[:16]}:{device}"


def _forget(session: Session, key: str) -> None:
    """All that is kept under a key, schedules that were searched on it too."""
    for table in (OperatorCostRow, StageCostRow, ScheduleRow):
        session.execute(delete(table).where(table.device_class == key))


def _scale(session: Session, before: str, own: str, found: Renewal) -> None:
    """Put the operators that held under the device's own key, each time by its factor; who measured it and
    when stays. Stages are not kept: what groups cost together does not change as they do."""
    columns = OperatorCostRow.__table__.columns
    rows = [
        dict(row._mapping)
        for row in session.execute(select(*columns).where(OperatorCostRow.device_class == before))
    ]
    _forget(session, own)
    for row in rows:
        factor = found.factor(Digest(row["artifact"]), OpId(row["operator"]))
        row |= {"device_class": own, "median_us": row["median_us"] * factor}
    for at in range(0, len(rows), _MOST):
        session.execute(insert(OperatorCostRow), rows[at : at + _MOST])


def _stage_row(
    device: DeviceId, own: str, measured: MeasuredStage, executor: ExecutorOptions
) -> StageCostRow:
    text = stage_text(Stage(measured.groups, measured.merge))
    return StageCostRow(
        device_class=own,
        executor=executor_key(executor),
        batch=measured.batch,
        combined_block=combined_digest(measured.members),
        members=msgspec.msgpack.encode(measured.members),
        stage_digest=digest_bytes([text.encode()]),
        stage=text,
        median_us=measured.seconds * 1e6,
        spread_us=0.0,
        runs=measured.samples,
        measured_on=device,
        measured_at_us=measured.measured_at_us,
    )
