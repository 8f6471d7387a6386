"""The Debian package's tree, without building wheels: one made-up wheel, and the scripts as they are."""

import subprocess
from pathlib import Path

import pytest

from deploy.deb.__main__ import SCRIPTS, control_text, lay_out
from stageloom.shared.version import __version__

pytestmark = pytest.mark.promise("debian-package")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    wheel = tmp_path / "stageloom-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    lay_out(tmp_path / "tree", [wheel], extras="edge,onnx", architecture="arm64")
    return tmp_path / "tree"


def test_the_package_holds_its_wheels_and_says_which_of_them_to_install(tree: Path) -> None:
    share = tree / "usr/share/stageloom-agent"
    assert [path.name for path in (share / "wheels").iterdir()] == ["stageloom-1-py3-none-any.whl"]
    assert (share / "requirement").read_text() == f"stageloom[edge,onnx]=={__version__}\n"


def test_unit_and_program_are_those_of_the_packages_own_environment(tree: Path) -> None:
    unit = (tree / "usr/lib/systemd/system/stageloom-agent.service").read_text()
    assert "ExecStart=/opt/stageloom/bin/stageloom-agent run --home /var/lib/stageloom-agent\n" in unit
    assert (tree / "usr/bin/stageloom-agent").readlink() == Path("/opt/stageloom/bin/stageloom-agent")


def test_compiled_wheels_bind_the_package_to_their_python_and_processor(tree: Path) -> None:
    control = control_text(architecture="arm64", python=(3, 11), size_kib=7)
    assert "Architecture: arm64\n" in control
    assert "python3 (>= 3.11), python3 (<< 3.12), python3-venv" in control
    assert "Architecture: arm64\n" in (tree / "DEBIAN/control").read_text()


def test_an_environment_that_may_be_a_planners_is_left_alone_and_its_new_place_named(
    tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "opt").mkdir()
    script = (tree / "DEBIAN/preinst").read_text().replace("-e /opt/stageloom", f"-e {tmp_path / 'opt'}")
    done = subprocess.run(["sh", "-c", script, "preinst", "install"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "not of this package" in done.stderr and "/opt/stageloom-planner" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_executable_and_parse(tree: Path, name: str) -> None:
    script = tree / "DEBIAN" / name
    assert script.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(script)], check=True)
