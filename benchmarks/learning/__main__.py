"""The learned planner beside every rival on the twin, on TOP's devices and workloads.

    python -m benchmarks.learning [--quick] [--json] [--device NAME]... [--workload NAME]... [--budget S]
                                  [--untrained] [--state DIR]

Per device file and workload: every rival under its best partition, MADDPG trained anew with three seeds
at once, and the planner's answer: the best rival's plan, or the best learned one if it is surely better,
by arrivals that chose neither; it is measured on others again. Beside them every seed: an unlearned
candidate that a training starts from, so what learning gains is the margin over the best of them. A row
per planner has throughput_per_s, utilisation, queue_variance (of queued work, s^2) and p99_ms with
spreads over arrivals (and over the seeds of trainings for `maddpg`). Everything is simulated: `twin`.

--state keeps what was done, and goes on from there when the same command is given again. Without it nothing
is kept. One pair takes about --budget seconds for its trainings and a minute for its rivals. --quick: the
Nano under the paper's workload and little training. --untrained: rivals and seeds alone, without a training.
`python -m benchmarks.learning.table FILE...` prints docs/learning.md's table from what --json printed.
"""

import argparse
import contextlib
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import zoo
from benchmarks.learning.pair import MEMBERS_MAX, MIX, QUEUE, Effort, run_pair, workloads
from benchmarks.learning.table import verdict
from benchmarks.runner import Report, progress, run
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.digest import digest_of
from stageloom.shared.graph import Graph
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.costs import CostTable

NAMES = ("paper", "capacity_0.8", "capacity_1.1", "single")


def measure(report: Report, options: argparse.Namespace) -> int:
    """All pairs, one after another; 1 where the planner falls behind a rival."""
    devices = options.device or (["nano"] if options.quick else list(MEMBERS_MAX))
    names = options.workload or (["paper"] if options.quick else list(NAMES))
    effort = Effort(budget_s=options.budget)
    if options.quick:
        effort = Effort(
            seeds=(1,), budget_s=min(options.budget, 30.0), settings=MaddpgSettings(transitions=300)
        )
    report.about = {"twin": True}
    with _state(options.state) as folder:
        graphs = _graphs(folder)
        for device in devices:
            for pair in _pairs(device, names, graphs, None if options.untrained else effort, folder):
                report.add(_figures(pair), pair["rows"])
    held = [value for name, value in report.figures.items() if name.endswith("planner_holds")]
    report.add(_totals(report.figures))
    return 0 if all(held) else 1


@contextlib.contextmanager
def _state(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="stageloom-learning-") as made:
        yield Path(made)


def _graphs(folder: Path) -> dict[str, Graph]:
    """The models' graphs; the weights of the networks are made, imported and forgotten once."""
    kept = folder / "graphs.pickle"
    if not kept.exists():
        progress(f"importing {', '.join(name for name, _ in MIX)}")
        kept.write_bytes(pickle.dumps({name: zoo.graph_of(name) for name, _ in MIX}))
    graphs: dict[str, Graph] = pickle.loads(kept.read_bytes())  # written by the lines above
    return graphs


def _pairs(
    name: str, wanted: Sequence[str], graphs: dict[str, Graph], effort: Effort | None, folder: Path
) -> Iterator[dict[str, Any]]:
    device = load_device(name)
    choices = [_choice(model, graphs[model]) for model, _ in MIX]
    times = StepTimes(device, CostTable(rates=device.rates()))
    for workload in workloads(device, times, choices):
        if workload.name not in wanted:
            continue
        where = f"{name}, {workload.name}"
        progress(where)
        models = [one for one in choices if one.name in workload.models]
        kept, told = folder / name / workload.name, partial(_tell, where)
        yield run_pair(device, workload, models, effort, folder=kept, told=told)


def _tell(where: str, line: str) -> None:
    progress(f"{where}: {line}")


def _choice(name: str, graph: Graph) -> ModelChoice:
    """A model without weights: nothing is run, so its name stands for its contents."""
    return ModelChoice(name=name, artifact=digest_of(name), graph=graph, queue=QUEUE)


def _figures(pair: dict[str, Any]) -> dict[str, float]:
    first = pair["rows"][0]
    prefix = f"{first['device']}.{first['workload']}."
    found = {prefix + name: value for name, value in verdict(pair["rows"]).items() if value is not None}
    if pair["trainings"]:
        found[prefix + "train_s_max"] = max(one["train_s"] for one in pair["trainings"])
    for one in pair["interference"]:
        found[f"{prefix}planner_over_best_rival_at_interference_{one['factor']}"] = one[
            "planner_over_best_rival"
        ]
    return found


def _totals(figures: dict[str, float]) -> dict[str, float]:
    def those(ending: str, *, several: bool = False) -> list[float]:
        return [
            value
            for name, value in figures.items()
            if name.endswith(ending) and not (several and ".single." in name)
        ]

    ahead = those(".learned_ahead_of_best_seed")
    found = {"seeds_pairs": float(len(those(".seed_over_best_rival")))}
    if holds := those(".planner_holds"):
        found |= {
            "pairs": float(len(holds)),
            "planner_holds": sum(holds),
            "planner_over_best_rival_min": min(those(".planner_over_best_rival")),
            "multi_model_pairs": float(len(those(".maddpg_holds", several=True))),
            "maddpg_holds_multi_model": sum(those(".maddpg_holds", several=True)),
            "learned_ahead_of_best_seed": sum(ahead),
        }
    return found


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "--device": {"action": "append", "choices": sorted(MEMBERS_MAX), "help": "default: all"},
        "--workload": {"action": "append", "choices": NAMES, "help": "default: all"},
        "--budget": {"type": float, "default": 600.0, "help": "seconds for the trainings of a pair"},
        "--state": {"type": Path, "help": "keep what was done here, and go on from it"},
        "--untrained": {"action": "store_true", "help": "rivals and seeds alone"},
    }
    sys.exit(run(measure, ("torch", "numpy", "numba"), options=own))
