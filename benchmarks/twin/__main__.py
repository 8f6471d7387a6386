"""The twin against this machine's engine, on plans that it was not calibrated on; and how fast it is.

    python -m benchmarks.twin [--quick] [--json]

Small models on the onnx executor, so that two cores suffice. A seeded sampler draws plans (partition,
replicas, combination, scheduler, lanes, rules, launch intervals) and loads (periodic, Poisson, bursty; 0.35
to 1.25 of what the device can do). All are served in turns, each turn in an order of its own, with a round
of the calibration before every turn and after the last. The twin is fitted to the calibration's plans alone,
and then replays the arrivals of every turn. What is compared is a plan's median over its turns, measured and
predicted: a shared machine's speed changes by the minute. `floor_*` are the same figures of the even turns
against the odd ones: by how much what is measured of a plan differs between halves of its turns, which have
other arrivals. They are no bound of the others: predictions replay the arrivals of all turns. `free_items_*`
are those of the twin without what an item costs beside another lane.

`times_real_time_*`: simulated seconds per second, of the paper's workload (Inception V3, ResNet-50 and
SqueezeNet, 30, 60 and 120 tasks a second) on the A100's device file.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from typing import TypeAlias

import numpy as np

from benchmarks import zoo
from benchmarks.runner import Report, progress, rank_correlation, run
from benchmarks.twin.calibration import (
    Collected,
    Trial,
    calibration,
    operator_times,
    sample,
    service_times,
)
from benchmarks.twin.engine_device import EngineDevice
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.planner.twin.arrivals import Periodic, Recorded
from stageloom.planner.twin.calibrate import Calibrated, Operators, calibrate
from stageloom.planner.twin.device_file import cpu_device, load_device
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import TargetDevice, Window
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import Digest
from stageloom.shared.search.compose import ModelChoice, compose

SMALL = {"squeezenet": (0.5, 96), "googlenet": (0.25, 96), "resnet50": (0.25, 64)}
"""Width and side of the image: a millisecond or a few per task."""

PAPER = {"inception_v3": 30.0, "resnet50": 60.0, "squeezenet_bypass": 120.0}
SEED = 6

Served: TypeAlias = tuple[Window, dict[str, tuple[float, ...]]]
"""A window of a plan, and when its tasks really came, by model."""


def serve(trial: Trial, artifacts: Mapping[Digest, Artifact], seconds: float, turn: int) -> Served:
    """A plan on an engine of its own."""
    progress(f"turn {turn}: serve {trial.name}")
    with EngineDevice(artifacts, trial.arrivals, seed=SEED + turn) as device:
        device.deploy(trial.bound)
        device.warm_up()
        device.run(seconds / 8)  # masks that occur get their programs
        device.drained()
        window = device.run(seconds)
        return window, device.arrived_s(window.began_s)


def predict(
    calibrated: Calibrated, trial: Trial, arrived: Mapping[str, tuple[float, ...]], seconds: float, turn: int
) -> Window:
    """The twin under the arrivals that came; its noise is another one in each turn, as on the machine."""
    arrivals = {name: Recorded(times_s=times) for name, times in arrived.items()}
    twin = Twin(calibrated.times, arrivals, seed=SEED + turn)
    twin.deploy(trial.bound)
    return twin.run(seconds)


def accuracy(report: Report, workload: Mapping[str, Artifact], *, quick: bool) -> None:
    seconds, turns, count, repeats = (1.0, 2, 6, 3) if quick else (2.5, 6, 24, 9)
    operators = operator_times(workload, repeats)
    by_digest = {artifact.digest: artifact for artifact in workload.values()}
    plans = dict(calibration(workload))
    service_s = {name: service_times(bound, by_digest) for name, bound in plans.items()}
    collected = Collected(plans, by_digest, service_s)
    trials = sample(workload, next(iter(service_s.values())), count, SEED)
    served: dict[str, list[Served]] = {trial.name: [] for trial in trials}
    try:
        for turn in range(turns):
            collected.round(seconds / 2)
            for trial in Random(SEED + turn).sample(trials, len(trials)):
                served[trial.name].append(serve(trial, by_digest, seconds, turn))
        collected.round(seconds / 2)
    finally:
        whole = min(map(len, served.values()))
        if whole >= 2:  # halves of the turns are compared
            alike = {name: windows[:whole] for name, windows in served.items()}
            compare(report, collected, operators, trials, alike, seconds)


def compare(
    report: Report,
    collected: Collected,
    operators: Operators,
    trials: Sequence[Trial],
    served: Mapping[str, Sequence[Served]],
    seconds: float,
) -> None:
    """A row per plan and figures over all, of as many turns as each was served in."""
    device = cpu_device(len(os.sched_getaffinity(0)))
    measured = collected.measured(operators, device.cores, "steps served by this benchmark")
    calibrated = calibrate(device, measured)
    free_items = replace(calibrated, device=replace(calibrated.device, item_beside_s=0.0))
    rows = []
    for trial in trials:
        windows = [window for window, _ in served[trial.name]]
        predicted, without = (
            [
                predict(fit, trial, arrived, seconds, turn)
                for turn, (_, arrived) in enumerate(served[trial.name])
            ]
            for fit in (calibrated, free_items)
        )
        halves = {"measured": windows, "predicted": predicted, "odd": windows[::2], "even": windows[1::2]}
        halves["free_items"] = without
        rows.append(row(trial.name, halves))
    report.add(
        {
            **figures(rows, "predicted", "measured", ""),
            **figures(rows, "even", "odd", "floor_"),
            **figures(rows, "free_items", "measured", "free_items_"),
            "plans": float(len(trials)),
            "turns": float(len(served[trials[0].name])),
            "calibration_median_relative_error": median(abs(one) for one in calibrated.errors),
            "step_overhead_us": 1e6 * calibrated.device.step_s,
            "task_overhead_us": 1e6 * calibrated.device.task_s,
            "item_overhead_us": 1e6 * calibrated.device.item_s,
            "groups_interference": calibrated.device.groups_interference,
            "lanes_interference": calibrated.device.lanes_interference,
            "beside_us": 1e6 * calibrated.device.beside_s,
            "item_beside_us": 1e6 * calibrated.device.item_beside_s,
        },
        rows,
    )


def row(name: str, windows: Mapping[str, Sequence[Window]]) -> dict[str, object]:
    """What is compared of one plan: medians over turns."""
    found: dict[str, object] = {"plan": name}
    for key, turns in windows.items():
        found[f"{key}_throughput_per_s"] = median(one.throughput_per_s for one in turns)
        found[f"{key}_p99_ms"] = 1e3 * median(one.p99_s for one in turns)
        found[f"{key}_busy_ms_per_task"] = 1e3 * median(
            one.busy_s_per_task if one.completed else 0.0 for one in turns
        )
        found[f"{key}_busy_share"] = median(one.busy_s / one.seconds for one in turns)
        found[f"{key}_refused"] = sum(model.ended.refused for one in turns for model in one.models)
    return found


def figures(rows: Sequence[Mapping[str, object]], other: str, against: str, prefix: str) -> dict[str, float]:
    """Errors of one column against another, and how alike both rank the plans."""
    found: dict[str, float] = {}
    for name, key in (("throughput", "throughput_per_s"), ("p99", "p99_ms"), ("busy", "busy_ms_per_task")):
        measured = np.array([one[f"{against}_{key}"] for one in rows], dtype=float)
        given = np.array([one[f"{other}_{key}"] for one in rows], dtype=float)
        errors = np.abs(given / measured - 1.0)
        found[f"{prefix}{name}_median_relative_error"] = float(np.median(errors))
        found[f"{prefix}{name}_p90_relative_error"] = float(np.quantile(errors, 0.9))
        rank = f"{prefix}rank_correlation" if name == "throughput" else f"{prefix}{name}_rank_correlation"
        found[rank] = rank_correlation(measured.tolist(), given.tolist())
    return found


def speed(report: Report, *, quick: bool) -> None:
    """Simulated seconds per second on the paper's workload, of every twin that this installation has."""
    twins: dict[str, Callable[..., TargetDevice]] = {"reference": Twin}
    if find_spec("numba") is not None:
        twins["compiled"] = import_module("stageloom.planner.twin.compiled.twin").CompiledTwin
    with tempfile.TemporaryDirectory() as folder:
        graphs = {name: artifact.graph for name, artifact in zoo.artifacts(PAPER, Path(folder)).items()}
    choices = [
        ModelChoice(name=name, artifact=graph.digest, graph=graph, partition="paper")
        for name, graph in graphs.items()
    ]
    bound = bind(compose(choices), {graph.digest: graph for graph in graphs.values()})
    times = StepTimes.derived(load_device("a100"))
    simulated_s = 2.0 if quick else 10.0
    load = {model: Periodic(rate_per_s=rate) for model, rate in PAPER.items()}
    for name, twin_of in twins.items():
        _simulate(twin_of(times, load, seed=SEED), bound, 0.1)  # what is compiled at first use is not timed
        rates = [_simulate(twin_of(times, load, seed=SEED), bound, simulated_s) for _ in range(5)]
        report.add({f"times_real_time_{name}": median(rates)})


def _simulate(twin: TargetDevice, bound: BoundPlan, seconds: float) -> float:
    twin.deploy(bound)
    began_s = time.perf_counter()
    twin.run(seconds)
    return seconds / (time.perf_counter() - began_s)


def measure(report: Report, options: argparse.Namespace) -> None:
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    with tempfile.TemporaryDirectory() as folder:
        progress(f"import {', '.join(SMALL)}")
        workload: dict[str, Artifact] = {}
        for name, (width, size) in SMALL.items():
            workload |= zoo.artifacts([name], Path(folder), width=width, size=size)
        accuracy(report, workload, quick=options.quick)
    speed(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "numpy", "msgspec", "numba")))
