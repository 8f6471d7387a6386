"""Processes that we start import nothing from the folder that the user is in."""

import subprocess
from pathlib import Path

import pytest

from stageloom.shared.module_command import module_command
from tests.planner.processes import ROOT, environment


@pytest.mark.parametrize("safe_path", [False, True], ids=["Python 3.10", "later"])
def test_a_file_of_the_users_folder_is_not_imported(
    safe_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the user has a queue.py')\n")
    monkeypatch.setattr("stageloom.shared.module_command._HAS_SAFE_PATH", safe_path)
    command = module_command("stageloom.edge_agent.run", "{}", "too many")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert "error: this process is started by the command line; use `stageloom-agent run`" in done.stderr


def test_every_process_that_runs_a_module_of_ours_is_started_that_way() -> None:
    files = [path for folder in ("edge_agent", "planner", "shared") for path in (ROOT / folder).rglob("*.py")]
    starters = {path.name for path in files if "sys.executable" in path.read_text()}
    assert starters == {"module_command.py", "install.py"}, "and a service's installation names it"
