"""What engine_cpu measures: rates that neither a cut nor callers in step bend; choosing is not comparing."""

import json
import random
import subprocess
import sys

import pytest

from benchmarks.engine_cpu import two_groups_us
from benchmarks.ratios import MIN_TASKS, Clocked, Effort, EnginePlan, Setting, Window, compare, measured
from benchmarks.runner import Report
from stageloom.edge_agent.worker.recorder import StepEntry
from tests.executor.models import artifact_of


def _callers(count: int, each_s: float, until_s: float, offset_s: float = 0.0) -> list[tuple[float, float]]:
    """Callers that run tasks of one length without a pause, all in step or each a little later."""
    spans = []
    for caller in range(count):
        at_s = caller * offset_s
        while at_s < until_s:
            spans.append((at_s, at_s + each_s))
            at_s += each_s
    return spans


@pytest.mark.promise("benchmark-s-rate-depends")
@pytest.mark.parametrize("callers", [1, 2, 3])
@pytest.mark.parametrize("offset_s", [0.0, 0.013])
@pytest.mark.parametrize("begin_s", [0.3, 0.47, 0.5])
def test_a_rate_depends_neither_on_the_cut_nor_on_callers_in_step(
    callers: int, offset_s: float, begin_s: float
) -> None:
    spans = _callers(callers, 0.1, 4.0, offset_s)
    random.Random(0).shuffle(spans)
    window = measured(spans, begin_s, begin_s + 1.0, cpu_s=len(spans) * 0.05)
    assert window.rate_per_s == pytest.approx(callers / 0.1)
    assert window.cpu_s == pytest.approx(0.05)


def test_idle_time_within_a_window_counts() -> None:
    spans = [(float(n), n + 0.5) for n in range(10)]
    assert measured(spans, 2.0, 6.0, 1.0).rate_per_s == pytest.approx(1.0)


def test_the_load_goes_on_until_what_ran_at_the_end_has_ended() -> None:
    clocked = Clocked(seconds=0.0, at_a_time=2)
    before_s, behind_s = -1.0, 1e12  # ends long before and long behind any window of this test
    for _ in range(MIN_TASKS - 1):
        assert clocked.ended(before_s - 1.0, before_s)
    assert clocked.ended(before_s - 1.0, before_s), "too few tasks have ended, and none behind the window"
    assert clocked.ended(behind_s - 1.0, behind_s)
    assert not clocked.ended(behind_s - 1.0, behind_s)


@pytest.mark.promise("benchmark-s-rate-depends")
def test_what_was_chosen_is_compared_in_windows_that_chose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Every contestant runs at 10/s, with noise. 2. The choice takes the luckiest of many settings.
    3. The figure is still 1 on average: the luck stays behind."""
    rng = random.Random(3)

    class Played:
        def __init__(self, what: object, *_: object) -> None:
            self.name = str(what)

        def window(self, seconds: float) -> Window:
            return Window(10.0 * rng.uniform(0.8, 1.2), 0.1)

        def close(self) -> None:
            pass

    monkeypatch.setattr("benchmarks.ratios.Direct", Played)
    monkeypatch.setattr("benchmarks.ratios.Engine", Played)
    model = artifact_of("squeezenet")
    report = Report("test")
    settings = [Setting(1, callers, 1) for callers in range(1, 20)]
    plan = EnginePlan(partition="whole", scheduler="sequential", replicas=1, lanes=1)
    effort = Effort(choosing=1, rounds=400, window_s=0.0)
    compare(report, "net", {"net": model}, {"ratio": (plan,)}, effort, settings)
    assert report.figures["ratio.net"] == pytest.approx(1.0, abs=0.05)


def test_the_cost_of_two_groups_is_what_the_longer_one_does_not_explain() -> None:
    groups = ((1, 0, 1.00, 1.03), (2, 1, 1.02, 1.06), (0, 0, 0.5, 1.0))
    step = StepEntry(0, 0, 1, 0, 1, (0,), (0,), False, 0.4, 1.1, groups)
    span_us, cost_us = two_groups_us(step)
    assert span_us == pytest.approx(1e5)
    assert cost_us == pytest.approx(6e4)
    with pytest.raises(RuntimeError, match="1 groups"):
        two_groups_us(StepEntry(0, 0, 1, 0, 1, (0,), (0,), False, 0.4, 1.1, groups[1:]))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_engines_part_of_the_benchmark_prints_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.engine_cpu", "--quick", "--json"]
    only = [word for part in ("steps", "memory", "groups") for word in ("--only", part)]
    done = subprocess.run([*command, *only], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["figures"]
    names = {"step_overhead_p50_us", "step_overhead_p99_us", "trace_overhead_p50_us", "rss_growth_mib"}
    names |= {"two_groups_p50_us", "two_groups_p99_us"}
    assert figures.keys() == names
