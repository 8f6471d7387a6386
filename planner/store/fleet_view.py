"""The fleet as a person looks at it: numbers that the database counts, devices that fit a search, alarms."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import msgspec
from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from stageloom.planner.store.devices import device_numbers
from stageloom.planner.store.labels import has_labels
from stageloom.planner.store.rows import known_device
from stageloom.planner.store.tables import AlarmRow, DeviceRow, QuarantineRow, ReportedRow
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, DeviceState

_TRIED: Final = (DeviceState.TRIAL, DeviceState.PROBATION)
_NOT_TAKEN: Final = (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
_CHUNK: Final = 500


class FleetState(str, Enum):
    """What devices may be chosen by."""

    ANY = "any"
    ONLINE = "online"
    OFFLINE = "offline"
    TRIED = "trying a plan"
    NOT_TAKEN = "refused a plan"
    QUARANTINED = "quarantined"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class FleetFilter:
    """Devices with `search` in their name, class or agent's version, in a state, with all of `labels`."""

    search: str = ""
    state: FleetState = FleetState.ANY
    labels: Mapping[str, str] = field(default_factory=dict)


class FleetNumbers(NamedTuple):
    """Devices that may come, those of them that try a plan or refused one, and those that may not come."""

    enrolled: int
    tried: int
    not_taken: int
    quarantined: int
    revoked: int


def fleet_numbers(session: Session) -> FleetNumbers:
    """Counted by the database."""
    numbers = device_numbers(session)
    counted = session.execute(
        select(ReportedRow.state, func.count())
        .join(DeviceRow, DeviceRow.name == ReportedRow.device)
        .where(DeviceRow.revoked.is_(False), ReportedRow.state.in_([*_TRIED, *_NOT_TAKEN]))
        .group_by(ReportedRow.state)
    )
    states = {state: number for state, number in counted}
    return FleetNumbers(
        enrolled=numbers.enrolled - numbers.revoked,
        tried=sum(states.get(state.value, 0) for state in _TRIED),
        not_taken=sum(states.get(state.value, 0) for state in _NOT_TAKEN),
        quarantined=numbers.quarantined,
        revoked=numbers.revoked,
    )


def fleet_devices(
    session: Session, wanted: FleetFilter, online: Collection[DeviceId], *, after: str = "", limit: int = 50
) -> list[DeviceId]:
    """Names of the devices that fit, in order, those behind `after`. Who is online only a running planner
    knows, so of those filters names are read until `limit` fit."""
    chosen = _chosen(wanted).where(DeviceRow.name > after).order_by(DeviceRow.name)
    if wanted.state not in (FleetState.ONLINE, FleetState.OFFLINE):
        return [DeviceId(name) for name in session.scalars(chosen.limit(limit))]
    found: list[DeviceId] = []
    with session.scalars(chosen.execution_options(yield_per=_CHUNK)) as names:
        for name in names:
            if (name in online) == (wanted.state is FleetState.ONLINE):
                found.append(DeviceId(name))
            if len(found) == limit:
                break
    return found


def _chosen(wanted: FleetFilter) -> Select[str]:
    chosen = select(DeviceRow.name)
    if wanted.search:
        columns = (DeviceRow.name, DeviceRow.device_class, DeviceRow.agent_version)
        chosen = chosen.where(or_(*(column.icontains(wanted.search, autoescape=True) for column in columns)))
    if wanted.labels:
        chosen = chosen.where(has_labels(wanted.labels))
    if wanted.state is FleetState.QUARANTINED:
        chosen = chosen.join(QuarantineRow, QuarantineRow.device == DeviceRow.name)
    elif wanted.state in (FleetState.TRIED, FleetState.NOT_TAKEN):
        states = _TRIED if wanted.state is FleetState.TRIED else _NOT_TAKEN
        chosen = chosen.join(ReportedRow, ReportedRow.device == DeviceRow.name)
        chosen = chosen.where(ReportedRow.state.in_(states))
    if wanted.state is not FleetState.ANY:
        chosen = chosen.where(DeviceRow.revoked.is_(wanted.state is FleetState.REVOKED))
    return chosen


def newest_alarms(session: Session, device: DeviceId, limit: int = 20) -> list[Alarm]:
    """What a device's triggers said, newest first.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    rows = session.scalars(
        select(AlarmRow.body)
        .where(AlarmRow.device == device)
        .order_by(AlarmRow.received_at_us.desc(), AlarmRow.number.desc())
        .limit(limit)
    )
    return [msgspec.msgpack.decode(body, type=Alarm) for body in rows]
