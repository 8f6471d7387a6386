"""The recipes that run the tests, with a pytest that only ends as it is told."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["test", "test-more", "test-edge"])
@pytest.mark.parametrize(("code", "runs"), [(0, 1), (1, 2), (2, 1), (3, 1), (137, 1)])
def test_failed_tests_alone_are_tried_again(tmp_path: Path, target: str, code: int, runs: int) -> None:
    """A run that ended otherwise (an internal error, killed) knows no failed tests, and green it is not."""
    environment, calls = tmp_path / ("venv-edge" if target == "test-edge" else "venv"), tmp_path / "calls"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    (environment / ".installed").touch()
    python.write_text(f"#!/bin/sh\necho $* >> {calls}\n[ $(wc -l < {calls}) -gt 1 ] || exit {code}\n")
    python.chmod(0o755)
    command = ["make", "--silent", f"VENV={tmp_path / 'venv'}", target]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    lines = calls.read_text().splitlines()
    assert [("--last-failed" in line) for line in lines] == [False, True][:runs]
    assert (ended.returncode == 0) is (code in (0, 1))


def test_the_target_for_a_gpu_names_what_every_test_run_needs() -> None:
    """Its machine has no environment of ours: whoever sets it up goes by this line."""
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    imported = {*re.findall(r"^(?:from|import) (\w+)", conftest, re.MULTILINE)} - sys.stdlib_module_names
    (target,) = re.findall("^test-gpu:.*", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    needed = imported | {"pytest-timeout"}  # else pytest refuses the setting `timeout` of pyproject.toml
    assert {"pytest", "hypothesis"} < needed <= {*re.findall("[a-z-]+", target)}
