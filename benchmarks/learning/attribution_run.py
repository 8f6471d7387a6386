"""The attribution's pieces, one per cell, method and seed, on a pool; what they say of each cell.

Pieces that the figures need come first, cell by cell, then those that explain them. A folder keeps finished
pieces: the same command goes on behind them. Whatever ends a run, there are the figures of what it has done;
without workers these are all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.learning.attribution import (
    BEST_PAIR,
    METHODS,
    OUTSIDE,
    RIVAL,
    TRAINING,
    Cell,
    attributed,
    cell_of,
)
from benchmarks.learning.deciding import WAYS
from benchmarks.learning.margin import Margin, best_of_methods, margin
from benchmarks.learning.pair import MIX, QUEUE, workloads
from benchmarks.paper.code_digest import digest_of_code
from benchmarks.runner import Report, progress
from benchmarks.zoo import graphs_of
from stageloom.planner.tournament.score import Score
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.digest import digest_of
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.costs import CostTable

DEVICES: Final = ("nano", "xavier_nx", "i7_7700")
LOADS: Final = ("paper", "capacity_1.1", "swapping", "capacity_0.8")
DEVICE_NAMES: Final = {"nano": "Nano", "xavier_nx": "Xavier NX", "i7_7700": "i7-7700"}
LOAD_NAMES: Final = {"capacity_0.8": "0.8", "capacity_1.1": "1.1"}
STANDS_FOR_CPU: Final = "i7_7700, a derived file: none of this machine's processor has rates for the zoo"

LEAST_SEEDS: Final = 2
HEADLINE: Final = (*OUTSIDE, *(name for name, method in METHODS.items() if method.headline))
DECIDING: Final = (*WAYS, BEST_PAIR)
EXPLAINING: Final = tuple(name for name in METHODS if name not in (*HEADLINE, *DECIDING))
CHANGING: Final = ("swapping",)
"""Loads under which it could pay to decide anew."""

Row = Mapping[str, Any]


class Piece(NamedTuple):
    """What a worker does at a time."""

    device: str
    load: str
    method: str
    seed: int

    @property
    def file(self) -> Path:
        return Path(f"{self.device}-{self.load}", f"{self.method.replace(' ', '_')}-{self.seed}.json")


def pieces(
    devices: Sequence[str], loads: Sequence[str], seeds: int, methods: Sequence[str] = ()
) -> list[Piece]:
    """All there is to do, in its order; beside what the figures need only `methods`, if there are any."""
    return [
        Piece(device, load, method, seed)
        for kind in (HEADLINE, DECIDING, EXPLAINING)
        for load in loads
        if kind is not DECIDING or load in CHANGING
        for device in devices
        for seed in range(1, seeds + 1)
        for method in kind
        if kind is HEADLINE or not methods or method in methods
    ]


def attribute(
    report: Report,
    devices: Sequence[str],
    loads: Sequence[str],
    *,
    methods: Sequence[str] = (),
    seeds: int,
    evaluations: int,
    workers: int,
    state: Path | None,
) -> None:
    """Fill the report with the rows of all pieces, and with a row and figures per cell that is complete."""
    wanted = pieces(devices, loads, seeds, methods)
    code = digest_of_code("benchmarks.learning.attribution", ["planner/twin/devices"])
    folder = None if state is None else state / f"{evaluations}-{code}"
    rows: dict[Piece, Row] = {}
    if folder is not None:
        rows = {piece: row for piece in wanted if (row := _kept(folder / piece.file)) is not None}
    left = [piece for piece in wanted if piece not in rows]
    try:
        if left and workers:
            for piece, row in _done(left, evaluations, workers):
                rows[piece] = row
                if folder is not None:
                    _keep(folder / piece.file, row)
                progress(f"{len(rows)} of {len(wanted)}: {', '.join(map(str, piece))}")
    except KeyboardInterrupt:
        progress(f"stopped with {len(rows)} of {len(wanted)}")
    finally:  # a worker that died, or SIGTERM, leaves what is there, too
        report.about = {
            "twin": True,
            "evaluations": evaluations,
            "seeds": seeds,
            "cpu": STANDS_FOR_CPU,
            "pieces": f"{len(rows)} of {len(wanted)}",
        }
        summarise(report, [rows[piece] for piece in wanted if piece in rows])


def _done(left: Sequence[Piece], evaluations: int, workers: int) -> Iterator[tuple[Piece, dict[str, Any]]]:
    """The rows of pieces, in their order; those of a cell are begun together."""
    models = [  # nothing is run, so a name stands for a model's contents
        ModelChoice(name=name, artifact=digest_of(name), graph=graph, queue=QUEUE)
        for name, graph in graphs_of([name for name, _ in MIX]).items()
    ]
    cells: dict[tuple[str, str], Cell] = {}
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        for key, own in groupby(left, key=lambda piece: (piece.device, piece.load)):
            if key not in cells:
                cells[key] = _cell(*key, models)
                outside = ", ".join(f"{name}: {of}" for name, (of, _) in cells[key].outside.items())
                progress(f"{', '.join(key)}: {cells[key].structure}; {outside}")
            given = [
                (piece, pool.submit(attributed, cells[key], piece.method, evaluations, piece.seed))
                for piece in own
            ]
            for piece, future in given:
                yield piece, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _cell(device: str, load: str, models: Sequence[ModelChoice]) -> Cell:
    file = load_device(device)
    made = workloads(file, StepTimes(file, CostTable(rates=file.rates())), models)
    return cell_of(file, load, made[load], models)


def _kept(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    row: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return row


def _keep(file: Path, row: Row) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(row), "utf-8")
    part.replace(file)


def cell_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the rows of each cell say together, of seeds that all headline methods have; none of fewer than 2.

    `best_method` is the best of all, `best_unlearned` that without training, `best_search` that among those
    on the training's own problem. They are chosen by the arrivals that judge, which favours the best of many
    over the one training.
    """
    found = []
    for device, load in dict.fromkeys((row["device"], row["load"]) for row in rows):
        own = [row for row in rows if (row["device"], row["load"]) == (device, load)]
        names = dict.fromkeys((*HEADLINE, *METHODS))
        of = {name: {row["seed"]: row for row in own if row["method"] == name} for name in names}
        seeds = sorted(set.intersection(*(set(of[name]) for name in HEADLINE)))
        if len(seeds) < LEAST_SEEDS:
            continue
        scores = {
            name: [score_in(by_seed[seed]) for seed in seeds]
            for name, by_seed in of.items()
            if by_seed.keys() >= set(seeds)
        }
        unlearned = {name: scores[name] for name in HEADLINE if name != TRAINING}
        best = best_of_methods(unlearned)
        search = best_of_methods({name: found for name, found in unlearned.items() if name not in OUTSIDE})
        policy = [score_in(of[TRAINING][seed], "policy_") for seed in seeds]
        found.append(
            {
                "device": device,
                "load": load,
                "structure": of[RIVAL][seeds[0]]["beside"],
                "seeds": len(seeds),
                "best_method": best_of_methods(scores),
                "best_unlearned": best,
                "best_search": search,
                **_columns("learned_over_best_unlearned", margin(scores[TRAINING], unlearned[best])),
                **_columns("policy_over_best_unlearned", margin(policy, unlearned[best])),
                **_columns("learned_over_best_search", margin(scores[TRAINING], unlearned[search])),
            }
        )
    return found


