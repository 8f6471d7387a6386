"""The table of docs/learning.md, from what `python -m benchmarks.learning --json` printed.

    python -m benchmarks.learning.table FILE...

Files of one benchmark add up: rows of trainings in one and those of `--untrained` in another. A row that
both hold must be the same in both.

The verdicts say what the rows of one pair say of the learned policy and of the planner.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stageloom.planner.tournament.score import LEAST_SPREAD
from stageloom.shared.errors import InputError

LEARNED: Final = ("maddpg", "planner")
"""Rows of what was trained."""

LEARNED_PLAN: Final = "maddpg's best plan"
"""What the planner's row is `of` where it chose a plan of a training."""

SEED: Final = "seed"
"""Rows of unlearned candidates; a training starts with the best
(`stageloom.planner.learning.maddpg.seeds`)."""

Row = Mapping[str, Any]


def compared(one: Row, other: Row) -> int:
    """1 where the first is ahead, -1 where it is behind, else 0.

    Throughput decides. Where it is equal within spread, the p99 does. The spread of two rows is the larger
    of their spreads over arrivals, but at least half a per cent: less is no difference, whatever the seeds
    say (`stageloom.planner.contest.worth`).
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


DEVICES = {"nano": "Nano", "tx2": "TX2", "xavier_nx": "Xavier NX", "a100": "A100"}
LOADS = {"paper": "paper", "capacity_0.8": "0.8", "capacity_1.1": "1.1", "single": "single"}
COLUMNS = (
    "device",
    "load",
    "best rival, tasks/s",
    "planner is",
    "planner",
    "policy alone",
    "best seed",
    "learned over seed",
    "growth: policy, joint graph",
    "interference 0.5, 1.5",
)


def merged(files: Iterable[Mapping[str, Any]]) -> tuple[list[Row], dict[str, float]]:
    """Rows, each once, and figures of several files.

    Raises:
        InputError: a row or figure of one file is another one in a second.
    """
    rows: dict[tuple[str, ...], Row] = {}
    figures: dict[str, float] = {}
    for file in files:
        for row in file["rows"]:
            key = tuple(str(row.get(name)) for name in ("device", "workload", "planner", "of", "partition"))
            if rows.setdefault(key, row) != row:
                raise InputError(
                    f"two files differ in {', '.join(key[:3])}",
                    remedy="give files of one engine and one effort",
                )
        figures |= file["figures"]
    return list(rows.values()), figures


def table(rows: Sequence[Row], figures: Mapping[str, float]) -> list[str]:
    """Markdown, a line per device and workload that was trained."""
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for device in DEVICES:
        for load in LOADS:
            pair = [row for row in rows if (row["device"], row["workload"]) == (device, load)]
            if best_learned(pair) is not None:
                lines.append(_line(_cells(device, load, pair, figures)))
    return lines


def _cells(device: str, load: str, rows: Sequence[Row], figures: Mapping[str, float]) -> list[str]:
    by_name = {row["planner"]: row for row in rows}
    rival, seed, learned = best_rival(rows), best_seed(rows), best_learned(rows)
    planner, policy, joint = by_name["planner"], by_name["maddpg"], by_name.get("synchronised")
    growth = [row["variance_growth_per_s"] for row in (policy, joint) if row is not None]
    prefix = f"{device}.{load}.planner_over_best_rival_at_interference_"
    return [
        DEVICES[device],
        LOADS[load],
        f"{rival['planner']}, {rival['throughput_per_s']:.1f}",
        "learned" if planner["of"] == LEARNED_PLAN else planner["of"],
        _pair(*over(planner, rival)),
        _pair(*over(policy, rival)),
        f"{seed['of']}: {_pair(*over(seed, rival))}" if seed is not None else "",
        _pair(*over(learned, seed)) if seed is not None and learned is not None else "",
        ", ".join(f"{value:.2g}" for value in growth) if joint is not None else "",
        ", ".join(f"{figures[prefix + factor]:.3f}" for factor in ("0.5", "1.5")),
    ]


def _pair(throughput: float, p99: float) -> str:
    return f"{throughput:.3f}, {p99:.2f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = [json.loads(file.read_text(encoding="utf-8")) for file in parser.parse_args(argv).files]
    print("\n".join(table(*merged(files))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
