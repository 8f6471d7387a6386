"""The benchmark where there is a GPU: `python -m pytest -m gpu tests/benchmarks/gpu`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def rows_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--quick", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_part_runs_and_no_row_fails(tmp_path: Path) -> None:
    found = rows_of(tmp_path)
    assert [row for row in found["rows"] if "failed" in row] == []
    wrong = [row["name"] for row in found["rows"] if row.get("right") is False]
    assert wrong == [] and found["machine"]["gpu"]


def test_streams_alias_from_the_33rd_on(tmp_path: Path) -> None:
    figures = rows_of(tmp_path, "--only", "probes")["figures"]
    assert 2 <= figures["probe.first_alias_stream"] <= 33
