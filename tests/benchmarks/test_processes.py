"""The demo's children: none outlives it, however it ends."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks.processes import Processes
folder = Path(sys.argv[1])
(folder / "waits.py").write_text("import signal; signal.pause()")
child = Processes(folder, {"PYTHONPATH": str(folder)}).start("child", "waits")
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_demo_takes_its_children_along(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    child = int(killed.stdout)
    try:
        ended = os.pidfd_open(child)
    except ProcessLookupError:
        return  # it has ended already
    gone, _, _ = select.select([ended], [], [], 30.0)
    os.close(ended)
    if not gone:
        os.kill(child, signal.SIGKILL)
    assert gone
