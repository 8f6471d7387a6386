"""`docs/testing.md` maps promises to tests: every id that it names exists."""

import re
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

PAGE = ROOT / "docs/testing.md"
ID = re.compile(r"`(tests/[\w/]+\.py(?:::[^`\s]+)*)`")


def named_ids(page: str) -> list[str]:
    """The test ids in backticks: a file, a test, or a test with its parameters."""
    return ID.findall(page)


def collected(files: set[str]) -> set[str]:
    """Every id that pytest collects from `files`, also without parameters, and the files themselves."""
    present = sorted(file for file in files if (ROOT / file).is_file())
    if not present:
        return set()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *present],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ids = {line for line in done.stdout.splitlines() if "::" in line}
    return ids | {line.split("[")[0] for line in ids} | {line.split("::")[0] for line in ids}


def missing_ids(page: str) -> list[str]:
    """What the page names and pytest does not collect.

    Raises:
        ValueError: the page names no id at all, so the check could not fail.
    """
    named = named_ids(page)
    if not any("::" in name for name in named):
        raise ValueError("the page names no test id")
    known = collected({name.split("::")[0] for name in named})
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


def test_every_test_that_the_page_names_exists() -> None:
    assert missing_ids(PAGE.read_text(encoding="utf-8")) == []
