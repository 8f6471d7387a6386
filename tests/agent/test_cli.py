"""The command line: one line per error with cause and remedy, documented exit codes, light processes."""

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from benchmarks.agent_cpu import agent_rss_mib
from stageloom import __version__
from stageloom.edge_agent.cli.app import execute, status_text
from stageloom.edge_agent.config import (
    OLD_SETTINGS_NAME,
    SETTINGS_NAME,
    AgentConfig,
    ModelFile,
    decode_config,
    load_config,
)
from stageloom.edge_agent.ingest.channel import HOME_VARIABLE
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.link.connection import Membership, new_keys, save_membership
from stageloom.edge_agent.link.factory import KEY_NAME, MEMBERSHIP_NAME, connect_planner
from stageloom.edge_agent.machine.device import gpu_names
from stageloom.edge_agent.machine.doctor import (
    clock_check,
    disk_check,
    gpu_check,
    home_check,
    key_check,
    openvino_check,
    runtime_check,
    settings_check,
)
from stageloom.edge_agent.reporting.status import (
    AgentStatus,
    EngineStatus,
    LinkStatus,
    PolicyStatus,
    TrialStatus,
)
from stageloom.shared.errors import SettingError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import read_keys, write_keys
from stageloom.shared.token import Endpoints, JoinToken, format_token
from tests.agent.command import agent_command
from tests.agent.process import AgentProcess
from tests.architecture.sources import ROOT


