"""How often the demo's re-plan is committed: the demo again and again, each with other arrivals.

    python -m benchmarks.demos [--json] [--quick] [--runs N]

Each row is a run: its exit code, the verdict that its page begins with, how the re-plan ended and by what
ratio, and tasks in time per second before and after it. A run takes four minutes;
`--quick` runs three, of smaller networks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.runner import Report, progress, run

RUNS, QUICK_RUNS = 10, 3
_REPLAN = ("outcome", "ratio", "interval", "pairs", "trigger_to_active_ms")


def demo(seed: int, *options: str) -> dict[str, Any]:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="stageloom-demos-") as out:
        command = (sys.executable, "-m", "examples.demo", "--json", "--out", out, "--seed", str(seed))
        began_s = time.monotonic()
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=False)
        row: dict[str, Any] = {"seed": seed, "exit": done.returncode, "seconds": time.monotonic() - began_s}
        if done.returncode:
            return row
        report = json.loads(done.stdout)
    replans = [{name: one[name] for name in _REPLAN} for one in report["replans"]]
    served = {one["who"]: one["in_time_per_s"] for one in report["served"]}
    return {**row, "verdict": report["verdict"], "replans": replans, "in_time_per_s": served}


def measure(report: Report, options: argparse.Namespace) -> None:
    """One run after the other."""
    runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    try:
        for seed in range(1, runs + 1):
            progress(f"run {seed} of {runs}")
            report.add({}, [demo(seed, *(["--quick"] if options.quick else []))])
    finally:
        rows = report.rows
        committed = [any(one["outcome"] == "committed" for one in row.get("replans", ())) for row in rows]
        failed = sum(bool(row["exit"]) for row in rows)
        report.add({"runs": len(rows), "committed": sum(committed), "failed": failed})


if __name__ == "__main__":
    sys.exit(run(measure, options={"--runs": {"type": int, "metavar": "N", "help": "default 10, quick 3"}}))
