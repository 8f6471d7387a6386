"""GPG against exact dynamic programming, beam search, and what learned nothing, on networks it never saw.

    python -m benchmarks.gpg [--checkpoint FILE] [--save FILE] [--quick] [--json]

Trains on random combined blocks of the zoo less GoogLeNet and NASNet-A Large (`train_s`, two processes: the
policy, and beside it two variants), then schedules combined blocks of one to four blocks of those two. With
--checkpoint nothing is trained. Costs are roofline estimates of an A100 by its data sheet, on which small
kernels leave room (`stageloom.shared.search.analytic`); r = 3, s = 8. Nothing is measured: this ranks
searches, not devices.

Per method and number of members: the median and largest ratio of its cost to the reference, and its search
time. The reference is exact dynamic programming, or beam search where that is out of reach
(`exact_share`), so that a ratio may be below 1. Methods of the policy, none with beam's help:

- `gpg_actor`: one roll-out that takes the action as it is. `gpg_best_of_16`: with noise, the cheapest.
- `gpg_look_ahead`: one roll-out that weighs some endings by the value of what they leave.
- `gpg`: that and a local search on the schedule: the policy as it is used; `cost_ratio_median` is its
  median.
- `gpg_without_imitation` and `gpg_paper_reward`: shorter trainings, by reinforcement alone; the second
  with TOP's reward exp(-latency) and gamma 0.95, used as TOP does (the action as it is).
- `uniform_refined` and `sequential_refined`: the local search with no policy before it.

Members of four: `four_members_*` compares the time of `gpg` with the time that beam search needs for a
schedule that costs no more, over growing budgets.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from benchmarks import zoo
from benchmarks.runner import Report, progress, run
from stageloom.planner.learning.gpg.lessons import Drawing, MemberOf, analytic_costs
from stageloom.planner.learning.gpg.trainer import GpgResult, GpgSettings, Reward, train
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
CONTENTION: Final = 0.1  # the middle of those that trainings draw (stageloom.planner.learning.gpg.lessons)
LEAST_OPERATORS: Final = 5  # smaller blocks leave nothing to choose
BEAM_EXPANSIONS: Final = (1_000, 4_000, 16_000, 64_000, 256_000, 1_024_000)
MAIN: Final = GpgSettings(imitation_steps=400, episodes=300)
ALONE: Final = GpgSettings(imitation_steps=0, episodes=300)


@dataclass(frozen=True)
class Size:
    main_s: float = 600.0  # each training's limit
    variant_s: float = 250.0
    cases: int = 12  # per number of members
    four: int = 6
    exact: int = 1_500_000  # pairs of a state and an ending
    beam: int = 400_000
    settings: GpgSettings = MAIN
    alone: GpgSettings = ALONE  # without imitation


QUICK: Final = Size(
    main_s=20.0,
    variant_s=10.0,
    cases=3,
    four=1,
    exact=30_000,
    beam=20_000,
    settings=replace(MAIN, imitation_steps=20, episodes=4, validation_blocks=4),
    alone=replace(ALONE, episodes=4, validation_blocks=4),
)
Method = Callable[[Stages], list[int]]


@dataclass(frozen=True)
class Case:
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
    found = []
    for number in range(count):
        random = Random(f"{members}:{number}")
        chosen = [random.choice(blocks[random.choice(HELD_OUT)]) for _ in range(members)]
        graph = combine([(model, block) for _, model, block in chosen])
        found.append(Case(members, graph, table.for_members(chosen)))
    return found


def reference(case: Case, size: Size) -> tuple[float, bool]:
    """Seconds, and whether nothing is cheaper."""
    stages = case.stages()
    try:
        return cheapest_by_state(stages, size.exact)[(1 << case.graph.size) - 1], True
    except TooManyError:
        return schedule_s(stages, best_endings(stages, size.beam)), False


def methods(case: Case, networks: Mapping[str, GpgNetwork], number: int) -> dict[str, Method]:
    """Every way to schedule a case, by name."""
    one_by_one = [1 << op for op in range(case.graph.size)]

    def encoded(name: str) -> EncodedBlock:
        return EncodedBlock(networks[name], case.graph, case.costs)

    def look(stages: Stages, name: str = "gpg") -> list[int]:
        return looked_ahead(encoded(name), stages, LookAhead(), Random(number))

    def best_of(stages: Stages) -> list[int]:
        return sampled(encoded("gpg"), stages, count=16, noise=0.1, random=Random(number))

    def by_greedy(stages: Stages) -> list[int]:
        found = greedy(case.graph, case.costs, TOP_LIMITS, Budget())
        return [sum(1 << op for op in stage.operators) for stage in found.stages]

    found: dict[str, Method] = {
        "sequential": lambda stages: one_by_one,
        "greedy": by_greedy,
        "uniform": lambda stages: drawn(stages, Random(number)),
        "uniform_refined": lambda stages: refined(stages, drawn(stages, Random(number))),
        "sequential_refined": lambda stages: refined(stages, one_by_one),
        "beam_4k": lambda stages: best_endings(stages, 4_000),  # takes about the time of `gpg`
        "beam_16k": lambda stages: best_endings(stages, 16_000),
        "gpg_actor": lambda stages: acted(encoded("gpg"), stages),
        "gpg_best_of_16": best_of,
        "gpg_look_ahead": look,
        "gpg": lambda stages: refined(stages, look(stages)),
    }
    if "gpg_without_imitation" in networks:
        found["gpg_without_imitation"] = partial(look, name="gpg_without_imitation")
        found["gpg_paper_reward"] = lambda stages: acted(encoded("gpg_paper_reward"), stages)
    return found


def timed(case: Case, method: Method) -> tuple[float, float]:
    """Seconds that the schedule takes, and that the search took; the schedule is checked."""
    stages = case.stages()
    began_s = time.perf_counter()
    endings = method(stages)
    search_s = time.perf_counter() - began_s
    if sum(endings) != (1 << case.graph.size) - 1:
        raise AssertionError("a schedule misses operators")
    return case.costs.schedule_s(stages.schedule(endings)), search_s


def compared(found: Sequence[Case], networks: Mapping[str, GpgNetwork], size: Size) -> list[dict[str, Any]]:
    """A row per case and method."""
    rows = []
    for number, case in enumerate(found):
        best_s, exact = reference(case, size)
        progress(f"{case.members} members, block {number + 1} of {len(found)}: {case.graph.size} operators")
        for name, method in methods(case, networks, number).items():
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


def against_beam(found: Sequence[Case], network: GpgNetwork) -> dict[str, float]:
    """The policy's time, and beam's for a schedule at most as dear."""
    ours_ms, beam_ms, gains = [], [], []
    reached = 0
    for number, case in enumerate(found):
        progress(f"four members, block {number + 1} of {len(found)}: {case.graph.size} operators")
        cost_s, search_s = timed(case, methods(case, {"gpg": network}, number)["gpg"])
        ours_ms.append(search_s * 1e3)
        for expansions in BEAM_EXPANSIONS:
            beam_s, took_s = timed(case, partial(best_endings, expansions=expansions))
            if beam_s <= cost_s * (1.0 + 1e-9):
                reached += 1
                break
        beam_ms.append(took_s * 1e3)  # where it was not reached, that of the largest budget
        gains.append(beam_s / cost_s)
    faster = sum(ours < theirs for ours, theirs in zip(ours_ms, beam_ms, strict=True))
    return {
        "four_members_gpg_ms": median(ours_ms),
        "four_members_beam_ms": median(beam_ms),
        "four_members_beam_reached_share": reached / len(found),
        "four_members_gpg_faster_share": faster / len(found),
        "four_members_beam_over_gpg_cost": median(gains),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures over all of one to three members, and a row per method and number of members."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    figures = {}
    table = []
    for name in names:
        own = [row for row in rows if row["method"] == name]
        key = "cost_ratio_median" if name == "gpg" else f"{name}_ratio_median"
        figures[key] = median(row["ratio"] for row in own)
        for members in sorted({row["members"] for row in own}):
            some = [row for row in own if row["members"] == members]
            table.append(
                {
                    "method": name,
                    "members": members,
                    "ratio_median": median(row["ratio"] for row in some),
                    "ratio_max": max(row["ratio"] for row in some),
                    "search_ms": median(row["search_ms"] for row in some),
                    "exact_share": sum(row["exact"] for row in some) / len(some),
                }
            )
    figures["exact_share"] = sum(row["exact"] for row in rows) / len(rows)
    return figures, table


def trained(models: Mapping[str, Graph], settings: GpgSettings, limit_s: float) -> GpgResult:
    drawing = Drawing({graph.digest: graph for graph in models.values()}, analytic_costs)
    names = {graph.digest: name for name, graph in models.items()}
    return train(drawing, settings, names=names, costs="analytic", time_limit_s=limit_s)


def train_all(models: Mapping[str, Graph], size: Size, report: Report) -> dict[str, bytes]:
    """The policy in one process, the variants one after another in a second one."""
    seen = {name: graph for name, graph in models.items() if name not in HELD_OUT}
    wanted = {
        "gpg": (size.settings, size.main_s),
        "gpg_without_imitation": (size.alone, size.variant_s),
        "gpg_paper_reward": (replace(size.alone, reward=Reward.PAPER, gamma=0.95), size.variant_s),
    }
    began_s = time.perf_counter()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        running = {name: pool.submit(trained, seen, *one) for name, one in wanted.items()}
        found = {name: future.result() for name, future in running.items()}
    figures = {"train_s": time.perf_counter() - began_s}
    for name, one in found.items():
        progress(f"{name}: {one.steps} steps in {one.train_s:.0f} s, ended: {one.ended}")
        figures |= {f"{name}_train_s": one.train_s, f"{name}_steps": float(one.steps)}
    report.add(figures)
    return {name: one.checkpoint for name, one in found.items()}


def networks_of(
    models: Mapping[str, Graph], args: argparse.Namespace, size: Size, report: Report
) -> dict[str, GpgNetwork]:
    if args.checkpoint is not None:
        return {"gpg": decode(args.checkpoint.read_bytes()).network}
    progress("training")
    found = train_all(models, size, report)
    if args.save is not None:
        args.save.write_bytes(found["gpg"])
    return {name: decode(raw).network for name, raw in found.items()}


def measure(report: Report, options: argparse.Namespace) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes to come: two train at a time
    size = QUICK if options.quick else Size()
    models: dict[str, Graph] = {}
    for name in HELD_OUT if options.checkpoint is not None else tuple(zoo.ZOO):
        progress(f"importing {name}")
        # In a process of its own: the importer limits the time of its process.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            models[name] = pool.submit(zoo.graph_of, name).result()
    networks = networks_of(models, options, size, report)
    rows: list[dict[str, Any]] = []
    for members in (1, 2, 3):
        rows += compared(cases(models, members, size.cases), networks, size)
    report.add(*summary(rows))
    report.add(against_beam(cases(models, 4, size.four), networks["gpg"]))


if __name__ == "__main__":
    own = {
        "--checkpoint": {"type": Path, "help": "evaluate this one; train nothing"},
        "--save": {"type": Path, "help": "where the trained policy goes"},
    }
    sys.exit(run(measure, ["torch", "numpy", "onnx", "onnxruntime"], options=own))
