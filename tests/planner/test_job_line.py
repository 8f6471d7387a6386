"""What a job's line tells where nothing is redrawn, as in a log, and on a terminal."""

import io
import os
import sys

import pytest

from stageloom.planner.cli.jobs import ProgressLine
from stageloom.planner.schema.job import JobProgress


def _told(capsys: pytest.CaptureFixture[str], *steps: tuple[float, str]) -> list[str]:
    line = ProgressLine()
    for elapsed_s, text in steps:
        line.show(JobProgress(text=text, elapsed_s=elapsed_s))
    return capsys.readouterr().err.splitlines()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.mark.parametrize(("columns", "seen"), [(40, 39), (0, 79)])
def test_a_line_that_is_redrawn_fits_the_terminal_and_one_of_no_width_has_the_usual_one(
    columns: int, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((columns, 24)))
    ProgressLine().show(JobProgress(text="refining abreast, " * 9, done=1, size=2))
    assert len(terminal.getvalue().removeprefix("\r\x1b[K")) == seen


def test_numbers_that_change_faster_than_every_second_are_told_every_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = [(0.1 * step, f"refining abreast, paper: {step} neighbours") for step in range(1, 26)]
    assert _told(capsys, *steps) == [
        "0.1 s, refining abreast, paper: 1 neighbours",
        "1.1 s, refining abreast, paper: 11 neighbours",
        "2.1 s, refining abreast, paper: 21 neighbours",
    ]


def test_other_words_are_told_at_once_and_the_same_text_once(capsys: pytest.CaptureFixture[str]) -> None:
    steps = (0.1, "best so far ios, whole"), (0.2, "best so far ios, whole"), (0.3, "best so far beam, whole")
    assert _told(capsys, *steps) == ["0.1 s, best so far ios, whole", "0.3 s, best so far beam, whole"]
