"""What host_executors prints."""

import json
import subprocess
import sys

import pytest


@pytest.mark.full
def test_the_benchmark_prints_every_figure() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.host_executors",
        "--quick",
        "--json",
        "--model",
        "squeezenet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["figures"]
    memory = {"import_rss_mib", "import_mib", "whole_mib"}
    times = {f"squeezenet.{part}_{unit}" for part in ("whole", "paper") for unit in ("ms", "cpu_ms")}
    names = {f"{executor}.{name}" for executor in ("onnx", "openvino") for name in memory | times}
    assert figures.keys() == names | {"weights_mib", "over.squeezenet.whole", "over.squeezenet.paper"}
    assert min(figures.values()) > 0
