"""`docs/testing.md` maps promises to tests: every id that it names exists."""

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.architecture.sources import ROOT
from tests.conftest import COLLECTED

PAGE = ROOT / "docs/testing.md"
ID = re.compile(r"`(tests/[\w/]+\.py(?:::[^`\s]+)*)`")


def named_ids(page: str) -> list[str]:
    """The test ids in backticks: a file, a test, or a test with its parameters."""
    return ID.findall(page)


def with_shorter(ids: Iterable[str]) -> set[str]:
    """Ids of tests, also without parameters, and their files."""
    found = set(ids)
    return found | {one.split("[")[0] for one in found} | {one.split("::")[0] for one in found}


def collected(files: set[str], already: frozenset[str] = frozenset()) -> set[str]:
    """Every id that pytest collects from `files`, also without parameters, and the files themselves.

    `already`: those that this run collected, from some files all.
    """
    known = with_shorter(already)
    present = sorted(file for file in files - known if (ROOT / file).is_file())
    if not present:
        return known
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *present],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return known | with_shorter(line for line in done.stdout.splitlines() if "::" in line)


def missing_ids(page: str, already: frozenset[str] = frozenset()) -> list[str]:
    """What the page names and pytest does not collect.

    Raises:
        ValueError: the page names no id at all, so the check could not fail.
    """
    named = named_ids(page)
    if not any("::" in name for name in named):
        raise ValueError("the page names no test id")
    known = collected({name.split("::")[0] for name in named}, already)
    return [name for name in named if name not in known]


HERE = "tests/architecture/test_testing_page.py"


def test_an_id_that_does_not_exist_is_found() -> None:
    page = f"""
    | a promise | `{HERE}::test_an_id_that_does_not_exist_is_found` |
    | another   | `{HERE}::test_that_was_renamed`, `{HERE}` and `tests/architecture/test_gone.py::test_x` |
    """
    assert missing_ids(page) == [f"{HERE}::test_that_was_renamed", "tests/architecture/test_gone.py::test_x"]


def test_a_page_without_ids_is_refused() -> None:
    for page in ("", "all is tested, see `tests/`", f"see `{HERE}`"):
        with pytest.raises(ValueError, match="no test id"):
            missing_ids(page)


def test_every_test_that_the_page_names_exists(request: pytest.FixtureRequest) -> None:
    """A run of one test by its id has collected nothing else of its file, so it asks for all."""
    whole = not any("::" in one for one in request.config.args)
    already = request.config.stash[COLLECTED] if whole else frozenset[str]()
    assert missing_ids(PAGE.read_text(encoding="utf-8"), already) == []
