"""Costs: measured operators and stages, found schedules, and which of them hold for a device.

Devices of one class share costs. A device that drifts gets costs under a key of its own, so that one device's
hot summer does not spoil its class. A stage's key is what it computes, whatever plan it came from: the device
class, the executor's options, the batch, the digest of its combined block, and its text.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, delete, insert, select
from sqlalchemy.orm import Session

from stageloom.planner.costs.drift import Renewal
from stageloom.planner.costs.records import Calibration, OperatorCost
from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import add_event, known_device
from stageloom.planner.store.tables import CalibrationRow, OperatorCostRow, ScheduleRow, StageCostRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest, OpId
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.costs import MeasuredStage, Members, combined_digest
from stageloom.shared.stage_string import parse, to_string

_USUAL: Final = ExecutorOptions()

MOST_SCHEDULES: Final = 5_000
"""That a proposal looks among: those found last are of plans that matter now."""


_ANY: Final = ""
"""In the place of an executor's key: it was measured by an agent that does not tell its executors."""

_OPERATORS: Final = (
    select(
        OperatorCostRow.executor,
        OperatorCostRow.operator,
        OperatorCostRow.median_us,
        OperatorCostRow.spread_us,
        OperatorCostRow.runs,
        OperatorCostRow.measured_at_us,
    )
    .where(
        OperatorCostRow.device_class == bindparam("there"),
        OperatorCostRow.executor.in_((bindparam("under"), _ANY)),
        OperatorCostRow.artifact == bindparam("of"),
        OperatorCostRow.batch == bindparam("batch_of"),
    )
    .order_by(OperatorCostRow.executor.desc(), OperatorCostRow.operator)  # without a name last
)


def operator_costs(
    session: Session,
    device_class: str,
    artifact: Digest,
    batch: int = 1,
    executor: ExecutorOptions = _USUAL,
) -> dict[int, OperatorCost]:
    """Operators measured on an executor, by index; those that were never measured are absent.

    Where none was, those that were measured by an agent that does not tell its executors.
    """
    rows = (
        session.connection()
        .execute(
            _OPERATORS,
            {"there": device_class, "under": executor_key(executor), "of": artifact, "batch_of": batch},
        )
        .all()
    )
    return {row[1]: OperatorCost(*row[1:]) for row in rows if row[0] == rows[0][0]}


def keep_schedules(
    session: Session, device_class: str, scheduler: str, schedules: Mapping[tuple[Digest, int], str]
) -> None:
    """Remember stage strings that were found, by (combined block, batch): TOP's stage_dict.

    A newer one replaces an older.
    """
    for (combined_block, batch), stage_string in schedules.items():
        session.merge(
            ScheduleRow(
                device_class=device_class,
                batch=batch,
                combined_block=combined_block,
                scheduler=scheduler,
                stage_string=stage_string,
                found_at_us=now_us(session),
            )
        )


def kept_schedules(session: Session, keys: Sequence[str]) -> dict[tuple[Digest, int], tuple[str, ...]]:
    """Stage strings that were found under some keys, by (combined block, batch), the newest of them."""
    row = ScheduleRow
    found: dict[tuple[Digest, int], dict[str, None]] = {}
    rows = session.execute(
        select(row.combined_block, row.batch, row.stage_string)
        .where(row.device_class.in_(keys))
        .order_by(row.found_at_us.desc(), row.combined_block, row.scheduler)
        .limit(MOST_SCHEDULES)
    )
    for combined_block, batch, text in rows:
        found.setdefault((Digest(combined_block), batch), {})[text] = None
    return {key: tuple(texts) for key, texts in found.items()}


_MEMBERS: Final = msgspec.msgpack.Decoder(Members)

MOST_STAGES: Final = 2_000
"""The newest that a search reads of a device class: what they teach is known long before."""


_STAGES: Final = (
    select(
        StageCostRow.members,
        StageCostRow.batch,
        StageCostRow.stage,
        StageCostRow.median_us,
        StageCostRow.runs,
        StageCostRow.measured_at_us,
    )
    .where(
        StageCostRow.device_class == bindparam("there"),
        StageCostRow.executor == bindparam("under"),
    )
    .order_by(StageCostRow.measured_at_us.desc(), StageCostRow.combined_block, StageCostRow.stage_digest)
    .limit(MOST_STAGES)
)

