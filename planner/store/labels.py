"""Labels of devices, and the devices that have all of a selection's."""

from collections.abc import Collection, Mapping

from sqlalchemy import ColumnElement, and_, delete, exists, select
from sqlalchemy.orm import Session

from stageloom.planner.labels import LabelChanges
from stageloom.planner.schema.device import MOST_LABELS
from stageloom.planner.store.rows import add_event, known_device
from stageloom.planner.store.tables import DeviceLabelRow, DeviceRow
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId


def change_labels(session: Session, device: DeviceId, changes: LabelChanges) -> dict[str, str]:
    """Give labels to a device and take others away; returns all that it has then.

    Raises:
        InputError: there is no such device, or it would have too many labels.
    """
    known_device(session, device)
    before = labels_of(session, [device]).get(device, {})
    after = {
        name: value for name, value in {**before, **changes.given}.items() if name not in changes.removed
    }
    if len(after) > MOST_LABELS:
        raise InputError(
            f"device {device!r} would have {len(after)} labels", remedy=f"{MOST_LABELS} are allowed"
        )
    if after != before:
        session.execute(delete(DeviceLabelRow).where(DeviceLabelRow.device == device))
        session.add_all(
            DeviceLabelRow(device=device, name=name, value=value) for name, value in after.items()
        )
        said = [f"{name}={after[name]}" for name in sorted(after) if before.get(name) != after[name]]
        said += [f"{name}-" for name in sorted(before.keys() - after.keys())]
        add_event(session, device, "labels", " ".join(said)[:512])
    return after


def labels_of(session: Session, devices: Collection[str]) -> dict[str, dict[str, str]]:
    """Labels by device; devices without any are left out."""
    found: dict[str, dict[str, str]] = {}
    rows = session.execute(
        select(DeviceLabelRow.device, DeviceLabelRow.name, DeviceLabelRow.value)
        .where(DeviceLabelRow.device.in_(list(devices)))
        .order_by(DeviceLabelRow.name)
    )
    for device, name, value in rows:
        found.setdefault(device, {})[name] = value
    return found


def has_labels(selection: Mapping[str, str]) -> ColumnElement[bool]:
    """The condition that a device has all labels of a selection."""
    return and_(
        *(
            exists().where(
                DeviceLabelRow.device == DeviceRow.name,
                DeviceLabelRow.name == name,
                DeviceLabelRow.value == value,
            )
            for name, value in sorted(selection.items())
        ),
        DeviceRow.name.is_not(None),
    )


def selected_devices(session: Session, selection: Mapping[str, str]) -> list[DeviceId]:
    """Devices that are not revoked and have all labels of a selection, by name; all for an empty one."""
    wanted = (
        select(DeviceRow.name)
        .where(DeviceRow.revoked.is_(False), has_labels(selection))
        .order_by(DeviceRow.name)
    )
    return [DeviceId(name) for name in session.scalars(wanted)]
