"""A run on disk is whole or not there, and is taken for no other run."""

from pathlib import Path

import pytest

from stageloom.planner.learning.maddpg.train import FILE, load_run, save_run
from stageloom.shared.errors import InputError

ABOUT = {"seed": 3, "models": [["digest", 1, 2]]}


def test_what_was_saved_last_is_loaded(tmp_path: Path) -> None:
    assert load_run(tmp_path, ABOUT) is None
    for number in (1, 2):
        save_run(tmp_path, ABOUT, float(number), b"state\n" * number)
    assert load_run(tmp_path, {"seed": 3, "models": [("digest", 1, 2)]}) == (2.0, b"state\nstate\n")


def test_a_run_that_was_killed_while_it_wrote_goes_on_from_before(tmp_path: Path) -> None:
    save_run(tmp_path, ABOUT, 1.0, b"before")
    (tmp_path / (FILE + ".part")).write_bytes(b'{"about"')
    assert load_run(tmp_path, ABOUT) == (1.0, b"before")


def test_a_run_of_something_else_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    save_run(tmp_path, ABOUT, 1.0, b"")
    with pytest.raises(InputError, match=r"a run with other seed; delete it"):
        load_run(tmp_path, {**ABOUT, "seed": 4})


@pytest.mark.parametrize("body", [b"", b"[1]\n", b'{"about": {}}\n', b"\xff\n"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / FILE).write_bytes(body)
    with pytest.raises(InputError, match="no training run"):
        load_run(tmp_path, ABOUT)
