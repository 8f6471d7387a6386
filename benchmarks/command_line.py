"""What a command of `stageloom` costs before it answers.

    python -m benchmarks.command_line [--quick] [--json]

Processor time, user and system, of whole processes, the median of several: `help_s` of `stageloom --help`;
`read_s` of `device list` over the local socket of a running planner, `remote_read_s` over TLS with a token,
`offline_read_s` on the data of a planner that does not run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from benchmarks.runner import Report, run
from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.config import PlannerConfig
from stageloom.planner.schema.access import AccessCreateRequest
from stageloom.planner.service import Planner

_COMMAND = (sys.executable, "-c", "from stageloom.planner.cli import main; main()")


def measure(report: Report, options: argparse.Namespace) -> None:
    """Run each command some times."""
    repeats = 3 if options.quick else 11
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        home, token = Path(folder, "planner"), Path(folder, "token")
        config = PlannerConfig(data_dir=home, listen="127.0.0.1:0", api="127.0.0.1:0", search="local")
        local = ("device", "list", "--data-dir", str(home))
        with closing(Planner(config)) as planner:
            with PlannerClient(data_dir=home) as client:
                made = client.call(routes.ACCESS_CREATE, AccessCreateRequest(name="benchmark"))
            token.write_text(made.token)
            remote = ("device", "list", "--planner", planner.api_url, "--token-file", str(token))
            figures = {
                "help_s": _spent_s(("--help",), repeats),
                "read_s": _spent_s(local, repeats),
                "remote_read_s": _spent_s(remote, repeats),
            }
        report.add({**figures, "offline_read_s": _spent_s(local, repeats)})


def _spent_s(words: Sequence[str], repeats: int) -> float:
    """Processor seconds of a command, the median; the first run, which compiles modules, does not count."""
    spent = []
    for _ in range(repeats + 1):
        before = os.times()
        subprocess.run([*_COMMAND, *words], check=True, capture_output=True)
        after = os.times()
        spent.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    return median(spent[1:])


if __name__ == "__main__":
    raise SystemExit(run(measure, ("typer", "msgspec")))
