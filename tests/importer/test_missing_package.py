"""Where a package of the extra `onnx` is missing, the error names the package, and not the file."""

from pathlib import Path

import pytest

from stageloom.edge_agent.cli.app import execute as agent
from stageloom.planner.cli.app import execute as planner
from tests.e2e.networks import write_chain


def test_a_package_that_is_missing_is_not_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_chain(tmp_path / "fine.onnx", 1))
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError(name='onnxruntime')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert planner(["model", "inspect", model]) == 6
    assert "install it with `pip install 'stageloom[onnx]'`" in capsys.readouterr().err
    assert agent(["verify", model, "--schedule", "greedy"]) == 6
    assert "install it with `pip install 'stageloom[edge,onnx]'`" in capsys.readouterr().err
