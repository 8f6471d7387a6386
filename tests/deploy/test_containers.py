"""What the Containerfiles tell their reader fits what they build."""

import re
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / "deploy" / "container"
_FILES = sorted(_FOLDER.glob("Containerfile.*"))
_RUNTIMES = {"onnx", "edge", "planner", "planner-lite", "openvino"}
"""Extras that others take the place of; the rest of the default goes with every choice."""


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.name)
def test_other_extras_leave_out_nothing_that_the_default_serves(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    (default,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    (other,) = re.findall(r"--build-arg EXTRAS=([\w,-]+)", text)
    assert {*default.split(",")} - _RUNTIMES <= {*other.split(",")}


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.name)
def test_the_build_that_is_shown_keeps_the_health_check(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    builds = [line for line in text.splitlines() if line.startswith("#   podman build")]
    assert "\nHEALTHCHECK" in text and builds
    assert all("--format docker" in line for line in builds)
