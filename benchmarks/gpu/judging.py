"""From the samples to what they mean: distances, concurrency, and the goals.

How far a time is from what cannot be beaten is told by three distances, by ceilings measured on the same
device.

The goals were set for a Hopper in fp16 at batch 1. They are hypotheses until measured. A ratio counts by
its median; its 16th and 84th percentile over the rounds and the spread of the baseline against itself
stand beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.gpu.device import Device
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.probes import Ceilings, trace_of
from benchmarks.gpu.profiled_kernels import busy_share, concurrency, kernels_of, union_us
from benchmarks.gpu.results import Results
from benchmarks.gpu.rivals import MIX, batch_name
from benchmarks.gpu.rounds import Ratio, Variant, faster
from benchmarks.gpu.table import Table, again_row, known_times, sequential_rows
from stageloom.shared.bitmask import bits
from stageloom.shared.graph import Graph


@dataclass(frozen=True)
class Work:
    """What one image costs at least."""

    flop: int
    weight_bytes: int
    activation_bytes: int  # every tensor written once
    units: int  # fused
    critical_units: int  # on the longest path

    @property
    def moved_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes


def work_of(graph: Graph, precision: str) -> Work:
    """Of one model at batch 1."""
    scale = 2 if precision == "fp16" else 1  # the graph counts float32
    made = {tensor for operator in graph.operators for tensor in operator.outputs}
    return Work(
        sum(operator.flop for operator in graph.operators),
        sum(operator.weight_bytes for operator in graph.operators) // scale,
        sum(graph.tensors[tensor].nbytes for tensor in made) // scale,
        len({operator.fused_unit for operator in graph.operators}),
        _critical(graph),
    )


def _critical(graph: Graph) -> int:
    """Fused units on the longest path."""
    before: dict[int, set[int]] = {}
    for op, mask in enumerate(graph.predecessors):
        unit = graph.operators[op].fused_unit
        others = {graph.operators[one].fused_unit for one in bits(mask)}
        before.setdefault(unit, set()).update(others - {unit})
    depth: dict[int, int] = {}

    def reach(unit: int) -> int:
        """Units in order of their first operator, so what comes before is known but for few."""
        if unit not in depth:
            depth[unit] = 1 + max((reach(one) for one in before[unit]), default=0)
        return depth[unit]

    return max(reach(unit) for unit in sorted(before))


@dataclass(frozen=True)
class Distances:
    """Lower bounds in microseconds per image, each from another reason; None where it was not measured."""

    flop_us: float
    bytes_us: float
    path_us: float
    empirical_us: float | None

    @property
    def roofline_us(self) -> float:
        """The longer of computing and of moving bytes."""
        return max(self.flop_us, self.bytes_us)


def distances(work: Work, ceilings: Ceilings, empirical_us: float | None) -> Distances:
    """`empirical_us` is the best of batch 64 and of independent graphs on 1 to 16 streams, per image."""
    return Distances(
        work.flop / ceilings.flop_per_s * 1e6,
        work.moved_bytes / ceilings.bytes_per_s * 1e6,
        work.critical_units * ceilings.chain_graph_s * 1e6,
        empirical_us,
    )


@dataclass(frozen=True)
class Goal:
    """At least `least` times faster than `than` on a subject; `never_slower`: or within its spread."""

    name: str
    subject: str
    than: str
    variant: str  # "ours, best" is the plan that the quick selection chose
    least: float
    never_slower: bool = False


@dataclass(frozen=True)
class Verdict:
    """`reached` None: not measured, and `text` says why."""

    reached: bool | None
    text: str


OURS_BEST: Final = "ours, best"
BEST_SEQUENTIAL: Final = "best sequential graph"
"""Ours or torch's, whichever is faster: the harder one to beat."""

BEST_STREAMS: Final = "best of N streams"

