"""The learned planner beside every rival on the twin, on TOP's devices and workloads.

    python -m benchmarks.learning [--quick] [--json] [--device NAME]... [--workload NAME]... [--budget S]
                                  [--untrained] [--state DIR]
    python -m benchmarks.learning --attribution [--json] [--device NAME]... [--workload NAME]... [--seeds N]
                                  [--evaluations N] [--workers N] [--state DIR]
    python -m benchmarks.learning --launcher [--quick] [--json] [--device NAME]...
    python -m benchmarks.learning --table FILE

Per device file and workload: every rival under its best partition, MADDPG trained anew with three seeds
at once, and the planner's answer: the best rival's plan, or the best learned one if it is surely better,
by arrivals that chose neither; it is measured on others again. Beside them every seed: an unlearned
candidate that a training starts from, so what learning gains is the margin over the best of them. A row
per planner has throughput_per_s, utilisation, queue_variance (of queued work, s^2) and p99_ms with
spreads over arrivals (and over the trainings for `maddpg`). Everything is simulated: `twin`.

--state keeps every pair that was done; the same command goes on behind them. One pair takes about --budget
seconds for its trainings and a minute for its rivals. --quick: the Nano under the paper's workload and little
training. --untrained: rivals and seeds alone.

--attribution compares the training with methods that learn nothing and with itself less one part, all with
equal evaluations (`benchmarks.learning.attribution`): per cell `learned_over_best_unlearned` with a 95 %
interval over --seeds. --evaluations: of each method and seed, 20 simulated seconds each. Ctrl-C ends it with
the cells that are complete.

--launcher asks what launch intervals can do under deadlines that a fixed rule cannot: strict intervals that
an oracle finds, beside the earliest deadline first (`benchmarks.learning.launcher`). --quick: one load.

--table prints docs/learning.md's table from a kept file of either.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.attribution_run import DEVICES as ATTRIBUTED_DEVICES
from benchmarks.learning.attribution_run import LOADS as ATTRIBUTED_LOADS
from benchmarks.learning.attribution_run import attribute
from benchmarks.learning.attribution_run import table as attribution_table
from benchmarks.learning.launcher_run import DEVICES as LAUNCHER_DEVICES
from benchmarks.learning.launcher_run import launcher
from benchmarks.learning.launcher_run import table as launcher_table
from benchmarks.learning.pair import MIX, QUEUE, Effort, run_pair, workloads
from benchmarks.learning.table import LOADS, verdict
from benchmarks.runner import Report, progress, run
from benchmarks.zoo import graphs_of
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.stored import TOP_MEMBERS
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.digest import digest_of
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.costs import CostTable

EVALUATIONS: Final = 48
"""So that nano, xavier_nx and i7_7700 take no longer than 90 minutes on two cores."""

KNOWN_DEVICES: Final = sorted({*TOP_MEMBERS, *ATTRIBUTED_DEVICES, *LAUNCHER_DEVICES})
KNOWN_LOADS: Final = list(dict.fromkeys((*LOADS, *ATTRIBUTED_LOADS)))


def measure(report: Report, options: argparse.Namespace) -> int:
    """All pairs, one after another; 1 where the planner falls behind a rival."""
    if options.table:
        rows = json.loads(options.table.read_text("utf-8"))["rows"]
        contest = any(row.get("part") == "contestants" for row in rows)
        print("\n".join(launcher_table(rows) if contest else attribution_table(rows)))
        return 0
    if options.launcher:
        launcher(report, options.device or LAUNCHER_DEVICES, quick=options.quick)
        return 0
    if options.attribution:
        attribute(
            report,
            options.device or ATTRIBUTED_DEVICES,
            options.workload or ATTRIBUTED_LOADS,
            seeds=options.seeds,
            evaluations=options.evaluations,
            workers=options.workers,
            state=options.state,
        )
        return 0
    effort: Effort | None = Effort(budget_s=options.budget)
    if options.quick:
        settings = MaddpgSettings(transitions=300)
        effort = Effort(seeds=(1,), budget_s=min(options.budget, 30.0), settings=settings)
    report.about = {"twin": True}
    models = [  # nothing is run, so a name stands for a model's contents
        ModelChoice(name=name, artifact=digest_of(name), graph=graph, queue=QUEUE)
        for name, graph in graphs_of([name for name, _ in MIX]).items()
    ]
    for name in options.device or (["nano"] if options.quick else list(TOP_MEMBERS)):
        device = load_device(name)
        loads = workloads(device, StepTimes(device, CostTable(rates=device.rates())), models)
        for load in options.workload or (["paper"] if options.quick else list(LOADS)):
            own = [model for model in models if model.name in loads[load]]
            told = partial(_tell, f"{name}, {load}")
            make = partial(run_pair, device, loads[load], own, None if options.untrained else effort, told)
            rows, train_s = _kept(options.state, f"{name}-{load}-{not options.untrained}.json", make)
            figures = {f"{name}.{load}.{key}": value for key, value in verdict(rows).items()}
            report.add(
                {**figures, f"{name}.{load}.train_s_max": train_s},
                [{"device": name, "workload": load, **row} for row in rows],
            )
    held = [value for name, value in report.figures.items() if name.endswith("planner_holds")]
    ahead = [value for name, value in report.figures.items() if name.endswith("learned_ahead_of_best_seed")]
    report.add({"pairs": len(held), "planner_holds": sum(held), "learned_ahead_of_best_seed": sum(ahead)})
    return 0 if all(held) else 1


def _tell(pair: str, line: str) -> None:
    progress(f"{pair}: {line}")


def _kept(folder: Path | None, name: str, make: Any) -> Any:
    """What the folder has of an earlier run, else what is made now."""
    if folder is None:
        return make()
    file = folder / name
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = json.dumps(make())
        file.write_text(made, "utf-8")
    return json.loads(file.read_text("utf-8"))


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "--device": {"action": "append", "choices": KNOWN_DEVICES, "help": "default: all of the kind"},
        "--workload": {"action": "append", "choices": KNOWN_LOADS, "help": "default: all of the kind"},
        "--budget": {"type": float, "default": 600.0, "help": "seconds for the trainings of a pair"},
        "--state": {"type": Path, "help": "keep what was done here, and go on from it"},
        "--untrained": {"action": "store_true", "help": "rivals and seeds alone"},
        "--attribution": {"action": "store_true", "help": "what the training gains over other methods"},
        "--launcher": {"action": "store_true", "help": "what launch intervals can do under deadlines"},
        "--seeds": {"type": int, "default": 5, "help": "of the attribution"},
        "--evaluations": {"type": int, "default": EVALUATIONS, "help": "of each method and seed"},
        "--workers": {
            "type": int,
            "default": os.cpu_count() or 1,
            "help": "processes of the attribution; 0: report what --state has",
        },
        "--table": {"type": Path, "metavar": "FILE", "help": "print the page's table"},
    }
    sys.exit(run(measure, ("torch", "numpy", "numba"), options=own))
