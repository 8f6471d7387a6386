"""Parts of operators as devices measured them, and hand-overs: what plans with splits are made from.

They are kept under the class that a device was when it measured them, and stay raw where a device drifted
and has costs of its own: a split is chosen by how times compare, not by what they are. So operators' times
that are compared with them are those of the same state of the device; see `parts_since`.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from stageloom.planner.store.costs import executor_key
from stageloom.planner.store.database import now_us
from stageloom.planner.store.profiles import answers_request, implausible
from stageloom.planner.store.rows import insert_rows, known_device
from stageloom.planner.store.tables import ArtifactRow, HandoverCostRow, PartCostRow, ProfileRow
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import MAX_PARTS
from stageloom.shared.messages.telemetry import PartProfileResult
from stageloom.shared.partition import Axis
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.measured_splits import PartSample

_KEY: Final = ("device_class", "executor", "artifact", "operator", "axis", "extent")

_COLUMNS: Final = (*_KEY, "median_us", "spread_us", "runs", "measured_on", "measured_at_us")

_NEWER: Final = f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in _COLUMNS[len(_KEY) :]
)

_MOST_US: Final = 1e6
"""No hand-over takes a second."""

_MOST_BYTES_PER_S: Final = 1e13


@dataclass(frozen=True, slots=True)
class Handover:
    """Seconds of calling another resource and waiting for it, and bytes per second of joining halves."""

    seconds: float
    copy_bytes_per_s: float


def store_part_times(session: Session, device: DeviceId, told: PartProfileResult) -> str:
    """Keep parts that a device was asked to measure; returns why not, empty where they are kept."""
    request = session.get(ProfileRow, told.request)
    why = answers_request(session, device, request, told.request, told.environment)
    if request is None or why:
        return why
    there = told.environment or known_device(session, device).device_class
    under = executor_key(
        ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads or 1)
    )
    why = _refusal(session, request, told, there, under)
    if told.reason or why:
        request.reason = f"refused: {why}" if why else told.reason
    if why:
        return why
    at_us = now_us(session)
    rows = {
        (one.operator, one.axis, one.extent): (
            *(there, under, told.artifact, one.operator, one.axis.value, one.extent),
            *(one.median_us, one.spread_us, one.runs, device, at_us),
        )
        for one in told.timings
    }
    insert_rows(
        session.connection(), PartCostRow.__tablename__, _COLUMNS, list(rows.values()), conflict=_NEWER
    )
    if told.handover_us is not None and told.copy_bytes_per_s is not None:
        session.merge(
            HandoverCostRow(
                device_class=there,
                executor=under,
                handover_us=told.handover_us,
                copy_bytes_per_s=told.copy_bytes_per_s,
                measured_on=device,
                measured_at_us=at_us,
            )
        )
    return ""


def _refusal(session: Session, request: ProfileRow, told: PartProfileResult, there: str, under: str) -> str:
    """Why parts that are to be kept of a class under an executor cannot be an answer to an open request."""
    if not request.parts or not request.executor:
        return f"request {request.request} asked for no parts"
    if told.artifact != request.artifact:
        return f"request {request.request} is about another artifact"
    artifact = session.get(ArtifactRow, request.artifact)
    operators = artifact.operators if artifact is not None else 0
    if any(one.operator >= operators for one in told.timings):
        return f"the artifact of request {request.request} has {operators} operators"
    if told.handover_us is not None and not 0.0 < told.handover_us <= _MOST_US:
        return f"a hand-over of {told.handover_us:g} us is outside 0 to {_MOST_US:g}"
    if told.copy_bytes_per_s is not None and not 1.0 <= told.copy_bytes_per_s <= _MOST_BYTES_PER_S:
        return f"copies of {told.copy_bytes_per_s:g} bytes per second cannot be"
    kept = select(func.count()).where(
        PartCostRow.device_class == there,
        PartCostRow.executor == under,
        PartCostRow.artifact == told.artifact,
    )
    if (session.scalar(kept) or 0) > operators * len(Axis) * MAX_PARTS:
        return f"more parts of artifact {told.artifact[:12]} are kept than a request asks for"
    return implausible(told.timings)


def part_samples_of(
    session: Session, device_class: str, artifact: Digest, executor: ExecutorOptions
) -> tuple[PartSample, ...]:
    """Parts measured of an artifact on an executor, by operator, axis and extent; empty where none were."""
    rows = session.scalars(
        select(PartCostRow)
        .where(
            PartCostRow.device_class == device_class,
            PartCostRow.executor == executor_key(executor),
            PartCostRow.artifact == artifact,
        )
        .order_by(PartCostRow.operator, PartCostRow.axis, PartCostRow.extent)
    )
    return tuple(PartSample(row.operator, Axis(row.axis), row.extent, row.median_us / 1e6) for row in rows)


def parts_since(
    session: Session,
    device: DeviceId,
    device_class: str,
    artifact: Digest,
    executor: ExecutorOptions,
    at_us: int,
) -> bool:
    """Whether the device itself measured parts that are kept of an artifact at that time or later."""
    found = select(PartCostRow.operator).where(
        PartCostRow.device_class == device_class,
        PartCostRow.executor == executor_key(executor),
        PartCostRow.artifact == artifact,
        PartCostRow.measured_on == device,
        PartCostRow.measured_at_us >= at_us,
    )
    return session.scalar(found.limit(1)) is not None


def handover_of(session: Session, device_class: str, executor: ExecutorOptions) -> Handover | None:
    """What devices of a class take to hand over between resources of an executor; None: not measured."""
    row = session.get(HandoverCostRow, (device_class, executor_key(executor)))
    return None if row is None else Handover(row.handover_us / 1e6, row.copy_bytes_per_s)
