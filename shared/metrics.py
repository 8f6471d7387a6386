"""Metrics in Prometheus' forms: what there is to tell as a table, histograms that count, and the text of it.

What counts does so in plain integers. The package prometheus-client is imported when the text is asked for,
so that nobody who is not scraped pays for it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any, Final

from msgspec import Struct

from stageloom.shared.errors import UnavailableError

SECONDS: Final = tuple(20e-6 * 2**step for step in range(23))
"""Upper bounds of buckets, a factor two apart: from 20 us to 84 s; a last bucket takes all above."""

PACKAGE: Final = "prometheus_client"
REMEDY: Final = "pip install 'stageloom[metrics]'"


class CountedSeconds(Struct):
    """Durations in buckets of `SECONDS`: how many, and their sum."""

    counts: list[int]  # [len(SECONDS) + 1], each of its own bucket
    sum_s: float = 0.0

    @classmethod
    def empty(cls) -> "CountedSeconds":
        """Nothing is counted yet."""
        return cls([0] * (len(SECONDS) + 1))

    def add(self, seconds: float) -> None:
        """One more; below zero, which no clock should say, counts as nothing."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        if seconds > 0.0:
            self.sum_s += seconds


class MetricKind(str, Enum):
    """The types of the text format that are used here."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricSpec:
    """One metric. Counters end in `_total`; durations are in seconds and sizes in bytes."""

    name: str
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()


class Samples:
    """What one scrape tells: values of some metrics."""

    def __init__(self) -> None:
        self._values: dict[MetricSpec, list[tuple[tuple[str, ...], float | CountedSeconds]]] = {}

    def add(self, spec: MetricSpec, value: float | CountedSeconds, *labels: str) -> None:
        """The value of a metric under these values of its labels, in their order."""
        assert len(labels) == len(spec.labels), spec.name
        assert isinstance(value, CountedSeconds) == (spec.kind is MetricKind.HISTOGRAM), spec.name
        self._values.setdefault(spec, []).append((labels, value))

    def render(self, accept: str, more: Sequence[Any] = ()) -> tuple[bytes, str]:
        """(body, content type) in the form that a scraper's Accept header asks for.

        `more`: collectors of prometheus-client whose metrics are told, too.

        Raises:
            UnavailableError: prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import choose_encoder
        except ImportError as error:
            raise UnavailableError(
                f"{PACKAGE} cannot be imported, which metrics need", remedy=REMEDY
            ) from error
        registry = CollectorRegistry(auto_describe=False)
        for collector in (self, *more):
            registry.register(collector)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def collect(self) -> Iterable[Any]:
        """As prometheus-client asks its collectors."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        plain = {MetricKind.GAUGE: GaugeMetricFamily, MetricKind.COUNTER: CounterMetricFamily}
        for spec, values in self._values.items():
            make: Any = plain.get(spec.kind, HistogramMetricFamily)
            family = make(spec.name, spec.about, labels=spec.labels)
            for labels, value in values:
                if isinstance(value, CountedSeconds):
                    family.add_metric(labels, _cumulative(value), value.sum_s)
                else:
                    family.add_metric(labels, value)
            yield family


def _cumulative(counted: CountedSeconds) -> list[tuple[str, int]]:
    """(upper bound, how many up to it), as Prometheus has buckets."""
    bounds = [*map(repr, SECONDS), "+Inf"]
    return list(zip(bounds, accumulate(counted.counts), strict=True))
