"""What the rows of one pair say of the learned policy and of the planner. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from planner.contest.worth import LEAST_SPREAD

LEARNED: Final = ("maddpg", "planner")
"""Rows that are no rival's."""

Row = Mapping[str, Any]


def compared(one: Row, other: Row) -> int:
    """1 where the first is ahead, -1 where it is behind, else 0.

    Throughput decides. Where it is equal within spread, the p99 does. The spread of two rows is the larger
    of their spreads over arrivals, but at least half a per cent: less is no difference, whatever the seeds
    say (`planner.contest.worth`).
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
    rivals = [row for row in rows if row["planner"] not in LEARNED]
    top = max(rivals, key=lambda row: float(row["throughput_per_s"]))
    level = [row for row in rivals if not _ahead(top, row, "throughput_per_s", "throughput_spread")]
    return min(level, key=lambda row: float(row["p99_ms"]))


def verdict(rows: Sequence[Row]) -> dict[str, float | None]:
    """Policy and planner beside the best rival; growth of the queues' variance beside the joint graph's.

    `*_holds` is 1 where the row is level with the best rival or ahead. `synchronised_variance_growth_per_s`
    is None for one model, which has nothing to wait for.
    """
    rival = best_rival(rows)
    by_name = {row["planner"]: row for row in rows}
    found: dict[str, float | None] = {}
    for name in LEARNED:
        row = by_name[name]
        found[f"{name}_over_best_rival"] = round(row["throughput_per_s"] / rival["throughput_per_s"], 4)
        found[f"{name}_p99_over_best_rival"] = (
            round(row["p99_ms"] / rival["p99_ms"], 4) if rival["p99_ms"] else 1.0
        )
        found[f"{name}_holds"] = float(compared(row, rival) >= 0)
    joint = by_name.get("synchronised")
    found["maddpg_variance_growth_per_s"] = by_name["maddpg"]["variance_growth_per_s"]
    found["synchronised_variance_growth_per_s"] = joint["variance_growth_per_s"] if joint else None
    return found
