"""What the twin predicts of plans, and what it predicted beside what devices measured since."""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta

from stageloom.planner.schema.base import After, LongText, PageSize, Reply, Request
from stageloom.planner.schema.plan import ArrivalRate
from stageloom.shared.messages.base import (
    MOST,
    NO_NUL,
    Count,
    DeviceName,
    DigestText,
    MicroSeconds,
    Name,
    Real,
    Seconds,
)

RECORDED_MAX: Final = 65_536
"""Arrivals of one model in a recording."""

SIMULATED_MAX_S: Final = 86_400.0

LATEST_S: Final = 1e10
"""Of an arrival in a recording, which may count from 1970."""

Twin = Annotated[str, Meta(max_length=64 << 10, pattern=NO_NUL)]
"""A device to simulate: the name of a device file that comes with the planner, or the text of one."""

Arrived = Annotated[tuple[Annotated[float, Meta(ge=0.0, le=LATEST_S)], ...], Meta(max_length=RECORDED_MAX)]
"""When tasks arrived, in seconds, ascending; also since 1970."""


class ArrivalKind(str, Enum):
    """How tasks arrive at a given rate."""

    PERIODIC = "periodic"
    POISSON = "poisson"


class PredictionCreateRequest(Request, frozen=True, kw_only=True):
    """Predict queues, latency and utilisation of a plan, which runs on a simulated device.

    `device`: costs and arrivals are what this device measured; `twin` is the device to simulate, by default
    that of the device's class. At least one of them is needed. `rates` or `recording` say what arrives,
    without them the newest `last_s` of the device's telemetry do. `arrivals` is for `rates`. A recording
    begins with its first arrival if that lies behind a day (seconds since 1970), else at 0. `seconds` None:
    as long as was recorded, or 60. Equal seeds give equal predictions. `keep`: the prediction is kept beside
    what is measured later.
    """

    plan: Name
    device: DeviceName | None = None
    twin: Twin = ""
    rates: Annotated[tuple[ArrivalRate, ...], Meta(max_length=64)] = ()
    arrivals: ArrivalKind | None = None
    recording: Annotated[dict[Name, Arrived], Meta(max_length=64)] | None = None
    last_s: Annotated[float, Meta(ge=1.0, le=1e9)] = 600.0
    seconds: Annotated[float, Meta(ge=0.1, le=SIMULATED_MAX_S)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MOST)] = 0
    keep: bool = True


Figures = Annotated[dict[str, Real], Meta(max_length=1024)]
"""By name, as `stageloom.planner.twin.replay.figures` makes them: `MODEL.NAME` of a model, `NAME` of all."""


class PredictionListRequest(Request, frozen=True, kw_only=True):
    """Predictions of one device or of all, newest first."""

    device: DeviceName | None = None
    after: After = ""
    limit: PageSize = 20


class PredictionInfo(Reply, frozen=True, kw_only=True):
    """One prediction; `number` 0: it was not kept.

    `twin` says where its step times are from, `arrivals` its load. `measured`: of the last time that the plan
    ran on the device since; None where it did not, or the prediction is for no device in particular.
    `relative_errors`: predicted over measured, less 1. `doubt`: where utilisation and queues contradict each
    other, or what was measured.
    """

    number: Count
    made_at_us: MicroSeconds
    device: DeviceName | None
    plan: Name
    digest: DigestText
    twin: LongText
    arrivals: LongText
    seconds: Seconds
    predicted: Figures
    measured: Figures | None = None
    relative_errors: Figures | None = None
    doubt: LongText = ""
