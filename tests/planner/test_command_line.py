"""What commands have in common: helps, times, tables on a terminal, Ctrl-C."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stageloom.edge_agent.cli import app as agent
from stageloom.edge_agent.executor.executors import EXECUTORS
from stageloom.planner.api.problem import ApiRefused, problem_of
from stageloom.planner.cli import app, connection, device, main, plan, plan_create, service, train
from stageloom.planner.cli.output import emit_table
from stageloom.planner.cli.settings import take_options
from stageloom.planner.schema.device import DeviceProfileReply, DeviceProfileRequest
from stageloom.planner.schema.plan import MAX_PUSHED, PlanPushReply, PlanPushRequest, Pushed
from stageloom.planner.schema.training import MaddpgTrainingReply
from stageloom.shared.errors import ExitCode, NotFoundError
from stageloom.shared.ids import Digest
from tests.planner.processes import ROOT, environment
from tests.store.helpers import verdict_on
from tests.store.migrated import new_store


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group below a group, with its words."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))


@pytest.mark.parametrize("command_line", [app.app, agent.app], ids=["stageloom", "stageloom-agent"])
def test_help_lists_whole_sentences_and_says_what_each_option_takes(command_line: typer.Typer) -> None:
    """In 80 columns a sentence that is too long ends in dots; an option without a metavar shows a type."""
    root = typer.main.get_command(command_line)
    runner = CliRunner()
    groups = [(), *(path for path, command in _commands(root, ()) if hasattr(command, "commands"))]
    for path in groups:
        listed = runner.invoke(command_line, [*path, "--help"], env={"COLUMNS": "80"}).stdout
        assert [line for line in listed.splitlines()[1:] if line.endswith("...")] == [], path
    for path, _ in _commands(root, ()):
        shown = runner.invoke(command_line, [*path, "--help"]).stdout
        assert re.findall(r"^ +-.*<(?:str|int|float|path)\b.*", shown, re.MULTILINE) == [], path


def test_the_planner_knows_the_executors_that_agents_have() -> None:
    assert set(plan_create.EXECUTORS) == set(EXECUTORS)


def _ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_python_that_is_too_old_for_the_planner_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip leaves its packages out there without a word; the first import that fails says nothing of it."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.BACKEND
    assert "the planner needs Python 3.11 or later, this is 3.10" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_with_its_code_and_a_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "emit", _ctrl_c)
    assert app.execute(["version"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "error: interrupted"
    monkeypatch.setattr(agent, "default_home", _ctrl_c)
    assert agent.execute(["status"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "error: interrupted"


@pytest.mark.parametrize(
    "command",
    [
        ["device", "token", "--lifetime"],
        ["device", "replan", "nano", "--budget"],
        ["device", "profile", "nano", "--budget"],
        ["device", "profile", "nano", "--timeout"],
        ["plan", "create", "--model", "m", "--budget"],
        ["policy", "train", "gpg", "--budget"],
        ["policy", "train", "gpg", "--time-limit"],
        ["policy", "train", "maddpg", "--device", "nano", "--budget"],
    ],
    ids=" ".join,
)
def test_times_that_are_given_are_written_alike(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit is understood everywhere; a word that is no time is refused with an example of one."""
    home = ["--data-dir", str(tmp_path)]
    assert app.execute([*command, "soon", *home]) == ExitCode.USAGE
    assert "'soon' is no duration; write it like --" in capsys.readouterr().err
    app.execute([*command, "2m", *home])
    assert "no planner" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "wait_s"),
    [
        ([], 140.0),
        (["--splits"], 180.0),
        (["--budget", "5m"], 420.0),
        (["--budget", "5m", "--timeout", "1m"], 60.0),
        (["--budget", "5m", "--no-wait"], 0.0),
    ],
    ids=str,
)
def test_results_are_awaited_for_longer_than_the_device_may_measure(
    options: list[str], wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DeviceProfileRequest] = []

    def run_job(route: Any, request: DeviceProfileRequest) -> DeviceProfileReply:
        asked.append(request)
        return DeviceProfileReply(requests=(1,), epoch=1, generation=1)

    monkeypatch.setattr(device, "run_job", run_job)
    assert app.execute(["device", "profile", "nano", *options]) == ExitCode.OK
    assert [request.wait_s for request in asked] == [wait_s]


def test_a_refusal_of_the_one_device_beyond_a_full_request_leaves_the_report_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. A request takes 512 devices, so the last of 513 has one to itself. 2. The planner refuses that."""
    asked: list[int] = []
    error = NotFoundError("there is no device 'd512'", remedy="see `stageloom device list`")
    refusal = ApiRefused(problem_of(error, "plan.push"))

    class Planner:
        def call(self, route: Any, request: PlanPushRequest) -> PlanPushReply:
            asked.append(len(request.devices))
            if request.devices == ("d512",):
                raise refusal
            pushed = (Pushed(device=one, epoch=1, generation=2) for one in request.devices)
            return PlanPushReply(pushed=tuple(pushed))

    monkeypatch.setattr(plan, "connected", lambda: nullcontext(Planner()))
    devices = [f"d{number}" for number in range(MAX_PUSHED + 1)]
    assert app.execute(["plan", "push", *devices, "busy", "--json"]) == ExitCode.USAGE
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert len(rows) == MAX_PUSHED + 1 and [row["device"] for row in rows if row["cause"]] == ["d512"]
    assert "there is no device 'd512'; see `stageloom device list`" in told.err
    assert "1 of 513 devices were refused" in told.err
    assert asked == [MAX_PUSHED, 1]

    asked.clear()
    assert app.execute(["plan", "push", *devices[:-1], "no name", "busy"]) == ExitCode.USAGE
    assert asked == [], "a name that cannot be one is refused before anything is pushed"


@pytest.mark.parametrize(
    ("reason", "more", "said"),
    [
        (None, [], "the policy was not checked: it has no say before `stageloom policy check`"),
        (None, ["--unchecked"], "the policy was not checked; it may plan all the same"),
        ("it is behind", [], "did not pass its check: it is behind"),
        ("it is behind", ["--unchecked"], "did not pass its check: it is behind; it may plan all the same"),
        ("", ["--unchecked"], "passed its check"),
    ],
)
def test_a_training_says_whether_its_policy_may_plan(
    reason: str | None,
    more: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`reason`: why the policy did not pass; None: it was not checked."""
    verdict = None if reason is None else verdict_on(b"policy", reason)
    trained = MaddpgTrainingReply(
        checkpoint=Digest("ab" * 32),
        plan="best",
        ended="done",
        train_s=1.0,
        transitions=20,
        updates=1,
        twin="derived from nano",
        arrivals="relu 30/s",
        arrivals_per_s=(30.0,),
        rows={},
        curves=(),
        device_file="",
        verdict=verdict,
    )
    monkeypatch.setattr(train, "run_job", lambda route, request: trained)
    assert app.execute(["policy", "train", "maddpg", "--device", "nano", *more]) == ExitCode.OK
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.endswith(said)], lines


