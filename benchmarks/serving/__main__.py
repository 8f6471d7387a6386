"""What serving over HTTP and gRPC costs beyond the native client, and what it carries beside other servers.

    python -m benchmarks.serving [--json] [--quick] [--only PART]... [--mix NAME]... [--minutes M]

| part | what is measured | figures |
| --- | --- | --- |
| overhead | one request of 602 kB, beside bare servers | `http_beyond_native_ms`, `http_own_part_ms`, ... |
| rivals | load within deadlines, beside LitServe and MLServer | `in_time_over_litserve.MIX`, ... |

**overhead**: one agent serves a mean over 1x3x224x224 float32 (602 kB in, 12 bytes out), which takes the
engine little time. The native client, tritonclient over HTTP and gRPC, and tritonclient with the input in
system shared memory take turns, one request at a time, in shuffled order; each sends the same array. A
latency is from the call to the result; with shared memory it includes writing the input there, as the native
client's does. The same clients ask servers that look at nothing and answer 12 bytes: uvicorn (`echo_http`),
grpc.aio (`echo_grpc_asyncio`) and grpc's synchronous server (`echo_grpc_threads`). `WAY_own_part_ms` is what
a way takes beyond the native client and the bare server that it is built on: Stageloom's own part.

**rivals**: the mixes, arrivals and deadlines of `benchmarks.slo`: the capacity of a server is the largest
Poisson rate at which 95 % of each model's tasks meet their deadlines. Stageloom serves the plan that it makes
itself over gRPC. LitServe (HTTP) and MLServer (gRPC) run onnxruntime, with one and two workers of one and two
threads each; Stageloom is compared with the best of these four. Windows on the same seeded arrivals take
turns in shuffled order. `in_time_over_SERVER.MIX` is the ratio of capacities, the median of a bootstrap; rows
have its interval; there is none from fewer than four windows at one rate, as with `--quick`. Tasks have their
deadline where a server takes one: MLServer's calls end with it, LitServe gives up what has waited as long as
the longest. Each rival is installed once, in an environment of its own under `--cache`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.real_models.fetching import NoRegistryError
from benchmarks.runner import Report, progress, run
from benchmarks.serving.environments import CACHE, SERVERS, python_of, versions_in
from benchmarks.serving.overhead import measure_overhead
from benchmarks.serving.rivals import ServersMeasurement
from benchmarks.slo.mixes import MIXES, load_mix
from benchmarks.slo.one_mix import QUICK, MixEffort

NO_REGISTRY = 3
PARTS = ("overhead", "rivals")
_OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"},
    "--mix": {
        "action": "append",
        "choices": list(MIXES),
        "help": "of models that rivals serve; repeat for more; default zoo",
    },
    "--minutes": {
        "type": float,
        "default": 5.0,
        "metavar": "M",
        "help": "of windows for each mix; default 5",
    },
    "--cache": {
        "type": Path,
        "default": CACHE,
        "metavar": "DIR",
        "help": "rivals and downloads; default %(default)s",
    },
}
_PACKAGES = ("numpy", "onnxruntime", "openvino", "tritonclient", "grpcio", "uvicorn", "httptools")


def measure(report: Report, options: argparse.Namespace) -> int:
    """The parts that are asked for, one after the other; the exit code is 3 where no registry answers."""
    parts = options.only or PARTS
    if "overhead" in parts:
        measure_overhead(report, quick=options.quick)
    if "rivals" not in parts:
        return 0
    try:
        _measure_rivals(report, options)
    except NoRegistryError as error:
        progress(f"no registry: {error}")
        return NO_REGISTRY
    return 0


def _measure_rivals(report: Report, options: argparse.Namespace) -> None:
    pythons = {server: python_of(server, options.cache) for server in SERVERS}
    report.about |= {server: versions_in(server, python) for server, python in pythons.items()}
    effort = QUICK if options.quick else MixEffort(options.minutes * 60.0)
    for name in options.mix or list(MIXES)[:1]:
        progress(name)
        with tempfile.TemporaryDirectory(prefix="stageloom-serving-") as folder:
            models = load_mix(name, Path(folder), options.cache)
            weights = [entry.weight for entry in MIXES[name]]
            one = ServersMeasurement(name, models, weights, effort, times_folder=folder)
            one.pythons = {server: str(python) for server, python in pythons.items()}
            try:
                one.run()
            finally:
                figures = {f"{figure}.{name}": value for figure, value in one.result.figures.items()}
                report.add(figures, one.result.rows)


if __name__ == "__main__":
    sys.exit(run(measure, _PACKAGES, options=_OPTIONS))