GOALS: Final = (
    Goal("graph_over_eager.inception_v3", "inception_v3", "torch eager", BEST_SEQUENTIAL, 3.0),
    Goal("graph_over_eager.resnet50", "resnet50", "torch eager", BEST_SEQUENTIAL, 3.0),
    Goal("graph_over_eager.squeezenet", "squeezenet", "torch eager", BEST_SEQUENTIAL, 3.0),
    Goal("ours_over_sequential.inception_v3", "inception_v3", BEST_SEQUENTIAL, OURS_BEST, 1.3),
    Goal("ours_over_sequential.squeezenet", "squeezenet", BEST_SEQUENTIAL, OURS_BEST, 1.2),
    Goal("ours_over_sequential.resnet50", "resnet50", BEST_SEQUENTIAL, OURS_BEST, 1.0, never_slower=True),
    Goal("ours_over_sequential.mix", "mix", BEST_SEQUENTIAL, OURS_BEST, 1.6),
    Goal("ours_over_streams.mix", "mix", BEST_STREAMS, OURS_BEST, 1.1),
)
SWITCH_P99_MS: Final = 50.0


def judge(goal: Goal, ratio: Ratio | None, itself: Ratio | None) -> Verdict:
    """`itself` is the baseline against its own second copy."""
    if ratio is None:
        return Verdict(None, "not measured")
    least = goal.least
    noise = "" if itself is None else f"; the baseline against itself {itself.text}"
    if goal.never_slower and itself is not None:
        least = min(least, itself.low)
    return Verdict(ratio.value >= least, f"{ratio.text} in {ratio.rounds} rounds, asked {goal.least}{noise}")


def judge_switch(p99_ms: float | None, lost: int | None) -> tuple[bool | None, str]:
    """A plan switch: its p99 and the tasks lost in all switches."""
    if p99_ms is None or lost is None:
        return None, "not measured"
    return (
        p99_ms < SWITCH_P99_MS and lost == 0,
        f"p99 {p99_ms:.2f} ms, asked {SWITCH_P99_MS:.0f}; {lost} lost",
    )


_TRACED_RUNS = 5


def add_ceilings(results: Results, ceilings: Ceilings) -> None:
    """What everything is compared with."""
    results.add(
        {
            "ceiling.tflop_per_s": ceilings.flop_per_s / 1e12,
            "ceiling.gbyte_per_s": ceilings.bytes_per_s / 1e9,
            "probe.chain_eager_us": ceilings.chain_eager_s * 1e6,
            "probe.chain_graph_us": ceilings.chain_graph_s * 1e6,
        },
        part="probe",
        name="ceilings, and one link of a dependent chain of the smallest convolution",
        tflop_per_s=ceilings.flop_per_s / 1e12,
        gbyte_per_s=ceilings.bytes_per_s / 1e9,
        chain_eager_us=ceilings.chain_eager_s * 1e6,
        chain_graph_us=ceilings.chain_graph_s * 1e6,
    )


def add_distances(
    results: Results, table: Table, subjects: Sequence[Subject], ceilings: Ceilings, precision: str
) -> None:
    """Per model the three lower bounds, and how far the fastest variant at batch 1 is from each."""
    for subject in subjects:
        times = known_times(table, subject.name)
        many = [us for name, us in times.items() if "streams" in name or name == batch_name(64)]
        one = {name: us for name, us in times.items() if "streams" not in name and "batch" not in name}
        if not one:
            results.skip("distance", subject.name, "nothing was measured")
            continue
        work = work_of(subject.artifact.graph, precision)
        found = distances(work, ceilings, min([*many, *one.values()]))
        fastest = min(one, key=lambda name: one[name])
        row: dict[str, Any] = {
            "gflop": work.flop / 1e9,
            "mbyte": work.moved_bytes / 1e6,
            "units": work.units,
            "critical_units": work.critical_units,
            "fastest": fastest,
            "fastest_us": one[fastest],
        }
        bounds = {
            "roofline": found.roofline_us,
            "path": found.path_us,
            "empirical": found.empirical_us,
        }
        figures: dict[str, float | None] = {}
        for name, bound_us in bounds.items():
            row[f"{name}_us"] = bound_us
            row[f"over_{name}"] = None if bound_us is None else one[fastest] / bound_us
            figures[f"distance.{subject.name}.{name}"] = row[f"over_{name}"]
        results.add(figures, part="distance", name=subject.name, **row)


