"""Installing the services: what is written, what is asked of the system, what is refused."""

import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import which

import pytest

from stageloom.edge_agent.cli.app import execute as agent_command
from stageloom.edge_agent.machine.doctor import unit_check
from stageloom.planner.cli.app import execute as planner_command
from stageloom.shared.errors import SettingError, StorageError, UnavailableError
from stageloom.shared.systemd import install as systemd
from stageloom.shared.systemd.install import Service, install, run_command, uninstall, unit_text
from stageloom.shared.systemd.unit import command_line
from tests.architecture.sources import ROOT

ME = pwd.getpwuid(os.geteuid()).pw_name
CODE = (Path("/opt/stageloom"),)
UNITS = ("edge_agent/stageloom-agent.service", "planner/stageloom-planner.service")
MOST_EXPOSED = 20  # tenths; systemd calls up to 4.9 of 10 acceptable


class System:
    """The machine as far as an installer changes it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units = folder / "units"
        self.units.mkdir()
        self.home = folder / "state"
        self.commands: list[list[str]] = []
        self.said: list[str] = []
        monkeypatch.setattr(systemd, "_RUNNING", folder)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(systemd, "hidden_from_service", lambda paths: None)

    def run(self, words: Sequence[str]) -> None:
        self.commands.append(list(words))

    def service(self, user: str = ME) -> Service:
        return agent_service(self.home, user, "run", "--home", str(self.home))

    def install(self, user: str = ME) -> None:
        install(self.service(user), self.said.append, unit_directory=self.units, run=self.run, code=CODE)

    def uninstall(self) -> bool:
        return uninstall("stageloom-agent", self.said.append, unit_directory=self.units, run=self.run)


def agent_service(home: Path, user: str, *arguments: str) -> Service:
    return Service(
        name="stageloom-agent",
        package="stageloom.edge_agent",
        program="stageloom-agent",
        arguments=arguments,
        home=home,
        user=user,
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


def test_unit_names_the_program_of_this_environment_home_and_account(machine: System) -> None:
    machine.install()
    lines = (machine.units / "stageloom-agent.service").read_text().splitlines()
    assert f"ExecStart={Path(sys.prefix)}/bin/stageloom-agent run --home {machine.home}" in lines
    assert f"User={ME}" in lines
    assert f"ReadWritePaths={machine.home}" in lines
    assert machine.home.stat().st_mode & 0o777 == 0o700
    assert machine.commands == [["systemctl", "daemon-reload"]]


def test_installing_twice_changes_nothing_the_second_time(machine: System) -> None:
    machine.install()
    path = machine.units / "stageloom-agent.service"
    before = (path.stat().st_ino, path.stat().st_mtime_ns)
    machine.commands.clear()
    machine.install()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert machine.commands == []
    assert machine.said[-1] == f"{path} is as it should be"


def test_an_older_unit_is_brought_up_to_date(machine: System) -> None:
    path = machine.units / "stageloom-agent.service"
    path.write_text("[Service]\nExecStart=/old\n")
    machine.install()
    assert path.read_text() == unit_text(machine.service())
    assert machine.commands == [["systemctl", "daemon-reload"]]


def test_account_that_is_missing_is_made_for_the_service_alone(
    machine: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, real = pwd.getpwnam(ME), pwd.getpwnam

    def look_up(name: str) -> pwd.struct_passwd:
        return mine if name == "weaver" and machine.commands else real(name)

    monkeypatch.setattr(pwd, "getpwnam", look_up)
    machine.install("weaver")
    (made, _) = machine.commands
    assert made[0] == "useradd" and made[-1] == "weaver"
    assert {"--system", "--no-create-home", "/usr/sbin/nologin"} <= set(made)


def test_removing_stops_the_service_and_keeps_its_state(machine: System) -> None:
    machine.install()
    machine.commands.clear()
    assert machine.uninstall()
    assert machine.commands == [
        ["systemctl", "disable", "--now", "stageloom-agent.service"],
        ["systemctl", "daemon-reload"],
    ]
    assert not any(machine.units.iterdir())
    assert machine.home.is_dir()
    assert not machine.uninstall()


def test_where_systemd_does_not_run_the_next_boot_is_told(
    machine: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "_RUNNING", machine.units / "none")
    monkeypatch.setattr(systemd, "which", lambda name: f"/usr/bin/{name}")
    machine.install()
    assert machine.commands == []
    assert machine.said[-1] == "systemd does not run here: the unit takes effect once it does"
    assert machine.uninstall()
    assert machine.commands == [["systemctl", "disable", "stageloom-agent.service"]]


def test_without_root_nothing_is_written_and_the_remedy_is_told(
    machine: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "orig_argv", ["/opt/50% off/python", "uninstall"])
    sudo = "run `sudo '/opt/50% off/python' uninstall`"
    with pytest.raises(StorageError, match=f"installing a service needs root; {sudo}, or use --dry-run"):
        machine.install()
    assert not any(machine.units.iterdir())
    assert not machine.home.exists()
    (machine.units / "stageloom-agent.service").touch()
    with pytest.raises(StorageError, match=f"removing a service needs root; {sudo}$"):
        machine.uninstall()


def test_code_that_the_service_could_not_read_is_refused(tmp_path: Path) -> None:
    service = agent_service(tmp_path / "x", ME)
    with pytest.raises(SettingError, match="/home/me/venv is out of the service's sight"):
        install(service, print, unit_directory=tmp_path, code=[Path("/home/me/venv")])
    with pytest.raises(SettingError, match="choose a state directory"):
        install(agent_service(Path("/home/x"), ME), print, unit_directory=tmp_path, code=CODE)


def test_an_interpreter_without_the_program_is_refused(
    machine: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(machine.units / "python"))
    with pytest.raises(SettingError, match=r"stageloom-agent is missing; install Stageloom with pip for "):
        machine.install()
    assert not any(machine.units.iterdir())


def test_state_of_another_account_is_not_taken_over(machine: System, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.home.mkdir()
    (machine.home / "device.key").touch()
    other = pwd.struct_passwd(("weaver", "x", os.getuid() + 1, os.getgid(), "", "/", "/bin/false"))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: other)
    with pytest.raises(SettingError, match=f"chown -R {ME}: {machine.home}"):
        machine.install()


@pytest.mark.parametrize("user", ["", "a b", "root\nExecStartPre=/bin/evil", "-x"])
def test_what_is_no_account_is_refused(machine: System, user: str) -> None:
    with pytest.raises(SettingError, match="cannot be an account's name"):
        machine.install(user)


def test_a_tool_of_the_system_that_fails_is_one_line() -> None:
    with pytest.raises(UnavailableError, match=r"`ls --nosuch` failed: .*nosuch"):
        run_command(["ls", "--nosuch"])
    with pytest.raises(UnavailableError, match="no-such-tool is missing"):
        run_command(["no-such-tool"])


def test_a_dry_run_prints_the_unit_of_either_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent_command(["install", "--dry-run", "--user", ME, "--home", "/srv/edge"]) == 0
    agent = capsys.readouterr().out
    assert agent.endswith("WantedBy=multi-user.target\n")
    assert "Environment=CUDA_CACHE_PATH=/srv/edge/cuda-cache\n" in agent
    assert planner_command(["planner", "install", "--dry-run", "--listen", "0.0.0.0:7500"]) == 0
    assert "up --data-dir /var/lib/stageloom --listen 0.0.0.0:7500\n" in capsys.readouterr().out


def test_a_planner_that_could_not_start_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_command(["planner", "install", "--dry-run", "--listen", "nowhere:"]) == 2
    assert "is no address" in capsys.readouterr().err


# -- the units that are shipped


@pytest.mark.parametrize("unit", UNITS)
def test_deploy_and_the_package_ship_one_and_the_same_unit(unit: str) -> None:
    assert (ROOT / "deploy" / Path(unit).name).resolve() == ROOT / unit


def _settings(unit: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in (ROOT / unit).read_text().splitlines() if line[:1] not in "#[")
    return {name: value for name, _, value in pairs if name}


@pytest.mark.promise("hardening-leaves-out-breaks")
def test_agents_hardening_leaves_out_what_breaks_cuda() -> None:
    settings = _settings(UNITS[0])
    assert {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateUsers", "ProcSubset"}.isdisjoint(settings)
    assert settings["DevicePolicy"] == "closed"
    assert "RemoveIPC" not in settings, "applications may share the account"
    assert "DeviceAllow=/dev/nvmap rw\n" in (ROOT / UNITS[0]).read_text()


@pytest.mark.parametrize(
    "driver",
    [
        *("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "drm"),
        *("nvhost", "nvhost-ctrl", "host1x-fence"),
        *("57000000.gpu", "17000000.gp10b", "17000000.gv11b", "17000000.ga10b", "17000000.gpu"),
    ],
)
def test_the_agent_may_use_the_gpus_drivers_under_the_names_that_they_have(driver: str) -> None:
    """As /proc/devices lists them, on cards and on Jetson's Nano, TX2, Xavier and Orin."""
    lines = (ROOT / UNITS[0]).read_text().splitlines()
    allowed = [line.removeprefix("DeviceAllow=char-").split()[0] for line in lines if "=char-" in line]
    assert any(fnmatchcase(driver, pattern) for pattern in allowed)


