"""The verdict over a pair's rows: throughput first, p99 where that is equal, both within spread."""

from typing import Any

import pytest

from benchmarks.learning.table import (
    LEARNED_PLAN,
    best_learned,
    best_rival,
    best_seed,
    compared,
    verdict,
)


def row(planner: str, throughput: float, p99: float, *, spreads: tuple[float, float] = (1.0, 5.0)) -> Any:
    return {
        "planner": planner,
        "throughput_per_s": throughput,
        "throughput_spread": spreads[0],
        "p99_ms": p99,
        "p99_spread_ms": spreads[1],
    }


@pytest.mark.parametrize(
    ("throughput", "p99", "who"),
    [
        (102.0, 900.0, 1),  # more than the spread: the p99 does not count
        (101.0, 60.0, 1),
        (101.0, 105.0, 0),
        (99.0, 106.0, -1),
        (98.0, 1.0, -1),
    ],
)
def test_throughput_decides_and_p99_where_it_is_equal_within_spread(
    throughput: float, p99: float, who: int
) -> None:
    one, other = row("one", throughput, p99), row("other", 100.0, 100.0)
    assert compared(one, other) == who == -compared(other, one)


def test_the_larger_spread_counts() -> None:
    sure, unsure = (
        row("sure", 100.0, 100.0, spreads=(0.0, 0.0)),
        row("unsure", 90.0, 50.0, spreads=(10.0, 0.0)),
    )
    assert compared(unsure, sure) == 1


def test_less_than_half_a_per_cent_is_no_difference_even_where_all_seeds_agree() -> None:
    one, other = (row(name, 100.0, 100.0, spreads=(0.0, 0.0)) for name in ("one", "other"))
    assert compared({**one, "throughput_per_s": 100.4}, other) == 0
    assert compared({**one, "throughput_per_s": 99.6, "p99_ms": 99.0}, other) == 1
    assert compared({**one, "throughput_per_s": 100.6, "p99_ms": 900.0}, other) == 1


def test_policy_and_planner_are_no_rivals_of_themselves() -> None:
    rows = [
        row("a", 100.0, 50.0),
        row("b", 100.5, 40.0),
        row("maddpg", 98.0, 1.0),
        row("planner", 101.0, 44.0),
    ]
    rival = best_rival(rows)
    assert rival is not None and rival["planner"] == "b"
    found = verdict(rows)
    assert (found["maddpg_holds"], found["planner_holds"]) == (0.0, 1.0)
    assert found["planner_p99_over_best_rival"] == pytest.approx(1.1)


def seeded() -> list[Any]:
    """A rival, two seeds of which the second is better, and a policy that is better still."""
    seeds = [
        {**row("seed", throughput, 40.0), "of": name} for name, throughput in (("a", 101.0), ("b", 110.0))
    ]
    planner = {**row("planner", 112.0, 90.0), "of": LEARNED_PLAN}
    return [row("rival", 100.0, 50.0), *seeds, row("maddpg", 109.9, 60.0), planner]


@pytest.mark.promise("learning-gains-counted-best")
def test_what_learning_gains_is_counted_from_the_best_unlearned_seed() -> None:
    rows = seeded()
    rival, seed, learned = best_rival(rows), best_seed(rows), best_learned(rows)
    assert rival is not None and rival["planner"] == "rival"
    assert seed is not None and seed["of"] == "b"
    assert learned is not None and learned["planner"] == "planner"
    found = verdict(rows)
    assert found["seed_over_best_rival"] == pytest.approx(1.1)
    assert found["learned_over_best_seed"] == pytest.approx(1.0182)
    assert found["learned_ahead_of_best_seed"] == 1.0


def test_a_planner_that_chose_a_rival_learned_nothing() -> None:
    rows = [{**one, "of": "rival"} if one["planner"] == "planner" else one for one in seeded()]
    learned = best_learned(rows)
    assert learned is not None and learned["planner"] == "maddpg"
    assert verdict(rows)["learned_ahead_of_best_seed"] == 0.0


def test_rows_without_a_training_have_no_verdict_on_learning() -> None:
    rows = [one for one in seeded() if one["planner"] in ("rival", "seed")]
    assert best_learned(rows) is None
    assert set(verdict(rows)) == {"seed_over_best_rival", "seed_p99_over_best_rival"}
