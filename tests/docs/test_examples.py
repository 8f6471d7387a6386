"""Every example, run as its page says, beside a planner and two devices; the demo has `make demo`."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Device, Fleet
from tests.e2e.networks import write_chain
from tests.planner.processes import ROOT, until

EXAMPLES = {"application.py", "camera.py", "ocr.py", "rollout.py", "session.sh"}
"""The camera is tried in tests/serving/test_camera.py, the pipeline in tests/serving/test_rapidocr.py."""
OF_OTHER_TOOLS = {"cpp/infer.cc"}
"""Needs two repositories of Triton's, which no index has as a package."""

pytestmark = [pytest.mark.full, pytest.mark.promise("examples-work")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A planner with one network and a plan, whose API other machines may use; `ci.token` beside its data."""
    fleet = Fleet(tmp_path_factory.mktemp("examples"), start=False)
    with fleet.config.open("a") as settings:
        settings.write('api = "127.0.0.1:0"\n')
    fleet.start()
    fleet.do("model", "add", str(write_chain(fleet.folder / "detector.onnx", 1)))
    fleet.make_plan("whole", "--model", "detector")
    fleet.do("access", "create", "ci", "--role", "operator", "--output", str(fleet.folder / "ci.token"))
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def device(fleet: Fleet) -> Iterator[Device]:
    """One that runs the plan."""
    with Device(fleet, "camera-7", fleet.folder) as device:
        device.join().start()
        device.run("whole")
        yield device


def run(*command: str, home: Path | None = None, code: int = 0) -> str:
    """What an example prints, run from the top of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STAGELOOM_")}
    if home is not None:
        environment["STAGELOOM_AGENT_HOME"] = str(home)
    words = [sys.executable, "-W", "error", *command] if command[0] == "-m" else command
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_no_example_goes_untried() -> None:
    found = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh")}
    assert found - {"__init__.py"} == EXAMPLES
    page = (ROOT / "docs" / "examples.md").read_text()
    assert (
        set(re.findall(r"^--8<--\nexamples/(.*)\n--8<--$", page, re.MULTILINE)) == EXAMPLES | OF_OTHER_TOOLS
    )


def test_an_application_counts_how_its_tasks_end(device: Device) -> None:
    command = ("-m", "examples.application")
    said = run(*command, "detector", "--rate", "20", "--deadline", "5", "--seconds", "2", home=device.home)
    assert re.fullmatch(r"[34]\d done\n", said), said
    said = run(*command, "detector", "--rate", "20", "--deadline", "1e-6", "--seconds", "1", home=device.home)
    assert re.fullmatch(r"[12]\d late\n", said), said
    assert "no model 'cat' runs here; choose detector" in run(*command, "cat", home=device.home, code=1)


def test_an_application_goes_on_when_the_agent_restarts(device: Device) -> None:
    before = device.running.now().tasks[0].submitted
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.application", "detector", "--rate", "20", "--seconds", "8"],
        cwd=ROOT,
        env={**os.environ, "STAGELOOM_AGENT_HOME": str(device.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: device.running.now().tasks[0].submitted > before + 5)
    device.running.kill()
    device.start().until_ready()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert int(re.findall(r"(\d+) done", out)[0]) > 20, out  # of 160, less the seconds of the restart


def test_a_plan_is_rolled_out_to_one_device_first(fleet: Fleet, device: Device) -> None:
    with Device(fleet, "camera-8", fleet.folder) as other:
        other.join().start()
        until(lambda: other.seen()["online"])
        planner = ("--planner", fleet.planner.ready["api"], "--token-file", str(fleet.folder / "ci.token"))
        said = run("-m", "examples.rollout", "whole", "camera-7", *planner)
        assert re.fullmatch(r"camera-7: committed.*\ncamera-8: pushed\nwhole is on 2 devices\n", said), said
        other.until_seen(lambda seen: seen["report"]["state"] == "committed", "the plan")
        refused = run("-m", "examples.rollout", "nosuch", "camera-7", *planner, code=1)
        assert "error: there is no plan 'nosuch'" in refused


def test_a_session_with_curl_makes_a_plan_once(fleet: Fleet, device: Device) -> None:
    certificate = fleet.folder / "planner.pem"
    subprocess.run(["openssl", "x509", "-in", fleet.home / "api.pem", "-out", certificate], check=True)
    address = fleet.planner.ready["api"].removeprefix("https://")
    session = str(ROOT / "examples" / "session.sh")
    said = run(session, address, str(fleet.folder / "ci.token"), str(certificate), "detector")
    assert "camera-7  online: true" in said
    first, second = re.findall(r"request \d is job (\w+)", said)
    assert first == second and f"{first}" in said
    assert re.search(r"^plan \S+ by ios$", said, re.MULTILINE)
    assert "404: there is no plan 'no-such-plan'; see `stageloom plan list`" in said
