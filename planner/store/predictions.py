"""What the twin predicted, kept until a device has measured the same plan."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.store.database import Database
from stageloom.planner.store.tables import PredictionRow
from stageloom.shared.ids import DeviceId, Digest


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One prediction; `device` None: for no device in particular. `number` 0: not kept yet."""

    device: DeviceId | None
    plan: str
    digest: Digest
    twin: str  # where its step times are from
    arrivals: str  # and its load
    seconds: float
    figures: Mapping[str, float]  # see `stageloom.planner.twin.replay.figures`
    made_at_us: int
    number: int = 0


def keep(database: Database, prediction: Prediction) -> int:
    """Keep a prediction; returns its number.

    Raises:
        StorageError: the database cannot be written.
    """

    def work(session: Session) -> int:
        row = PredictionRow(
            device=prediction.device,
            plan=prediction.plan,
            digest=prediction.digest,
            twin=prediction.twin,
            arrivals=prediction.arrivals,
            seconds=prediction.seconds,
            figures=json.dumps(dict(prediction.figures), sort_keys=True),
            made_at_us=prediction.made_at_us,
        )
        session.add(row)
        session.flush()
        return row.prediction

    return database.change(work)


def newest(session: Session, device: DeviceId | None = None, *, limit: int = 100) -> list[Prediction]:
    """The newest predictions, of one device or of all, newest first."""
    wanted = select(PredictionRow).order_by(PredictionRow.prediction.desc()).limit(limit)
    if device is not None:
        wanted = wanted.where(PredictionRow.device == device)
    return [
        Prediction(
            device=None if row.device is None else DeviceId(row.device),
            plan=row.plan,
            digest=Digest(row.digest),
            twin=row.twin,
            arrivals=row.arrivals,
            seconds=row.seconds,
            figures=json.loads(row.figures),
            made_at_us=row.made_at_us,
            number=row.prediction,
        )
        for row in session.scalars(wanted)
    ]
