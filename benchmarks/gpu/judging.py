"""From the samples to what they mean: distances, concurrency, and the goals.

How far a time is from what cannot be beaten is told by three distances, by ceilings measured on the same
device. The goals were set for a Hopper in fp16 at batch 1. They are hypotheses until measured. A ratio counts
by its median; its 16th and 84th percentile over the rounds and the spread of the baseline against itself
stand beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.gpu.bench import Ceilings
from benchmarks.gpu.device import repeat, require_cuda
from benchmarks.gpu.kernel_intervals import busy_share, concurrency, kernels_of, trace_of, union_us
from benchmarks.gpu.plans import SEQUENTIAL
from benchmarks.gpu.results import Results
from benchmarks.gpu.rivals import AGAIN, EAGER, GRAPH, MIX, batch_name
from benchmarks.gpu.rounds import Ratio
from benchmarks.gpu.table import Table
from stageloom.shared.bitmask import bits
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId

_TRACED_RUNS: Final = 5


@dataclass(frozen=True)
class ModelWork:
    """What one image costs at least."""

    flop: int
    weight_bytes: int
    activation_bytes: int  # what every fused unit reads and writes
    units: int  # fused
    critical_units: int  # on the longest path

    @property
    def moved_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes

    def bounds_us(self, ceilings: Ceilings) -> dict[str, float]:
        """Lower bounds: by computing or moving bytes, whichever takes longer, and by the path."""
        flop_s, bytes_s = self.flop / ceilings.flop_per_s, self.moved_bytes / ceilings.bytes_per_s
        path_s = self.critical_units * ceilings.chain_graph_s
        return {"roofline": max(flop_s, bytes_s) * 1e6, "path": path_s * 1e6}


def work_of(graph: Graph, precision: str) -> ModelWork:
    """Of one model at batch 1."""
    scale = 2 if precision == "fp16" else 1  # the graph counts float32
    units: dict[int, list[int]] = {}
    for op, operator in enumerate(graph.operators):
        units.setdefault(operator.fused_unit, []).append(op)
    return ModelWork(
        sum(operator.flop for operator in graph.operators),
        sum(operator.weight_bytes for operator in graph.operators) // scale,
        sum(graph.tensors[tensor].nbytes for ops in units.values() for tensor in _crossing(graph, ops))
        // scale,
        len(units),
        _critical_units(graph),
    )


def _crossing(graph: Graph, ops: Sequence[int]) -> set[TensorId]:
    """What a fused unit reads and what it leaves to others."""
    read = {tensor for op in ops for tensor in graph.operators[op].inputs}
    made = {tensor for op in ops for tensor in graph.operators[op].outputs}
    inside = {tensor for tensor in made & read if set(graph.consumers[tensor]) <= set(ops)}
    return (read | made) - inside


def _critical_units(graph: Graph) -> int:
    """Fused units on the longest path."""
    before: dict[int, set[int]] = {}
    for op, mask in enumerate(graph.predecessors):
        unit = graph.operators[op].fused_unit
        others = {graph.operators[other].fused_unit for other in bits(mask)}
        before.setdefault(unit, set()).update(others - {unit})
    depth: dict[int, int] = {}

    def reach(unit: int) -> int:
        """Units in order of their first operator, so what comes before is known but for few."""
        if unit not in depth:
            depth[unit] = 1 + max((reach(other) for other in before[unit]), default=0)
        return depth[unit]

    return max(reach(unit) for unit in sorted(before))


def add_distances(results: Results, table: Table, ceilings: Ceilings) -> None:
    """Per model three lower bounds, and how far the fastest variant at batch 1 is from each.

    The empirical one is the best of batch 64 and of independent graphs on 1 to 16 streams, per image.
    """
    for subject in table.subjects:
        times = table.times_us(subject.name)
        single = {name: us for name, us in times.items() if "streams" not in name and "batch" not in name}
        if not single:
            results.skip("distance", subject.name, "nothing was measured")
            continue
        many = [us for name, us in times.items() if "streams" in name or name == batch_name(64)]
        work = work_of(subject.artifact.graph, table.settings.precision)
        bounds = {**work.bounds_us(ceilings), "empirical": min([*many, *single.values()])}
        fastest = min(single, key=lambda name: single[name])
        over = {name: single[fastest] / bound_us for name, bound_us in bounds.items()}
        results.add(
            {f"distance.{subject.name}.{name}": ratio for name, ratio in over.items()},
            part="distance",
            name=subject.name,
            gflop=work.flop / 1e9,
            mbyte=work.moved_bytes / 1e6,
            units=work.units,
            critical_units=work.critical_units,
            fastest=fastest,
            fastest_us=single[fastest],
            **{f"{name}_us": bound_us for name, bound_us in bounds.items()},
            **{f"over_{name}": ratio for name, ratio in over.items()},
        )


def add_concurrency(results: Results, table: Table) -> None:
    """Busy time and concurrency of the sequential graph and of our chosen plan, by kernel intervals."""
    require_cuda(table.device)
    for variant in table.variants:
        best = table.best(variant.subject)
        if variant.name not in (GRAPH, best):
            continue
        with results.attempt("concurrency", f"{variant.subject}, {variant.name}"):
            kernels = kernels_of(trace_of(table.device, partial(repeat, variant.run, _TRACED_RUNS)))
            at_once = concurrency(kernels)
            results.add(
                {f"concurrency.{variant.subject}.{'ours' if variant.name == best else 'torch'}": at_once},
                part="concurrency",
                name=f"{variant.subject}, {variant.name}",
                kernels=len(kernels) / _TRACED_RUNS,
                busy_us=union_us(kernels) / _TRACED_RUNS / variant.units,
                busy_share=busy_share(kernels),
                concurrency=at_once,
            )


# Goals

OURS_BEST: Final = "ours, best"
"""The plan that the quick selection chose."""

BEST_SEQUENTIAL: Final = "best sequential graph"
"""Ours or torch's, whichever is faster: the harder one to beat."""

