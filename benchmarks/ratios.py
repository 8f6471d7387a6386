"""The saturated engine over onnxruntime itself: choose first, then compare on fresh windows.

Which onnxruntime setting is best is itself measured with noise, and the best of several noisy figures is too
good: divided by that maximum, an engine of equal speed would seem slower. So settings and engine plans are
chosen in windows of their own, and what was chosen runs again, side by side, in windows that chose nothing:
in each round one window of each contestant, in random order. A figure is the median over rounds of the
engine's tasks per second over onnxruntime's in the same round.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import zoo
from benchmarks.report import Report, progress, spread
from benchmarks.saturated import Contestant, Direct, Engine, EnginePlan, Inputs, Setting, Window
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.api import artifact_path, import_model

SETTINGS = (
    Setting(1, 1, 1),
    Setting(1, 2, 1),
    Setting(1, 2, 2),
    Setting(1, 3, 1),
    Setting(2, 1, 1),
    Setting(2, 2, 1),
)

WHOLE = (
    EnginePlan(partition="whole", scheduler="sequential", replicas=2, lanes=2),
    EnginePlan(partition="whole", scheduler="sequential", replicas=3, lanes=3),
)
BLOCKS = (EnginePlan(partition="paper", scheduler="sequential", replicas=2, lanes=2),)
GREEDY = (EnginePlan(partition="paper", scheduler="greedy", replicas=1, lanes=1),)
STAGED = (
    *GREEDY,
    EnginePlan(partition="paper", scheduler="ios", replicas=1, lanes=1, contention=0.5),
    EnginePlan(partition="paper", scheduler="ios", replicas=2, lanes=2, contention=0.5),
)

Workload = Mapping[str, Artifact]
"""Models by name; their tasks come in turn."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    choosing: int  # windows per contestant, each half as long as those that count
    rounds: int
    window_s: float


FULL = Effort(choosing=3, rounds=15, window_s=1.0)
QUICK = Effort(choosing=1, rounds=3, window_s=0.4)


def workloads(names: Sequence[str], folder: Path, *, width: float = 1.0) -> dict[str, Workload]:
    """Every model alone, and `mix` of all."""
    artifacts = {}
    for name in names:
        progress(f"import {name}")
        zoo.write(name, folder / f"{name}.onnx", width=width)
        found = import_model(folder / f"{name}.onnx", shapes={}, out_dir=folder)
        artifacts[name] = open_artifact(artifact_path(folder, found.digest))
    return {**{name: {name: artifact} for name, artifact in artifacts.items()}, "mix": artifacts}


def compare(
    report: Report,
    name: str,
    workload: Workload,
    kinds: Mapping[str, Sequence[EnginePlan]],
    effort: Effort,
    settings: Sequence[Setting] = SETTINGS,
) -> None:
    """Add `KIND.name` for every kind of engine plan, and the rows behind it."""
    rng = random.Random(name)
    artifacts = list(workload.values())
    inputs = [zoo_inputs(artifact) for artifact in artifacts]
    direct = _choose([Direct(setting, artifacts, inputs) for setting in settings], effort, rng)
    chosen: dict[str, Contestant] = {}
    for kind, plans in kinds.items():
        progress(f"{name}: {kind}, {len(plans)} plans beside {direct.name}")
        engines = [Engine(plan.name, plan.plan(workload), artifacts, inputs) for plan in plans]
        chosen[kind] = _choose(engines, effort, rng)
    progress(f"{name}: {effort.rounds} rounds")
    found = _rounds({"onnxruntime": direct, **chosen}, effort.rounds, effort.window_s, rng)
    for contestant in (direct, *chosen.values()):
        contestant.close()
    base = found.pop("onnxruntime")
    report.add({}, [_row(name, direct.name, base, base)])
    for kind, windows in found.items():
        figure = median(a.rate_per_s / b.rate_per_s for a, b in zip(windows, base, strict=True))
        report.add({f"{kind}.{name}": figure}, [_row(name, chosen[kind].name, windows, base)])


def zoo_inputs(artifact: Artifact) -> Inputs:
    """Seeded noise for every input."""
    rng = np.random.default_rng(0)
    tensors = [artifact.graph.tensors[t] for t in artifact.graph.inputs]
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in tensors}


def _choose(contestants: Sequence[Contestant], effort: Effort, rng: random.Random) -> Contestant:
    """The one with the highest median rate; the others are closed."""
    best = contestants[0]
    if len(contestants) > 1:
        by_name = {contestant.name: contestant for contestant in contestants}
        found = _rounds(by_name, effort.choosing, effort.window_s / 2, rng)
        best = max(contestants, key=lambda contestant: median(w.rate_per_s for w in found[contestant.name]))
    for contestant in contestants:
        if contestant is not best:
            contestant.close()
    return best


def _rounds(
    contestants: Mapping[str, Contestant], rounds: int, seconds: float, rng: random.Random
) -> dict[str, list[Window]]:
    """Per contestant one window per round; each round in an order of its own."""
    found: dict[str, list[Window]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in rng.sample(list(contestants), len(contestants)):
            found[name].append(contestants[name].window(seconds))
    return found


def _row(name: str, contestant: str, windows: Sequence[Window], base: Sequence[Window]) -> dict[str, object]:
    ratios = [a.rate_per_s / b.rate_per_s for a, b in zip(windows, base, strict=True)]
    cpu_ratios = [b.cpu_s / a.cpu_s for a, b in zip(windows, base, strict=True)]
    return {
        "workload": name,
        "contestant": contestant,
        "rounds": len(windows),
        **{f"{key}_per_s": value for key, value in spread([w.rate_per_s for w in windows]).items()},
        "cpu_ms_per_task": 1e3 * median(w.cpu_s for w in windows),
        **{f"ratio_{key}": value for key, value in spread(ratios).items()},
        "ratio_by_cpu": median(cpu_ratios),
    }