def test_the_agent_starts_after_whatever_loads_the_gpus_driver_and_says_where_mps_must_be() -> None:
    text = (ROOT / UNITS[0]).read_text()
    after = [word for line in text.splitlines() if line.startswith("After=") for word in line[6:].split()]
    assert {"nvidia-persistenced.service", "nvpmodel.service", "nv-load-display-modules.service"} <= {*after}
    assert _settings(UNITS[0])["PrivateTmp"] == "yes" and "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps" in text


@pytest.mark.parametrize("unit", UNITS)
def test_services_are_watched_restarted_and_outlive_a_child_without_memory(unit: str) -> None:
    settings = _settings(unit)
    assert (settings["Type"], settings["Restart"], settings["OOMPolicy"]) == (
        "notify",
        "on-failure",
        "continue",
    )
    assert int(settings["WatchdogSec"]) >= 30
    assert settings["KillMode"] == "mixed"  # the main process ends the others itself


def test_the_planner_waits_for_the_time_by_which_it_deletes() -> None:
    settings = _settings(UNITS[1])
    assert "time-sync.target" in settings["After"].split()
    assert "time-sync.target" in settings["Wants"].split()


@pytest.mark.parametrize("unit", UNITS)
def test_services_leave_memory_and_tasks_to_the_system(unit: str) -> None:
    settings = _settings(unit)
    high, most = (int(settings[name].removesuffix("%")) for name in ("MemoryHigh", "MemoryMax"))
    assert 50 <= high < most <= 95, "slowed down before anything is ended"
    assert int(settings["TasksMax"]) >= 1_024


