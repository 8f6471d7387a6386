"""Error rates of the whole trial over 1,000 seeds with the measured noise; docs/trial.md states them."""

import re
from collections.abc import Sequence

import pytest

from benchmarks.trial import CASES, SEEDS, outcomes, try_plan
from stageloom.shared.engine.trial import TrialConfig, TrialResult, Verdict
from tests.architecture.sources import ROOT

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def trials() -> dict[str, list[TrialResult]]:
    return {case: [try_plan(seed, ratio) for seed in range(SEEDS)] for case, ratio in CASES.items()}


def share(results: Sequence[TrialResult], verdict: Verdict) -> float:
    return sum(result.verdict is verdict for result in results) / len(results)


@pytest.mark.promise("trial-statistics-pair-gives")
def test_a_plan_against_itself_gives_no_gain_in_95_of_100_trials(
    trials: dict[str, list[TrialResult]],
) -> None:
    assert share(trials["same"], Verdict.NO_GAIN) >= 0.95
    assert len(trials["same"]) == 1000


@pytest.mark.promise("trial-statistics-pair-gives")
def test_a_plan_5_percent_better_commits_in_90_of_100_trials(trials: dict[str, list[TrialResult]]) -> None:
    assert CASES["better"] == 1.05
    assert share(trials["better"], Verdict.COMMIT) >= 0.9
    assert max(result.seconds_s for result in trials["better"]) <= 60.0


@pytest.mark.promise("trial-statistics-pair-gives")
def test_a_plan_5_percent_worse_is_never_committed(trials: dict[str, list[TrialResult]]) -> None:
    assert CASES["worse"] == 0.95
    assert share(trials["worse"], Verdict.COMMIT) == 0.0


def test_with_its_borders_at_0_the_simulated_test_decides_between_equal_plans() -> None:
    """The simulation can fail: borders and confidence make looks after every pair harmless."""
    careless = [try_plan(seed, 1.0, config=TrialConfig(gain=0.0, confidence=0.95)) for seed in range(100)]
    assert share(careless, Verdict.NO_GAIN) < 0.8
    assert share(careless, Verdict.COMMIT) > 0.05


def test_the_page_states_what_the_simulation_gives(trials: dict[str, list[TrialResult]]) -> None:
    page = (ROOT / "docs/trial.md").read_text(encoding="utf-8")
    for case, results in trials.items():
        row = re.search(rf"^\| normal \| {case} \|(.*)\|$", page, re.MULTILINE)
        assert row is not None, case
        found = outcomes(results, CASES[case])
        stated = [float(cell.strip().removesuffix("%")) for cell in row[1].split("|")]
        shares = [100 * found[f"{name}_share"] for name in ("commit", "no_gain", "reject")]
        assert stated[:3] == pytest.approx(shares, abs=0.5), case
        medians = [found[name] for name in ("pairs_median", "seconds_median_s", "ratio_median")]
        assert stated[3:6] == pytest.approx(medians, rel=0.1), case
        assert stated[6] == pytest.approx(100 * found["interval_holds_share"], abs=0.5), case
