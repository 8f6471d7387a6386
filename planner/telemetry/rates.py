"""Throughput, latency quantiles and queue length of each model over a short window."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ModelRate
from stageloom.shared.messages.base import MOST_REAL
from stageloom.shared.messages.telemetry import (
    LatencyHistogram,
    QueueSample,
    Row,
    RowKind,
    TaskCounters,
    quantile_us,
)

KINDS = (RowKind.TASK_COUNTERS, RowKind.LATENCY_HISTOGRAM, RowKind.QUEUE_SAMPLE)
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
