"""The suite's own order: what is begun first must be there."""

from tests.architecture.sources import ROOT
from tests.conftest import LONGEST_FIRST


def test_files_that_are_begun_first_exist_and_are_named_once() -> None:
    assert all((ROOT / "tests" / name).is_file() for name in LONGEST_FIRST)
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)
