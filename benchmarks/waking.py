"""How long a thread waits for a core while another session computes on every core, by how nice that is.

    python -m benchmarks.waking [--json] [--quick]

A process of a session of its own computes on each core, as an agent's lanes do. A thread in this session
wakes 50 times a second and copies 10 MiB, as a client does that hands tasks over. A row per niceness of that
session (`niceness` of the agent's settings, by default 0): milliseconds from when the thread was to wake to
when it ran, median, p90 and p99. `own_niceness` is that of this session, on which it depends most: a terminal
that is nicer than an agent's session waits for it. Fails where the kernel groups no sessions.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.runner import Report, progress, run
from stageloom.shared.errors import UnavailableError

NICENESSES: Final = (0, 1, 3, 5, 10, 19)
_AUTOGROUP: Final = Path("/proc/self/autogroup")
_PAUSE_S: Final = 0.02
_COPIES: Final = 10
_COMPUTE: Final = """
import os, pathlib, sys
from stageloom.shared.session_nice import make_session_nice
make_session_nice(int(sys.argv[1]))
own = pathlib.Path("/proc/self/autogroup")
said = own.read_text() if own.exists() else ""
for core in sys.argv[2:-1]:
    if os.fork() == 0:
        os.sched_setaffinity(0, {int(core)})
        while True: pass
os.sched_setaffinity(0, {int(sys.argv[-1])})
print(said.strip(), flush=True)
while True: pass
"""


def waits_ms(niceness: int, wakings: int) -> list[float]:
    """What the thread waited each time.

    Raises:
        UnavailableError: the other session did not start, or is not so nice.
    """
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    command = [sys.executable, "-c", _COMPUTE, str(niceness), *cores]
    source, target = np.ones(1 << 18, np.float32), np.empty(1 << 18, np.float32)
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().strip()
            if said.split()[-1:] != [str(niceness)]:
                raise UnavailableError(
                    f"the session that computes is not {niceness} nice, but {said or 'ended or in no group'}",
                    remedy="see its error above; Linux has to group sessions (/proc/self/autogroup)",
                )
            for _ in range(wakings):
                due_s = time.monotonic() + _PAUSE_S
                time.sleep(_PAUSE_S)
                found.append(1e3 * (time.monotonic() - due_s))
                for _ in range(_COPIES):
                    np.copyto(target, source)
        finally:
            os.killpg(process.pid, 9)
    return found


def measure(report: Report, options: argparse.Namespace) -> None:
    """One niceness after the other."""
    for niceness in NICENESSES:
        found = waits_ms(niceness, 100 if options.quick else 400)
        own = int(_AUTOGROUP.read_text().split()[-1])
        median, p90, p99 = np.quantile(found, (0.5, 0.9, 0.99)).round(2).tolist()
        row: dict[str, Any] = {"niceness": niceness, "median_ms": median, "p90_ms": p90, "p99_ms": p99}
        report.add({f"median_ms.{niceness}": median}, [{**row, "own_niceness": own}])
        progress(f"niceness {niceness}: {median} ms, p99 {p99} ms")


if __name__ == "__main__":
    sys.exit(run(measure, ("numpy",)))
