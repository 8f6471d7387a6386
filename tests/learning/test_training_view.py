"""What a person sees of a training."""

import pytest

from stageloom.planner.cli.options import parse_duration
from stageloom.planner.cli.training_view import bar, lines, sparkline
from stageloom.planner.learning.maddpg.course import TrainingCourse
from stageloom.planner.learning.maddpg.work import run
from stageloom.shared.errors import InputError
from tests.learning.maddpg.toy import SMALL, problem


def test_a_curve_runs_from_its_lowest_to_its_highest() -> None:
    assert sparkline([1.0, 8.0]) == "▁█"
    assert sparkline([float(value) for value in range(8)]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(value) for value in range(100)], width=40)) == 40


def test_a_bar_is_never_more_than_full() -> None:
    assert bar(0.5) == "[##########..........]  50 %"
    assert bar(7.0).endswith("100 %") and "." not in bar(7.0)


def test_the_best_so_far_is_shown_beside_its_rivals_as_soon_as_it_is_known() -> None:
    where = problem()
    course = TrainingCourse(where, SMALL, seed=0)
    assert len(lines(course, 0.0, 60.0, "1 worker")) == 1
    while (work := course.next_work()) is not None and len(course.history) < 2:
        course.take(work, run(where, course.table, SMALL, work))
    shown = lines(course, 30.0, 60.0, "1 worker")
    assert "0:30 of 1:00, 1 worker" in shown[0] and f"of {SMALL.transitions} transitions" in shown[0]
    names = [line.split("  ")[1] for line in shown[1:]]
    assert names == [
        "sequential",
        "best rival",
        "policy",
        "best plan",
        "policy's tasks/s",
        "policy's p99 ms",
        "best tasks/s",
    ]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "m", "-3s", "0", "nan", "inf", "10 minutes"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--budget .* is no duration"):
        parse_duration(text, "--budget")
