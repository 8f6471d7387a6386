"""The services of docs/operations.md are those that are installed."""

import pytest

from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("unit", ["stageloom-agent", "stageloom-planner"])
def test_services_of_the_page_are_those_that_are_installed(unit: str) -> None:
    assert f"systemctl enable --now {unit}" in PAGE
    assert (ROOT / "deploy" / f"{unit}.service").is_file()