def test_a_table_whose_words_do_not_fit_the_terminal_is_shown_row_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. drawn where every word has its place; 2. one column less, and a row is lines, no empty cells."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    columns, rows = (
        ("plan", "digest", "why"),
        [("p1", "bc627f4aec37", "it won"), ("p2", "63db585a0022", None)],
    )
    monkeypatch.setenv("COLUMNS", "23")  # plan, 12 characters, won; two gaps of 2
    emit_table(columns, rows, empty="")
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [line.split() for line in drawn.splitlines()[2:]] == [
        ["p1", "bc627f4aec37", "it"],
        ["won"],
        ["p2", "63db585a0022", "-"],
    ]
    monkeypatch.setenv("COLUMNS", "22")
    emit_table(columns, rows, empty="")
    assert capsys.readouterr().out == (
        "plan    p1\ndigest  bc627f4aec37\nwhy     it won\n\nplan    p2\ndigest  63db585a0022\n"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["predictions"], ["prediction", "list"]),
        (["backup", "no/such/folder.tar"], ["planner", "backup", "no/such/folder.tar"]),
        (["trust-clock"], ["planner", "trust-clock"]),
        (["replans", "--limit", "3"], ["replan", "list", "--limit", "3"]),
        (
            ["plan", "compare", "--scheduler", "ios", "--model", "no-such"],
            ["scheduler", "compare", "--scheduler", "ios", "--model", "no-such"],
        ),
    ],
)
def test_a_command_in_its_old_words_does_the_same_with_a_hint(
    old: list[str], new: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_store(tmp_path).close()
    answers = []
    for words in (old, new):
        code = app.execute([*words, "--data-dir", str(tmp_path), "--json"])
        said = capsys.readouterr()
        answers.append((code, said.out, said.err.splitlines()))
    (code, out, err), expected = answers
    hint = (
        f"hint: `stageloom {' '.join(old[: len(old) - len(new) + 2])}` is now `stageloom {' '.join(new[:2])}`"
    )
    assert err[0] == hint
    assert (code, out, err[1:]) == expected


def test_a_token_from_stdin_does_for_every_connection_of_one_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []

    def client(*, url: str, token: str) -> Any:
        given.append((url, token))
        return nullcontext()

    monkeypatch.setattr(connection, "PlannerClient", client)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    for _ in range(2):
        take_options(["status", "--planner", "planner", "--token-file", "-"])
        for _ in range(2):
            with connection.connected():
                pass
    take_options([])
    assert given == [("planner", "one\n")] * 2 + [("planner", "two\n")] * 2


def test_old_words_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.execute(["--help"]) == ExitCode.OK
    listed = capsys.readouterr().out
    commands = {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line.split()}
    assert {"prediction", "replan"} <= commands
    assert not {"predictions", "replans", "backup", "trust-clock"} & commands


@pytest.mark.parametrize("command", ["version", "planner install --dry-run"])
def test_json_is_one_document_of_commands_about_this_machine_too(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.execute([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_what_is_not_utf_8_is_shown_with_escapes_and_asked_of_no_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new_store(tmp_path).close()
    here, file = ["--data-dir", str(tmp_path)], str(tmp_path / os.fsdecode(b"b\xff.tar"))
    assert app.execute(["planner", "backup", file, "--json", *here]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["file"] == file and Path(file).is_file()
    monkeypatch.setattr(service, "__version__", "1\udcff")
    assert app.execute(["version"]) == ExitCode.OK
    assert capsys.readouterr().out == "1\\udcff\n"
    assert app.execute(["webhook", "add", "http://x/\udcff", *here]) == ExitCode.USAGE
    assert capsys.readouterr().err == "error: 'http://x/\\udcff' is not UTF-8; write it in UTF-8\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_that_was_started_without_standard_streams_does_all_the_same(
    closed: str, tmp_path: Path
) -> None:
    """What it would have written there is lost, what goes to another stream is not."""
    home, file = tmp_path / "home", tmp_path / "kept.tar"
    home.mkdir()
    new_store(home).close()
    commands = {
        "stageloom.planner": ["planner", "backup", str(file), "--json"],
        "stageloom.edge_agent": ["version", "--json"],
    }
    for module, words in commands.items():
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(home),
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == ExitCode.OK, done.stderr
        assert bool(done.stdout) == (closed == "2>&-")
        assert bool(done.stderr) == (closed == ">&-" and module == "stageloom.planner"), done.stderr
    assert file.is_file()
