"""What is asked of split models that run, and whether runs meet it: windows of rival plans that take turns.

A runner runs a model once under a plan and says the seconds; `take_turns` is all that calls it,
whatever the executor. *A/A* is the same plan as a rival of itself: a difference within its spread is none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import median
from typing import Any, Final, TypeVar

from stageloom.shared.search.eop import key_operators
from stageloom.shared.search.split_problem import AxisTimes, Halves, SplitProblem

PlanT = TypeVar("PlanT")
"""What a runner runs: a choice of splits, or a plan that is loaded."""

Windows = Mapping[str, Sequence[float]]
"""Seconds by plan, one per round."""

AGAIN: Final = "eop again"
SINGLE: Final = ("fast", "slow")
BOUND_SHARE: Final = 0.85
BOUNDARY_SLACK: Final = 0.05
DRAWS: Final = 1000


def take_turns(
    run: Callable[[PlanT], float], plans: Mapping[str, PlanT], rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Every plan once a round, in an order drawn anew; `eop` is its own rival as `AGAIN`. Seconds by plan."""
    order = {**plans, **({AGAIN: plans["eop"]} if "eop" in plans else {})}
    random = Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in order}
    for plan in order.values():
        run(plan)  # what is compiled or packed at first is not counted
    for _ in range(rounds):
        for name in random.sample(list(order), len(order)):
            taken[name].append(run(order[name]))
    return taken


def ratio_of(windows: Windows, name: str, base: str) -> float:
    """The median over rounds of what one takes over what another took in the same round."""
    return median(one / other for one, other in zip(windows[name], windows[base], strict=True))


def aa_spread(windows: Windows, name: str = "eop", again: str = AGAIN) -> float:
    """How far, at 95 %, a plan seems to be from itself: bootstrap over rounds."""
    ratios = [one / other for one, other in zip(windows[name], windows[again], strict=True)]
    return max(abs(end - 1.0) for end in interval(ratios))


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The median's 95 % interval, by bootstrap."""
    random = Random(seed)
    drawn = sorted(median(random.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return drawn[DRAWS * 25 // 1000], drawn[DRAWS * 975 // 1000 - 1]


def bound_s(problem: SplitProblem) -> float:
    """What no split is below: key operators at both resources' joint rate, the rest on the better one."""
    keys = key_operators(problem.operators)
    bound = 0.0
    for op, operator in enumerate(problem.operators):
        fast_s, slow_s = operator.whole_s
        bound += fast_s * slow_s / (fast_s + slow_s) if op in keys else operator.least_whole_s
    return bound


def around(axis: AxisTimes, boundary: int) -> tuple[int, ...]:
    """A boundary and its two neighbours on each side, as far as there are any."""
    ends = axis.boundaries
    at = ends.index(boundary)
    return ends[max(at - 2, 0) : at + 3]


def boundary_line(where: str, chosen: Halves, measured: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The chosen boundary beside its neighbours: within 5 % of the best, beyond its own rounds' spread."""
    medians = {end: median(seconds) for end, seconds in measured.items()}
    best_s = min(medians.values())
    own = measured[chosen.boundary]
    low, high = interval([one / medians[chosen.boundary] for one in own])
    over = medians[chosen.boundary] / best_s - 1.0
    met = over <= BOUNDARY_SLACK + (high - low) / 2
    return line(where, "chosen boundary over the best of five", "<= 0.05 beyond A/A", over, met)


def model_lines(where: str, windows: Windows, problem: SplitProblem) -> list[dict[str, Any]]:
    """Of one model at one batch: against either resource alone, the paper's plan, and the bound."""
    spread = aa_spread(windows)
    single = min(SINGLE, key=lambda name: median(windows[name]))
    over_single = ratio_of(windows, "eop", single)
    over_paper = ratio_of(windows, "eop", "eop_paper")
    # The bound is predicted; what the fast resource takes here over its prediction scales it.
    predicted_s = sum(one.whole_s[0] for one in problem.operators)
    reached = bound_s(problem) / predicted_s * median(windows["fast"]) / median(windows["eop"])
    return [
        line(where, f"eop over {single} alone", "<= 1 beyond A/A", over_single, over_single <= 1 + spread),
        line(where, "eop over eop_paper", "<= 1 beyond A/A", over_paper, over_paper <= 1 + spread),
        line(where, "of the bound", ">= 0.85", reached, reached >= BOUND_SHARE),
    ]


def auto_lines(where: str, windows: Windows, auto: str, wide: str) -> list[dict[str, Any]]:
    """Of what the trial chose, `eop` or a session of two threads, where both are candidates: that it is no
    slower than either, and such a session where the best, `wide`, takes less than `eop` beyond A/A."""
    spread = aa_spread(windows)
    auto_s, *others_s = (median(windows[name]) for name in (auto, "eop", wide))
    over, is_wide = auto_s / min(others_s), auto != "eop"
    asked = "auto over the better of eop and intra_op=2"
    found = [line(where, asked, "<= 1 beyond A/A", over, over <= 1 + spread)]
    if ratio_of(windows, wide, "eop") < 1 - spread:
        found.append(line(where, "auto is an intra_op=2, which wins", "yes", float(is_wide), is_wide))
    return found


def rival_lines(
    of_models: Mapping[str, Windows], rivals: Sequence[str] = ("equal", "fixed")
) -> list[dict[str, Any]]:
    """Over all models: the geometric mean over each rival, and its 95 % interval over models and rounds."""
    found = []
    for rival in rivals:
        by_model = [
            [one / other for one, other in zip(windows[rival], windows["eop"], strict=True)]
            for windows in of_models.values()
        ]
        random = Random(0)
        drawn = sorted(
            _geometric(
                [
                    median(random.choices(ratios, k=len(ratios)))
                    for ratios in random.choices(by_model, k=len(by_model))
                ]
            )
            for _ in range(DRAWS)
        )
        least = drawn[DRAWS * 25 // 1000]
        mean = _geometric([median(ratios) for ratios in by_model])
        row = line("all", f"{rival} over eop, geometric mean", "> 1 with 95 %", mean, least > 1.0)
        found.append(row | {"at_least": least})
    return found


def _geometric(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def line(where: str, what: str, asked: str, measured: float, met: bool) -> dict[str, Any]:
    """A row of the part `lines`."""
    return {"part": "lines", "model": where, "line": what, "asked": asked, "measured": measured, "met": met}
