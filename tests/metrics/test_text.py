"""The text that Prometheus reads, parsed again with prometheus-client's own parser."""

import sys
from bisect import bisect_left
from itertools import accumulate
from random import Random

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from stageloom.shared.errors import UnavailableError
from stageloom.shared.metrics import SECONDS, CountedSeconds, MetricKind, MetricSpec, Samples

TIMES = MetricSpec("try_seconds", MetricKind.HISTOGRAM, "Times.", ("model",))
ENDS = MetricSpec("try_ends_total", MetricKind.COUNTER, "Ends.", ("model", "outcome"))
LEVEL = MetricSpec("try_level", MetricKind.GAUGE, "Level.")


def _counted(seconds: list[float]) -> CountedSeconds:
    counted = CountedSeconds.empty()
    for one in seconds:
        counted.add(one)
    return counted


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    rng = Random(3)
    seconds = [10 ** rng.uniform(-6, 3) for _ in range(500)] + list(SECONDS)
    told = Samples()
    told.add(TIMES, _counted(seconds), "a")
    [family] = parse(told.render("")[0].decode())
    buckets = {float(one.labels["le"]): one.value for one in family.samples if one.name.endswith("_bucket")}
    assert list(buckets) == [*SECONDS, float("inf")]
    assert buckets == {bound: sum(one <= bound for one in seconds) for bound in buckets}
    others = {one.name: one.value for one in family.samples if "le" not in one.labels}
    assert others["try_seconds_count"] == len(seconds)
    assert others["try_seconds_sum"] == pytest.approx(sum(seconds))


def test_time_before_zero_counts_as_none() -> None:
    counted = _counted([-1.0, 0.0])
    assert (counted.counts[0], sum(counted.counts), counted.sum_s) == (2, 2, 0.0)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0,text/plain;q=0.3"])
def test_text_says_what_was_added_in_both_forms(accept: str) -> None:
    told = Samples()
    odd = 'a"b\\c\nd'
    told.add(ENDS, 3, odd, "completed")
    told.add(ENDS, 0, odd, "failed")
    told.add(LEVEL, True)
    body, form = told.render(accept)
    assert form.startswith("application/openmetrics-text" if accept else "text/plain; version=0.0.4")
    families = {family.name: family for family in (parse_open if accept else parse)(body.decode())}
    assert {name: (one.type, one.documentation) for name, one in families.items()} == {
        "try_ends": ("counter", "Ends."),
        "try_level": ("gauge", "Level."),
    }
    assert [(one.labels, one.value) for one in families["try_ends"].samples] == [
        ({"model": odd, "outcome": "completed"}, 3.0),
        ({"model": odd, "outcome": "failed"}, 0.0),
    ]
    assert [one.value for one in families["try_level"].samples] == [1.0]


def test_value_under_other_labels_than_the_metric_has_is_a_mistake() -> None:
    for spec, value, labels in ((ENDS, 1.0, ("a",)), (TIMES, 1.0, ("a",)), (LEVEL, _counted([]), ())):
        with pytest.raises(AssertionError):
            Samples().add(spec, value, *labels)


def test_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnavailableError, match=r"prometheus_client .*stageloom\[metrics\]"):
        Samples().render("")


def test_quantile_from_buckets_is_within_a_factor_of_two() -> None:
    rng = Random(5)
    seconds = sorted(10 ** rng.uniform(-4, 1) for _ in range(2000))
    so_far = list(accumulate(_counted(seconds).counts))
    for share in (0.5, 0.95, 0.99):
        exact, at = seconds[int(share * len(seconds))], bisect_left(so_far, share * len(seconds))
        assert SECONDS[at - 1] <= exact <= SECONDS[at] * 1.01
