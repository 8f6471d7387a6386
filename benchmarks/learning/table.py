"""The table of docs/learning.md, from what `python -m benchmarks.learning --json` printed.

    python -m benchmarks.learning.table FILE...

Files of one benchmark add up: rows of trainings in one and those of `--untrained` in another. A row that both
hold must be the same in both.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.verdict import LEARNED_PLAN, Row, best_learned, best_rival, best_seed, over
from stageloom.shared.errors import InputError

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
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = [json.loads(file.read_text(encoding="utf-8")) for file in parser.parse_args(argv).files]
    print("\n".join(table(*merged(files))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
