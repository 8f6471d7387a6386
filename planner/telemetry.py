"""Telemetry as figures: the books of what was sent, rates of models, and rows rolled up by time. Pure.

A rolled-up row says what many telemetry rows of one subject in one span of time say together. Counters,
histograms and step timings add up; samples keep their number, smallest, mean and largest. Merging is
associative and commutative, so rows may be rolled up in any order, in parts, and late: minutes of rows, and
hours of minutes, give what the hours of all rows give.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ModelRate
from stageloom.shared.messages.base import MOST, MOST_REAL
from stageloom.shared.messages.telemetry import (
    LATENCY_BOUNDS_US,
    DifferenceSample,
    LatencyHistogram,
    Ledger,
    QueueSample,
    Row,
    RowData,
    RowKind,
    StepTimings,
    TaskCounters,
    Utilisation,
    quantile_us,
)


class Balance(NamedTuple):
    """Rows over one or all devices and boots; produced = stored + dropped + lost after every commit."""

    produced: int
    stored: int
    dropped: int
    lost: int


@dataclass(frozen=True, slots=True)
class TelemetryAccount:
    """One boot. Every sequence below `settled` is stored, dropped or lost: what comes again is a repeat.

    Rows are recognised as repeats by this number, not by the rows themselves, which do not stay for ever.
    """

    produced: int = 0
    dropped: int = 0
    stored: int = 0
    lost: int = 0
    settled: int = 0

    def take(
        self, sequences: Iterable[int], said: Iterable[Ledger]
    ) -> "tuple[TelemetryAccount, frozenset[int]]":
        """The book after a batch, and those of its rows that are new and must be stored.

        Of repeated ledgers the larger counts win. `lost` is counted only when the device tells its ledger:
        between two ledgers a gap may be rows that it dropped.
        """
        new = frozenset(sequence for sequence in sequences if sequence >= self.settled)
        ledgers = tuple(said)
        produced = max((self.produced, *(one.produced for one in ledgers)))
        dropped = max((self.dropped, *(one.dropped for one in ledgers)))
        stored = self.stored + len(new)
        return (
            TelemetryAccount(
                produced=produced,
                dropped=dropped,
                stored=stored,
                lost=max(produced - dropped - stored, 0) if ledgers else self.lost,
                settled=max((self.settled, produced, *(sequence + 1 for sequence in new))),
            ),
            new,
        )


RATE_KINDS = (RowKind.TASK_COUNTERS, RowKind.LATENCY_HISTOGRAM, RowKind.QUEUE_SAMPLE)
"""The row kinds that `model_rates` reads."""


@dataclass
class _Sums:
    completed: int = 0
    interval_us: int = 0
    histograms: list[LatencyHistogram] = field(default_factory=list)
    queued: int = 0


def model_rates(device: DeviceId, rows: Iterable[Row]) -> list[ModelRate]:
    """One entry per model, by name; `rows` oldest first. A model without a finished interval has rate 0."""
    sums: dict[str, _Sums] = {}
    for row in rows:
        data = row.data
        if isinstance(data, TaskCounters):
            model = sums.setdefault(data.model, _Sums())
            model.completed += data.completed
            model.interval_us += data.interval_us
        elif isinstance(data, LatencyHistogram):
            sums.setdefault(data.model, _Sums()).histograms.append(data)
        elif isinstance(data, QueueSample):
            sums.setdefault(data.model, _Sums()).queued = data.tasks
    return [
        ModelRate(
            device=device,
            model=name,
            throughput_per_s=(
                min(model.completed * 1e6 / model.interval_us, MOST_REAL) if model.interval_us else 0.0
            ),
            latency_p50_ms=quantile_us(model.histograms, 0.50) / 1e3,
            latency_p99_ms=quantile_us(model.histograms, 0.99) / 1e3,
            queued=model.queued,
        )
        for name, model in sorted(sums.items())
    ]


class Width(IntEnum):
    """The spans of time, in seconds; each starts at a multiple of itself since 1970."""

    MINUTE = 60
    HOUR = 3600

    def begin_us(self, at_us: int) -> int:
        """The start of the span that holds a moment."""
        return at_us - at_us % (self.value * 1_000_000)


class Gauge(Struct, frozen=True, array_like=True):
    """A sampled value: how often it was sampled, the smallest and largest, and the sum of all."""

    samples: int
    low: float
    high: float
    total: float

    @property
    def mean(self) -> float:
        """The mean over the samples, each weighing the same."""
        return self.total / self.samples

    @classmethod
    def of(cls, value: float) -> "Gauge":
        """One sample."""
        return cls(1, value, value, value)

    def merge(self, other: "Gauge") -> "Gauge":
        """Both together."""
        return Gauge(
            self.samples + other.samples,
            min(self.low, other.low),
            max(self.high, other.high),
            self.total + other.total,
        )


class QueueSpan(Struct, frozen=True, tag=101, array_like=True):
    """Samples of one model's queue."""

    model: str
    tasks: Gauge
    queued_work_us: Gauge
    oldest_age_us: Gauge


class UtilisationSpan(Struct, frozen=True, tag=102, array_like=True):
    """Samples of one metric; `value` is None where the machine never could tell, `unknown` counts those."""

    metric: str
    unit: str
    value: Gauge | None
    unknown: int


