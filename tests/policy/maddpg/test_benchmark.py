"""The benchmark of the forward pass measures what it says."""

from benchmarks.policy import space, time_forward
from benchmarks.runner import Report


def test_it_times_the_papers_three_models() -> None:
    assert space().bins == 30 and space().state_width == 10 * (3 + 30)
    report = Report("policy")
    time_forward(report, 20)
    assert 0.0 < report.figures["forward_p50_ms"] <= report.figures["forward_p99_ms"]
    assert report.figures["decide_p50_ms"] > 0.0
