"""The agent on a CPU: the saturated engine against onnxruntime itself, and what the agent weighs.

`ratio.MODEL` is the engine's tasks per second over those of the best onnxruntime setting (threads inside an
operator, callers, sessions), both from memory, in windows of one run that alternate in random order; the
median over paired windows. `ratio_blocks` is one session per block of the papers' partition, `ratio_greedy`
the greedy schedule's parallel groups, on the same terms.

    python -m benchmarks.agent_cpu [--quick] [--json]
"""

import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import ingest, zoo
from benchmarks.report import Report, arguments, emit, progress, spread
from benchmarks.saturated import Contestant, Direct, Engine, EnginePlan, Setting, Window
from edge_agent.worker.config import WorkerConfig
from shared.artifact import Artifact, open_artifact
from shared.importer.api import artifact_path, import_model

MODELS = ("squeezenet", "resnet50", "inception_v3")
SETTINGS = (
    Setting(1, 1, 1),
    Setting(1, 2, 1),
    Setting(1, 2, 2),
    Setting(1, 3, 1),
    Setting(2, 1, 1),
    Setting(2, 2, 1),
)
PLANS = {
    "ratio": (
        EnginePlan(partition="whole", scheduler="sequential", replicas=2, lanes=2),
        EnginePlan(partition="whole", scheduler="sequential", replicas=3, lanes=3),
    ),
    "ratio_blocks": (EnginePlan(partition="paper", scheduler="sequential", replicas=2, lanes=2),),
    "ratio_greedy": (EnginePlan(partition="paper", scheduler="greedy", replicas=1, lanes=1),),
}
"""Per figure the plans that are measured; as with onnxruntime's settings, the best of them counts."""

FINALISTS = 2
"""Settings that are measured beside the engine after all have been tried."""

PACKAGES = ("onnxruntime", "numpy", "msgspec", "msgpack")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = arguments(__doc__.splitlines()[0]).parse_args(argv)
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    report = Report("agent_cpu")
    for part in PARTS:
        part(report, options.quick)
    emit(report, as_json=options.json, packages=PACKAGES)


def ratios(report: Report, quick: bool) -> None:
    """The saturated engine over onnxruntime, per model and for a mix of all."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {name: _import(name, Path(folder)) for name in MODELS}
        workloads: dict[str, Mapping[str, Artifact]] = {name: {name: artifacts[name]} for name in MODELS}
        workloads["mix"] = artifacts
        for name, workload in workloads.items():
            _compare(report, name, workload, quick)


def _import(name: str, folder: Path) -> Artifact:
    progress(f"import {name}")
    zoo.write(name, folder / f"{name}.onnx")
    found = import_model(folder / f"{name}.onnx", shapes={}, out_dir=folder)
    return open_artifact(artifact_path(folder, found.digest))


def _compare(report: Report, name: str, workload: Mapping[str, Artifact], quick: bool) -> None:
    rng = random.Random(name)
    artifacts = list(workload.values())
    inputs = [_inputs(artifact) for artifact in artifacts]
    window_s, rounds, tries = (0.4, 3, 1) if quick else (1.0, 9, 3)
    progress(f"{name}: trying {len(SETTINGS)} onnxruntime settings")
    settings: list[Contestant] = [Direct(setting, artifacts, inputs) for setting in SETTINGS]
    tried = _windows(settings, tries, window_s / 2, rng)
    finalists = sorted(settings, key=lambda c: -_rate(tried[c.name]))[:FINALISTS]
    for contestant in settings:
        if contestant not in finalists:
            contestant.close()
    progress(f"{name}: the engine beside {', '.join(c.name for c in finalists)}")
    engines: list[Contestant] = [
        Engine(f"{kind}: {choice.name}", choice.plan(workload), artifacts, inputs)
        for kind, choices in PLANS.items()
        for choice in choices
    ]
    rates = _windows([*finalists, *engines], rounds, window_s, rng)
    for contestant in (*finalists, *engines):
        contestant.close()
    _note(report, name, rates, [contestant.name for contestant in finalists])


def _note(
    report: Report, name: str, windows: Mapping[str, Sequence[Window]], settings: Sequence[str]
) -> None:
    """The best engine plan of each kind over the best setting, pair by pair."""
    best = max(settings, key=lambda setting: _rate(windows[setting]))
    for contestant, found in windows.items():
        row: dict[str, object] = {"workload": name, "contestant": contestant, "pairs": len(found)}
        row |= {f"{key}_per_s": value for key, value in spread([w.rate_per_s for w in found]).items()}
        row["cpu_ms_per_task"] = 1e3 * median(w.cpu_s for w in found)
        ratios = [a.rate_per_s / b.rate_per_s for a, b in zip(found, windows[best], strict=True)]
        row |= {f"ratio_{key}": value for key, value in spread(ratios).items()}
        report.add({}, [row])
    for kind in PLANS:
        chosen = max(
            (contestant for contestant in windows if contestant.startswith(f"{kind}: ")),
            key=lambda contestant: _rate(windows[contestant]),
        )
        pairs = zip(windows[chosen], windows[best], strict=True)
        report.add({f"{kind}.{name}": median(a.rate_per_s / b.rate_per_s for a, b in pairs)})


def _rate(windows: Sequence[Window]) -> float:
    return median(window.rate_per_s for window in windows)


def _windows(
    contestants: Sequence[Contestant], rounds: int, seconds: float, rng: random.Random
) -> dict[str, list[Window]]:
    """Per contestant one window per round; each round in an order of its own."""
    rates: dict[str, list[Window]] = {contestant.name: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant in rng.sample(contestants, len(contestants)):
            rates[contestant.name].append(contestant.window(seconds))
    return rates


def _inputs(artifact: Artifact) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = [artifact.graph.tensors[t] for t in artifact.graph.inputs]
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in tensors}


PARTS: tuple[Callable[[Report, bool], None], ...] = (ingest.part, ratios)


if __name__ == "__main__":
    main()