class DifferenceSpan(Struct, frozen=True, tag=103, array_like=True):
    """Comparisons of one model's served outputs."""

    model: str
    difference: Gauge
    sensitivity: Gauge


SpanData = TaskCounters | LatencyHistogram | StepTimings | QueueSpan | UtilisationSpan | DifferenceSpan


ROLLED_KINDS: Final = (
    RowKind.TASK_COUNTERS,
    RowKind.LATENCY_HISTOGRAM,
    RowKind.QUEUE_SAMPLE,
    RowKind.STEP_TIMINGS,
    RowKind.UTILISATION,
    RowKind.DIFFERENCE_SAMPLE,
)
"""The kinds of rows that are rolled up."""


class SpanKey(NamedTuple):
    """What is rolled up together: rows of one kind and subject in one span of time."""

    begin_us: int
    kind: RowKind
    subject: str


class RollupSpan(NamedTuple):
    """A rolled-up row: its key, how many telemetry rows it stands for, and what they say."""

    key: SpanKey
    rows: int
    data: SpanData


def span_of(at_us: int, kind: RowKind, row: RowData, width: Width) -> RollupSpan:
    """One row as a span of its own.

    Raises:
        KeyError: rows of this kind are not rolled up.
    """
    data = _as_span(row)
    return RollupSpan(SpanKey(width.begin_us(at_us), kind, _subject(data)), 1, data)


def widen(span: RollupSpan, width: Width) -> RollupSpan:
    """The same in a wider span of time."""
    return span._replace(key=span.key._replace(begin_us=width.begin_us(span.key.begin_us)))


def merge(spans: Iterable[RollupSpan]) -> dict[SpanKey, RollupSpan]:
    """One span per key."""
    merged: dict[SpanKey, RollupSpan] = {}
    for span in spans:
        found = merged.get(span.key)
        if found is None:
            merged[span.key] = span
        else:
            merged[span.key] = RollupSpan(span.key, found.rows + span.rows, _together(found.data, span.data))
    return merged


def encode_data(data: SpanData) -> bytes:
    """What the store keeps."""
    return _ENCODER.encode(data)


def decode_data(body: bytes) -> SpanData:
    """What `encode_data` wrote."""
    data: SpanData = _DECODER.decode(body)
    return data


_ENCODER: Final = msgspec.msgpack.Encoder()

_DECODER: Final = msgspec.msgpack.Decoder(SpanData)


def _as_span(row: RowData) -> SpanData:
    match row:
        case TaskCounters() | StepTimings():
            return row
        case LatencyHistogram():
            return msgspec.structs.replace(row, buckets=_buckets(row.buckets))
        case QueueSample():
            return QueueSpan(
                row.model,
                Gauge.of(row.tasks),
                Gauge.of(row.queued_work_us),
                Gauge.of(row.oldest_age_us),
            )
        case Utilisation():
            known = Gauge.of(row.value) if row.value is not None else None
            return UtilisationSpan(row.metric, row.unit, known, int(known is None))
        case DifferenceSample():
            return DifferenceSpan(row.model, Gauge.of(row.difference), Gauge.of(row.sensitivity))
    raise KeyError(type(row).__name__)


def _subject(data: SpanData) -> str:
    match data:
        case StepTimings():
            return f"{data.plan} {data.combined_block} {data.mask}"
        case UtilisationSpan():
            return f"{data.metric} {data.unit}"
        case _:
            return data.model


def _together(one: Any, other: Any) -> SpanData:
    """Two of one kind and subject."""
    match one:
        case TaskCounters():
            counts = (_sum(getattr(one, name), getattr(other, name)) for name in _COUNTS)
            return TaskCounters(one.model, *counts)
        case LatencyHistogram():
            return LatencyHistogram(
                one.model,
                _sum(one.count, other.count),
                _sum(one.sum_us, other.sum_us),
                max(one.max_us, other.max_us),
                _buckets((*one.buckets, *other.buckets)),
            )
        case StepTimings():
            return StepTimings(
                one.plan,
                one.combined_block,
                one.mask,
                _sum(one.count, other.count),
                _sum(one.sum_us, other.sum_us),
                max(one.max_us, other.max_us),
            )
        case QueueSpan():
            return QueueSpan(
                one.model,
                one.tasks.merge(other.tasks),
                one.queued_work_us.merge(other.queued_work_us),
                one.oldest_age_us.merge(other.oldest_age_us),
            )
        case UtilisationSpan():
            known = [gauge for gauge in (one.value, other.value) if gauge is not None]
            value = known[0].merge(known[1]) if len(known) == 2 else known[0] if known else None
            return UtilisationSpan(one.metric, one.unit, value, one.unknown + other.unknown)
    return DifferenceSpan(
        one.model,
        one.difference.merge(other.difference),
        one.sensitivity.merge(other.sensitivity),
    )


_COUNTS: Final = TaskCounters.__struct_fields__[1:]


def _sum(one: int, other: int) -> int:
    """A device that lies must not make a span that cannot be read."""
    return min(one + other, MOST)


def _buckets(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Counts by bucket, added up; a bucket beyond the last is the last."""
    counts: dict[int, int] = {}
    for bucket, count in pairs:
        known = min(bucket, len(LATENCY_BOUNDS_US) - 1)
        counts[known] = _sum(counts.get(known, 0), count)
    return tuple(sorted(counts.items()))
