"""Child processes of the benchmark: `python -m benchmarks.gpu.child PART`. Not called by hand."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.device import make_device
from benchmarks.gpu.networks import make_subject
from benchmarks.gpu.probes import connections_child, operators_child
from benchmarks.gpu.rivals import compile_child, slice_child, use_precision


def main() -> int:
    """Run one part; what it prints on stdout is its answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("compile", "connections", "operators", "slice"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="squeezenet")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--flop-per-s", type=float, default=1e12)
    parser.add_argument("--bytes-per-s", type=float, default=1e11)
    given = parser.parse_args()
    device = make_device(given.device)
    if given.part == "connections":
        connections_child(device)
        return 0
    use_precision(given.precision)
    with tempfile.TemporaryDirectory() as folder:
        subject = make_subject(given.model, Path(folder), width=given.width, size=given.size)
        match given.part:
            case "compile":
                compile_child(device, subject, given.mode, given.precision)
            case "operators":
                operators_child(device, subject, given.precision, given.flop_per_s, given.bytes_per_s)
            case _:
                slice_child(device, subject, given.precision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
