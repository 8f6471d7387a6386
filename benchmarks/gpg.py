"""GPG against exact dynamic programming, beam search, and what learned nothing, on networks it never saw.

    python -m benchmarks.gpg [--checkpoint FILE] [--quick] [--json]

Schedules combined blocks of one to four blocks of GoogLeNet and NASNet-A Large, which the packaged policy was
not trained on (`stageloom train gpg --output DIR` writes another one). Costs are roofline estimates of an
A100 by its data sheet, on which small kernels leave room (`stageloom.shared.search.analytic`); r = 3, s = 8.
Nothing is measured: this ranks searches, not devices.

Per method and number of members: the median and largest ratio of its cost to the reference, and its search
time. The reference is exact dynamic programming, or beam search where that is out of reach
(`exact_share`), so that a ratio may be below 1. Methods of the policy, none with beam's help:

- `gpg_actor`: one roll-out that takes the action as it is. `gpg_best_of_16`: with noise, the cheapest.
- `gpg_look_ahead`: one roll-out that weighs some endings by the value of what they leave.
- `gpg`: that and a local search on the schedule: the policy as it is used; `cost_ratio_median` is its
  median. `uniform_refined` and `sequential_refined`: the local search with no policy before it.

Members of four: `four_members_*` compares the time of `gpg` with the time that beam search needs for a
schedule that costs no more, over growing budgets.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from benchmarks.one_thread import in_one_thread
from benchmarks.runner import Report, progress, run
from benchmarks.zoo import graphs_of
from stageloom.planner.learning.gpg.lessons import MemberOf
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.policy.gpg.checkpoint import decode
from stageloom.shared.policy.gpg.choose import LookAhead, acted, drawn, looked_ahead, sampled, schedule_s
from stageloom.shared.policy.gpg.network import EncodedBlock, GpgNetwork
from stageloom.shared.search.baselines import greedy
from stageloom.shared.search.beam import best_endings
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.endings import TooManyError
from stageloom.shared.search.gpg import policy_stages, refined
from stageloom.shared.search.interface import TOP_LIMITS, Budget
from stageloom.shared.search.ios import cheapest_by_state
from stageloom.shared.search.stages import Stages

HELD_OUT: Final = ("googlenet", "nasnet_large")
DEVICE: Final = "a100"
PACKAGED: Final = Path(__file__).parents[1] / "shared/policy/gpg/default.checkpoint"
CONTENTION: Final = 0.1  # the middle of those that trainings draw (stageloom.planner.learning.gpg.lessons)
LEAST_OPERATORS: Final = 5  # smaller blocks leave nothing to choose
BEAM_EXPANSIONS: Final = (1_000, 4_000, 16_000, 64_000, 256_000, 1_024_000)


class Size(NamedTuple):
    cases: int = 12  # per number of members
    four: int = 6
    exact: int = 1_500_000  # pairs of a state and an ending
    beam: int = 400_000
    budgets: tuple[int, ...] = BEAM_EXPANSIONS


QUICK: Final = Size(cases=3, four=1, exact=30_000, beam=20_000, budgets=BEAM_EXPANSIONS[:3])
Method = Callable[[Stages], list[int]]


class Case(NamedTuple):
    """One combined block of held-out networks."""

    members: int
    graph: CombinedGraph
    costs: StageCosts

    def stages(self) -> Stages:
        """Anew for every method, so that none finds anything computed."""
        return policy_stages(self.graph, self.costs, TOP_LIMITS)


def cases(models: Mapping[str, Graph], members: int, count: int) -> list[Case]:
    """Blocks drawn with a seed."""
    table = CostTable(rates=replace(load_device(DEVICE).rates(), contention=CONTENTION))
    blocks: dict[str, list[MemberOf]] = {}
    for name in HELD_OUT:
        model = models[name]
        offered = dict(model.partitions)
        blocks[name] = [
            (model.digest, model, block)
            for block in split(model, offered.get("paper", offered["base"]))
            if len(block.operators) >= LEAST_OPERATORS
        ]
    drawn_cases = []
    for number in range(count):
        random = Random(f"{members}:{number}")
        chosen = [random.choice(blocks[random.choice(HELD_OUT)]) for _ in range(members)]
        graph = combine([(model, block) for _, model, block in chosen])
        drawn_cases.append(Case(members, graph, table.for_members(chosen)))
    return drawn_cases


def reference(case: Case, size: Size) -> tuple[float, bool]:
    """Seconds, and whether nothing is cheaper."""
    stages = case.stages()
    try:
        return cheapest_by_state(stages, size.exact)[(1 << case.graph.size) - 1], True
    except TooManyError:
        return schedule_s(stages, best_endings(stages, size.beam)), False


def methods(case: Case, network: GpgNetwork, number: int) -> dict[str, Method]:
    """Every way to schedule a case, by name."""
    in_turn = [1 << op for op in range(case.graph.size)]

    def encoded() -> EncodedBlock:
        return EncodedBlock(network, case.graph, case.costs)

    def look(stages: Stages) -> list[int]:
        return looked_ahead(encoded(), stages, LookAhead(), Random(number))

    def by_greedy(stages: Stages) -> list[int]:
        schedule = greedy(case.graph, case.costs, TOP_LIMITS, Budget())
        return [sum(1 << op for op in stage.operators) for stage in schedule.stages]

    return {
        "sequential": lambda stages: in_turn,
        "greedy": by_greedy,
        "uniform": lambda stages: drawn(stages, Random(number)),
        "uniform_refined": lambda stages: refined(stages, drawn(stages, Random(number))),
        "sequential_refined": lambda stages: refined(stages, in_turn),
        "beam_4k": partial(best_endings, expansions=4_000),  # takes about the time of `gpg`
        "beam_16k": partial(best_endings, expansions=16_000),
        "gpg_actor": lambda stages: acted(encoded(), stages),
        "gpg_best_of_16": lambda stages: sampled(
            encoded(), stages, count=16, noise=0.1, random=Random(number)
        ),
        "gpg_look_ahead": look,
        "gpg": lambda stages: refined(stages, look(stages)),
    }


def timed(case: Case, method: Method) -> tuple[float, float]:
    """Seconds that the schedule takes, and that the search took; the schedule is checked."""
    stages = case.stages()
    began_s = time.perf_counter()
    endings = method(stages)
    search_s = time.perf_counter() - began_s
    if sum(endings) != (1 << case.graph.size) - 1:
        raise AssertionError("a schedule misses operators")
    return case.costs.schedule_s(stages.schedule(endings)), search_s


def compared(blocks: Sequence[Case], network: GpgNetwork, size: Size) -> list[dict[str, Any]]:
    """A row per case and method."""
    rows = []
    for number, case in enumerate(blocks):
        best_s, exact = reference(case, size)
        progress(f"{case.members} members, block {number + 1} of {len(blocks)}: {case.graph.size} operators")
        for name, method in methods(case, network, number).items():
            cost_s, search_s = timed(case, method)
            rows.append(
                {
                    "method": name,
                    "members": case.members,
                    "ratio": cost_s / best_s,
                    "search_ms": search_s * 1e3,
                    "exact": exact,
                }
            )
    return rows


def against_beam(blocks: Sequence[Case], network: GpgNetwork, budgets: Sequence[int]) -> dict[str, float]:
    """The policy's time, and beam's for a schedule at most as dear; else that of its largest budget."""
    taken: list[
        tuple[float, float, float]
    ] = []  # ms of the policy and of beam, beam's cost over the policy's
    for number, case in enumerate(blocks):
        progress(f"four members, block {number + 1} of {len(blocks)}: {case.graph.size} operators")
        cost_s, search_s = timed(case, methods(case, network, number)["gpg"])
        for expansions in budgets:
            beam_s, took_s = timed(case, partial(best_endings, expansions=expansions))
            if beam_s <= cost_s * (1.0 + 1e-9):
                break
        taken.append((search_s * 1e3, took_s * 1e3, beam_s / cost_s))
    return {
        "four_members_gpg_ms": median(policy_ms for policy_ms, _, _ in taken),
        "four_members_beam_ms": median(beam_ms for _, beam_ms, _ in taken),
        "four_members_beam_reached_share": fmean(cost <= 1.0 + 1e-9 for _, _, cost in taken),
        "four_members_gpg_faster_share": fmean(policy_ms < beam_ms for policy_ms, beam_ms, _ in taken),
        "four_members_beam_over_gpg_cost": median(cost for _, _, cost in taken),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures over all of one to three members, and a row per method and number of members."""
    by_method: dict[str, list[float]] = {}
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row["ratio"])
        groups.setdefault((row["method"], row["members"]), []).append(row)
    figures = {
        "cost_ratio_median" if name == "gpg" else f"{name}_ratio_median": median(ratios)
        for name, ratios in by_method.items()
    }
    table = [
        {
            "method": name,
            "members": members,
            "ratio_median": median(row["ratio"] for row in own),
            "ratio_max": max(row["ratio"] for row in own),
            "search_ms": median(row["search_ms"] for row in own),
            "exact_share": fmean(row["exact"] for row in own),
        }
        for (name, members), own in groups.items()
    ]
    return {**figures, "exact_share": fmean(row["exact"] for row in rows)}, table


def measure(report: Report, options: argparse.Namespace) -> None:
    in_one_thread("benchmarks.gpg")
    size = QUICK if options.quick else Size()
    models = graphs_of(HELD_OUT)
    network = decode(options.checkpoint.read_bytes()).network
    rows: list[dict[str, Any]] = []
    for members in (1, 2, 3):
        rows += compared(cases(models, members, size.cases), network, size)
    report.add(*summary(rows))
    report.add(against_beam(cases(models, 4, size.four), network, size.budgets))


if __name__ == "__main__":
    own = {"--checkpoint": {"type": Path, "default": PACKAGED, "help": "a policy; default: the packaged one"}}
    sys.exit(run(measure, ["numpy", "onnx", "onnxruntime"], options=own))
