"""What the Containerfiles tell their reader fits what they build."""

import os
import re
import subprocess
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


def test_a_token_that_is_shown_names_its_device_since_a_containers_host_name_is_random() -> None:
    shown = [one for file in _FILES for one in re.findall(r"device token(.*)", file.read_text("utf-8"))]
    assert shown and all(re.fullmatch(r" \w+", one) for one in shown)


@pytest.mark.parametrize(("code", "answer"), [(0, "ready yes"), (1, "ready no"), (1, ""), (4, "")])
def test_an_agent_that_answers_is_healthy_whether_or_not_it_takes_tasks(
    tmp_path: Path, code: int, answer: str
) -> None:
    program = tmp_path / "stageloom-agent"
    said = f"echo {answer}" if answer else "echo error >&2"
    program.write_text(f'#!/bin/sh\n[ "$*" = status ] && {said} && exit {code}\n')
    program.chmod(0o755)
    text = (_FOLDER / "Containerfile.agent").read_text(encoding="utf-8")
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.+)$", text, re.MULTILINE)
    done = subprocess.run(["sh", "-c", check], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    assert (done.returncode == 0) is bool(answer)