_parsed = lru_cache(maxsize=4096)(parse)  # every re-plan reads all stages of its class


def executor_key(options: ExecutorOptions) -> str:
    """What a stage's time depends on beside the device class."""
    return f"{options.name} threads={options.intra_op_threads} {options.precision}"


def stage_text(stage: Stage) -> str:
    """The stage string of one stage."""
    return to_string(StageSchedule((stage,)))


def stage_costs(session: Session, device_class: str, executor: ExecutorOptions) -> list[MeasuredStage]:
    """Measured stages of a device class under these options, the newest first, MOST_STAGES at most."""
    rows = session.connection().execute(_STAGES, {"there": device_class, "under": executor_key(executor)})
    found = []
    for members, batch, stage, median_us, runs, measured_at_us in rows:
        schedule = _parsed(stage)
        if isinstance(schedule, StageSchedule) and len(schedule.stages) == 1:
            (parsed,) = schedule.stages
            if parsed.resources:  # an older planner kept those, too
                continue
            known = _MEMBERS.decode(members)
            found.append(
                MeasuredStage(
                    known, batch, parsed.groups, median_us / 1e6, parsed.merge, runs, measured_at_us
                )
            )
    return found


def measured_operators(
    session: Session, device_class: str, artifact: Digest, batch: int, executor: ExecutorOptions
) -> dict[int, OperatorCostRow]:
    """Per operator of `operator_costs` its row, which says where its time comes from."""
    rows = session.scalars(
        select(OperatorCostRow)
        .where(
            OperatorCostRow.device_class == device_class,
            OperatorCostRow.executor.in_((executor_key(executor), _ANY)),
            OperatorCostRow.artifact == artifact,
            OperatorCostRow.batch == batch,
        )
        .order_by(OperatorCostRow.executor.desc())
    ).all()
    return {row.operator: row for row in rows if row.executor == rows[0].executor}


def measured_stages(
    session: Session, device_class: str, executor: ExecutorOptions, combined_block: Digest, batch: int
) -> dict[str, StageCostRow]:
    """Per measured stage of a combined block, by its stage string, its row."""
    rows = session.scalars(
        select(StageCostRow).where(
            StageCostRow.device_class == device_class,
            StageCostRow.executor == executor_key(executor),
            StageCostRow.combined_block == combined_block,
            StageCostRow.batch == batch,
        )
    )
    return {row.stage: row for row in rows}


def schedules_of(
    session: Session, device_class: str, combined_block: Digest, batch: int
) -> Sequence[ScheduleRow]:
    """Every schedule that was found for a combined block of a device class, by scheduler."""
    return session.scalars(
        select(ScheduleRow)
        .where(
            ScheduleRow.device_class == device_class,
            ScheduleRow.combined_block == combined_block,
            ScheduleRow.batch == batch,
        )
        .order_by(ScheduleRow.scheduler)
    ).all()


def calibration_of(session: Session, device: DeviceId, environment: str | None = None) -> Calibration:
    """Which costs hold for a device in an environment; None: in its own device class.

    Raises:
        InputError: there is no such device.
    """
    if environment is None:
        environment = known_device(session, device).device_class
    return calibration_from(environment, session.get(CalibrationRow, (device, environment)))


def calibration_from(device_class: str, row: Any) -> Calibration:
    """What a row with the columns of `CalibrationRow`, or none, says of a device of that class."""
    if row is None or row.costs_key is None:
        return Calibration(device_class, device_class)
    return Calibration(device_class, row.costs_key, row.steps_since_us, row.ratio, row.at_us)


def environment_changed(session: Session, device: DeviceId, environment: str, at_us: int) -> None:
    """A device is another now, from `at_us` of its clock on: what it served before was served by another."""
    row = session.get(CalibrationRow, (device, environment))
    if row is None:
        _make_room(session, device)
        row = CalibrationRow(
            device=device, environment=environment, costs_key=environment, ratio=1.0, at_us=0
        )
        session.add(row)
    row.steps_since_us = at_us


