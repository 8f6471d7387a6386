"""What serving over HTTP and gRPC costs beyond the native client.

    python -m benchmarks.serving [--json] [--quick] [--only PART]...

| part | what is measured | figures |
| --- | --- | --- |
| overhead | one request of 602 kB, beside bare servers | `http_beyond_native_ms`, `http_own_part_ms`, ... |

**overhead**: one agent serves a mean over 1x3x224x224 float32 (602 kB in, 12 bytes out), which takes the
engine little time. The native client, tritonclient over HTTP and gRPC, and tritonclient with the input in
system shared memory take turns, one request at a time, in shuffled order; each sends the same array. A
latency is from the call to the result; with shared memory it includes writing the input there, as the native
client's does. The same clients ask servers that look at nothing and answer 12 bytes: uvicorn (`echo_http`),
grpc.aio (`echo_grpc_asyncio`) and grpc's synchronous server (`echo_grpc_threads`). `WAY_own_part_ms` is what
a way takes beyond the native client and the bare server that it is built on: Stageloom's own part.
"""

import argparse
import sys
from typing import Any

from benchmarks.runner import Report, run
from benchmarks.serving.overhead import measure_overhead

PARTS = ("overhead",)
_OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"},
}
_PACKAGES = ("numpy", "onnxruntime", "tritonclient", "grpcio", "uvicorn", "httptools")


def measure(report: Report, options: argparse.Namespace) -> None:
    """The parts that are asked for, one after the other."""
    parts = options.only or PARTS
    if "overhead" in parts:
        measure_overhead(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(run(measure, _PACKAGES, options=_OPTIONS))
