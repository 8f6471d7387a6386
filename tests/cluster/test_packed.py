"""A value that tasks have in common."""

from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.cluster import ray_pool
from stageloom.planner.cluster.packed import Packed
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.planner.twin import compiled
from stageloom.planner.twin.compiled import compile_cache


class Counted:
    """Counts in the process how often it was unpickled."""

    unpickled = 0

    def __setstate__(self, state: Any) -> None:
        Counted.unpickled += 1
        self.__dict__.update(state)

    def __init__(self, name: str) -> None:
        self.name = name


def name_and_count(packed: Packed[Counted]) -> tuple[str, int]:
    return packed.value.name, Counted.unpickled


def test_a_process_unpickles_a_value_once_however_many_tasks_have_it() -> None:
    pool = ProcessPool(1)
    first, second = Packed.of(Counted("first")), Packed.of(Counted("second"))
    try:
        found = [pool.submit(name_and_count, one).result() for one in (first, first, second, first)]
    finally:
        pool.close()
    assert found == [("first", 1), ("first", 1), ("second", 2), ("first", 2)]
    assert Counted.unpickled == 0


def touch() -> None:
    Path("compiled").touch()


@pytest.mark.parametrize("before", [False, True])
def test_a_node_compiles_the_kernels_in_a_process_of_its_own_unless_they_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compile_cache, "is_compiled", lambda: before)
    monkeypatch.setattr(compiled, "compile_ahead", touch)
    ray_pool.compile_here()
    assert Path("compiled").exists() is not before