BEST_STREAMS: Final = "best of N streams"
SWITCH_P99_MS: Final = 50.0


@dataclass(frozen=True)
class Goal:
    """At least `least` times faster than `than` on a subject; `never_slower`: or within its spread."""

    name: str
    subject: str
    than: str
    variant: str
    least: float
    never_slower: bool = False


GOALS: Final = (
    *(
        Goal(f"graph_over_eager.{model}", model, EAGER, BEST_SEQUENTIAL, 3.0)
        for model in ("inception_v3", "resnet50", "squeezenet")
    ),
    Goal("ours_over_sequential.inception_v3", "inception_v3", BEST_SEQUENTIAL, OURS_BEST, 1.3),
    Goal("ours_over_sequential.squeezenet", "squeezenet", BEST_SEQUENTIAL, OURS_BEST, 1.2),
    Goal("ours_over_sequential.resnet50", "resnet50", BEST_SEQUENTIAL, OURS_BEST, 1.0, never_slower=True),
    Goal("ours_over_sequential.mix", MIX, BEST_SEQUENTIAL, OURS_BEST, 1.6),
    Goal("ours_over_streams.mix", MIX, BEST_STREAMS, OURS_BEST, 1.1),
)


def judge(goal: Goal, ratio: Ratio | None, itself: Ratio | None) -> tuple[bool | None, str]:
    """Whether it was reached (None: not measured), and why; `itself`: the baseline over its copy."""
    if ratio is None:
        return None, "not measured"
    least = goal.least
    noise = "" if itself is None else f"; the baseline against itself {itself.text}"
    if goal.never_slower and itself is not None:
        least = min(least, itself.low)
    return ratio.value >= least, f"{ratio.text} in {ratio.rounds} rounds, asked {goal.least}{noise}"


def judge_switch(p99_ms: float | None, lost: int | None) -> tuple[bool | None, str]:
    """A plan switch: its p99 and the tasks lost in all switches."""
    if p99_ms is None or lost is None:
        return None, "not measured"
    reached = p99_ms < SWITCH_P99_MS and lost == 0
    return reached, f"p99 {p99_ms:.2f} ms, asked {SWITCH_P99_MS:.0f}; {lost} lost"


def _row_named(table: Table, subject: str, name: str) -> str | None:
    """The row that a goal's name stands for; None where it was not measured."""
    if name == OURS_BEST:
        return table.best(subject)
    times = table.times_us(subject)
    rows: dict[str, list[str]] = {
        BEST_SEQUENTIAL: [row for row in (GRAPH, SEQUENTIAL) if row in times],
        BEST_STREAMS: [row for row in times if "graphs on" in row],
    }
    return min(rows.get(name, [name]), key=lambda row: times.get(row, float("inf")), default=None)


def add_goals(results: Results, table: Table, switch: Mapping[str, Any]) -> None:
    """Every goal as reached or not, with the measured ratio and spread; `switch`: figures of plan switches.

    A quick run and one on the host judge nothing.
    """
    if table.settings.quick:
        results.skip("goal", "all goals", "a quick run says nothing about speed")
        return
    for goal in GOALS:
        than, variant = (_row_named(table, goal.subject, name) for name in (goal.than, goal.variant))
        ratio = table.faster(goal.subject, than, variant) if than and variant else None
        reached, text = judge(goal, ratio, table.faster(goal.subject, GRAPH, AGAIN))
        results.add(
            {f"goal.{goal.name}": None if ratio is None else ratio.value},
            part="goal",
            name=goal.name,
            reached=reached,
            detail=f"{text} ({variant} over {than})",
        )
    p99_ms = switch.get("first_task_p99_ms")
    reached, text = judge_switch(p99_ms, switch.get("lost"))
    results.add({"goal.switch_p99_ms": p99_ms}, part="goal", name="switch", reached=reached, detail=text)
