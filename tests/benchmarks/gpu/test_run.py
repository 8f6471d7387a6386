"""The whole benchmark on the host: every part runs, nothing fails, and what was measured is never lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main as command
from benchmarks.gpu.device import Device
from benchmarks.gpu.results import PARTS, Deadline, Results, quick_settings
from benchmarks.gpu.rivals import PROVIDERS
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Table
from benchmarks.runner import readable
from tests.benchmarks.gpu.tiny import subject_of

pytestmark = pytest.mark.more

ALL_PARTS = {"correctness", "probe", "table fp32", "distance", "concurrency", "serving"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The host as a device uses one thread; others want theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_all_parts_run_on_the_host_and_no_row_fails(tmp_path: Path) -> None:
    settings = replace(
        quick_settings("cpu", "torch_cpu"),
        models=("squeezenet",),
        children=False,
        mix_instances=(1,),
    )
    results = Results(tmp_path / "rows.jsonl")
    run = Run(settings, results, Deadline(600.0), tmp_path)
    try:
        run.all_parts()
    finally:
        run.close()
        results.close()
    rows = results.report.rows
    assert [row for row in rows if "failed" in row] == []
    assert ALL_PARTS | {"switching", "goal"} <= {row["part"] for row in rows}
    reasons = {row["name"]: row["skipped"] for row in rows if "skipped" in row}
    for name in ("the 33rd stream", "connections", "kernel intervals"):
        assert "needs CUDA" in reasons[name]
    for provider in PROVIDERS:
        assert reasons[f"squeezenet, {provider.row}"].endswith((f"without {provider.name}", "needs CUDA"))
    figures = results.report.figures
    assert figures["correctness.fp32.wrong_variants"] == 0.0
    assert figures["switch.lost"] == 0.0 and figures["distance.squeezenet.path"] > 0.0
    measured = [row for row in rows if row["part"] == "table fp32" and "device_us" in row]
    assert {"squeezenet, torch eager", "squeezenet, ours sequential", "mix, torch joint graph"} <= {
        row["name"] for row in measured
    }
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in kept if entry["row"]] == json.loads(json.dumps(rows))
    assert "== goal ==" in readable(rows, {"gpu": "none"})


@pytest.mark.promise("benchmark-s-rate-depends")
def test_a_row_that_fails_says_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    results = Results(path, clock=lambda: 1.0)
    with results.attempt("probe", "first"):
        raise RuntimeError("CUDA error:\n an illegal memory access")
    results.add({"a": 1.0, "b": None, "c": float("nan")}, part="probe", name="second", value=2)
    assert results.report.rows == [
        {"part": "probe", "name": "first", "failed": "RuntimeError: CUDA error: an illegal memory access"},
        {"part": "probe", "name": "second", "value": 2},
    ]
    assert results.report.figures == {"a": 1.0}
    assert len(path.read_text().splitlines()) == 2, "on disk before anything is closed"
    results.close()


def test_a_signal_ends_the_run_and_is_no_failed_row() -> None:
    results = Results(None)
    with pytest.raises(SystemExit), results.attempt("probe", "first"):
        raise SystemExit("stopped")
    assert results.report.rows == []


def test_an_executor_that_is_missing_is_a_row_and_the_rivals_stay(tmp_path: Path) -> None:
    settings = replace(
        quick_settings("cpu", "no_such"), models=("squeezenet",), mix_instances=(), instances=(), batches=()
    )
    results = Results(None)
    table = Table(Device(), [subject_of("squeezenet")], settings, results, rng=Random(0))
    table.build_torch()
    table.build_ours()
    failed = [row for row in results.report.rows if "failed" in row]
    assert [row["name"] for row in failed] == ["executor no_such"]
    assert "ExecutorError" in failed[0]["failed"]
    assert ("squeezenet", "torch graph") in {one.key for one in table.variants}


def test_after_the_time_for_building_nothing_is_built_and_the_rows_say_so(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl")
    over = Deadline(0.0, clock=lambda: 1.0)
    settings = quick_settings("cpu", "torch_cpu")
    table = Table(Device(), [subject_of("squeezenet")], settings, results, rng=Random(0), building=over)
    table.build_torch()
    results.close()
    assert table.variants == []
    assert {row["skipped"] for row in results.report.rows} == {"the time was up"}


def test_networks_that_search_for_kernels_are_compiled_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once disturb each other's timing, which handicaps torch.compile; others may share the time."""
    met: list[str] = []

    def in_child(work: Any, kind: str, subject: Any, mode: str, precision: str, *, limit_s: float) -> float:
        with suppress(threading.BrokenBarrierError):  # nobody came
            barriers[mode].wait(0.3)
            met.append(mode)
        return 0.0

    monkeypatch.setattr("benchmarks.gpu.run.in_child", in_child)
    monkeypatch.setattr("benchmarks.gpu.run.make_device", lambda kind: Device())
    settings = replace(quick_settings("cuda", "torch_cuda"), modes=("default", "max-autotune"))
    barriers = {mode: threading.Barrier(2) for mode in settings.modes}
    run = Run(settings, Results(None), Deadline(600.0), tmp_path)
    run._subjects = [subject_of("squeezenet"), subject_of("inception_v3")]
    assert len(run._compile()) == 4
    assert "max-autotune" not in met and met.count("default") in (0, 2)


