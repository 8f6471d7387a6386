"""What Xu et al. 2022 (EOP) claim, each claim beside what the searches find on a model of their machine.

Two models stand for it. *Derived*: rooflines of a Core i7-7700 and an RTX 2060 with launches, a bus and
barriers (`planner/twin/device_pairs`); joins are those of `BorderJoins`. *Tables*: what its own figures
say, and nothing else: per kind of operator the ratio of speeds that its table 5 balances, no launches, free
joins; the card's times are the roofline's. Kinds that are not in the table are as fast on both.

A claim that holds on neither contradicts the hardware and the paper's own tables. A ratio holds if ours is
within a quarter of it, a range if ours are within a tenth of its ends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Final

from benchmarks.eop.networks import NETWORKS, bert, gru, inception_v3, lstm, mobilenet, yolo_v3
from benchmarks.eop.problems import Shares, ShareSeconds, all_cores, joined_by, problem_of, roofline
from benchmarks.runner import Report, progress
from stageloom.planner.twin.device_pair import DevicePair, load_pair, pair_names
from stageloom.shared.graph import Graph
from stageloom.shared.search.analytic import roofline_s
from stageloom.shared.search.eop import (
    apart_cost_s,
    at_best_home,
    eop_at_most,
    key_operators,
    pair_apart_s,
    pair_coupled_s,
    splitter,
    splitters,
    tuned,
)
from stageloom.shared.search.split_problem import (
    ConstantJoins,
    Halves,
    SplitProblem,
    SplittableOperator,
    Whole,
    coupled_s,
)

EDGE_SERVER: Final = "i7_7700_rtx_2060"
BATCH: Final = 16

FEW: Final = 24
"""Splits of a model, so that those of three are some 500 bytes of a plan."""

OPERATORS: Final = {
    "InceptionV3": 416, "ResNet-18": 91, "MobileNet": 113, "SqueezeNet": 102, "Yolo v3": 354,
    "LSTM": 347, "GRU": 337, "Transformers": 903,
}  # fmt: skip
"""Table 1."""

TIMES_US: Final = {
    "InceptionV3": (inception_v3, 4999.43, 2539.66, 1498.49),
    "MobileNet": (mobilenet, 164.20, 43.29, 33.57),
    "Yolo v3": (yolo_v3, 827.66, 234.02, 221.51),
}
"""Table 4: equal, fixed, EOP."""

RATIOS: Final = {
    "split": (0.62, 0.38), "concatenate": (0.23, 0.77), "dense": (0.15, 0.85), "add": (0.90, 0.10),
    "sigmoid": (0.80, 0.20), "tanh": (0.87, 0.12), "multiply": (0.18, 0.22), "subtract": (0.32, 0.68),
}  # fmt: skip
"""Table 5, recurrent networks: shares (alpha, beta) of processor and card."""

BERT_RATIOS: Final = {
    **RATIOS,
    "transpose": (0.70, 0.30),
    "dense": (0.28, 0.72),
    "batch_matmul": (0.28, 0.72),
}
"""Table 5, transformers; a product of two activations is taken for a dense layer."""

FIGURE_8: Final = {"cpu": (1.67, 3.53), "gpu": (1.67, 2.9), "rival": (1.25, 1.97)}
"""Least and most improvement over the processor, the card, and the better of `equal` and `fixed`."""


@dataclass(frozen=True)
class Claim:
    """One thing that the paper says."""

    where: str
    model: str
    claim: str
    ours: str
    holds: bool

    @property
    def row(self) -> dict[str, Any]:
        """As it is reported."""
        own = {"where": self.where, "model": self.model, "claim": self.claim}
        return {"part": "paper", **own, "ours": self.ours, "holds": self.holds}


@dataclass(frozen=True)
class Times:
    """Predicted seconds of one model, split in every way."""

    cpu_s: float
    gpu_s: float
    split_s: Mapping[str, float]

    def over(self, rival: str) -> float:
        """Its seconds over those of `eop_paper`."""
        rivals = {"cpu": self.cpu_s, "gpu": self.gpu_s}
        rivals["rival"] = min(self.split_s["equal"], self.split_s["fixed"])
        return rivals.get(rival, self.split_s.get(rival, 0.0)) / self.split_s["eop_paper"]


def near(ours: float, claimed: float) -> bool:
    """Whether a ratio is reproduced in shape."""
    return 0.8 * claimed <= ours <= 1.25 * claimed


def within(ours: Sequence[float], low: float, high: float) -> bool:
    """Whether all of them are in a range that is claimed, or nearly so."""
    return low / 1.1 <= min(ours) and max(ours) <= 1.1 * high


def times_of(problem: SplitProblem) -> Times:
    fast_s, slow_s = (
        coupled_s(replace(problem, home=Whole(r)), [Whole(r)] * len(problem.operators)) for r in (0, 1)
    )
    found = {name: one.choose(problem).seconds for name, one in splitters().items()}
    return Times(slow_s, fast_s, found)


def derived(graph: Graph, pair: DevicePair, batch: int = BATCH) -> SplitProblem:
    return problem_of(graph, batch, roofline(pair), joined_by(pair, graph, batch))


def of_tables(graph: Graph, pair: DevicePair, batch: int = BATCH) -> SplitProblem:
    """The paper's table 5 as a machine."""
    ratios = BERT_RATIOS if graph.name == "BERT" else RATIOS
    rates = replace(all_cores(pair.fast), launch_s=0.0, threads=0)

    def seconds(part: Shares, resource: int) -> float:
        card_s = roofline_s(rates, ceil(part.flop), ceil(part.moved_bytes), ceil(part.elements))
        alpha, beta = ratios.get(part.operator.kind, (0.5, 0.5))
        return card_s * beta / alpha if resource else card_s

    return problem_of(graph, batch, seconds, ConstantJoins(0.0))


