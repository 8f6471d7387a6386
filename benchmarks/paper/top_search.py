"""TOP's figures of searching: 13 (GPG beside dynamic programming), and what a decision costs online (VI-F).

Times are processor seconds of this process, so that other programs move them little.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.paper.contestants import MIX, SERVER, choices
from benchmarks.paper.finding import Finding, Inputs, Panel, PaperClaim, Row, lines_of, not_run
from benchmarks.paper.graphs import zoo_graph
from benchmarks.policy import LOADS, drawn, samples, space
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.bound import bind
from stageloom.shared.launch_list import lower
from stageloom.shared.plan import decode_plan
from stageloom.shared.policy.gpg.checkpoint import decode
from stageloom.shared.policy.gpg.choose import LookAhead, acted, looked_ahead, ranked
from stageloom.shared.policy.gpg.network import EncodedBlock, GpgNetwork
from stageloom.shared.policy.maddpg.decide import decide
from stageloom.shared.policy.maddpg.network import state_of
from stageloom.shared.search.beam import best_endings
from stageloom.shared.search.compose import Combination, compose
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.endings import TooManyError
from stageloom.shared.search.gpg import policy_stages, refined
from stageloom.shared.search.interface import TOP_LIMITS
from stageloom.shared.search.ios import exact
from stageloom.shared.search.stages import Stages

PACKAGED: Final = Path(__file__).parents[2] / "shared/policy/gpg/default.checkpoint"
PAIRS_MAX: Final = 1_500_000
"""Pairs of a state and an ending up to which dynamic programming is let run."""

BEAM: Final = 4_000
CASES: Final = 3
LEAST_OPERATORS: Final = 5  # smaller blocks leave nothing to choose
DECIDES_MS: Final = 0.05
REBUILDS_S: Final = 3.0


class Combined(NamedTuple):
    """One combined block and its costs."""

    graph: CombinedGraph
    costs: StageCosts


def combined_blocks(inputs: Inputs, members: int, count: int) -> list[Combined]:
    """Blocks of TOP's three models, drawn with a seed."""
    table = CostTable(rates=load_device(SERVER).rates())
    blocks = []
    for choice in choices({name: zoo_graph(inputs, name) for name, _ in MIX}):
        least = 1 if inputs.small else LEAST_OPERATORS
        blocks += [
            (choice.artifact, choice.graph, block)
            for block in split(choice.graph, choice.cuts())
            if len(block.operators) >= least
        ]
    found = []
    for number in range(count):
        chosen = Random(f"{members}:{number}").choices(blocks, k=members)
        graph = combine([(graph, block) for _, graph, block in chosen])
        found.append(Combined(graph, table.for_members(chosen)))
    return found


def figure_13(inputs: Inputs) -> Finding:
    """Search time and cost of both, over the number of sub-blocks."""
    network = decode(PACKAGED.read_bytes()).network
    rows: list[Row] = []
    for members in (1, 2) if inputs.small else (1, 2, 3, 4):
        for number, case in enumerate(combined_blocks(inputs, members, 1 if inputs.small else CASES)):
            rows += [
                {"sub-blocks": members, "block": number, **row} for row in searched(case, network, number)
            ]
    return Finding(_claims_13(rows), tuple(rows), _panels_13(rows), _NOTE_13)


_NOTE_13: Final = (
    "Combined blocks of Inception V3, ResNet-50 and SqueezeNet, three drawn per number of sub-blocks; r = 3, "
    "s = 8; costs of the A100's roofline. *DP* is our dynamic programming, which counts before it searches "
    "and gives up beyond 1.5 million pairs of a state and an ending; *GPG* is the packaged policy with its "
    "look-ahead and local search, *GPG actor* its bare actions, as printed. Cost is over the cheapest that "
    "any of them found."
)


