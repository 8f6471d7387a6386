"""Artifacts stay open for as long as a plan uses them, and no longer."""

import pytest

from stageloom.edge_agent.worker.resources import ArtifactTable
from stageloom.shared.errors import PlanError
from tests.executor.models import artifact_of


def test_artifact_goes_with_the_last_plan_that_uses_it() -> None:
    model = artifact_of("squeezenet")
    table = ArtifactTable()
    first = table.use(1, model.digest, {model.digest: str(model.path)})
    assert table.use(2, model.digest, {}) is first, "it is open already"
    table.release(1)
    assert len(table) == 1
    table.release(2)
    assert len(table) == 0
    with pytest.raises(PlanError, match="is not here"):
        table.use(3, model.digest, {})
    assert len(table) == 0


def test_hundred_plans_one_after_another_leave_nothing_open() -> None:
    model = artifact_of("squeezenet")
    table = ArtifactTable()
    for key in range(100):
        table.use(key, model.digest, {model.digest: str(model.path)})
        table.release(key - 1)
        assert len(table) == 1
    table.release(99)
    assert len(table) == 0
