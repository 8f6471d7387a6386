"""The refinement's benchmark: evaluations are counted, both sides get as many, and rows say who won."""

import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.refined import Listed, best_of_list, compared, device_row, tournament
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, Scenario
from stageloom.planner.tournament.score import Score
from stageloom.planner.twin.arrivals import Poisson
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.plan import Plan
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search
from tests.search.test_rivals import LEFT, RIGHT, choice
from tests.twin.cases import device

TOY = device(launch_s=2e-2)
COSTS = CostTable(rates=TOY.rates())


@pytest.fixture
def listed() -> Listed:
    """Two models under more than the device serves one operator after another."""
    candidates = plan_candidates(
        (choice(LEFT), choice(RIGHT)), COSTS, policy_names=["sequential", "instances"]
    )
    return Listed(
        device="toy",
        scenario=Scenario(
            times=StepTimes(TOY, COSTS),
            arrivals={"left": Poisson(rate_per_s=8.0), "right": Poisson(rate_per_s=8.0)},
            graphs=dict((LEFT, RIGHT)),
            service_s=(84e-3, 84e-3),
        ),
        flooded_per_s=100.0,
        candidates=tuple(replace(one, ready=run_search(one.job, time.monotonic)) for one in candidates),
        costs=COSTS,
    )


def test_the_budget_is_the_list_and_so_many_neighbours(listed: Listed) -> None:
    found = tournament(listed, 1, 5).tournament
    assert (found.done, found.left, found.neighbours) == (len(listed.candidates), 0, 5)
    assert tournament(listed, 1, 0).tournament.neighbours == 0


def test_without_refinement_as_many_evaluations_go_to_further_arrivals(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evaluation has three seeds; the finalists' own come on top, as for the refined list."""
    spent: list[int] = []
    evaluate = Scenario.evaluate

    def counted(self: Scenario, plan: Plan, settings: EvaluationSettings) -> Score:
        spent.append(len(settings.seeds))
        return evaluate(self, plan, settings)

    found = {number: score for number, (_, score) in tournament(listed, 1, 0).tournament.evaluated.items()}
    monkeypatch.setattr(Scenario, "evaluate", counted)
    assert best_of_list(listed, found, 1, 8) in found
    assert len(spent) == 4 and sum(spent) == 3 * 4 + 3 * 8


def test_equal_seeds_give_equal_rows_of_both_answers(listed: Listed) -> None:
    first, again = (
        [{name: value for name, value in row.items() if name != "cpu_s"} for row in compared(listed, 1, 3)]
        for _ in range(2)
    )
    assert first == again
    assert [row["answer"] for row in first] == ["listed", "refined"]


def _row(seed: int, answer: str, throughput: float) -> dict[str, Any]:
    return {
        "device": "toy",
        "seed": seed,
        "listed": 4,
        "neighbours": 8,
        "answer": answer,
        "of": f"{answer} 1 of ios, whole",
        "throughput_per_s": throughput,
        "p99_ms": 10.0,
        "utilisation": 1.0,
        "queue_variance": 0.0,
        "variance_growth_per_s": 0.0,
        "met": 1.0,
    }


@pytest.mark.parametrize(
    ("refined", "ratio", "by", "pays"),
    [
        ((110.0, 121.0), (1.1 * 1.21) ** 0.5, "throughput", True),
        ((90.0, 80.0), (0.9 * 0.8) ** 0.5, "throughput", False),
        ((110.0, 99.0), 1.0, "p99", False),  # level within spread, and the p99s are equal
    ],
)
def test_it_pays_where_the_whole_interval_is_above_one(
    refined: tuple[float, float], ratio: float, by: str, pays: bool
) -> None:
    rows = [_row(seed, "listed", 100.0) for seed in (1, 2)]
    rows += [_row(seed, "refined", throughput) for seed, throughput in zip((1, 2), refined, strict=True)]
    found = device_row(rows)
    assert (found["pays"], found["evaluations"], found["neighbour_was_the_answer"]) == (pays, 12, 2)
    assert (found["refined_over_listed"], found["by"]) == (pytest.approx(ratio, abs=1e-4), by)
