"""Rolling up as a pure function: closed forms, and any order or partition gives the same."""

import random
from collections import Counter

import pytest

from stageloom.planner.store.retention import FACTS
from stageloom.planner.telemetry import (
    ROLLED_KINDS,
    DifferenceSpan,
    Gauge,
    QueueSpan,
    TelemetryEntry,
    UtilisationSpan,
    Width,
    decode_data,
    encode_data,
    merge,
    span_of,
    widen,
)
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    DifferenceSample,
    Event,
    LatencyHistogram,
    QueueSample,
    RowData,
    RowKind,
    StepTimings,
    TaskCounters,
    Utilisation,
    histogram_of,
    quantile_us,
)

MINUTE_US = 60_000_000


def spans(rows: list[tuple[int, RowData]], width: Width) -> list[TelemetryEntry]:
    return [span_of(at_us, KIND_OF[type(data)], data, width) for at_us, data in rows]


def random_rows(seed: int, count: int = 300) -> list[tuple[int, RowData]]:
    """Rows of every kind over three hours; figures are sums of powers of two, so that no sum is rounded."""
    rng = random.Random(seed)

    def one() -> RowData:
        model = rng.choice(["a", "b"])
        choices: list[RowData] = [
            TaskCounters(model, 1_000_000, *(rng.randrange(9) for _ in range(6))),
            histogram_of(model, [rng.randrange(1, 10**6) for _ in range(rng.randrange(5))]),
            QueueSample(model, rng.randrange(9), rng.randrange(10**6), rng.randrange(10**6)),
            StepTimings("p" * 16, rng.randrange(2), rng.randrange(1, 4), 3, rng.randrange(999), 500),
            Utilisation("gpu", rng.choice([None, 0.25, 0.5, 96.0]), "%"),
            DifferenceSample(model, rng.randrange(64) / 64, rng.randrange(64) / 64),
        ]
        return rng.choice(choices)

    return [(rng.randrange(3 * 3600 * 10**6), one()) for _ in range(count)]


def test_a_histogram_of_an_hour_is_that_of_all_its_tasks() -> None:
    rng = random.Random(1)
    latencies = [[rng.randrange(100, 10**6) for _ in range(rng.randrange(40))] for _ in range(60)]
    rows: list[tuple[int, RowData]] = [
        (minute * MINUTE_US, histogram_of("m", some)) for minute, some in enumerate(latencies)
    ]
    (hour,) = merge(spans(rows, Width.HOUR)).values()
    everything = histogram_of("m", [one for some in latencies for one in some])
    assert (hour.key, hour.rows, hour.data) == ((0, RowKind.LATENCY_HISTOGRAM, "m"), 60, everything)
    assert isinstance(hour.data, LatencyHistogram)
    assert quantile_us([hour.data], 0.99) == quantile_us([everything], 0.99)


def test_samples_keep_number_bounds_and_mean() -> None:
    rows: list[tuple[int, RowData]] = [
        (1, QueueSample("m", 2, 20, 5)),
        (2, QueueSample("m", 6, 60, 9)),
        (3, Utilisation("gpu", None, "%")),
        (4, Utilisation("gpu", 30.0, "%")),
        (5, Utilisation("gpu", 50.0, "%")),
        (6, DifferenceSample("m", 0.5, 0.25)),
        (7, DifferenceSample("m", 0.25, 0.75)),
    ]
    found = [span.data for span in merge(spans(rows, Width.MINUTE)).values()]
    assert found == [
        QueueSpan("m", Gauge(2, 2, 6, 8), Gauge(2, 20, 60, 80), Gauge(2, 5, 9, 14)),
        UtilisationSpan("gpu", "%", Gauge(2, 30.0, 50.0, 80.0), 1),
        DifferenceSpan("m", Gauge(2, 0.25, 0.5, 0.75), Gauge(2, 0.25, 0.75, 1.0)),
    ]
    assert Gauge(2, 30.0, 50.0, 80.0).mean == 40.0


def test_a_metric_that_was_never_known_has_no_value() -> None:
    rows: list[tuple[int, RowData]] = [(at, Utilisation("gpu", None)) for at in range(3)]
    (span,) = merge(spans(rows, Width.MINUTE)).values()
    assert span.data == UtilisationSpan("gpu", "", None, 3)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_any_partition_give_the_same(seed: int) -> None:
    rows = random_rows(seed)
    hours = merge(spans(rows, Width.HOUR))
    assert sum(span.rows for span in hours.values()) == len(rows)
    assert {span.kind for span in hours.values()} == set(ROLLED_KINDS)
    rng = random.Random(seed)
    shuffled = rng.sample(spans(rows, Width.MINUTE), len(rows))
    parts = [merge(shuffled[at : at + 17]) for at in range(0, len(shuffled), 17)]
    minutes = merge(span for part in parts for span in part.values())
    assert merge(widen(span, Width.HOUR) for span in minutes.values()) == hours


def test_every_span_survives_its_bytes() -> None:
    for span in merge(spans(random_rows(3), Width.MINUTE)).values():
        assert decode_data(encode_data(span.data)) == span.data


def test_a_device_that_lies_makes_no_span_that_cannot_be_read() -> None:
    most = 2**53
    counters: RowData = TaskCounters("m", most, *[most] * 6)
    histogram: RowData = LatencyHistogram(
        "m", most, most, most, tuple((bucket, most) for bucket in range(5, 10**6, 10_000))
    )
    for row in (counters, histogram, StepTimings("p", 1, 2**62, most, most, most)):
        total = merge(spans([(0, row)] * 5, Width.MINUTE))
        (span,) = merge([*total.values(), *total.values()]).values()
        assert decode_data(encode_data(span.data)) == span.data


def test_what_is_not_a_measurement_is_not_rolled_up() -> None:
    with pytest.raises(KeyError, match="Event"):
        span_of(0, RowKind.EVENT, Event("x"), Width.MINUTE)


def test_every_kind_of_row_is_rolled_up_or_a_fact_or_meant_to_go() -> None:
    profiles = (RowKind.PROFILE_RESULT, RowKind.PART_PROFILE_RESULT)
    gone = (RowKind.STEP_TRACE, *profiles, RowKind.UNREADABLE)
    assert Counter([*ROLLED_KINDS, *FACTS, *gone]) == Counter(RowKind)
