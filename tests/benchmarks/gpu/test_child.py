"""Work in a process beside the benchmark's."""

import os
import time

import pytest

from benchmarks.gpu.child import in_child


def variable(name: str) -> tuple[int, str]:
    os.write(1, b"the parent prints one JSON object there")
    return os.getpid(), os.environ[name]


def test_a_child_gives_its_answer_or_says_why_not_and_ends_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    pid, value = in_child(variable, "CUDA_CONNECTIONS", limit_s=60.0, CUDA_CONNECTIONS="8")
    assert pid != os.getpid() and value == "8"
    assert capfd.readouterr().out == ""
    with pytest.raises(RuntimeError, match="KeyError: 'CUDA_CONNECTIONS'"):
        in_child(variable, "CUDA_CONNECTIONS", limit_s=60.0)
    with pytest.raises(RuntimeError, match="without an answer"):
        in_child(os._exit, 3, limit_s=60.0)
    with pytest.raises(TimeoutError, match="not done in 0 s"):
        in_child(time.sleep, 60.0, limit_s=0.1)
