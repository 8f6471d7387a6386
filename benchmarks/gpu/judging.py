"""From the samples to what they mean: distances, concurrency, and the goals."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.device import Device
from benchmarks.gpu.goals import (
    BEST_SEQUENTIAL,
    BEST_STREAMS,
    GOALS,
    OURS_BEST,
    Goal,
    Verdict,
    judge,
    judge_switch,
)
from benchmarks.gpu.limits import distances, work_of
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.profiled_kernels import busy_share, concurrency, kernels_of, union_us
from benchmarks.gpu.results import Results
from benchmarks.gpu.rounds import Variant, faster
from benchmarks.gpu.table import Table, again_row, known_times, sequential_rows
from benchmarks.gpu.torch_rows import MIX, batch_name
from benchmarks.gpu.tracing import trace_of

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

                def work() -> None:
                    for _ in range(_TRACED_RUNS):
                        variant.run()  # noqa: B023

                kernels = kernels_of(trace_of(device, work))
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


def verdict(table: Table, goal: Goal) -> Verdict:
    """One goal on this run's samples."""
    than, variant = (resolved(table, goal.subject, one) for one in (goal.than, goal.variant))
    if than is None or variant is None:
        return judge(goal, None, None)
    samples = table.measured.samples
    itself = faster(samples, goal.subject, *again_row(goal.subject))
    found = judge(goal, faster(samples, goal.subject, than, variant), itself)
    return Verdict(goal, found.reached, f"{found.text} ({variant} over {than})")


def add_goals(results: Results, table: Table, switch: Mapping[str, Any] | None) -> None:
    """Every goal as reached or not, with the measured ratio and spread.

    A quick run and one on the host judge nothing.
    """
    if table.settings.quick:
        results.skip("goal", "all goals", "a quick run says nothing about speed")
        return
    for goal in GOALS:
        found = verdict(table, goal)
        ratio = None
        than, variant = (resolved(table, goal.subject, one) for one in (goal.than, goal.variant))
        if than is not None and variant is not None:
            ratio = faster(table.measured.samples, goal.subject, than, variant)
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
