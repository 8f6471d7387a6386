"""Failpoints do nothing unless the environment names them, and then exactly what it says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stageloom.shared import failpoint
from stageloom.shared.errors import SettingError

CODE = """
from stageloom.shared.failpoint import ARMED, failpoint
[failpoint('a.b') for _ in range(3)]
print(ARMED)
"""


def run(setting: str | None) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name != failpoint.VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", CODE],
        env=kept if setting is None else {**kept, failpoint.VARIABLE: setting},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_the_variable_nothing_happens() -> None:
    assert run(None).stdout == "False\n"


def test_kill_ends_the_process_as_sigkill_does_at_the_time_that_is_named() -> None:
    assert run("a.b=kill@3").returncode == -signal.SIGKILL
    assert run("a.b=kill@4,another=kill").stdout == "True\n"


def test_error_is_an_error_of_the_disk_each_time_or_once() -> None:
    always, once = failpoint.acts("a.b=error"), failpoint.acts("a.b=error@2")
    assert always is not None
    assert once is not None
    for _ in range(2):
        with pytest.raises(OSError, match=r"failpoint a\.b"):
            always("a.b")
    once("a.b")
    with pytest.raises(OSError, match=r"failpoint a\.b"):
        once("a.b")
    once("a.b")
    once("another")


@pytest.mark.parametrize("setting", ["a.b", "a.b=", "a.b=die", "a.b=kill@", "a.b=kill@x", "a.b=kill@0"])
def test_a_setting_that_cannot_be_read_is_refused(setting: str) -> None:
    with pytest.raises(SettingError, match="write NAME=kill"):
        failpoint.acts(setting)
