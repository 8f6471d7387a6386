"""What learning gains on the twin, beside methods that learn nothing.

    python -m benchmarks.learning [--full] [--json] [--device NAME]... [--workload NAME]... [--method NAME]...
                                  [--seeds N] [--evaluations N] [--workers N] [--state DIR]
    python -m benchmarks.learning --launcher [--quick] [--json] [--device NAME]...
    python -m benchmarks.learning --table FILE

Compares MADDPG's training with methods that learn nothing, all with equal evaluations
(`benchmarks.learning.attribution`): per cell `learned_over_best_unlearned` with a 95 % interval over --seeds.
Under a load that changes also policies that choose among known plans, learned in other ways
(`benchmarks.learning.deciding`). --evaluations: of each method and seed, 20 simulated seconds each. Ctrl-C
ends it with the cells that are complete; --state keeps what was done, and the same command goes on behind it.
--full: all device files of TOP, and what explains the training: itself less one part, and as printed.
--quick: one device and load, two seeds, half of the evaluations. Everything is simulated: `twin`.

--launcher asks what launch intervals can do under deadlines that a fixed rule cannot: strict intervals that
an oracle finds, beside the earliest deadline first (`benchmarks.learning.launcher`). --quick: one load.

--table prints docs/learning.md's table from a kept file of either.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.attribution_run import DECIDING, EXPLAINING, LEAST_SEEDS, attribute, deciding_table
from benchmarks.learning.attribution_run import DEVICES as ATTRIBUTED_DEVICES
from benchmarks.learning.attribution_run import LOADS as ATTRIBUTED_LOADS
from benchmarks.learning.attribution_run import table as attribution_table
from benchmarks.learning.launcher_run import DEVICES as LAUNCHER_DEVICES
from benchmarks.learning.launcher_run import launcher
from benchmarks.learning.launcher_run import table as launcher_table
from benchmarks.runner import Report, run
from stageloom.planner.learning.maddpg.stored import TOP_MEMBERS

EVALUATIONS: Final = 48
"""So that nano, xavier_nx and i7_7700 take no longer than 90 minutes on two cores."""

QUICK_EVALUATIONS: Final = 24
ALL_DEVICES: Final = tuple(dict.fromkeys((*ATTRIBUTED_DEVICES, *TOP_MEMBERS)))
KNOWN_DEVICES: Final = sorted({*ALL_DEVICES, *LAUNCHER_DEVICES})


def measure(report: Report, options: argparse.Namespace) -> None:
    """All cells, or what a file has of them."""
    if options.table:
        rows = json.loads(options.table.read_text("utf-8"))["rows"]
        parts = {row.get("part") for row in rows}
        lines = launcher_table(rows) if "contestants" in parts else attribution_table(rows)
        print("\n".join([*lines, *(["", *deciding_table(rows)] if "deciding" in parts else [])]))
    elif options.launcher:
        launcher(report, options.device or LAUNCHER_DEVICES, quick=options.quick)
    else:
        devices, loads = (ALL_DEVICES if options.full else ATTRIBUTED_DEVICES), ATTRIBUTED_LOADS
        attribute(
            report,
            options.device or devices[: 1 if options.quick else None],
            options.workload or loads[: 1 if options.quick else None],
            methods=options.method or (DECIDING if not options.full else ()),
            seeds=LEAST_SEEDS if options.quick else options.seeds,
            evaluations=min(options.evaluations, QUICK_EVALUATIONS) if options.quick else options.evaluations,
            workers=options.workers,
            state=options.state,
        )


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "--device": {"action": "append", "choices": KNOWN_DEVICES, "help": "default: all of the kind"},
        "--workload": {"action": "append", "choices": ATTRIBUTED_LOADS, "help": "default: all"},
        "--state": {"type": Path, "help": "keep what was done here, and go on from it"},
        "--full": {"action": "store_true", "help": "all device files of TOP, all methods"},
        "--launcher": {"action": "store_true", "help": "what launch intervals can do under deadlines"},
        "--method": {
            "action": "append",
            "choices": [*DECIDING, *EXPLAINING],
            "help": "beside those that the figures need; default: those that decide anew, with --full all",
        },
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
