"""Telemetry as figures: the books of what was sent, rates of models, and rows rolled up by time. Pure.

A rolled-up row says what many telemetry rows of one subject in one span of time say together. Counters,
histograms and step timings add up; samples keep their number, smallest, mean and largest. Merging is
associative and commutative, so rows may be rolled up in any order, in parts, and late: minutes of rows, and
hours of minutes, give what the hours of all rows give.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from stageloom.planner.schema.service import ModelRate
from stageloom.shared.ids import DeviceId
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


def model_rates(device: DeviceId, rows: Sequence[Row]) -> list[ModelRate]:
    """One entry per model, by name; `rows` oldest first. A model without a finished interval has rate 0."""
    covered_us = _covered_us(rows)
    counters: defaultdict[str, list[TaskCounters]] = defaultdict(list)
    histograms: defaultdict[str, list[LatencyHistogram]] = defaultdict(list)
    queued: dict[str, int] = {}
    for row in rows:
        if isinstance(row.data, TaskCounters):
            counters[row.data.model].append(row.data)
        elif isinstance(row.data, LatencyHistogram):
            histograms[row.data.model].append(row.data)
        elif isinstance(row.data, QueueSample):
            queued[row.data.model] = row.data.tasks
    return [
        ModelRate(
            device=device,
            model=name,
            throughput_per_s=_completed_per_s(counters[name], covered_us),
            latency_p50_ms=quantile_us(histograms[name], 0.50) / 1e3,
            latency_p99_ms=quantile_us(histograms[name], 0.99) / 1e3,
            queued=queued.get(name, 0),
        )
        for name in sorted({*counters, *histograms, *queued})
    ]


def _covered_us(rows: Sequence[Row]) -> int:
    """The time that the device counted in: from its first interval's begin to its last one's end.

    No counters are sent of an interval in which a model had no task, so their own intervals do not add up to
    it. Queues are sampled all the same: as many whole intervals as their samples reach further count, too.
    """
    counted = [(row.at_us, row.data.interval_us) for row in rows if isinstance(row.data, TaskCounters)]
    length_us = max((interval_us for _, interval_us in counted), default=0)
    if not length_us:
        return 0
    begin_us = min(at_us - interval_us for at_us, interval_us in counted)
    end_us = max(at_us for at_us, _ in counted)
    before_us = max(begin_us - min(row.at_us for row in rows), 0)
    after_us = max(row.at_us for row in rows) - end_us
    idle = before_us // length_us + after_us // length_us
    return end_us - begin_us + idle * length_us


def _completed_per_s(counters: Sequence[TaskCounters], covered_us: int) -> float:
    completed = sum(one.completed for one in counters)
    return min(completed * 1e6 / covered_us, MOST_REAL) if covered_us else 0.0


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


SpanKey: TypeAlias = tuple[int, RowKind, str]
"""What is rolled up together: rows of one kind and subject in one span of time, which begins then."""


class UnreadableData(Struct, frozen=True, array_like=True):
    """A row that is kept as its bytes, and why nobody reads them."""

    reason: str
    size_bytes: int


class TelemetryEntry(NamedTuple):
    """One row, or what `rows` of them say of a subject in `width_s` seconds from `at_us` on (0: it is a row).

    A row that cannot be read is of kind UNREADABLE, whatever it was stored as.
    """

    at_us: int
    width_s: int
    kind: RowKind
    rows: int
    data: RowData | SpanData | UnreadableData
    subject: str = ""  # of a span

    @property
    def key(self) -> SpanKey:
        """What it is rolled up with."""
        return self.at_us, self.kind, self.subject


def span_of(at_us: int, kind: RowKind, row: RowData, width: Width) -> TelemetryEntry:
    """One row as a span of its own.

    Raises:
        KeyError: rows of this kind are not rolled up.
    """
    data = _as_span(row)
    return TelemetryEntry(width.begin_us(at_us), width.value, kind, 1, data, _subject(data))


def widen(span: TelemetryEntry, width: Width) -> TelemetryEntry:
    """The same in a wider span of time."""
    return span._replace(at_us=width.begin_us(span.at_us), width_s=width.value)


def merge(spans: Iterable[TelemetryEntry]) -> dict[SpanKey, TelemetryEntry]:
    """One span per key; they are of one width."""
    merged: dict[SpanKey, TelemetryEntry] = {}
    for span in spans:
        found = merged.get(span.key)
        if found is not None:
            span = span._replace(rows=found.rows + span.rows, data=together((found.data, span.data)))
        merged[span.key] = span
    return merged


def encode_data(data: msgspec.Struct) -> bytes:
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


def together(rows: Sequence[Any]) -> Any:
    """What rows or spans of one kind and subject say together, as one of that kind."""
    first = rows[0]
    match first:
        case TaskCounters():
            return TaskCounters(first.model, *(_sum(rows, name) for name in _COUNTS))
        case LatencyHistogram():
            buckets = _buckets(pair for row in rows for pair in row.buckets)
            longest_us = max(row.max_us for row in rows)
            return LatencyHistogram(
                first.model, _sum(rows, "count"), _sum(rows, "sum_us"), longest_us, buckets
            )
        case StepTimings():
            longest_us = max(row.max_us for row in rows)
            of = (first.plan, first.combined_block, first.mask)
            return StepTimings(*of, _sum(rows, "count"), _sum(rows, "sum_us"), longest_us)
        case UtilisationSpan():
            known = [row.value for row in rows if row.value is not None]
            value = reduce(Gauge.merge, known) if known else None
            unknown = sum(row.unknown for row in rows)
            return UtilisationSpan(first.metric, first.unit, value, unknown)
    gauges = (
        reduce(Gauge.merge, (getattr(row, name) for row in rows)) for name in first.__struct_fields__[1:]
    )
    return type(first)(first.model, *gauges)


_COUNTS: Final = TaskCounters.__struct_fields__[1:]


def _sum(rows: Sequence[Any], name: str) -> int:
    """A device that lies must not make a span that cannot be read."""
    total: int = sum(getattr(row, name) for row in rows)
    return min(total, MOST)


def _buckets(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Counts by bucket, added up; a bucket beyond the last is the last."""
    counts: dict[int, int] = {}
    for bucket, count in pairs:
        known = min(bucket, len(LATENCY_BOUNDS_US) - 1)
        counts[known] = min(counts.get(known, 0) + count, MOST)
    return tuple(sorted(counts.items()))
