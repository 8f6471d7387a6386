"""A search that is cancelled ends, and keeps no plan: whoever pushes what it found pushes nothing."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiContext
from stageloom.planner.api.handlers import handler_of, plans
from stageloom.planner.api.jobs import Job, JobCancelled
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.store.plans import plan_infos
from stageloom.shared.clock import ManualClock
from tests.planner.api.context import OPERATOR, planner_context
from tests.planner.jobs import running_job
from tests.store.helpers import NANO, add_model, enrol, small_plan
from tests.store.migrated import new_store

MODELS = (ModelOptions(model="relu"),)
SPLIT = PlanCreateRequest(models=MODELS, device=NANO, scheduler="eop")
TOURNAMENT = PlanCreateRequest(models=MODELS, device=NANO, budget_s=60.0)
AUTO = PlanCreateRequest(models=MODELS, device=NANO)


class Computed(Future[Any]):
    """Computed elsewhere for minutes: whoever waits for it without having cancelled it waits for long."""

    def result(self, timeout: float | None = None) -> Any:
        assert self.done(), "the job waits for what it should have cancelled"
        return super().result(timeout)


@pytest.fixture
def answer() -> Computed:
    """What is computed beside the planner."""
    return Computed()


@pytest.fixture
def api(tmp_path: Path, answer: Computed) -> ApiContext:
    """A planner with a device and a model."""
    store = new_store(tmp_path, clock=ManualClock())
    enrol(store)
    add_model(store, tmp_path)
    return planner_context(store, ManualClock(), readers=SimpleNamespace(submit=lambda *_: answer))


@pytest.fixture
def job() -> Job:
    """One that runs."""
    return running_job(ManualClock())


@pytest.mark.parametrize("request_", [SPLIT, TOURNAMENT, AUTO], ids=["split", "tournament", "auto"])
def test_a_cancelled_search_cancels_what_is_computed_for_it(
    api: ApiContext, job: Job, answer: Computed, request_: PlanCreateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "is_auto", lambda _, request: request is AUTO)
    work: Callable[[Job], Any] = handler_of(routes.PLAN_CREATE)(api, request_, OPERATOR)
    job.cancel()
    with pytest.raises(JobCancelled):
        work(job)
    assert answer.cancelled() and not api.store.read(plan_infos)


def test_a_split_search_that_is_cancelled_as_it_ends_keeps_no_plan(
    api: ApiContext, job: Job, answer: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(plans, "_found_row", lambda *_: None)
    monkeypatch.setattr(plans, "_keep", lambda *kept_of: kept.append(kept_of))
    answer.set_result(SimpleNamespace(plan=small_plan(api.store), prediction=None, known=""))
    work = handler_of(routes.PLAN_CREATE)(api, SPLIT, OPERATOR)
    job.cancel()
    with pytest.raises(JobCancelled):
        work(job)
    assert not kept


def test_a_plan_from_what_is_known_that_is_cancelled_as_it_ends_is_not_kept(
    api: ApiContext, job: Job, answer: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer.set_result(None)  # of splits nothing is known

    def make(*_: object) -> tuple[Any, str]:
        job.cancel()
        return small_plan(api.store), ""

    monkeypatch.setattr(plans, "is_auto", lambda *_: True)
    monkeypatch.setattr(plans, "make", make)
    work = handler_of(routes.PLAN_CREATE)(api, AUTO, OPERATOR)
    with pytest.raises(JobCancelled):
        work(job)
    assert not api.store.read(plan_infos)