@pytest.mark.promise("benchmark-s-rate-depends")
def test_of_a_lost_device_everything_that_was_measured_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After an error that CUDA keeps, every call raises it: also those that describe and free the device."""

    def measure(run: Run) -> None:
        run.results.add({"probe.something": 1.0}, part="probe", name="something")

    def lost(*arguments: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Run, "all_parts", measure)
    monkeypatch.setattr(Run, "close", lost)
    monkeypatch.setattr(Device, "describe", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        command(["--device", "cpu", "--quick", "--json"])
    said = json.loads(capfd.readouterr().out)
    assert said["figures"] == {"probe.something": 1.0}
    assert said["machine"]["gpu"].startswith("lost: RuntimeError: CUDA error")


@pytest.mark.promise("benchmark-s-rate-depends")
def test_a_variant_that_is_wrong_is_not_measured(tmp_path: Path) -> None:
    settings = replace(
        quick_settings("cpu", "null"), models=("squeezenet",), mix_instances=(), instances=(), batches=()
    )
    results = Results(None)
    table = Table(Device(), [subject_of("squeezenet")], settings, results, rng=Random(0))
    table.build_torch()
    table.build_ours()  # answers zeros
    table.check()
    wrong = {row["name"] for row in results.report.rows if row.get("right") is False}
    assert "squeezenet, ours sequential" in wrong and "squeezenet, torch graph" not in wrong
    assert not any(one.name.startswith("ours") for one in table.variants)
    assert results.report.figures["correctness.fp32.wrong_variants"] == len(wrong)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--model", "squeezenet", *arguments]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_one_command_prints_one_object_with_machine_versions_figures_and_rows(tmp_path: Path) -> None:
    done = subprocess.run(
        _command("--json", "--out", str(tmp_path / "rows.jsonl")), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["benchmark"] == "gpu" and {"machine", "versions", "figures", "rows"} <= found.keys()
    assert found["machine"]["precision"] == "fp32" and "cores" in found["machine"]
    assert [row for row in found["rows"] if "failed" in row] == []


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_that_is_told_to_stop_still_prints_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    child = subprocess.Popen(
        _command("--json", "--no-children", "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "concatenation" in line:
            break
    os.kill(child.pid, signal.SIGTERM)
    stdout, _ = child.communicate()
    assert json.loads(stdout)["rows"], "one object, with the rows so far"
    assert out.read_text().splitlines()


def test_parts_are_those_that_settings_name() -> None:
    settings = quick_settings("cpu", "null")
    assert all(settings.wants(part) for part in PARTS)
    assert not replace(settings, parts=("probes",)).wants("table")
