"""`docs/testing.md` is what `tools/testing_page.py` makes of the promises and of the marks on the tests."""

import subprocess
import sys

from tests.architecture.sources import ROOT
from tools.testing_page import marks, page, problems

SOURCE = """
import pytest

pytestmark = pytest.mark.promise("whole-file")


@pytest.mark.parametrize("x", [1])
@pytest.mark.promise("first", "second")
def test_two(): ...


@pytest.mark.promise("first")
def test_one(): ...


def test_none(): ...
"""
SECTIONS = [
    {"title": "A", "promises": [{"id": "first", "text": "It holds."}, {"id": "second", "text": "So."}]}
]


def test_marks_of_functions_and_of_whole_files_are_found() -> None:
    assert list(marks(SOURCE)) == [
        ("whole-file", ""),
        ("first", "test_two"),
        ("second", "test_two"),
        ("first", "test_one"),
    ]


def test_the_page_lists_each_promise_with_its_tests() -> None:
    text = page("Title", "Intro.", SECTIONS, {"first": ["tests/a.py::test_x"], "second": ["tests/b.py"]})
    assert text == (
        "# Title\n\nIntro.\n\n## A\n\n- It holds.\n  - `tests/a.py::test_x`\n- So.\n  - `tests/b.py`\n"
    )


def test_a_promise_without_a_test_and_a_mark_without_a_promise_are_problems() -> None:
    assert problems(SECTIONS, {"first": ["tests/a.py::test_x"], "third": ["tests/c.py::test_y"]}) == [
        "no test holds the promise 'second'",
        "tests/c.py::test_y names 'third', which no promise has",
    ]
    assert problems([*SECTIONS, *SECTIONS], {"first": ["a"], "second": ["b"]}) == [
        "two promises are 'first'",
        "two promises are 'second'",
    ]


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/testing_page.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
