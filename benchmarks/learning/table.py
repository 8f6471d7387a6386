"""What the rows of a pair say of the learned policy and of the planner."""

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

LOADS: Final = ("paper", "capacity_0.8", "capacity_1.1", "single")

Row = Mapping[str, Any]


def compared(row: Row, other: Row) -> int:
    """1 where the first is ahead, -1 where it is behind, else 0: as `planner.tournament.score` compares.

    Throughput decides; where it is equal within spread, the p99 does. The spread of two rows is the larger
    of their spreads over arrivals, but at least half a per cent.
    """
    return _ahead(row, other, "throughput_per_s", "throughput_spread") or _ahead(
        other, row, "p99_ms", "p99_spread_ms"
    )


def _ahead(row: Row, other: Row, name: str, spread: str) -> int:
    """1 where the first has more of it beyond the spread, -1 where it has less, else 0."""
    gain = row[name] - other[name]
    if abs(gain) <= max(row[spread], other[spread], LEAST_SPREAD * other[name]):
        return 0
    return 1 if gain > 0.0 else -1


def best_rival(rows: Sequence[Row]) -> Row | None:
    return _best([row for row in rows if row["planner"] not in (*LEARNED, SEED)])


def best_seed(rows: Sequence[Row]) -> Row | None:
    """The best unlearned candidate; None in files that were written without them."""
    return _best([row for row in rows if row["planner"] == SEED])


def best_learned(rows: Sequence[Row]) -> Row | None:
    """The better of the policy alone and of the best learned plan, where the planner chose that one."""
    return _best([row for row in rows if row["planner"] == "maddpg" or row.get("of") == LEARNED_PLAN])


def _best(rows: Sequence[Row]) -> Row | None:
    """Of those whose throughput is level with the highest, the one with the shortest p99."""
    if not rows:
        return None
    top = max(rows, key=lambda row: float(row["throughput_per_s"]))
    level = [row for row in rows if not _ahead(top, row, "throughput_per_s", "throughput_spread")]
    return min(level, key=lambda row: float(row["p99_ms"]))


def over(row: Row, other: Row) -> tuple[float, float]:
    """Throughput and p99 of the first row over the second's."""
    return (
        round(row["throughput_per_s"] / other["throughput_per_s"], 4),
        round(row["p99_ms"] / other["p99_ms"], 4) if other["p99_ms"] else 1.0,
    )


def verdict(rows: Sequence[Row]) -> dict[str, float]:
    """Policy and planner beside the best rival and the best seed; what needs a row that is not there is out.

    `*_holds` is 1 where the row is level with the best rival or ahead. `learned_over_best_seed` is what
    learning gained; `learned_ahead_of_best_seed` is 1 where that is more than spread.
    """
    by_name = {row["planner"]: row for row in rows}
    rival, seed, learned = best_rival(rows), best_seed(rows), best_learned(rows)
    beside = {name: (by_name.get(name), "best_rival", rival) for name in LEARNED}
    beside |= {"seed": (seed, "best_rival", rival), "learned": (learned, "best_seed", seed)}
    figures = {}
    for name, (row, other_name, other) in beside.items():
        if row is None or other is None:
            continue
        figures[f"{name}_over_{other_name}"], figures[f"{name}_p99_over_{other_name}"] = over(row, other)
        if name in LEARNED:
            figures[f"{name}_holds"] = float(compared(row, other) >= 0)
        if name == "learned":
            figures["learned_ahead_of_best_seed"] = float(compared(row, other) > 0)
    return figures
