"""The repository stands alone: no file cites a place outside it, and every link in a page leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, repository_files
from tools.reference import PAGES

FILES = list(repository_files())
OUTSIDE = re.compile(r"(?<![\w.~-])/" + r"work/[\w./-]*")
UPWARDS = re.compile(r"(?:\.\./)+" + r"shared[\w./-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def foreign(text: str, folder: Path) -> list[str]:
    """Paths in a text that lie outside the repository, seen from the file's folder."""
    # The plain search is far faster than the patterns, and most files have neither.
    upwards = UPWARDS.findall(text) if "../" + "shared" in text else []
    outside: list[str] = OUTSIDE.findall(text) if "/" + "work/" in text else []
    return outside + [found for found in upwards if not _ours(folder / found.rstrip("."))]


def _ours(path: Path) -> bool:
    """Whether it is a file of this repository, or a page that the documentation's build makes."""
    found = path.resolve()
    made = found.parent == ROOT / "docs" / "reference" and found.stem in PAGES
    return made or (found.exists() and found.is_relative_to(ROOT))


def test_the_check_sees_paths_outside_and_lets_our_own_pass() -> None:
    outside, above = "/" + "work/x/notes.md", "../" + "shared/design.md"
    assert foreign(f"see {outside}", ROOT) == [outside]
    assert foreign(f"see `{above}`.", ROOT) == [above]
    assert foreign("see [plan](../" + "shared/plan.py)", ROOT / "docs") == []
    assert foreign("https://example.org/" + "work/ and the /workspace", ROOT) == []


def test_no_file_cites_a_place_outside_the_repository() -> None:
    found = {}
    for path in FILES:
        text = path.read_bytes().decode("utf-8", errors="replace")
        if places := foreign(text, path.parent):
            found[str(path.relative_to(ROOT))] = places
    assert found == {}


@pytest.mark.parametrize(
    "page", [p for p in FILES if p.suffix == ".md"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_relative_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = [link.split("#")[0] for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    broken = [page.parent / link for link in links if link and not _ours(page.parent / link)]
    assert [str(path.relative_to(ROOT)) for path in broken] == []


def test_the_files_of_a_checkout_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"pyproject.toml", "LICENSE", "shared/plan.py", ".ci/run", "docs/stage_string.md"} <= names
