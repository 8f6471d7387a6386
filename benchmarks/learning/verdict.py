"""What the rows of one pair say of the learned policy and of the planner. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stageloom.planner.tournament.score import LEAST_SPREAD

LEARNED: Final = ("maddpg", "planner")
"""Rows of what was trained."""

LEARNED_PLAN: Final = "maddpg's best plan"
"""What the planner's row is `of` where it chose a plan of a training."""

SEED: Final = "seed"
"""Rows of unlearned candidates; a training starts with the best
(`stageloom.planner.learning.maddpg.candidates`)."""

Row = Mapping[str, Any]


def compared(one: Row, other: Row) -> int:
    """1 where the first is ahead, -1 where it is behind, else 0.

    Throughput decides. Where it is equal within spread, the p99 does. The spread of two rows is the larger
    of their spreads over arrivals, but at least half a per cent: less is no difference, whatever the seeds
    say (`stageloom.planner.tournament.score`).
    """
    return _ahead(one, other, "throughput_per_s", "throughput_spread") or _ahead(
        other, one, "p99_ms", "p99_spread_ms"
    )


def _ahead(one: Row, other: Row, name: str, spread: str) -> int:
    """1 where the first has more of it beyond the spread, -1 where it has less, else 0."""
    gain = one[name] - other[name]
    if abs(gain) <= max(one[spread], other[spread], LEAST_SPREAD * other[name]):
        return 0
    return 1 if gain > 0.0 else -1


def best_rival(rows: Sequence[Row]) -> Row:
    """Of the rivals whose throughput is level with the highest, the one with the shortest p99."""
    return _best([row for row in rows if row["planner"] not in (*LEARNED, SEED)])


def best_seed(rows: Sequence[Row]) -> Row | None:
    """The best unlearned candidate, by the same rule; None in files that were written without them."""
    seeds = [row for row in rows if row["planner"] == SEED]
    return _best(seeds) if seeds else None


def best_learned(rows: Sequence[Row]) -> Row | None:
    """The better of the policy alone and of the best learned plan, where the planner chose that one.

    None where nothing was trained.
    """
    learned = [
        row
        for row in rows
        if row["planner"] == "maddpg" or (row["planner"] == "planner" and row.get("of") == LEARNED_PLAN)
    ]
    return _best(learned) if learned else None


def _best(rows: Sequence[Row]) -> Row:
    top = max(rows, key=lambda row: float(row["throughput_per_s"]))
    level = [row for row in rows if not _ahead(top, row, "throughput_per_s", "throughput_spread")]
    return min(level, key=lambda row: float(row["p99_ms"]))


def over(one: Row, other: Row) -> tuple[float, float]:
    """Throughput and p99 of the first row over the second's."""
    return (
        round(one["throughput_per_s"] / other["throughput_per_s"], 4),
        round(one["p99_ms"] / other["p99_ms"], 4) if other["p99_ms"] else 1.0,
    )


def verdict(rows: Sequence[Row]) -> dict[str, float | None]:
    """Policy and planner beside the best rival and the best seed; growth of the queues' variance.

    `*_holds` is 1 where the row is level with the best rival or ahead. `learned_over_best_seed` is what
    learning gained; `learned_ahead_of_best_seed` is 1 where that is more than spread. What needs a row that
    is not there is left out. `synchronised_variance_growth_per_s` is None for one model, which has nothing to
    wait for.
    """
    rival, seed, learned = best_rival(rows), best_seed(rows), best_learned(rows)
    by_name = {row["planner"]: row for row in rows}
    found: dict[str, float | None] = {}
    for name in LEARNED:
        if (row := by_name.get(name)) is not None:
            found[f"{name}_over_best_rival"], found[f"{name}_p99_over_best_rival"] = over(row, rival)
            found[f"{name}_holds"] = float(compared(row, rival) >= 0)
    if seed is not None:
        found["seed_over_best_rival"], found["seed_p99_over_best_rival"] = over(seed, rival)
    if seed is not None and learned is not None:
        found["learned_over_best_seed"], found["learned_p99_over_best_seed"] = over(learned, seed)
        found["learned_ahead_of_best_seed"] = float(compared(learned, seed) > 0)
    joint = by_name.get("synchronised")
    if "maddpg" in by_name:
        found["maddpg_variance_growth_per_s"] = by_name["maddpg"]["variance_growth_per_s"]
    found["synchronised_variance_growth_per_s"] = joint["variance_growth_per_s"] if joint else None
    return found
