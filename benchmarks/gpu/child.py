"""Child processes of the benchmark: `python -m benchmarks.gpu.child PART`. Not called by hand."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.probes import connections_child, operators_child
from benchmarks.gpu.rivals import compile_child, slice_child


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        match arguments.part:
            case "compile":
                return compile_child(arguments, Path(folder))
            case "connections":
                return connections_child(arguments)
            case "operators":
                return operators_child(arguments, Path(folder))
            case _:
                return slice_child(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
