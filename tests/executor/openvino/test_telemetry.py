"""Importing openvino reports to a server and writes into the user's home, unless it is kept from that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTED = "import openvino"
EXECUTOR = """
from stageloom.edge_agent.executor.executors import make_executor
executor = make_executor("openvino")
core = executor._open.__globals__["_core"]()
assert core.get_versions("CPU")
"""
WATCH = """
import sys
def watch(event, arguments):
    if event.startswith("socket.") and event not in ("socket.gethostname", "socket.__new__"):
        print(event, file=sys.stderr, flush=True)
sys.addaudithook(watch)
"""
FAKE = """
import os, pathlib, socket
pathlib.Path(os.environ["HOME"], "identity").write_text("1")
class Telemetry:
    def __init__(self, **options):
        with socket.socket() as one:
            one.connect_ex(("127.0.0.1", 9))
    def send_event(self, *words):
        pass
"""
"""Does at once what the package does from a thread, and where no server answers."""


def run(text: str, tmp_path: Path, *, fake: bool) -> tuple[str, list[str]]:
    """What a fresh interpreter tells of sockets, and the files that it leaves in the home."""
    home, packages = tmp_path / "home", tmp_path / "packages"
    home.mkdir()
    path = [str(folder) for folder in map(Path, sys.path) if (folder / "stageloom").exists()]
    if fake:
        package = packages / "openvino_telemetry"
        (package / "backend").mkdir(parents=True)
        (package / "__init__.py").write_text(FAKE)
        (package / "backend" / "__init__.py").touch()
        (package / "backend" / "backend_ga4.py").touch()
        path.insert(0, str(packages))
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "TF_BUILD")}
    done = subprocess.run(
        [sys.executable, "-c", WATCH + text],
        env={**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, sorted(str(file.relative_to(home)) for file in home.rglob("*"))


def test_a_package_that_connects_when_it_is_imported_is_seen(tmp_path: Path) -> None:
    """Else the tests below would prove nothing."""
    told, files = run(IMPORTED, tmp_path, fake=True)
    assert "socket.connect" in told and files == ["identity"]


@pytest.mark.promise("openvino-telemetry-off")
@pytest.mark.parametrize("fake", [True, False], ids=["a fake that connects at once", "as installed"])
def test_the_executor_connects_to_nothing_and_writes_nothing(fake: bool, tmp_path: Path) -> None:
    assert run(EXECUTOR, tmp_path, fake=fake) == ("", [])


@pytest.mark.promise("openvino-telemetry-off")
def test_telemetry_stays_off_where_the_converter_is_imported_later(tmp_path: Path) -> None:
    assert run(EXECUTOR + "import openvino.tools.ovc", tmp_path, fake=True) == ("", [])
