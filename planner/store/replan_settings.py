"""How each device is re-planned; every function is one part of a transaction."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.store.rows import known_device
from stageloom.planner.store.tables import ReplanSettingRow
from stageloom.shared.ids import DeviceId


def replan_settings(session: Session, device: DeviceId) -> ReplanSettings:
    """How a device is re-planned.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    row = session.get(ReplanSettingRow, device)
    return settings_of(row) if row is not None else ReplanSettings()


def settings_of(row: Any) -> ReplanSettings:
    """What a row with the columns of `ReplanSettingRow` says; the defaults where they are empty."""
    if row.enabled is None:
        return ReplanSettings()
    return msgspec.convert({name: getattr(row, name) for name in ReplanSettings.__slots__}, ReplanSettings)


def set_replan_settings(session: Session, device: DeviceId, wanted: ReplanSettings) -> None:
    """Keep how a device is re-planned.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    session.merge(ReplanSettingRow(device=device, **msgspec.to_builtins(wanted)))


def change_replan_settings(session: Session, device: DeviceId, changes: Mapping[str, Any]) -> ReplanSettings:
    """Change some of them in one transaction; returns all. Raises as `set_replan_settings`."""
    settings = replace(replan_settings(session, device), **changes)
    if changes:
        set_replan_settings(session, device, settings)
    return settings
