"""The verdict over a pair's rows: throughput first, p99 where that is equal, both within spread."""

from typing import Any

import pytest

from benchmarks.learning.verdict import best_rival, compared, verdict


def row(planner: str, throughput: float, p99: float, *, spreads: tuple[float, float] = (1.0, 5.0)) -> Any:
    return {
        "planner": planner,
        "throughput_per_s": throughput,
        "throughput_spread": spreads[0],
        "p99_ms": p99,
        "p99_spread_ms": spreads[1],
        "variance_growth_per_s": throughput / 100.0,
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
    assert best_rival(rows)["planner"] == "b"
    found = verdict(rows)
    assert (found["maddpg_holds"], found["planner_holds"]) == (0.0, 1.0)
    assert found["planner_p99_over_best_rival"] == pytest.approx(1.1)


def test_growth_stands_beside_the_joint_graphs_where_there_is_one() -> None:
    rows = [row("maddpg", 100.0, 50.0), row("planner", 100.0, 50.0), row("a", 100.0, 50.0)]
    assert verdict(rows)["synchronised_variance_growth_per_s"] is None
    found = verdict([*rows, row("synchronised", 40.0, 900.0)])
    assert found["synchronised_variance_growth_per_s"] == pytest.approx(0.4)
    assert found["maddpg_variance_growth_per_s"] == pytest.approx(1.0)
