"""The Debian package's script, with programs that note what they are asked: no device is left without."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "deb" / "postinst"


class Machine:
    """A root directory of its own; `pip` ends as the test says, the service is what `systemctl` made it.

    Without `starts` an agent of the new version does not start; systemd says `state` of one that runs.
    """

    def __init__(self, root: Path, *, pip: int = 0, starts: bool = True, state: str = "active") -> None:
        self.root, self.venv = root, root / "opt"
        self.active, self.asked = root / "active", root / "asked"
        programs = root / "bin"
        programs.mkdir()
        self._write("getent", "exit 0")
        self._write("install", "exit 0")
        fails = "" if starts else f'[ "$(cat {self.venv}/version)" != new ] || exit 1; '
        is_active = "exit 0" if state == "active" else "exit 3"  # as systemd: 3 for any other state
        told = f'case "$*" in *--quiet*) ;; *) echo {state};; esac'
        self._write(
            "systemctl",
            f'echo "$*" >> {self.asked}\n'
            f'case "$*" in *is-active*) [ -e {self.active} ] || exit 3; {told}; {is_active};; '
            f"stop*) rm -f {self.active};; start*) {fails}touch {self.active};; esac",
        )
        made = f'mkdir -p "$3/bin"; echo new > "$3/version"; cp {root}/pip "$3/bin/python"'
        self._write("python3", made)
        shutil.move(self._write("pip", f"exit {pip}"), root / "pip")

    def _write(self, name: str, text: str) -> Path:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def configure(self, before: str) -> int:
        """As dpkg does; `before` is the version that was configured last."""
        text = SCRIPT.read_text().replace("/opt/stageloom", str(self.venv))
        for path in ("/run/systemd/system", "/var/lib/stageloom-agent", "/usr/share/stageloom-agent"):
            text = text.replace(path, str(self.root / "bin"))
        environment = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}
        ran = subprocess.run(
            ["sh", "-c", text, "postinst", "configure", before], env=environment, check=False
        )
        return ran.returncode

    @property
    def version(self) -> str:
        return (self.venv / "version").read_text().strip()


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize(("pip", "version"), [(0, "new"), (1, "old")])
def test_an_upgrade_that_fails_leaves_the_version_from_before_which_runs_if_it_ran(
    tmp_path: Path, pip: int, version: str, runs: bool
) -> None:
    machine = Machine(tmp_path, pip=pip)
    machine.venv.mkdir()
    (machine.venv / "version").write_text("old")
    if runs:
        machine.active.touch()
    assert bool(machine.configure("0.1")) == bool(pip)
    assert (machine.version, machine.active.exists()) == (version, runs)
    assert [one.name for one in tmp_path.glob("opt*")] == ["opt"]


def _upgradable(machine: Machine) -> Machine:
    """With an old version, whose agent runs."""
    machine.venv.mkdir()
    (machine.venv / "version").write_text("old")
    machine.active.touch()
    return machine


def test_an_upgrade_whose_agent_does_not_start_brings_the_one_from_before_back(tmp_path: Path) -> None:
    machine = _upgradable(Machine(tmp_path, starts=False))
    assert machine.configure("0.1") != 0
    assert (machine.version, machine.active.exists()) == ("old", True)
    assert [one.name for one in tmp_path.glob("opt*")] == ["opt"]
    calls = [line.partition(" ")[0] for line in machine.asked.read_text().splitlines()]
    assert calls == ["is-active", "stop", "daemon-reload", "start", "stop", "start"]


@pytest.mark.parametrize("state", ["activating", "reloading"])
def test_an_agent_that_is_about_to_run_is_stopped_and_started_again(tmp_path: Path, state: str) -> None:
    machine = _upgradable(Machine(tmp_path, state=state))
    assert machine.configure("0.1") == 0
    calls = [line.partition(" ")[0] for line in machine.asked.read_text().splitlines()]
    assert calls == ["is-active", "stop", "daemon-reload", "start"]
    assert (machine.version, machine.active.exists()) == ("new", True)


def test_pip_is_given_no_option_that_older_ones_do_not_know(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    note = tmp_path / "pip-was-told"
    (tmp_path / "pip").write_text(f'#!/bin/sh\necho "$PIP_ROOT_USER_ACTION $*" > {note}\n')
    assert machine.configure("") == 0
    assert note.read_text().startswith("ignore ") and "--root-user-action" not in note.read_text()


def test_what_a_killed_upgrade_left_is_put_back_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path, pip=1)
    for name, version in (("opt", "half"), ("opt.before", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "version").write_text(version)
    assert machine.configure("0.1") != 0
    assert machine.version == "old"


def test_a_first_installation_starts_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.configure("") == 0
    assert machine.version == "new" and not machine.active.exists()


@pytest.mark.parametrize(("signal", "version"), [("TERM", "old"), ("KILL", "new")])
def test_an_upgrade_that_a_signal_ends_brings_the_agent_back_at_the_latest_when_it_is_configured_again(
    tmp_path: Path, signal: str, version: str
) -> None:
    machine, pip = _upgradable(Machine(tmp_path)), tmp_path / "pip"
    good = pip.read_text()
    pip.write_text(f"#!/bin/sh\nkill -{signal} $PPID\n")
    assert machine.configure("0.1") != 0
    assert (machine.version, machine.active.exists()) == (version, version == "old")
    pip.write_text(good)
    assert machine.configure("0.1") == 0
    assert (machine.version, machine.active.exists()) == ("new", True)
    assert [one.name for one in tmp_path.glob("opt*")] == ["opt"]