def searched(case: Combined, network: GpgNetwork, number: int) -> list[Row]:
    """A row per method: processor milliseconds and cost over the cheapest found; None out of reach."""

    def encoded() -> EncodedBlock:
        return EncodedBlock(network, case.graph, case.costs)

    methods: dict[str, Callable[[Stages], list[int]]] = {
        "DP": partial(exact, expansions=PAIRS_MAX),
        "GPG": lambda stages: refined(stages, looked_ahead(encoded(), stages, LookAhead(), Random(number))),
        "GPG actor": lambda stages: acted(encoded(), stages),
        "beam": partial(best_endings, expansions=BEAM),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, method in methods.items():
        stages = policy_stages(case.graph, case.costs, TOP_LIMITS)
        began_s = time.process_time()
        try:
            endings = method(stages)
        except TooManyError:
            continue
        took_s = time.process_time() - began_s
        found[name] = took_s, case.costs.schedule_s(stages.schedule(endings))
    least_s = min(cost_s for _, cost_s in found.values())
    return [
        {
            "method": name,
            "operators": case.graph.size,
            "search, ms": round(1e3 * found[name][0], 2) if name in found else None,
            "cost": round(found[name][1] / least_s, 4) if name in found else None,
        }
        for name in methods
    ]


def _claims_13(rows: Sequence[Row]) -> tuple[PaperClaim, ...]:
    times = _medians(rows, "search, ms")
    reached = sorted(members for method, members in times if method == "DP")
    most = reached[-1]
    growth = [times["DP", n] / times["DP", n - 1] for n in reached if n - 1 in reached]
    beyond = sum(row["search, ms"] is None for row in rows if row["method"] == "DP")
    ratio = times["DP", most] / times["GPG", most]
    known = {
        (row["sub-blocks"], row["block"]): row["cost"]
        for row in rows
        if row["method"] == "DP" and row["cost"] is not None
    }
    over = {
        method: [
            row["cost"] / known[place]
            for row in rows
            if row["method"] == method and (place := (row["sub-blocks"], row["block"])) in known
        ]
        for method in ("GPG", "GPG actor")
    }
    worst, bare = max(over["GPG"]), max(over["GPG actor"])
    return (
        PaperClaim(
            "the time of dynamic programming grows exponentially with the sub-blocks",
            f"times {', '.join(f'{one:.3g}' for one in growth)} per sub-block; {beyond} of "
            f"{sum(row['method'] == 'DP' for row in rows)} blocks are beyond {PAIRS_MAX:,} pairs",
            bool(growth) and min(growth) > 3.0,
        ),
        PaperClaim(
            "GPG takes a tenth of its time at larger sizes",
            f"1/{ratio:.3g} at {most} sub-blocks, the largest that dynamic programming reaches at the median",
            ratio >= 8.0,
        ),
        PaperClaim(
            "its schedules are only slightly dearer",
            f"at most {100 * (worst - 1):.1f} % on the {len(known)} blocks that dynamic programming reaches, "
            "look-ahead and local search included",
            worst <= 1.05,
        ),
        PaperClaim(
            "as printed, too, where the action alone decides",
            f"up to {100 * (bare - 1):.0f} % dearer on these",
            bare <= 1.05,
        ),
    )


def _medians(rows: Sequence[Row], column: str) -> dict[tuple[str, int], float]:
    """By method and sub-blocks; where most blocks were out of reach there is none."""
    groups: dict[tuple[str, int], list[Any]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["sub-blocks"]), []).append(row[column])
    return {
        key: median(value for value in values if value is not None)
        for key, values in groups.items()
        if 2 * sum(value is not None for value in values) > len(values)
    }


def _panels_13(rows: Sequence[Row]) -> tuple[Panel, ...]:
    panels = []
    for column, up, logarithmic in (
        ("search, ms", "processor ms, median", True),
        ("cost", "over the cheapest", False),
    ):
        flat = [
            {"method": method, "sub-blocks": members, column: value}
            for (method, members), value in _medians(rows, column).items()
        ]
        panels.append(
            Panel(column, "sub-blocks", up, lines_of(flat, "sub-blocks", column, "method"), logarithmic)
        )
    return tuple(panels)