Machine = Callable[[Graph, DevicePair, int], SplitProblem]
MACHINES: Final[Mapping[str, Machine]] = {"derived": derived, "tables": of_tables}


def measure_paper(report: Report) -> None:
    """Every claim as a row, how many hold as figures, and all networks on all pairs."""
    pair = load_pair(EDGE_SERVER)
    claims: list[Claim] = []
    for part in (table_1, key_shares, figure_7, figure_8, table_4, table_5, figure_9, figure_10, figure_11):
        progress(part.__name__.replace("_", " "))
        claims += part(pair)
    report.add(
        {"claims": len(claims), "claims_held": sum(one.holds for one in claims)}, [c.row for c in claims]
    )
    progress("all networks")
    report.add({}, _modelled())


# Tables


def table_1(pair: DevicePair) -> Iterator[Claim]:
    for name, wanted in OPERATORS.items():
        count = len(NETWORKS[name]().operators)
        close = abs(count - wanted) <= 0.1 * wanted
        yield Claim("table 1", name, f"{wanted} operators with table 3's parameters", str(count), close)
    for name, make in (("LSTM", lstm), ("GRU", gru)):
        counts = {steps: len(make(steps).operators) for steps in range(1, 20)}
        steps = min(counts, key=lambda one: abs(counts[one] - OPERATORS[name]))
        close = abs(counts[steps] - OPERATORS[name]) <= 0.1 * OPERATORS[name]
        ours = f"{counts[steps]} at {steps} steps"
        yield Claim("table 1", name, f"{OPERATORS[name]} operators at some number of steps", ours, close)


def key_shares(pair: DevicePair) -> Iterator[Claim]:
    for name, make in NETWORKS.items():
        problem = derived(make(), pair)
        share = len(key_operators(problem.operators)) / len(problem.operators)
        claim = "5-35 % of operators take over 95 % of the time"
        yield Claim("table 2", name, claim, f"{share:.0%}", 0.05 <= share <= 0.35)


def table_4(pair: DevicePair) -> Iterator[Claim]:
    flop_per_s = sum(all_cores(one).flop_per_s for one in (pair.fast, pair.slow))
    for name, (make, equal_us, fixed_us, eop_us) in TIMES_US.items():
        graph = make()
        least_us = 1e6 * BATCH * sum(one.flop for one in graph.operators) / flop_per_s
        ours = f"at least {least_us:.0f} us at both peaks, {least_us / eop_us:.0f} times as long"
        yield Claim("table 4", name, f"EOP takes {eop_us} us at batch {BATCH}", ours, least_us <= eop_us)
        found = times_of(derived(graph, pair))
        for rival, rival_us in (("equal", equal_us), ("fixed", fixed_us)):
            claim = f"EOP is {rival_us / eop_us:.2f} times as fast as {rival}"
            over = found.over(rival)
            yield Claim("table 4", name, claim, f"{over:.2f}", near(over, rival_us / eop_us))
        beside = f"{min(found.cpu_s, found.gpu_s) / found.split_s['eop_paper']:.2f}"
        claim = "EOP is faster than the better of processor and card"
        yield Claim("table 4", name, claim, beside, float(beside) > 1.0)


