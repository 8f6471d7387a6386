"""Rows of processes: what JAX computes, several processes at once, a service that is started and ended."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.jax_network import jax_network
from benchmarks.gpu.process_rows import PART, _by_turns, _service, add_process_rows, processes_us
from benchmarks.gpu.results import Deadline, Results, Skip, quick_settings
from tests.benchmarks.gpu.tiny import subject_of

pytestmark = pytest.mark.more

SETTINGS = replace(quick_settings("cpu", "torch_cpu"), models=("squeezenet",))


class _Cuda(Device):
    """As the rows see CUDA."""

    kind = "cuda"


@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "inception_v3"])
def test_jax_computes_what_torch_does(name: str) -> None:
    jax = pytest.importorskip("jax")
    subject = subject_of(name)
    forward, parameters = jax_network(onnx.load_model_from_string(subject.artifact.onnx_bytes()), "float32")
    logits = jax.jit(forward)(parameters, subject.image)
    assert subject.error_of(np.asarray(logits)) < 1e-4


def test_rows_of_jax_and_of_processes_are_measured_or_say_why_not(tmp_path: Path) -> None:
    results = Results(None)
    add_process_rows(results, Device(), [subject_of("squeezenet")], SETTINGS, Deadline(600.0), tmp_path)
    rows = {row["name"]: row for row in results.report.rows}
    assert {row["part"] for row in rows.values()} == {PART}
    assert [row for row in rows.values() if "failed" in row] == []
    assert rows["squeezenet, 2 processes, time slicing"]["host_us"] > 0
    assert rows["squeezenet, 2 processes, MPS"]["skipped"] == "needs CUDA"
    beside = rows["squeezenet, JAX, XLA"]
    if find_spec("jax") is None:
        assert beside["skipped"] == "JAX is not installed"
    else:
        assert beside["error"] < 1e-4 and beside["host_us"] > 0 and beside["over_torch_graph"] > 0


def test_without_time_or_processes_rows_say_so(tmp_path: Path) -> None:
    alone = replace(SETTINGS, children=False)
    for settings, left_s, why in ((SETTINGS, 1.0, "the time was up"), (alone, 600.0, "without processes")):
        results = Results(None)
        add_process_rows(results, Device(), [subject_of("squeezenet")], settings, Deadline(left_s), tmp_path)
        assert {row["skipped"] for row in results.report.rows} == {why}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_process_that_dies_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        processes_us(subject_of("squeezenet"), 2, replace(SETTINGS, device="cuda"), {})


def test_the_service_is_started_in_a_folder_of_its_own_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the control program notes what it is told."""
    log = tmp_path / "log"
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"told = sys.argv[1:] or [sys.stdin.read().strip()]\n"
        f"open({str(log)!r}, 'a').write(' '.join([*told, os.environ['CUDA_MPS_PIPE_DIRECTORY']]) + '\\n')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with _service(_Cuda(), tmp_path) as environment:
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps")
        assert log.read_text().splitlines() == [f"-d {tmp_path / 'mps'}"]
    assert log.read_text().splitlines()[1:] == [f"quit {tmp_path / 'mps'}"]
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no permission')\n")
    with pytest.raises(Skip, match="did not start: no permission"), _service(_Cuda(), tmp_path):
        pass
    program.unlink()
    with pytest.raises(Skip, match="is not installed"), _service(_Cuda(), tmp_path):
        pass


def test_ways_take_turns_in_every_round() -> None:
    now = [0.0]
    done: list[str] = []

    def runs(name: str, seconds: float) -> None:
        done.append(name)
        now[0] += seconds

    ways = {name: (lambda n=name, s=s: runs(n, s), lambda: None) for name, s in (("a", 1.0), ("b", 2.0))}
    taken = _by_turns(ways, 4, 4.0, lambda: now[0])  # type: ignore[arg-type]
    assert taken == {"a": [1.0] * 4, "b": [2.0] * 4}
    assert done.count("a") == 2 + 4 * 4 and done.count("b") == 2 + 4 * 2