def figure_19(inputs: Inputs) -> Finding:
    """Where the time of a step of GPG goes, on combined blocks of three sub-blocks; nothing is trained."""
    network = decode(PACKAGED.read_bytes()).network
    parts: dict[str, list[float]] = {}
    for case in combined_blocks(inputs, 1 if inputs.small else 3, 1 if inputs.small else CASES):
        for name, taken_ms in _parts_ms(case, network).items():
            parts.setdefault(name, []).append(taken_ms)
    step_ms = {name: round(median(taken), 4) for name, taken in parts.items()}
    rows: list[Row] = [{"part": name, "processor ms": taken} for name, taken in step_ms.items()]
    searching = step_ms["endings"] / sum(step_ms.values())
    claims = (
        PaperClaim(
            "of a step of GPG the search for endings takes the most time",
            f"{100 * searching:.0f} % of encoding, endings, decision and costing together",
            searching > 0.5,
        ),
        PaperClaim(
            "it takes about 6 s, everything else less than 5 s",
            f"{step_ms['endings']:.3g} ms, for endings are counted and drawn by number, not listed",
            3e3 <= step_ms["endings"] <= 12e3,
        ),
        not_run(
            "of a step of MADDPG running the tasks takes the most, 10 s",
            "a twin takes the device's place here, so that a step's time is no device's; benchmarks.learning "
            "has what trainings take",
        ),
    )
    note = (
        "Medians of three combined blocks of three sub-blocks each, in their first state: all operators left."
    )
    panel = Panel(
        "a step of GPG",
        "",
        "processor ms",
        lines_of([{**row, "of": ""} for row in rows], "part", "processor ms", "of"),
        True,
    )
    return Finding(claims, tuple(rows), (panel,), note)


def _parts_ms(case: Combined, network: GpgNetwork) -> dict[str, float]:
    """What encoding, endings, the decision and the cost of the chosen stage take."""
    stages = policy_stages(case.graph, case.costs, TOP_LIMITS)
    whole = (1 << case.graph.size) - 1
    began_s = time.process_time()
    encoded = EncodedBlock(network, case.graph, case.costs)
    encoded_s = time.process_time()
    found = ranked(stages, whole)
    ranked_s = time.process_time()
    ending = found.unrank(int(float(encoded.actions([whole])[0]) * found.count))
    decided_s = time.process_time()
    stages.costs.stage_s(stages.groups(ending))
    ended_s = time.process_time()
    marks = (began_s, encoded_s, ranked_s, decided_s, ended_s)
    names = ("encoding", "endings", "decision", "cost of the stage")
    return {name: 1e3 * (end - begin) for name, (begin, end) in zip(names, pairwise(marks), strict=True)}


def section_6_f(inputs: Inputs) -> Finding:
    """What a decision costs online: the actors' forward pass, and from a plan's bytes to launch lists."""
    repeats = 20 if inputs.small else 400
    where = space()
    network = drawn(where, np.random.default_rng(0))
    random = Random(0)
    seen = [samples(where, random) for _ in range(32)]
    forward_ms = _median_ms(lambda n: network.actions(state_of(where, seen[n % 32])), repeats)
    decide_ms = _median_ms(lambda n: decide(where, network, seen[n % 32], LOADS), repeats)
    rows: list[Row] = [
        {"what": "samples to actions, one thread", "processor ms": round(forward_ms, 4)},
        {"what": "on to combined blocks and launch intervals", "processor ms": round(decide_ms, 4)},
    ]
    rebuild_ms = _median_ms(_rebuilding(inputs), 3)
    rows.append(
        {"what": "a plan of three models: bytes to launch lists", "processor ms": round(rebuild_ms, 3)}
    )
    claims = (
        PaperClaim(
            "the policy answers within 0.05 ms on the server",
            f"{forward_ms:.2f} ms, numpy on one thread",
            forward_ms <= DECIDES_MS,
        ),
        PaperClaim(
            "results are parsed and graphs rebuilt on the device within 3 s",
            f"{rebuild_ms:.0f} ms from bytes to launch lists; sessions or captures of a backend come on top",
            rebuild_ms <= 1e3 * REBUILDS_S,
        ),
    )
    note = (
        "Processor time where the command ran; networks of TOP's sizes (500 and 128 units), n = 10 samples, "
        "weights drawn."
    )
    return Finding(claims, tuple(rows), (), note)


def _rebuilding(inputs: Inputs) -> Callable[[int], object]:
    """From a plan's bytes to the launch lists of all its combined blocks."""
    models = choices({name: zoo_graph(inputs, name) for name, _ in MIX})
    wire = compose(models, scheduler="greedy", combination=Combination.ALIGNED, members_max=3).wire
    graphs = {model.artifact: model.graph for model in models}

    def rebuild(number: int) -> object:
        bound = bind(decode_plan(wire), graphs)
        return [
            lower(one.plan.schedule, one.graph, (1 << len(one.plan.members)) - 1) for one in bound.combined
        ]

    return rebuild


def _median_ms(work: Callable[[int], object], repeats: int) -> float:
    taken = []
    for number in range(repeats + 1):
        began_s = time.process_time()
        work(number)
        taken.append(time.process_time() - began_s)
    return 1e3 * median(taken[1:])  # the first one warms up
