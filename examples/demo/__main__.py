"""`python -m examples.demo`: the whole system on this machine, then a report of what was measured.

A planner, an agent and three client processes run with folders of their own and nothing shared but sockets.
Inception V3, ResNet-50 and SqueezeNet 1.0 are imported and shipped; a plan is composed, pushed and run, and
the operators are profiled. Then three clients ask for tasks, at rates of 1:2:4 scaled to what this machine
was measured to serve, and a burst on one queue makes the device ask for another plan, twice: first the plain
replanner searches one, then the trained policy in examples/demo/policy is asked. The device tries either
against the first plan, and the report says which of the two is better here.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.processes import DemoFailed
from examples.demo.story import Options, tell
from stageloom.shared.errors import ExitCode, StageloomError

QUICK = {"search_s": 3.0, "trial_s": 20.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("var/demo"), help="folder for the report and all state")
    add("--seconds", type=float, default=240.0, help="seconds of load at most (default %(default)s)")
    add("--load", type=float, default=0.5, help="share of the measured capacity (default %(default)s)")
    add("--width", type=float, default=1.0, help="width of the networks; below 1 for a quick look")
    add("--seed", type=int, default=1)
    add("--json", action="store_true", help="print the report on stdout")
    add("--quick", action="store_true", help="quarter-width networks, short searches and trials")
    given = parser.parse_args()
    options = Options(
        out=given.out,
        seconds=given.seconds,
        load=given.load,
        width=0.25 if given.quick else given.width,
        seed=given.seed,
        **(QUICK if given.quick else {}),
    )
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