def add_concurrency(results: Results, device: Device, table: Table, variants: Sequence[Variant]) -> None:
    """Busy time and concurrency of the sequential graph and of ours, by CUPTI's kernel intervals."""
    if device.kind != "cuda":
        results.skip("concurrency", "kernel intervals", "needs CUDA")
        return
    for subject in [*(one.name for one in table.subjects), MIX]:
        wanted = {sequential_rows(subject)[0], table.best.get(subject, "")}
        for variant in variants:
            if variant.subject != subject or variant.name not in wanted:
                continue
            with results.attempt("concurrency", f"{subject}, {variant.name}"):
                kernels = kernels_of(trace_of(device, partial(_repeat, variant.run)))
                at_once = concurrency(kernels)
                whose = "ours" if variant.name == table.best.get(subject) else "torch"
                results.add(
                    {f"concurrency.{subject}.{whose}": at_once},
                    part="concurrency",
                    name=f"{subject}, {variant.name}",
                    kernels=len(kernels) / _TRACED_RUNS,
                    busy_us=union_us(kernels) / _TRACED_RUNS / variant.units,
                    busy_share=busy_share(kernels),
                    concurrency=at_once,
                )


def _repeat(work: Callable[[], None]) -> None:
    for _ in range(_TRACED_RUNS):
        work()


def _fastest(table: Table, subject: str, names: Sequence[str]) -> str | None:
    times = known_times(table, subject)
    known = [name for name in names if name in times]
    return min(known, key=lambda name: times[name], default=None)


def resolved(table: Table, subject: str, name: str) -> str | None:
    """The row that a goal's name stands for; None where it was not measured."""
    match name:
        case _ if name == BEST_SEQUENTIAL:
            return _fastest(table, subject, sequential_rows(subject))
        case _ if name == BEST_STREAMS:
            times = known_times(table, subject)
            return _fastest(table, subject, [one for one in times if "graphs on" in one])
        case _ if name == OURS_BEST:
            return table.best.get(subject)
        case _:
            return name


def verdict(table: Table, goal: Goal) -> tuple[Verdict, Ratio | None]:
    """One goal on this run's samples, and the ratio by which it was judged."""
    than, variant = (resolved(table, goal.subject, name) for name in (goal.than, goal.variant))
    if than is None or variant is None:
        return judge(goal, None, None), None
    samples = table.measured.samples
    ratio = faster(samples, goal.subject, than, variant)
    found = judge(goal, ratio, faster(samples, goal.subject, *again_row(goal.subject)))
    return Verdict(found.reached, f"{found.text} ({variant} over {than})"), ratio


def add_goals(results: Results, table: Table, switch: Mapping[str, Any] | None) -> None:
    """Every goal as reached or not, with the measured ratio and spread.

    A quick run and one on the host judge nothing.
    """
    if table.settings.quick:
        results.skip("goal", "all goals", "a quick run says nothing about speed")
        return
    for goal in GOALS:
        found, ratio = verdict(table, goal)
        results.add(
            {f"goal.{goal.name}": None if ratio is None else ratio.value},
            part="goal",
            name=goal.name,
            reached=found.reached,
            detail=found.text,
        )
    p99_ms = None if switch is None else switch.get("first_task_p99_ms")
    reached, text = judge_switch(p99_ms, None if switch is None else switch.get("lost"))
    results.add({"goal.switch_p99_ms": p99_ms}, part="goal", name="switch", reached=reached, detail=text)
