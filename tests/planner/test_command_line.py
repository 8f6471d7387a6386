"""What all commands have in common: Ctrl-C is told, on both command lines."""

from typing import Any

import pytest

import edge_agent.cli
from planner.cli import app, service
from shared.errors import ExitCode


def _ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_a_command_with_its_code_and_a_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "emit", _ctrl_c)
    assert app.execute(["version"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "error: interrupted"
    monkeypatch.setattr(edge_agent.cli, "default_home", _ctrl_c)
    assert edge_agent.cli.execute(["status"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "error: interrupted"