def deciding_rows(rows: Sequence[Row], cells: Sequence[Row]) -> list[dict[str, Any]]:
    """What the ways to decide anew say of each cell: what they answer with over the best unlearned method and
    over the best search, and the same of their policies, whether or not these are what they answer with."""
    found = []
    for cell in cells:
        own = [row for row in rows if (row["device"], row["load"]) == (cell["device"], cell["load"])]
        of = {
            name: {row["seed"]: row for row in own if row["method"] == name}
            for name in (*HEADLINE, *DECIDING)
        }
        for name in DECIDING:
            if len(of[name]) < cell["seeds"]:
                continue
            seeds = sorted(of[name])[: cell["seeds"]]
            row: dict[str, Any] = {"device": cell["device"], "load": cell["load"], "method": name}
            for rival in ("best_unlearned", "best_search"):
                under = [score_in(of[cell[rival]][seed]) for seed in seeds]
                for prefix in ("", "policy_") if name in WAYS else ("",):
                    over = [score_in(of[name][seed], prefix) for seed in seeds]
                    row |= _columns(f"{prefix}over_{rival}", margin(over, under))
            found.append(row)
    return found


def score_in(row: Row, prefix: str = "") -> Score:
    """The score that a row was made of."""
    return Score(
        throughput_per_s=row[f"{prefix}throughput_per_s"],
        p99_s=row[f"{prefix}p99_ms"] * 1e-3,
        utilisation=row[f"{prefix}utilisation"],
        queue_variance=row[f"{prefix}queue_variance"],
        variance_growth=row[f"{prefix}variance_growth_per_s"],
        met=row[f"{prefix}met"],
    )


