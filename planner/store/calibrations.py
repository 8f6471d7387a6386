"""Which costs hold for a device in an environment; every function is one part of a transaction."""

from typing import Any

from sqlalchemy.orm import Session

from stageloom.planner.costs.records import Calibration
from stageloom.planner.store.tables import CalibrationRow
from stageloom.shared.ids import DeviceId


def calibration(session: Session, device: DeviceId, device_class: str) -> Calibration:
    """Which costs hold for a device of that class now."""
    return calibration_of(device_class, session.get(CalibrationRow, (device, device_class)))


def calibration_of(device_class: str, row: Any) -> Calibration:
    """What a row with the columns of `CalibrationRow`, or none, says of a device of that class."""
    if row is None or row.costs_key is None:
        return Calibration(device_class, device_class)
    return Calibration(device_class, row.costs_key, row.steps_since_us, row.ratio, row.at_us)


def environment_changed(session: Session, device: DeviceId, environment: str, at_us: int) -> None:
    """A device is another now, from `at_us` of its clock on: what it served before was served by another."""
    row = session.get(CalibrationRow, (device, environment))
    if row is None:
        row = CalibrationRow(
            device=device, environment=environment, costs_key=environment, ratio=1.0, at_us=0
        )
        session.add(row)
    row.steps_since_us = at_us