@pytest.mark.promise("hardening-leaves-out-breaks")
@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("side", ["agent", "planner"])
def test_systemd_accepts_the_installed_unit_and_calls_it_well_hardened(
    tmp_path: Path, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = ["install", "--dry-run"]
    assert (agent_command(dry) if side == "agent" else planner_command(["planner", *dry])) == 0
    unit = tmp_path / f"stageloom-{side}.service"
    unit.write_text(capsys.readouterr().out)
    for check in (["verify", "--man=no"], ["security", "--offline=yes", f"--threshold={MOST_EXPOSED}"]):
        done = subprocess.run(
            ["systemd-analyze", *check, str(unit)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert check[0] != "verify" or done.stderr == ""


COMMAND_OF_0_1_0 = "/opt/stageloom/bin/python -m edge_agent run --home /var/lib/stageloom-agent"


def test_doctor_names_a_unit_of_0_1_0_until_it_is_installed_again(machine: System) -> None:
    unit = machine.units / "stageloom-agent.service"
    assert unit_check([machine.units]).detail == "not installed as a service"
    unit.write_text(f"[Service]\nExecStart={COMMAND_OF_0_1_0}\n")
    old = unit_check([machine.units])
    assert old.result == "fail"
    assert old.detail == f"{unit} starts `{COMMAND_OF_0_1_0}`, which this version does not have"
    assert "sudo stageloom-agent install" in old.remedy
    machine.install()
    assert unit_check([machine.units]).result == "ok"


@pytest.mark.parametrize("folder", ["plain", "a folder", "100%", "$HOME", 'the "new" one', r"a\b"])
def test_doctor_finds_the_program_of_a_unit_in_whatever_folder_it_is(
    machine: System, tmp_path: Path, folder: str
) -> None:
    program = tmp_path / folder / "stageloom-agent"
    program.parent.mkdir()
    unit = machine.units / "stageloom-agent.service"
    unit.write_text(f"[Service]\nExecStart={command_line([str(program), 'run'])}\n")
    assert unit_check([machine.units]).result == "fail", "it is not there yet"
    program.touch(0o755)
    assert unit_check([machine.units]).detail == f"{unit} starts {program}"


def test_doctor_sees_the_unit_of_a_package_unless_one_of_etc_hides_it(
    machine: System, tmp_path: Path
) -> None:
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    (packaged / "stageloom-agent.service").write_text("[Service]\nExecStart=/usr/bin/env\n")
    assert "packaged" in unit_check([machine.units, packaged]).detail
    machine.install()
    assert str(machine.units) in unit_check([machine.units, packaged]).detail


@pytest.mark.parametrize(
    ("execute", "words"),
    [(agent_command, ["install", "--home"]), (planner_command, ["planner", "install", "--data-dir"])],
)
def test_commands_to_paste_are_quoted_for_a_shell(
    execute: Callable[[list[str]], int],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(systemd, "install", lambda service, progress: None)
    home = "/srv/it's $HOME at 5%"
    assert execute([*words, home]) == 0
    (shown,) = [line for line in capsys.readouterr().err.splitlines() if "sudo -u" in line]
    assert shlex.split(shown)[-1] == home