def _columns(name: str, found: Margin) -> dict[str, Any]:
    ratios = {name: found.ratio, f"{name}_low": found.low, f"{name}_high": found.high}
    return {**{key: round(value, 4) for key, value in ratios.items()}, f"{name}_by": found.by}


def summarise(report: Report, rows: Sequence[Row]) -> None:
    """A row and figures per complete cell, then the rows themselves."""
    cells = cell_rows(rows)
    for cell in cells:
        figures = {key: value for key, value in cell.items() if isinstance(value, float)}
        named = {f"{cell['device']}.{cell['load']}.{key}": value for key, value in figures.items()}
        report.add(named, [{"part": "cells", **cell}])
    gains = sum(cell["learned_over_best_unlearned_low"] > 1.0 for cell in cells)
    deciding = deciding_rows(rows, cells)
    report.add(
        {
            "cells": len(cells),
            "cells_where_learning_gains": gains,
            "deciding": len(deciding),
            "deciding_that_gain": sum(
                row["over_best_unlearned_low"] > 1.0 for row in deciding if row["method"] in WAYS
            ),
        },
        [{"part": "deciding", **row} for row in deciding],
    )
    report.add({}, [{"part": "methods", **row} for row in rows])


OVER: Final = ("learned_over_best_unlearned", "policy_over_best_unlearned", "learned_over_best_search")
COLUMNS: Final = (
    *("device", "load", "best method", "best unlearned", "training over it", "its policy over it"),
    *("best search", "training over it"),
)


DECIDING_COLUMNS: Final = (
    *("device", "load", "method", "over the best unlearned", "over the best search"),
    "its policy alone over the best search",
)


def deciding_table(rows: Sequence[Row]) -> list[str]:
    """Markdown of the ways to decide anew among a kept file's rows."""
    lines = [DECIDING_COLUMNS, ("---",) * len(DECIDING_COLUMNS)]
    for row in rows:
        if row["part"] == "deciding":
            device, load = str(row["device"]), str(row["load"])
            names = (DEVICE_NAMES.get(device, device), LOAD_NAMES.get(load, load), row["method"])
            ratios = [_text(row, name) for name in ("over_best_unlearned", "over_best_search")]
            policy = _text(row, "policy_over_best_search") if row["method"] in WAYS else ""
            lines.append((*names, *ratios, policy))
    return [f"| {' | '.join(cells)} |" for cells in lines]


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown of the cells among a kept file's rows: ratios with 95 % intervals, and of what."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for cell in rows:
        if cell["part"] == "cells":
            device, load = str(cell["device"]), str(cell["load"])
            names = (DEVICE_NAMES.get(device, device), LOAD_NAMES.get(load, load))
            margins = [_text(cell, name) for name in OVER]
            lines.append(
                (
                    *(*names, cell["best_method"], cell["best_unlearned"], *margins[:2]),
                    *(cell["best_search"], margins[2]),
                )
            )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _text(cell: Row, name: str) -> str:
    ratio, low, high = (cell[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{ratio:.3f} [{low:.3f}, {high:.3f}] {cell[f'{name}_by']}"