MOST_ENVIRONMENTS: Final = 64
"""That are kept of a device: more than it can have power modes and versions of what it runs."""


def _make_room(session: Session, device: DeviceId) -> None:
    """What was entered longest ago gives way, with the device's own costs there."""
    newest_first = CalibrationRow.steps_since_us.desc(), CalibrationRow.environment
    rows = select(CalibrationRow).where(CalibrationRow.device == device).order_by(*newest_first)
    for row in session.scalars(rows.offset(MOST_ENVIRONMENTS - 1).limit(MOST_ENVIRONMENTS)).all():
        _forget(session, _own_key(device, row.environment))
        session.delete(row)


_MOST: Final = 500  # rows of one statement


def renew_costs(
    session: Session,
    device: DeviceId,
    renewal: Renewal | None,
    executor: ExecutorOptions,
    *,
    ratio: float,
    steps_since_us: int,
) -> Calibration:
    """Give a device costs of its own, made from those that held; None: those of its class again.

    `steps_since_us` is the newest of the steps that showed the drift, by the device's clock.

    Raises:
        InputError: there is no such device.
    """
    device_class = known_device(session, device).device_class
    before = calibration_of(session, device, device_class).costs_key
    if session.get(CalibrationRow, (device, device_class)) is None:
        _make_room(session, device)
    own = _own_key(device, device_class)
    if renewal is None:
        _forget(session, own)
    else:
        _scale(session, before, own, renewal)
        for stage in renewal.stages:
            row = stage_row(
                *(own, executor, stage.members, stage.batch, Stage(stage.groups, stage.merge)),
                median_us=stage.seconds * 1e6,
                spread_us=0.0,
                runs=stage.samples,
                measured_on=device,
                measured_at_us=stage.measured_at_us,
            )
            session.merge(row)
    calibration = session.merge(
        CalibrationRow(
            device=device,
            environment=device_class,
            costs_key=device_class if renewal is None else own,
            ratio=ratio,
            steps_since_us=steps_since_us,
            at_us=now_us(session),
        )
    )
    then = "the costs of its class hold again" if renewal is None else "it has costs of its own"
    add_event(session, device, "recalibrated", f"steps took {ratio:.2f} of what was planned: {then}")
    return calibration_from(device_class, calibration)


def _own_key(device: DeviceId, device_class: str) -> str:
    """No device class begins like this, and a device has one in every environment."""
    return f"own:{digest_bytes([device_class.encode()])[:16]}:{device}"


def _forget(session: Session, key: str) -> None:
    """All that is kept under a key, schedules that were searched on it too."""
    for table in (OperatorCostRow, StageCostRow, ScheduleRow):
        session.execute(delete(table).where(table.device_class == key))


def _scale(session: Session, before: str, own: str, renewal: Renewal) -> None:
    """Put the operators that held under the device's own key, each time by its factor; who measured it and
    when stays. Stages are not kept: what groups cost together does not change as they do."""
    columns = OperatorCostRow.__table__.columns
    rows = [
        dict(row._mapping)
        for row in session.execute(select(*columns).where(OperatorCostRow.device_class == before))
    ]
    _forget(session, own)
    for row in rows:
        factor = renewal.factor(Digest(row["artifact"]), OpId(row["operator"]))
        row |= {"device_class": own, "median_us": row["median_us"] * factor}
    for at in range(0, len(rows), _MOST):
        session.execute(insert(OperatorCostRow), rows[at : at + _MOST])


def stage_row(
    key: str, executor: ExecutorOptions, members: Members, batch: int, stage: Stage, **measured: Any
) -> StageCostRow:
    """The row of a stage under a device class or a device's own key; `measured` has the columns that say what
    was measured where and when."""
    text = stage_text(stage)
    return StageCostRow(
        device_class=key,
        executor=executor_key(executor),
        batch=batch,
        combined_block=combined_digest(members),
        members=msgspec.msgpack.encode(members),
        stage_digest=digest_bytes([text.encode()]),
        stage=text,
        **measured,
    )
