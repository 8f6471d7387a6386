"""A re-plan by hand from its search on: whose token still holds, what is noted, what is told."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from stageloom.planner.api.access import Principal, bearer_digest
from stageloom.planner.api.context import HANDLERS, ApiCall, ApiContext
from stageloom.planner.api.page import actions
from stageloom.planner.api.page.visit import Visit
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.api.routes import PLAN_CREATE, PLAN_PUSH
from stageloom.planner.schema.access import Role
from stageloom.planner.store.access import audit_entries
from stageloom.planner.store.desired import Push, desired, push
from stageloom.planner.store.plans import add_plan
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError
from stageloom.shared.plan import decode_plan
from tests.planner.api.context import planner_context
from tests.planner.jobs import running_job
from tests.planner.test_auto_plan import FACTS, Rig
from tests.store.helpers import NANO, add_model, enrol, small_plan
from tests.store.migrated import new_store

ADA = Principal("ada", Role.OPERATOR, "192.0.2.7")


class Replan(NamedTuple):
    """A planner, what its next push is answered with, and the plans that were to be pushed."""

    api: ApiContext
    pushing: "Future[Any]"
    pushed: list[str]

    def press(self) -> Any:
        """What the job of the button results in."""
        call = ApiCall(ADA)
        action = actions.replan(Visit(api=self.api, principal=ADA, path={"device": NANO}))
        return action.do(call)(running_job(ManualClock()))

    def noted(self) -> list[tuple[str, str, str, int]]:
        """The audit log: who, what, about what, how it was answered."""
        entries, _ = self.api.store.read(audit_entries)
        return [(entry.who, entry.operation, entry.target, entry.status) for entry in entries]


@pytest.fixture
def replan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replan]:
    """Ada may push; the search finds `best`."""
    pushing: Future[Any] = Future()
    pushed: list[str] = []

    def push(api: Any, request: Any, call: Any) -> "Future[Any]":
        pushed.append(request.plan)
        return pushing

    found = SimpleNamespace(plan=SimpleNamespace(plan="best", digest="d" * 64))
    monkeypatch.setitem(HANDLERS, PLAN_CREATE, lambda api, request, call: lambda job: found)
    monkeypatch.setitem(HANDLERS, PLAN_PUSH, push)
    with closing(new_store(tmp_path, clock=ManualClock())) as store:
        enrol(store)
        api = planner_context(store, ManualClock())
        api.live.tokens.hold([(bearer_digest("stl_ada"), "ada", Role.OPERATOR)])
        yield Replan(api, pushing, pushed)


def test_what_the_search_finds_is_pushed_and_noted(replan: Replan) -> None:
    replan.pushing.set_result(None)
    assert replan.press().pushed
    assert (replan.pushed, replan.noted()) == (["best"], [("ada", "plan.push", "best", 201)])


def test_a_token_that_was_revoked_during_the_search_pushes_nothing(replan: Replan) -> None:
    replan.api.live.tokens.hold([])
    with pytest.raises(ApiRefused, match="the access token ada was revoked during the search"):
        replan.press()
    assert (replan.pushed, replan.noted()) == ([], [("ada", "plan.push", "best", 403)])


def test_a_push_that_is_refused_is_in_the_audit_log(replan: Replan) -> None:
    replan.pushing.set_exception(InputError("the device was revoked", remedy="enrol it anew"))
    with pytest.raises(ApiRefused, match="the device was revoked"):
        replan.press()
    assert replan.noted() == [("ada", "plan.push", "best", 422)]


def test_a_push_that_is_not_committed_in_time_may_still_be(
    replan: Replan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_PUSH_S", 0.0)
    with pytest.raises(ApiRefused, match="may still be; see `stageloom plan history nano`") as caught:
        replan.press()
    assert caught.value.status == 503
    assert replan.noted() == [("ada", "plan.push", "best", 503)]


def test_a_re_plan_leaves_a_newer_version_of_a_model_to_its_rollout(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with closing(rig.store) as store:
        rig.tells(FACTS)
        store.write(add_plan, "first", small_plan(store, "long"), "sequential")
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
        add_model(store, tmp_path, "long", 12)
        api = planner_context(store, ManualClock())
        api.live.tokens.hold([(bearer_digest("stl_ada"), "ada", Role.OPERATOR)])
        assert Replan(api, Future(), []).press().pushed
        wanted = store.read(desired, NANO)
        assert wanted is not None and wanted.generation == 2 and wanted.plan
        (model,) = decode_plan(wanted.plan).models
        assert model.artifact == rig.artifacts["long"]
