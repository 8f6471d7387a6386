"""Prints the tables of docs/schedulers/README.md from a kept run of `benchmarks.search --json`.

    python -m tools.scheduler_tables docs/results/FILE.json

A test holds the page to the runs that it names.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.search import MIX

ORDER = (
    *("sequential", "greedy", "wavefront", "nimble", "opara"),
    *("ios", "ios_parallel", "ios_merge", "ios_rooted", "beam", "gpg", "brute"),
)
SEVERAL = {"+".join(MIX[:n]): name for n, name in ((2, "two members"), (3, "three"), (4, "four"))}
NAMES = {
    "squeezenet_bypass": "SqueezeNet with bypass",
    "googlenet": "GoogLeNet",
    "inception_v3": "Inception V3",
    "inception_v3_299": "Inception V3 (299 pixels)",
    "resnet50": "ResNet-50",
    "randwire": "RandWire",
    "nasnet_large": "NASNet-A Large",
    **SEVERAL,
}
"""Of networks, as the page's headings have them."""

SMALL = ("squeezenet_bypass", "googlenet", "inception_v3_299", "resnet50")
LARGE = ("randwire", "nasnet_large", *SEVERAL)
MEASURED = ("squeezenet_bypass", "googlenet", "inception_v3", "resnet50", *SEVERAL)

Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: per group of networks a table of seconds and gaps and one of shapes; or what was measured."""
    found = {(row["network"], row["scheduler"]): row for row in rows}
    if all("measured_over_sequential" in row for row in rows):
        first = {name: found[name, ORDER[0]] for name in MEASURED}
        yield _table(MEASURED, found, lambda row: _measured(row, first[row["network"]]))
        yield _errors(rows)
        return
    for networks in (SMALL, LARGE):
        for cell in (_seconds, _shape):
            yield _table(networks, found, cell)


def _table(networks: Sequence[str], found: Mapping[tuple[str, str], Row], cell: Callable[[Row], str]) -> str:
    lines = [
        f"| scheduler | {' | '.join(map(NAMES.__getitem__, networks))} |",
        f"| --- |{' --- |' * len(networks)}",
        *(
            f"| {scheduler} | {' | '.join(cell(found[name, scheduler]) for name in networks)} |"
            for scheduler in ORDER
        ),
    ]
    return "\n".join(lines)


def _measured(row: Row, sequential: Row) -> str:
    predicted = row["predicted_ms"] / sequential["predicted_ms"]
    return f"{predicted:.2f}, {row['measured_over_sequential']:.2f}"


def _errors(rows: Sequence[Row]) -> str:
    off = [abs(row["predicted_ms"] / row["measured_ms"] - 1.0) for row in rows]
    return (
        f"A prediction is off by {100 * median(off):.1f} % in the median, by {100 * max(off):.0f} % at worst"
    )


def _seconds(row: Row) -> str:
    gaps = [row["over_bound"], row["over_optimum"]]
    shown = [f"{100.0 * gap:.1f} %" for gap in gaps if gap is not None]
    return ", ".join([f"{row['predicted_ms']:.3f}", *shown])


def _shape(row: Row) -> str:
    if row["stages"] is None:
        return f"{row['streams_max']} streams"
    return f"{row['stages']} stages, {row['groups_max']} groups"


if __name__ == "__main__":
    print("\n\n".join(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"])))
