"""Time slicing: every model in a process of its own, and the driver gives each the device in turn."""

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.compiled import Zoo, child_command
from benchmarks.gpu.device import make_device
from benchmarks.gpu.rounds import Variant
from benchmarks.gpu.subjects import make_subject
from benchmarks.gpu.torch_rows import MIX, Rows, use_precision

NAME = "time slicing, a process per model"
_PATIENCE_S = 60.0


class Slices:
    """The processes; they wait between windows and take no time on the device then."""

    def __init__(self, kind: str, models: Sequence[str], zoo: Zoo, precision: str) -> None:
        self._precision = precision
        self._children = [
            subprocess.Popen(
                child_command(
                    "slice", "--device", kind, "--model", model, "--precision", precision, *zoo.arguments
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for model in models
        ]

        self.error = float("inf")  # the worst, once they are ready

    def wait_ready(self) -> None:
        """Until every process has its graph; from then on they only wait.

        Raises:
            RuntimeError: a process ended.
        """
        self.error = max(float(self._answer(child)["error"]) for child in self._children)

    def variant(self, runs: int) -> Variant:
        """`runs` images of every model begun together; time per image of each."""

        def run() -> None:
            for child in self._children:
                self._ask(child, runs)
            for child in self._children:
                self._answer(child)

        return Variant(MIX, NAME, run, runs, self._precision)

    def _ask(self, child: "subprocess.Popen[str]", runs: int) -> None:
        assert child.stdin is not None
        child.stdin.write(f"{runs}\n")
        child.stdin.flush()

    def _answer(self, child: "subprocess.Popen[str]") -> dict[str, float]:
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], _PATIENCE_S)
        if not ready:
            raise RuntimeError(f"a time slice has not answered in {_PATIENCE_S:.0f} s")
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"a time slice ended with exit code {child.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        """End them."""
        for child in self._children:
            assert child.stdin is not None and child.stdout is not None
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()


def slice_child(arguments: argparse.Namespace, folder: Path) -> int:
    """One process: a graph, replayed as often as each line of the input asks for."""
    device = make_device(arguments.device)
    use_precision(arguments.precision)
    subject = make_subject(arguments.model, folder, width=arguments.width, size=arguments.size)
    rows = Rows(device, [subject], arguments.precision)
    variant = rows.graph(subject)
    print(json.dumps({"error": rows.errors[variant.key]}), flush=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        for _ in range(int(line)):
            variant.run()
        device.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began_s}), flush=True)
    return 0
