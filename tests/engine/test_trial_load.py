"""The whole trial on a simulated queue: arrivals with deadlines, one wide lane against two narrow ones."""

import pytest

from benchmarks.trial_load import NARROW, WIDE_LANE, Shape, try_under_load
from stageloom.shared.engine.evidence import Figure
from stageloom.shared.engine.trial import TrialConfig, TrialResult, Verdict

WORSE = Shape(2, 1.05)


def verdicts(load: float, control: Shape, candidate: Shape, seeds: int) -> list[TrialResult]:
    return [try_under_load(seed, load, control, candidate) for seed in range(seeds)]


@pytest.mark.parametrize("load", [0.25, 0.9])
def test_a_plan_against_itself_gives_no_gain_under_load(load: float) -> None:
    results = verdicts(load, NARROW, NARROW, 20)
    assert sum(result.verdict is Verdict.NO_GAIN for result in results) >= 19


@pytest.mark.more
def test_with_the_confidence_of_one_look_it_would_often_be_decided_on() -> None:
    """The simulation can fail."""
    loose = TrialConfig(confidence=0.95, gain=0.0)
    results = [try_under_load(seed, 0.9, NARROW, NARROW, loose) for seed in range(20)]
    assert sum(result.verdict is Verdict.NO_GAIN for result in results) <= 16


@pytest.mark.more
@pytest.mark.parametrize("load", [0.25, 0.9, 1.1])
def test_a_plan_5_percent_worse_is_never_committed_under_load(load: float) -> None:
    assert all(result.verdict is not Verdict.COMMIT for result in verdicts(load, NARROW, WORSE, 20))


def test_by_night_the_wide_lane_wins_by_latency_and_by_day_the_narrow_ones_win() -> None:
    night = verdicts(0.25, NARROW, WIDE_LANE, 10)
    assert {result.verdict for result in night} == {Verdict.COMMIT}
    assert all((result.latency_ratio or 0.0) > 1.1 for result in night)
    assert {result.verdict for result in verdicts(0.25, WIDE_LANE, NARROW, 10)} == {Verdict.REJECT}
    assert {result.verdict for result in verdicts(0.9, WIDE_LANE, NARROW, 10)} == {Verdict.COMMIT}
    by_day = verdicts(0.9, NARROW, WIDE_LANE, 10)
    assert {result.verdict for result in by_day} == {Verdict.REJECT}
    assert {result.figure for result in night + by_day} <= {Figure.LATENCY, Figure.BUSY}
