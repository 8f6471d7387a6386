"""`python -m examples.demo`: re-planning on this machine, in three acts, then a report of what was measured.

A planner and an agent run as processes with folders of their own and nothing shared but sockets. Inception
V3, ResNet-50 and SqueezeNet 1.0 are imported, measured and served at rates of 1:2:4, scaled to what this
machine carries. Act one: default sessions beside a plan, the same arrivals. Act two: the load rises and
stays, and the device is planned anew by itself. Act three: a plan that looks better on paper. The report says
what came of it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.processes import DemoFailed
from examples.demo.story import Options, tell
from stageloom.shared.errors import ExitCode, StageloomError

QUICK: dict[str, Any] = {"windows": 2, "replan_s": 60.0, "afterwards_s": 8.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("var/demo"), help="folder for the report and all state")
    add("--width", type=float, default=1.0, help="width of the networks (default %(default)s)")
    add("--seed", type=int, default=1)
    add("--json", action="store_true", help="print the report on stdout")
    add("--quick", action="store_true", help="quarter-width networks, shorter acts")
    given = parser.parse_args()
    width = 0.25 if given.quick else given.width
    options = Options(out=given.out, width=width, seed=given.seed, **(QUICK if given.quick else {}))
    try:
        report = tell(options)
    except KeyboardInterrupt:
        print("interrupted; nothing is left running", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except (DemoFailed, StageloomError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return int(ExitCode.FAILED)
    if given.json:
        print(json.dumps(report))
    return int(ExitCode.OK)


if __name__ == "__main__":
    raise SystemExit(main())
