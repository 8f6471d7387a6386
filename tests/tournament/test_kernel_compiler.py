"""Kernels are compiled where they are not kept, in a process that ends with the planner."""

import threading
from functools import partial
from pathlib import Path

import pytest

from stageloom.planner.housekeeping import KernelCompiler
from tests.planner.processes import until


@pytest.mark.promise("both-twins-judge-plan")
def test_kernels_that_nobody_compiled_are_compiled_once_the_planner_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageloom.planner.housekeeping.is_compiled", lambda: False)
    ahead = KernelCompiler(0.0, partial(Path.touch, tmp_path / "compiled"))
    until((tmp_path / "compiled").exists)
    ahead.close()


def test_kernels_that_are_kept_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def kept() -> bool:
        asked.set()
        return True

    monkeypatch.setattr("stageloom.planner.housekeeping.is_compiled", kept)
    ahead = KernelCompiler(0.0, partial(Path.touch, tmp_path / "compiled"))
    assert asked.wait(30.0)
    ahead.close()
    assert not (tmp_path / "compiled").exists()


def test_a_planner_that_ends_soon_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stageloom.planner.housekeeping.is_compiled", lambda: pytest.fail("nobody should ask")
    )
    before = threading.active_count()
    KernelCompiler(60.0).close()
    until(lambda: threading.active_count() == before)
