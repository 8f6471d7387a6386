"""What a job's line tells where nothing is redrawn, as in a log."""

import pytest

from stageloom.planner.cli.jobs import _Line
from stageloom.planner.schema.job import JobInfo, JobProgress, JobState


def _told(capsys: pytest.CaptureFixture[str], *steps: tuple[float, str]) -> list[str]:
    line = _Line()
    for elapsed_s, text in steps:
        line.show(
            JobInfo(
                job="1",
                operation="plan-create",
                state=JobState.RUNNING,
                who="test",
                began_at_us=0,
                progress=JobProgress(text=text, elapsed_s=elapsed_s),
            )
        )
    return capsys.readouterr().err.splitlines()


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