def table_5(pair: DevicePair) -> Iterator[Claim]:
    for name, ratio in {**RATIOS, "transpose": (0.70, 0.30), "dense, BERT": (0.28, 0.72)}.items():
        total = sum(ratio)
        yield Claim("table 5", name, "alpha + beta = 1", f"{total:.2f}", abs(total - 1.0) < 0.005)
    for model, graph, ratios in (
        ("LSTM, GRU", gru(), RATIOS),
        ("BERT", bert(1), {one: BERT_RATIOS[one] for one in ("transpose", "dense")}),
    ):
        problem = derived(graph, pair)
        free = replace(problem, joins=ConstantJoins(0.0))
        for kind, (alpha, beta) in ratios.items():
            op = _largest(graph, kind)
            share = alpha / (alpha + beta)
            ours = _processor_share(free.operators[op])
            more = "processor" if share > 0.5 else "card"
            claim = f"{kind}: the {more} gets the larger part, alpha = {share:.2f}"
            yield Claim(
                "table 5", model, claim, f"alpha = {ours:.2f} with free joins", (ours > 0.5) == (share > 0.5)
            )
            least_s = problem.operators[op].least_whole_s
            best_s = min(_all_splits_s(problem, op), default=least_s)
            claim, over = (
                f"{kind}: a split is shorter than either resource",
                f"it takes {best_s / least_s:.2f} times as long",
            )
            yield Claim("table 5", model, claim, over, best_s < least_s)


def _largest(graph: Graph, kind: str) -> int:
    ops = [op for op, one in enumerate(graph.operators) if one.kind == kind]
    return max(ops, key=lambda op: Shares(graph, op, 1).moved_bytes)


def _all_splits_s(problem: SplitProblem, op: int) -> Iterator[float]:
    """At both homes."""
    for home in (0, 1):
        here = replace(problem, home=Whole(home))
        for axis in problem.operators[op].axes:
            yield from (apart_cost_s(here, op, Halves(axis.axis, end)) for end in axis.boundaries)


def _processor_share(operator: SplittableOperator) -> float:
    """Of the split that takes least, or of the whole operator where that takes no more."""
    best = (operator.whole_s[0], 0.0), (operator.whole_s[1], 1.0)
    splits = [
        (axis.seconds(end), 1.0 - end / axis.extent) for axis in operator.axes for end in axis.boundaries
    ]
    return min([*best, *splits])[1]


# Figures


def figure_7(pair: DevicePair) -> Iterator[Claim]:
    graph, batches = gru(), [1 << power for power in range(11)]
    spread: dict[str, float] = {}
    part_s = roofline(pair)
    for kind in RATIOS:
        op = _largest(graph, kind)
        speedups = [
            part_s(Shares(graph, op, batch), 1) / part_s(Shares(graph, op, batch), 0) for batch in batches
        ]
        spread[kind] = max(speedups) / min(speedups)
    fixed = [kind for kind, one in spread.items() if one < 1.5]
    ours = ", ".join(f"{kind} {one:.0f}x" for kind, one in spread.items())
    claim = "over batches of 1 to 1024 only split has a nearly fixed speedup"
    yield Claim("figure 7", "LSTM, GRU", claim, ours, fixed == ["split"])
    dense = _largest(graph, "dense")
    by_batch, by_channels = (_speedup_spread(graph, dense, part_s, one) for one in ("n", "c"))
    ours = f"{by_batch:.1f}x and {by_channels:.1f}x"
    claim = "dense: the speedup varies otherwise over channels than over the batch"
    yield Claim("figure 7", "LSTM, GRU", claim, ours, abs(by_batch - by_channels) > 0.1 * by_batch)


def _speedup_spread(graph: Graph, op: int, part_s: ShareSeconds, axis: str) -> float:
    problem = problem_of(graph, BATCH, part_s, ConstantJoins(0.0))
    one = next(one for one in problem.operators[op].axes if one.axis.value == axis)
    speedups = [one.part_s[1](end) / one.part_s[0](end) for end in one.boundaries]
    return max(speedups) / min(speedups)


def figure_8(pair: DevicePair) -> Iterator[Claim]:
    for name, make in (("LSTM", lstm), ("GRU", gru), ("BERT", bert)):
        for machine, problem_on in MACHINES.items():
            found = times_of(problem_on(make(), pair, BATCH))
            for rival, (low, high) in FIGURE_8.items():
                over = found.over(rival)
                claim, held = f"EOP over {rival}: {low}-{high}", within([over], low, high)
                yield Claim("figure 8", f"{name}, {machine}", claim, f"{over:.2f}", held)


