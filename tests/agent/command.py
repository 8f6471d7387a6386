"""The agent's command line in this process: a process of its own takes half a second of a processor."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from stageloom.edge_agent.cli.app import execute


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str


def agent_command(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Ended:
    """Run one command to its end; the program that it would become, as `run` does, is a process."""
    became: list[list[str]] = []
    capsys.readouterr()
    with patch("os.execv", lambda _, words: became.append(words)):
        code = execute(list(arguments))
    said = capsys.readouterr()
    if not became:
        return Ended(code, said.out, said.err)
    done = subprocess.run(became[0], capture_output=True, text=True, timeout=60, check=False)
    return Ended(done.returncode, said.out + done.stdout, said.err + done.stderr)
