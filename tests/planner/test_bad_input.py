"""Every case of `bad_input.toml` ends with its exit code and one line that names cause and remedy."""

import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

from planner.cli.app import execute
from planner.store.store import DATABASE_FILE, Store
from tests.planner.processes import PlannerProcess, environment, ok, stageloom

CASES: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "bad_input.toml").read_text(encoding="utf-8")
)["case"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the cases name."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "text.onnx").write_text("this is no model")
    (folder / "wrong_type.toml").write_text('[planner]\nbulk_credits = "many"\n')
    (folder / "unknown_key.toml").write_text("[planner]\nbulk_credit = 3\n")
    (folder / "not_toml.toml").write_text("[planner\n")
    (folder / "broken_database").mkdir()
    (folder / "broken_database" / DATABASE_FILE).write_bytes(b"no database, but long enough\n" * 100)
    (folder / "readable_key").mkdir()
    key = folder / "readable_key" / "planner.keys"
    key.write_text("x" * 40 + "\n" + "y" * 40 + "\n")
    key.chmod(0o644)
    (folder / "newer_schema").mkdir()
    Store(folder / "newer_schema").close()
    with sqlite3.connect(folder / "newer_schema" / DATABASE_FILE) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["command"]))
def test_bad_input_ends_in_one_line_and_its_exit_code(
    case: dict[str, Any],
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    code = execute([part.format(tmp=files, home=home) for part in case["command"]])
    out, err = capsys.readouterr()
    assert (code, out) == (case["exit"], "")
    assert err.startswith("error: ") and err.count("\n") == 1, err
    pattern = case["message"].replace("{home}", re.escape(str(home)))
    assert re.search(pattern, err), err


def test_a_planner_that_was_killed_leaves_a_socket_that_is_not_waited_for(tmp_path: Path) -> None:
    planner = PlannerProcess(tmp_path / "home")
    planner.stop(signal.SIGKILL)
    assert (planner.home / "admin.sock").exists()
    done = stageloom(planner.home, "status")
    assert (done.returncode, "no planner runs on" in done.stderr) == (4, True)
    again = PlannerProcess(tmp_path / "home")
    assert ok(planner.home, "status").startswith("planner")
    assert again.stop() == 0


def test_a_running_planner_refuses_with_its_own_line(tmp_path: Path, capsys: Any) -> None:
    planner = PlannerProcess(tmp_path / "home")
    for arguments, code, message in [
        (["plan", "push", "ghost", "first"], 2, "there is no device 'ghost'; see `stageloom device list`"),
        (["plan", "create", "--model", "ghost"], 2, "there is no model 'ghost'; see `stageloom model list`"),
        (["plan", "create", "--model", "ghost", "--combine", "x"], 2, "choose one of alone, aligned"),
        (["model", "remove", "ghost"], 2, "there is no model 'ghost'"),
        (["device", "revoke", "ghost"], 2, "there is no device 'ghost'"),
        (["watch", "ghost"], 2, "there is no device 'ghost'"),
        (["device", "profile", "ghost", "--model", "x"], 2, "there is no device 'ghost'"),
        (["plan", "show", "ghost"], 2, "there is no plan 'ghost'; see `stageloom plan list`"),
    ]:
        assert execute([*arguments, "--data-dir", str(planner.home)]) == code
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert planner.stop() == 0


def test_reading_from_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from planner.cli import main; main()' --help | true",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(tmp_path / "home"),
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
