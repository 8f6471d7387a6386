"""docs/schedulers: a page for every scheduler with all its parts, and tables that the kept run printed."""

import json
import re

import pytest

from stageloom.shared.search.registry import schedulers
from tests.architecture.sources import ROOT
from tools.scheduler_tables import ORDER, tables

PAGES = ROOT / "docs" / "schedulers"
OVERVIEW = (PAGES / "README.md").read_text(encoding="utf-8")
PAGE_OF = {
    name.strip(): page
    for names, page in re.findall(r"^\| \[([a-z_, ]+)\]\(([a-z]+\.md)\) \|", OVERVIEW, flags=re.MULTILINE)
    for name in names.split(",")
}
PARTS = {
    "source": r"\*\*Source\.\*\*",
    "complexity": r"\*\*Complexity\.\*\*",
    "deviations": r"\*\*Deviations\.\*\*|^## (Details and d|D)eviations",
    "results": r"\*\*Results\.\*\*|^## Measured",
}


def test_every_scheduler_has_a_page() -> None:
    assert PAGE_OF.keys() == set(schedulers()) == set(ORDER)


@pytest.mark.parametrize("page", sorted(set(PAGE_OF.values())))
def test_a_page_says_where_it_comes_from_what_it_costs_what_differs_and_what_was_found(page: str) -> None:
    text = (PAGES / page).read_text(encoding="utf-8")
    missing = [part for part, pattern in PARTS.items() if not re.search(pattern, text, flags=re.MULTILINE)]
    assert missing == []


@pytest.mark.promise("pages-tables-those-run")
def test_the_tables_are_those_of_the_runs_that_the_page_names() -> None:
    names = re.findall(r"^`(docs/results/[a-z0-9_-]+\.json)`", OVERVIEW, flags=re.MULTILINE)
    assert len(names) == 2, "one of costs that are formulas, one measured"
    for name in names:
        for table in tables(json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]):
            assert table in OVERVIEW
