"""The Debian package installed by dpkg into a fresh Debian, in a network namespace without a network."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.deb.__main__ import build

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise("debian-package"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0
        or any(shutil.which(name) is None for name in ("debootstrap", "unshare", "dpkg-deb")),
        reason="needs root, debootstrap, unshare and dpkg-deb",
    ),
]


class Root:
    """A Debian of its own: python3, python3-venv, systemd. systemd does not run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str, status: int = 0) -> str:
        """What a command says, on both channels; without any network but its own loopback."""
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "chroot", str(self.folder), *words]
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND": "noninteractive",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == status, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    """With the package installed."""
    folder = tmp_path_factory.mktemp("debian")
    release = _release()
    folder.chmod(0o755)  # the root of a system, which every account crosses
    packages = "python3,python3-venv,systemd"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", release, str(folder)], check=True
    )
    package = build(folder / "root", "edge,onnx")
    made = Root(folder)
    assert "join TOKEN" in made.run("dpkg", "-i", f"/root/{package.name}")
    yield made
    shutil.rmtree(folder)


def _release() -> str:
    """This machine's Debian, whose Python the package is built for; any other would not install it."""
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    return dict(line.partition("=")[::2] for line in lines)["VERSION_CODENAME"]


def test_systemd_accepts_the_unit(root: Root) -> None:
    said = root.run("systemd-analyze", "verify", "/usr/lib/systemd/system/stageloom-agent.service")
    assert said == ""


def test_doctor_runs_and_names_the_unit(root: Root) -> None:
    command = ["/opt/stageloom/bin/stageloom-agent", "doctor", "--home", "/var/lib/stageloom-agent"]
    said = root.run("setpriv", "--reuid=stageloom", "--regid=stageloom", "--init-groups", *command)
    assert "/usr/lib/systemd/system/stageloom-agent.service starts /opt/stageloom/bin/stageloom-agent" in said


def test_the_program_is_on_the_path_and_the_state_is_its_accounts_alone(root: Root) -> None:
    assert root.run("stageloom-agent", "--help")
    assert root.run("stat", "-c", "%U %a", "/var/lib/stageloom-agent") == "stageloom 700\n"


def test_removal_takes_the_environment_and_keeps_the_state_until_a_purge(root: Root) -> None:
    (root.folder / "var/lib/stageloom-agent/key").write_text("kept")
    root.run("dpkg", "--remove", "stageloom-agent")
    assert not (root.folder / "opt/stageloom").exists()
    assert (root.folder / "var/lib/stageloom-agent/key").exists()
    root.run("dpkg", "--purge", "stageloom-agent")
    assert not (root.folder / "var/lib/stageloom-agent").exists()


def test_an_environment_that_somebody_made_by_hand_is_left_alone(root: Root) -> None:
    (root.folder / "opt/stageloom").mkdir()
    (package,) = (root.folder / "root").glob("*.deb")
    assert "not of this package" in root.run("dpkg", "-i", f"/root/{package.name}", status=1)
    assert list((root.folder / "opt/stageloom").iterdir()) == []