def figure_9(pair: DevicePair) -> Iterator[Claim]:
    for machine, problem_on in MACHINES.items():
        for name, make in (("LSTM", lstm), ("GRU", gru)):

            def claimed(claim: str, ours: str, holds: bool, model: str = f"{name}, {machine}") -> Claim:
                return Claim("figure 9", model, claim, ours, holds)

            by_batch = [times_of(problem_on(make(), pair, batch)) for batch in (8, 16, 32, 64, 128)]
            over = [one.over(rival) for one in by_batch for rival in ("cpu", "gpu")]
            claim = "batches 8 to 128: EOP is 1.5-2.9 times as fast as processor and card"
            yield claimed(claim, _span(over), within(over, 1.5, 2.9))
            growth = by_batch[3].split_s["eop_paper"] / by_batch[0].split_s["eop_paper"]
            ours = f"{growth:.1f} times for 8 times the batch"
            yield claimed("batches 8 to 64: time grows linearly", ours, near(growth, 8.0))
            sizes = range(40, 201, 40)
            over = [times_of(problem_on(make(inputs=size), pair, BATCH)).over("rival") for size in sizes]
            claim = "inputs of 40 to 200: EOP stays 1.23 times as fast as its rivals"
            yield claimed(claim, _span(over), within(over, 1.23, 1.23))
            by_layers = [times_of(problem_on(make(layers=size), pair, BATCH)) for size in (2, 4, 6, 8)]
            growth = by_layers[-1].split_s["eop_paper"] / by_layers[0].split_s["eop_paper"]
            ours = f"{growth:.2f} times for 4 times the layers"
            yield claimed("2 to 8 layers: time grows linearly", ours, near(growth, 4.0))
            over = [one.over("rival") for one in by_layers]
            claim = "2 to 8 layers: EOP stays 1.1-1.25 times as fast as its rivals"
            yield claimed(claim, _span(over), within(over, 1.1, 1.25))


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def figure_10(pair: DevicePair, counts: tuple[int, int] = (12, 192)) -> Iterator[Claim]:
    """`counts`: of layers, and of heads in a network of the first count of layers."""
    for machine, problem_on in MACHINES.items():
        choose = splitter("eop_paper").choose
        layers = [choose(problem_on(bert(count), pair, BATCH)).seconds for count in counts]
        heads = [choose(problem_on(bert(counts[0], heads=count), pair, BATCH)).seconds for count in counts]
        claim = "12 to 192 attention layers change the time by less than 1 %"
        ours = f"{layers[1] / layers[0]:.2f} times"
        yield Claim("figure 10", f"BERT, {machine}", claim, ours, abs(layers[1] / layers[0] - 1) < 0.01)
        claim = "12 to 192 attention heads, if these are meant, do"
        ours = f"{heads[1] / heads[0]:.2f} times"
        yield Claim("figure 10", f"BERT, {machine}", claim, ours, abs(heads[1] / heads[0] - 1) < 0.01)


def figure_11(pair: DevicePair) -> Iterator[Claim]:
    """Condition 1: key operators, each by itself. 2: every operator split at its best. 3: both."""
    for machine, problem_on in MACHINES.items():
        problem = problem_on(bert(), pair, BATCH)
        found = times_of(problem)
        first_s, third_s = found.split_s["separate"], found.split_s["eop_paper"]
        second_s = sum(
            min((apart_cost_s(problem, op, state) for state in _splits(one)), default=one.least_whole_s)
            for op, one in enumerate(problem.operators)
        )
        best_s = min(found.cpu_s, found.gpu_s)
        where, model = "figure 11", f"BERT, {machine}"
        claim, ours = "condition 3 is 1.45 times as fast as the baseline", f"{best_s / third_s:.2f}"
        yield Claim(where, model, claim, ours, near(best_s / third_s, 1.45))
        claim, ours = "condition 3 is faster than condition 1", f"{first_s / third_s:.4f}"
        yield Claim(where, model, claim, ours, first_s / third_s > 1.0001)
        claim, ours = "condition 3 is faster than condition 2", f"{second_s / third_s:.4f}"
        yield Claim(where, model, claim, ours, second_s / third_s > 1.0001)
        printed, shared = (tuned(problem, pair_s).pairs for pair_s in (pair_apart_s, pair_coupled_s))
        claim = "neighbours gain from joint tuning"
        ours = f"{len(printed)} pairs as printed, {len(shared)} where neighbours share a join"
        yield Claim(where, model, claim, ours, bool(printed))


def _splits(operator: SplittableOperator) -> Iterator[Halves]:
    for axis in operator.axes:
        yield from (Halves(axis.axis, end) for end in axis.boundaries)


def _modelled() -> list[dict[str, Any]]:
    """All networks on all pairs, derived, in milliseconds."""
    rows = []
    for name in pair_names():
        pair = load_pair(name)
        for model, make in NETWORKS.items():
            problem = derived(make(), pair)
            found = times_of(problem)
            row: dict[str, Any] = {"part": "modelled", "pair": name, "model": model, "batch": BATCH}
            row |= {"fast_ms": 1e3 * found.gpu_s, "slow_ms": 1e3 * found.cpu_s}
            best = splitter("eop").choose(problem)
            few = at_best_home(partial(eop_at_most, splits=FEW), problem)
            row |= {"splits": len(best.splits), f"eop_{FEW}_splits_ms": 1e3 * few.seconds}
            rows.append(row | {f"{way}_ms": 1e3 * s for way, s in sorted(found.split_s.items())})
    return rows