def _command(*arguments: str, home: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stageloom.edge_agent", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, HOME_VARIABLE: str(home)},
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], 4, "no agent answers at .*start one with `stageloom-agent run`"),
        (["run"], 2, "joined no planner.*stageloom-agent join TOKEN"),
        (["run", "--model", "absent.onnx"], 4, "cannot read absent.onnx: .*; give the path of an ONNX file"),
        (["run", "--shape", "x=1x3"], 2, "--shape is given without --model"),
        (
            ["run", "--model", "a.onnx", "--shape", "x=1xthree"],
            2,
            "'1xthree' in --shape .* is no shape; write whole numbers like",
        ),
        (["run", "--model", "a b.onnx"], 2, "cannot be the name of a model; give one of .* as NAME=FILE"),
        (["run", "--model", "a.onnx", "--threads", "0"], 2, "'--threads': Input should be greater"),
        (
            ["run", "--model", "a.onnx", "--executor", "abacus"],
            2,
            "no executor 'abacus'; choose one of",
        ),
        (
            ["run", "--model", "absent.onnx", "--executor", "onnx", "--scheduler", "bogus"],
            2,
            "there is no scheduler 'bogus'; choose one of",
        ),
        *(
            (
                ["run", "--model", "a.onnx", *given],
                2,
                f"{given[-2]} has no effect on plans of the executor auto.*; name another",
            )
            for given in (
                ["--threads", "2"],
                ["--executor", "auto", "--replicas", "2"],
                ["--scheduler", "greedy"],
            )
        ),
        (["verify"], 2, "Missing argument.*see `stageloom-agent verify --help`"),
        (["join", "stgl2.rubbish"], 7, "token is damaged.*stageloom device token"),
        (["join", "nothing"], 7, "does not start with"),
        (["verify", "absent.onnx", "--schedule", "sequential"], 2, "absent.onnx"),
        (["--nonsense"], 2, "No such option"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_error_is_one_line_with_its_remedy_and_exit_code(
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    done = agent_command(arguments, capsys)
    assert done.returncode == code
    assert done.stdout == ""
    *progress, error = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert not any(line.startswith(("error", "Traceback")) for line in progress)


def test_settings_that_auto_does_not_need_are_taken_from_a_file_and_beside_an_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that a planner plans for measures with its threads, whatever its executor."""
    started: list[AgentConfig] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(decode_config(words[-1])))
    file, run = tmp_path / "agent.toml", ["run", "--home", str(tmp_path)]
    file.write_text('[agent]\nreplicas = 3\nscheduler = "ios"\n')
    assert execute([*run, "--model", "a.onnx"]) == 0
    assert execute([*run, "--model", "a.onnx", "--executor", "onnx", "--replicas", "4"]) == 0
    assert execute([*run, "--threads", "2"]) == 0
    file.write_text('[agent]\nexecutor = "onnx"\n')
    assert execute([*run, "--model", "a.onnx", "--threads", "2"]) == 0
    assert [(one.executor, one.replicas, one.intra_op_threads) for one in started] == [
        ("auto", 3, 1),
        ("onnx", 4, 1),
        ("auto", 3, 2),
        ("onnx", 2, 2),
    ]


@pytest.mark.promise("model-file-name-pinned")
def test_each_model_of_a_run_has_its_own_name_and_its_own_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(arguments))
    both = ["--model", f"{tmp_path}/yolo.onnx:images=1x3x64x64", "--model", "bert=b.onnx:ids:0=1x8,t=scalar"]
    assert execute(["run", "--home", str(tmp_path), *both]) == 0
    assert decode_config(started[0][-1]).models == (
        ModelFile(path=f"{tmp_path}/yolo.onnx", name="yolo", shapes={"images": (1, 3, 64, 64)}),
        ModelFile(path="b.onnx", name="bert", shapes={"ids:0": (1, 8), "t": ()}),
    )


def test_version_is_one_json_object_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__}


def test_version_is_an_option_too(tmp_path: Path) -> None:
    asked = _command("--version", home=tmp_path)
    assert asked.returncode == 0 and asked.stdout == f"{__version__}\n"


def test_unreadable_setting_stops_the_start_and_is_named(tmp_path: Path) -> None:
    for text, message in (
        ("[agent]\nprobation_s = -1\n", "probation_s"),
        ("[agent]\nprobation = 1\n", "probation"),
        ("[agent]\ntrial = { gain = 1.0 }\n", r"`float` < 1\.0 - at `\$\.trial\.gain`"),
        ("[agent]\ntrial = { gross = 1.0 }\n", r"`float` < 1\.0 - at `\$\.trial\.gross`"),
        ("[agent", "cannot be read"),
        ("probation_s = 1\n", "other than the table"),
    ):
        (tmp_path / SETTINGS_NAME).write_text(text)
        with pytest.raises(SettingError, match=message):
            load_config(tmp_path, environment={})
    (tmp_path / SETTINGS_NAME).write_text("[agent]\nprobation_s = 2.5\nreplicas = 3\n")
    wanted = AgentConfig(home=str(tmp_path), probation_s=2.5, replicas=4)
    assert load_config(tmp_path, environment={}, replicas=4) == wanted


def test_command_line_goes_before_environment_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_NAME).write_text("[agent]\nreplicas = 3\nprobation_s = 2.5\nalarms = true\n")
    environment = {
        "STAGELOOM_AGENT_REPLICAS": "4",
        "STAGELOOM_AGENT_ALARMS": "false",
        "STAGELOOM_AGENT_HOME": "/nowhere",
        "STAGELOOM_AGENT_SOCKET": "/nowhere/agent.sock",
        "HOME": "/",
    }
    config = load_config(tmp_path, environment=environment, probation_s=7.0)
    assert (config.replicas, config.alarms, config.probation_s) == (4, False, 7.0)
    with pytest.raises(SettingError, match="STAGELOOM_AGENT_REPLICA: there is no setting"):
        load_config(tmp_path, environment={"STAGELOOM_AGENT_REPLICA": "4"})


def test_settings_of_0_1_0_hold_until_there_are_newer_ones(tmp_path: Path) -> None:
    (tmp_path / OLD_SETTINGS_NAME).write_text('{"probation_s": 2.5, "trial": {"gain": 0.1}}')
    old = load_config(tmp_path, environment={})
    assert (old.probation_s, old.trial.gain) == (2.5, 0.1)
    assert f"--toml --home {tmp_path} > {tmp_path / SETTINGS_NAME}" in settings_check(tmp_path).remedy
    (tmp_path / SETTINGS_NAME).touch()  # as a shell does before it runs the command
    written = _command("config", "show", "--toml", home=tmp_path)
    (tmp_path / SETTINGS_NAME).write_text(written.stdout)
    assert load_config(tmp_path, environment={}) == old
    both = settings_check(tmp_path)
    assert (both.result, both.remedy) == ("warn", f"remove {tmp_path / OLD_SETTINGS_NAME}")
    (tmp_path / OLD_SETTINGS_NAME).unlink()
    assert settings_check(tmp_path).result == "ok"


def test_join_makes_the_key_for_its_owner_only_and_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    nowhere = "tcp://127.0.0.1:9"
    enrol = "tls://127.0.0.1:9"
    token = format_token(
        JoinToken(bytes(range(32)), bytes(16), nowhere, nowhere, nowhere, enrol, certificate=bytes(32))
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import stageloom.edge_agent.link.join as p, functools, sys\n"
            "p.join = functools.partial(p.join, timeout_s=0.3)\n"
            "from stageloom.edge_agent.cli.app import execute\n"
            f"sys.exit(execute(['join', {token!r}, '--home', {str(home)!r}]))",
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 4
    assert token not in done.stderr
    assert stat.S_IMODE((home / KEY_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    keys = read_keys(home / KEY_NAME)
    assert keys.secret not in done.stderr
    assert not (home / MEMBERSHIP_NAME).exists()


def _join(home: Path) -> None:
    home.mkdir(exist_ok=True)
    nowhere = "tcp://127.0.0.1:9"
    endpoints = Endpoints(nowhere, nowhere, nowhere)
    write_keys(home / KEY_NAME, new_keys())
    save_membership(
        home / MEMBERSHIP_NAME,
        Membership(device=DeviceId("edge-1"), planner_key=new_keys().public, endpoints=endpoints),
    )


def test_status_and_doctor_print_json_and_say_by_exit_code_whether_tasks_are_taken(tmp_path: Path) -> None:
    home = tmp_path / "home"
    _join(home)
    with AgentProcess(home) as agent:
        agent.until(lambda status: status.engine.up, "the engine is up")
        done = _command("status", "--json", home=home)
        assert done.returncode == 1
        found = json.loads(done.stdout)
        assert found["ready"] is False
        assert found["reason"] == "no plan is active"
        assert found["link"]["device"] == "edge-1"
        text = _command("status", home=home)
        assert "no plan is active" in text.stdout
        assert agent.stop() == 0
    done = _command("doctor", "--json", home=home)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    assert checks["keys"]["result"] == "ok"


def test_readable_key_keeps_the_agent_offline_and_is_named(tmp_path: Path) -> None:
    _join(tmp_path)
    (tmp_path / KEY_NAME).chmod(0o644)
    assert key_check(tmp_path).result == "fail"
    with AgentProcess(tmp_path) as agent:
        status = agent.until(lambda status: status.engine.up, "it starts all the same")
        assert status.link.state == "not_joined"
        assert "mode 0644" in status.link.detail
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert f'| status: link `{status.link.state}`, "the key file ... has mode 0644 ..." |' in page


def test_damaged_membership_does_not_stop_the_agent(tmp_path: Path) -> None:
    _join(tmp_path)
    (tmp_path / MEMBERSHIP_NAME).write_bytes(b"rubbish")
    _, problems = connect_planner(AgentConfig(home=str(tmp_path)), PlanManager(Supervisor(Random(0))))
    assert "join the planner again" in problems[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[agent", "agent.toml cannot be read"),
        ("a = 1", "other than the table"),
        ('[agent]\ncolour = "red"', "unknown field `colour`"),
        ("[agent]\nreplicas = 0", "Expected `int` >= 1 - at `$.replicas`"),
        (
            '[agent]\nexecutor = "onnx"\nscheduler = "bogus"\nmodels = [{name = "a", path = "a"}]',
            "no scheduler 'bogus'",
        ),
        ('[agent]\nexecutor = "abacus"', "no executor 'abacus'"),
        ('[agent.serving]\nhttp = "0.0.0.0:8000"', "0.0.0.0:8000 can be reached from other machines"),
        ('[agent.metrics]\nlisten = "0.0.0.0:9000"', "0.0.0.0:9000 can be reached from other machines"),
        ('[agent.serving]\nhttp = "127.0.0.1:8000"\ntokens = "/no/such.tokens"', "/no/such.tokens"),
    ],
)
def test_settings_that_the_agent_refuses_fail_the_doctor(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / SETTINGS_NAME).write_text(text)
    found = settings_check(tmp_path)
    assert (found.result, why in found.detail, bool(found.remedy)) == ("fail", True, True), found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[agent]\nreplicas = 3",
        '[agent]\nscheduler = "of plans made here"',
        '[agent]\nscheduler = "not of auto"\nmodels = [{name = "a", path = "a"}]',
    ],
)
def test_settings_that_the_agent_takes_pass_the_doctor(tmp_path: Path, text: str) -> None:
    (tmp_path / SETTINGS_NAME).write_text(text)
    assert settings_check(tmp_path).result == "ok"


def test_both_onnxruntimes_at_once_fail_the_doctor() -> None:
    both = runtime_check({"onnxruntime": "1.20", "onnxruntime-gpu": "1.20"})
    assert both.result == "fail"
    assert "uninstall both" in both.remedy
    assert runtime_check({"onnxruntime": "1.20"}).result == "ok"


def test_doctor_tells_of_openvino_and_how_to_install_it() -> None:
    there, absent = openvino_check({"openvino": "2026.4.1"}), openvino_check({})
    assert (there.result, absent.result) == ("ok", "ok")
    assert "openvino 2026.4.1" in there.detail and "[edge,openvino]" in absent.remedy


def test_gpu_that_nothing_uses_is_a_warning_and_no_gpu_is_none() -> None:
    assert gpu_check([], {}).result == "ok"
    assert gpu_check(["NVIDIA H100"], {"onnxruntime": "1.20"}).result == "warn"
    assert gpu_check(["NVIDIA H100"], {"torch": "2.5"}).result == "ok"


def test_gpus_are_read_from_the_driver_or_the_device_tree(tmp_path: Path) -> None:
    assert gpu_names(tmp_path) == []
    (tmp_path / "device-tree").mkdir()
    (tmp_path / "device-tree" / "model").write_bytes(b"NVIDIA Jetson Orin NX\0")
    assert gpu_names(tmp_path) == ["NVIDIA Jetson Orin NX"]
    (tmp_path / "device-tree" / "model").write_bytes(b"NVIDIA Orin NX Developer Kit\0")
    assert gpu_names(tmp_path, tmp_path) == []
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").touch()
    assert gpu_names(tmp_path, tmp_path) == ["NVIDIA Orin NX Developer Kit"]
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA A100\nIRQ: 1\n")
    assert gpu_names(tmp_path) == ["NVIDIA A100"]


def test_home_that_others_may_write_and_unset_clock_are_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert home_check(tmp_path).result == "fail"
    tmp_path.chmod(0o700)
    assert home_check(tmp_path).result == "ok"
    assert clock_check(0.0).result == "warn"


def test_a_home_that_is_not_utf_8_is_shown_with_escapes_and_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = str(tmp_path / os.fsdecode(b"h\xff"))
    assert execute(["config", "show", "--home", home]) == 0
    assert "h\\udcff" in capsys.readouterr().out
    assert execute(["run", "--home", home]) == 2
    assert capsys.readouterr().err.endswith("h\\udcff' is not UTF-8; rename what it names\n")


@pytest.mark.parametrize("below", ["", "home"])
def test_a_home_of_somebody_else_fails_a_check_and_ends_none(below: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, below)
        os.chmod(folder, 0)
        with _nobody():
            checks = home_check(home), settings_check(home), key_check(home), disk_check(home)
        os.chmod(folder, 0o700)
    assert [check.result for check in checks[:3]] == ["fail", "fail", "warn"]
    assert all("run as" in check.remedy for check in checks[:3])
    assert "free in" in checks[3].detail


@contextmanager
def _nobody() -> Iterator[None]:
    """Without the rights of the superuser, whom no permission keeps out."""
    ids = os.getresuid()
    if ids[0] == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(*ids)


def test_both_processes_together_stay_below_64_mib_before_a_backend_loads() -> None:
    assert agent_rss_mib()["both"] <= 64


_HEAVY = "typer rich numpy sqlalchemy ray onnxruntime onnx torch alembic"


@pytest.mark.promise("run-path-loads-heavy")
@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("stageloom.edge_agent.run stageloom.edge_agent.link.factory stageloom.edge_agent.service", _HEAVY),
        ("stageloom.edge_agent.lifecycle.alone", _HEAVY),
        ("stageloom.edge_agent.reporting.status stageloom.edge_agent.ingest.endpoint", f"{_HEAVY} zmq"),
        (
            "stageloom.edge_agent.worker.process",
            "typer rich sqlalchemy ray onnxruntime onnx torch alembic zmq",
        ),
        (
            "stageloom.edge_agent.ingest.client",
            "typer rich sqlalchemy ray onnxruntime onnx torch alembic zmq",
        ),
        ("stageloom.edge_agent.cli.app", "rich sqlalchemy ray onnxruntime onnx torch alembic numpy zmq"),
    ],
)
def test_fresh_interpreter_loads_no_heavy_package_on_this_path(modules: str, forbidden: str) -> None:
    code = (
        f"import sys\nfor name in {modules.split()!r}: __import__(name)\n"
        f"found = set({forbidden.split()!r}) & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(found)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


def shown(
    trial: TrialStatus | None = None, pause_ms: float | None = None, policy: PolicyStatus | None = None
) -> str:
    return status_text(
        AgentStatus(
            version="1",
            pid=1,
            home="h",
            uptime_s=1.0,
            ready=True,
            reason="",
            engine=EngineStatus(pid=2, up=True, restarts=0),
            plan=None,
            trial=trial,
            policy=policy,
            last_pause_ms=pause_ms,
            link=LinkStatus(state="alone"),
            queues=(),
            tasks=(),
            applications=0,
            problems=(),
        )
    )


def test_status_shows_a_trial_by_its_pairs_its_ratio_and_the_time_left() -> None:
    runs = TrialStatus(phase="trial", pairs=9, ratio=1.0432, seconds_left=55.2)
    assert "trial      9 pairs of windows, ratio so far 1.043, decided within 55 s" in shown(runs)
    assert "trial      0 pairs of windows, decided within 60 s" in shown(
        TrialStatus(phase="trial", seconds_left=60.0)
    )
    assert "the desired plan is staging" in shown(TrialStatus(phase="staging"))
    assert "trial" not in shown(None)
    assert "250 ms at the last swap" in shown(None, 250.0)


def test_status_shows_a_policy_and_why_it_has_no_say() -> None:
    assert "policy     abc, plans where no planner answers" in shown(policy=PolicyStatus(digest="abc"))
    refused = PolicyStatus(digest="abc", refused="it was trained for 3 models")
    assert "policy     abc: has no say, it was trained for 3 models" in shown(policy=refused)
    assert "policy" not in shown()
