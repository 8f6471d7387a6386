"""The benchmark of the forward pass measures what it says."""

from benchmarks.policy import compare_and_time, space
from benchmarks.runner import Report


def test_it_times_the_papers_three_models_and_compares_before() -> None:
    assert space().bins == 30 and space().state_width == 10 * (3 + 30)
    report = Report("policy")
    compare_and_time(report, 20)
    assert report.figures["largest_difference"] < 1e-5
    assert 0.0 < report.figures["forward_p50_ms"] <= report.figures["forward_p99_ms"]
    assert report.figures["decide_p50_ms"] > 0.0
