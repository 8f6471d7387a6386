"""How often a trial decides rightly: its state machine against a simulated device, over many seeds.

Every window's figure is the plan's true speed times noise, such that the log ratio of a pair of windows of
0.25 s spreads by 5.5 %, as measured for a plan against itself on a shared two-core machine. Besides normal
noise: twice as much of it, heavy tails (Student, 5 degrees), load that wanders from window to window, and a
device that slows down by 0.1 % a window. p99 and ages spread by 20 % a window. Figures are shares of seeds,
and medians; the rows say how often the 95 % interval that a trial states holds the true ratio.

Then the same under load, where windows see tasks that queue: Poisson arrivals of two models with deadlines
(`trial_load.py`), at 0.25 to 1.1 of what two narrow lanes carry, for a plan against itself, against one whose
tasks take 5 % longer or twice as long, and for two narrow lanes against one wide lane, both ways. And where
the load moves from 0.25 to 1.1 or back early in the trial, which is told 5 s later, or never.

    python -m benchmarks.trial [--quick] [--json] [--only PART]...
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from random import Random
from statistics import median
from typing import Any

from benchmarks.runner import Report, progress, run
from benchmarks.trial_load import NARROW, WIDE_LANE, Move, Shape, try_under_load
from stageloom.shared.engine.trial import (
    Decide,
    MeasureSide,
    SaveRecord,
    TrialConfig,
    TrialCore,
    TrialRecord,
    TrialResult,
    TrialSetup,
    Verdict,
)
from stageloom.shared.engine.windows import Side, WindowFigures
from stageloom.shared.ids import Digest

PAIR_SPREAD = 0.055
LATENCY_SPREAD = 0.2
SEEDS = 1000
CASES: Mapping[str, float] = {"same": 1.0, "better": 1.05, "worse": 0.95}
"""The candidate's true speed over the control's."""

LOADS = (0.25, 0.6, 0.9, 1.1)
LOAD_SEEDS = 300
LOAD_CASES: Mapping[str, tuple[Shape, Shape]] = {
    "same": (NARROW, NARROW),
    "same_wide": (WIDE_LANE, WIDE_LANE),
    "worse": (NARROW, Shape(2, 1.05)),
    "starving": (NARROW, Shape(2, 2.0)),
    "to_wide": (NARROW, WIDE_LANE),
    "to_narrow": (WIDE_LANE, NARROW),
}
"""Control and candidate."""

MOVES: Mapping[str, tuple[float, float]] = {"to_day": (0.25, 1.1), "to_night": (1.1, 0.25)}
"""Loads before and after."""
MOVED_S = 2.0
TOLD_S: Mapping[str, float] = {"told": 5.0, "untold": math.inf}

_WINDOW_SPREAD = PAIR_SPREAD / math.sqrt(2)
_DISK_S, _SETTLE_S, _SWAP_S = 0.005, 0.01, 0.001
_TASKS, _SERVICE_S = 20, 0.005

Noise = Callable[[Random], Iterator[float]]
"""Endless logarithms of what chance does to a window's speed."""


def normal(rng: Random) -> Iterator[float]:
    while True:
        yield rng.gauss(0.0, _WINDOW_SPREAD)


def doubled(rng: Random) -> Iterator[float]:
    """Normal, but pairs spread by 11 %: a machine that others use heavily."""
    for noise in normal(rng):
        yield 2 * noise


def heavy_tails(rng: Random) -> Iterator[float]:
    """Student's t with 5 degrees of freedom, scaled to the same spread."""
    while True:
        yield _WINDOW_SPREAD * math.sqrt(3 / 5) * rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(2.5, 0.4))


def wandering(rng: Random) -> Iterator[float]:
    """Nine tenths of a window's noise come from the window before; pairs spread as with the others."""
    kept = 0.9
    whole = PAIR_SPREAD / math.sqrt(2 * (1 - kept))
    level = rng.gauss(0.0, whole)
    while True:
        yield level
        level = kept * level + rng.gauss(0.0, whole * math.sqrt(1 - kept * kept))


def heating(rng: Random) -> Iterator[float]:
    """Normal noise on a device that slows down all the time."""
    for window, noise in enumerate(normal(rng)):
        yield noise - 0.001 * window


NOISES: Mapping[str, Noise] = {
    "normal": normal,
    "doubled": doubled,
    "heavy_tails": heavy_tails,
    "wandering": wandering,
    "heating": heating,
}


def try_plan(
    seed: int, ratio: float, noise: Noise = normal, config: TrialConfig | None = None
) -> TrialResult:
    """One trial of a candidate whose true speed is `ratio` times the control's, on a virtual clock."""
    record = TrialRecord(candidate=Digest("c"), control=Digest("i"), environment="simulated", began_us=0)
    setup = TrialSetup(
        record=record,
        models=("m",),
        service_s=(_SERVICE_S,),
        instance_s=(_SERVICE_S,),
        control_bytes=1,
        candidate_bytes=1,
        memory_bytes=2,
    )
    core = TrialCore(setup, Random(seed), config)
    chance = Random(f"noise {seed}")
    speeds = (noise(chance), noise(Random(f"latency {seed}")))
    now = 0.0
    todo = core.begin(now)
    while True:
        action, *todo = todo
        if isinstance(action, Decide):
            return action.result
        if isinstance(action, MeasureSide):
            now = action.to_s
            true = ratio if action.side is Side.CANDIDATE else 1.0
            speed, quickness = (math.exp(next(one)) * true for one in speeds)
            todo += core.window_ended(action.window, _figures(action, speed, quickness, chance), now)
        elif isinstance(action, SaveRecord):
            now += _DISK_S
            todo += core.recorded(now)
        else:
            now += _SWAP_S
            core.activated(now)
            now += _SETTLE_S
            todo += core.settled(now)


