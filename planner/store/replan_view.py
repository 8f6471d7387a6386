"""What a re-plan is decided by, read as one snapshot.

Somebody waits for the answer to an alarm. So nothing but the columns that count is read, in few statements:
each costs the interpreter's lock twice, which other threads of the planner hold.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import and_, bindparam, select
from sqlalchemy.orm import Session

from stageloom.planner.costs.records import Calibration, OperatorCost
from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.store import costs, replans, stages
from stageloom.planner.store.calibrations import calibration_of
from stageloom.planner.store.tables import (
    AlarmRow,
    CalibrationRow,
    DesiredRow,
    DeviceRow,
    PlanRow,
    ReplanRow,
    ReplanSettingRow,
    TrialRow,
)
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.costs import MeasuredStage

_TRIALS: Final = 1000
_ALARM: Final = msgspec.msgpack.Decoder(Alarm)
_BEGUN: Final = (
    select(
        AlarmRow.body,
        DeviceRow.device_class,
        DesiredRow.epoch,
        DesiredRow.generation,
        PlanRow.digest,
        ReplanSettingRow.enabled,
        ReplanSettingRow.scheduler,
        ReplanSettingRow.members_max,
        ReplanSettingRow.budget_s,
        ReplanSettingRow.proposer,
        ReplanSettingRow.attach,
        CalibrationRow.costs_key,
        CalibrationRow.steps_since_us,
        CalibrationRow.ratio,
        CalibrationRow.at_us,
    )
    .select_from(ReplanRow)
    .join(
        AlarmRow,
        and_(
            AlarmRow.device == ReplanRow.device,
            AlarmRow.boot == ReplanRow.boot,
            AlarmRow.number == ReplanRow.number,
        ),
    )
    .join(DeviceRow, DeviceRow.name == ReplanRow.device)
    .outerjoin(DesiredRow, DesiredRow.device == ReplanRow.device)
    .outerjoin(PlanRow, PlanRow.name == DesiredRow.plan)
    .outerjoin(ReplanSettingRow, ReplanSettingRow.device == ReplanRow.device)
    .outerjoin(
        CalibrationRow,
        and_(CalibrationRow.device == DeviceRow.name, CalibrationRow.environment == DeviceRow.device_class),
    )
    .where(ReplanRow.replan == bindparam("number"))
)
_VERDICTS: Final = (
    select(TrialRow.candidate, TrialRow.verdict)
    .where(TrialRow.device == bindparam("of"), TrialRow.environment == bindparam("there"))
    .order_by(TrialRow.decided_us.desc())
    .limit(_TRIALS)
)
_WIRES: Final = select(PlanRow.digest, PlanRow.wire).where(
    PlanRow.digest.in_(bindparam("wanted", expanding=True))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an alarm found: `desired` is the newest (epoch, generation) at the moment of the snapshot."""

    alarm: Alarm
    device_class: str
    calibration: Calibration
    desired: tuple[int, int]
    desired_plan: Digest | None
    settings: ReplanSettings


class ReplanView:
    """One snapshot; its methods may be called as long as it is open."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection()

    def begun(self, replan: int) -> Begun | None:
        """A re-plan's alarm and device; None: there is no such re-plan."""
        row = self._connection.execute(_BEGUN, {"number": replan}).first()
        if row is None:
            return None
        return Begun(
            alarm=_ALARM.decode(row.body),
            device_class=row.device_class,
            calibration=calibration_of(row.device_class, row),
            desired=(row.epoch or 0, row.generation or 0),
            desired_plan=Digest(row.digest) if row.digest else None,
            settings=replans.settings_of(row),
        )

    def committed(self, device: DeviceId, environment: str) -> list[Digest]:
        """Plans whose newest trial on this device in this environment committed, newest first."""
        rows = self._connection.execute(_VERDICTS, {"of": device, "there": environment})
        newest: dict[str, str] = {}
        for candidate, verdict in rows:
            newest.setdefault(candidate, verdict)
        return [Digest(candidate) for candidate, verdict in newest.items() if verdict == "commit"]

    def wires(self, digests: Collection[Digest]) -> dict[Digest, bytes]:
        """The wire forms of those plans that are known here."""
        found = self._connection.execute(_WIRES, {"wanted": list(digests)})
        return {Digest(digest): wire for digest, wire in found}

    def barred(self, device: DeviceId, environment: str, since_us: int) -> list[tuple[Digest, Digest]]:
        """(plan, structure) of the device's re-plans that did not gain there since then."""
        return replans.barred(self._session, device, environment, since_us)

    def operator_costs(self, device_class: str, artifact: Digest, batch: int = 1) -> dict[int, OperatorCost]:
        """Measured operators of an artifact on a device class."""
        return costs.operator_costs(self._session, device_class, artifact, batch)

    def stage_costs(self, device_class: str, executor: ExecutorOptions) -> list[MeasuredStage]:
        """Measured stages of a device class, the newest first."""
        return stages.stage_costs(self._session, device_class, executor)