def _figures(action: MeasureSide, speed: float, quickness: float, chance: Random) -> WindowFigures:
    return WindowFigures(
        completed=(_TASKS,),
        failed=0,
        measured_s=action.to_s - action.from_s,
        busy_s=_TASKS * _SERVICE_S / speed,
        saturated=False,
        p99_s=2 * _SERVICE_S * math.exp(chance.gauss(0.0, LATENCY_SPREAD)),
        oldest_age_s=_SERVICE_S * math.exp(chance.gauss(0.0, LATENCY_SPREAD)),
        judged=(_TASKS,),
        log_latency=(_TASKS * math.log(1.5 * _SERVICE_S / quickness),),
        due=_TASKS,
        in_time=_TASKS,
    )


def outcomes(results: Sequence[TrialResult], true_ratio: float) -> dict[str, float]:
    """Shares of the verdicts, medians of what there is, and how often the 95 % interval holds the truth."""
    counted = Counter(result.verdict for result in results)
    holds = sum(r.interval is not None and r.interval[0] <= true_ratio <= r.interval[1] for r in results)
    return {
        **{f"{v.value}_share": counted[v] / len(results) for v in _VERDICTS},
        "pairs_median": median(result.pairs for result in results),
        "seconds_median_s": median(result.seconds_s for result in results),
        "ratio_median": _median([result.ratio for result in results]),
        "interval_holds_share": holds / len(results),
    }


def _median(values: Sequence[float | None]) -> float:
    """Of those that there are; nan where there is none."""
    return median([value for value in values if value is not None] or [math.nan])


_VERDICTS = (Verdict.COMMIT, Verdict.NO_GAIN, Verdict.REJECT)


def moved_load(
    seeds: int, case: str, move: str, told_s: float, pool: ProcessPoolExecutor
) -> dict[str, float]:
    """Shares of the verdicts, and the median of seconds, of trials during which the load moves."""
    trial = partial(_moved_load, *LOAD_CASES[case], *MOVES[move], told_s)
    results = list(pool.map(trial, range(seeds), chunksize=5))
    counted = Counter(result.verdict for result in results)
    shares = {f"{v.value}_share": counted[v] / seeds for v in (*_VERDICTS, Verdict.ABANDONED)}
    return {**shares, "seconds_median_s": median(result.seconds_s for result in results)}


def _moved_load(
    control: Shape, candidate: Shape, before: float, after: float, told_s: float, seed: int
) -> TrialResult:
    return try_under_load(seed, before, control, candidate, move=Move(MOVED_S, after, told_s))


def under_load(seeds: int, case: str, load: float, pool: ProcessPoolExecutor) -> dict[str, float]:
    """Shares of the verdicts and medians, over so many seeds."""
    control, candidate = LOAD_CASES[case]
    trial = partial(_under_load, load, control, candidate)
    results = list(pool.map(trial, range(seeds), chunksize=5))
    found = outcomes(results, math.nan)
    del found["interval_holds_share"]
    by_figure = {
        f"{figure}_ratio_median": _median([getattr(result, f"{figure}_ratio") for result in results])
        for figure in ("latency", "busy")
    }
    return {**found, **by_figure}


def _under_load(load: float, control: Shape, candidate: Shape, seed: int) -> TrialResult:
    return try_under_load(seed, load, control, candidate)


PARTS = ("noise", "load", "moves")
_OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"}
}


def measure(report: Report, options: argparse.Namespace) -> None:
    parts = options.only or PARTS
    if "noise" in parts:
        _noise(report, SEEDS // 10 if options.quick else SEEDS)
    seeds = LOAD_SEEDS // 10 if options.quick else LOAD_SEEDS
    with ProcessPoolExecutor(2) as pool:
        if "load" in parts:
            _loads(report, seeds, pool)
        if "moves" in parts:
            _moves(report, seeds, pool)


def _noise(report: Report, seeds: int) -> None:
    for kind, noise in NOISES.items():
        progress(f"trial: {seeds} seeds each with noise of the kind {kind!r}")
        for case, ratio in CASES.items():
            found = outcomes([try_plan(seed, ratio, noise) for seed in range(seeds)], ratio)
            figures = {f"{case}.{name}": value for name, value in found.items()} if kind == "normal" else {}
            report.add(figures, [{"noise": kind, "case": case, "true_ratio": ratio, "seeds": seeds, **found}])


def _loads(report: Report, seeds: int, pool: ProcessPoolExecutor) -> None:
    for case in LOAD_CASES:
        progress(f"trial: {seeds} seeds each under load, {case!r}")
        for load in LOADS:
            found = under_load(seeds, case, load, pool)
            figures = {f"{case}.{load:g}.{name}": value for name, value in found.items()}
            report.add(figures, [{"load": load, "case": case, "seeds": seeds, **found}])


def _moves(report: Report, seeds: int, pool: ProcessPoolExecutor) -> None:
    for case, move, told in product(("to_wide", "to_narrow"), MOVES, TOLD_S):
        progress(f"trial: {seeds} seeds of {case!r}, a load that moves {move}, {told}")
        found = moved_load(seeds, case, move, TOLD_S[told], pool)
        figures = {f"{case}.{move}.{told}.{name}": value for name, value in found.items()}
        report.add(figures, [{"case": case, "move": move, "told": told, "seeds": seeds, **found}])


if __name__ == "__main__":
    sys.exit(run(measure, options=_OPTIONS))
