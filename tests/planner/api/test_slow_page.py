"""A part of a page that is computed for long: what whoever waits is told, and how often it is computed."""

from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlencode

import pytest

from stageloom.planner.api.access import Principal
from stageloom.planner.api.context import HANDLERS
from stageloom.planner.api.page import visit
from stageloom.planner.api.page.device import curves
from stageloom.planner.api.routes import DEVICE_TELEMETRY, PLAN_EXPLAIN
from stageloom.planner.schema.access import Role
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError, UnavailableError
from tests.planner.api.context import planner_context
from tests.planner.api.rig import ApiRig, served
from tests.store.migrated import new_store


def signed_in(rig: ApiRig, name: str) -> dict[str, str]:
    """The headers of somebody with a new token."""
    with closing(rig.https()) as connection:
        connection.request("POST", "/ui/sign-in", urlencode({"token": rig.token(name)}))
        answer = connection.getresponse()
        answer.read()
        return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


def seen(rig: ApiRig, path: str, who: dict[str, str]) -> tuple[int, str]:
    """Status and text of a page."""
    with closing(rig.https()) as connection:
        connection.request("GET", path, headers=who)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_page_that_waits_too_long_names_the_command_and_begins_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two look at a plan while it is explained for long; 2. another plan is another explanation; 3. once
    the first has ended, who looks begins the next."""
    begun: list[tuple[str, Future[Any]]] = []

    def explain(api: Any, request: Any, call: Any) -> Future[Any]:
        begun.append((request.plan, Future()))
        return begun[-1][1]

    monkeypatch.setattr(visit, "_PATIENCE_S", 0.01)
    with served(tmp_path, tls=True) as rig:
        monkeypatch.setitem(HANDLERS, PLAN_EXPLAIN, explain)
        for plan, who in (("slow", "ann"), ("slow", "bob"), ("other", "cid")):
            status, text = seen(rig, f"/ui/plans/{plan}/explanation", signed_in(rig, who))
            assert status == 503 and "`stageloom plan explain` waits longer" in text
        assert [plan for plan, _ in begun] == ["slow", "other"]
        begun[0][1].set_exception(InputError("it was removed"))
        seen(rig, "/ui/plans/slow/explanation", signed_in(rig, "dan"))
        assert [plan for plan, _ in begun] == ["slow", "other", "slow"]


def test_what_is_computed_for_long_holds_up_no_other_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two people load as many parts as may be computed for them at once; they and a third go on."""
    begun: SimpleQueue[Future[Any]] = SimpleQueue()

    def explain(api: Any, request: Any, call: Any) -> Future[Any]:
        begun.put(future := Future[Any]())
        return future

    with served(tmp_path, tls=True) as rig, ExitStack() as held:
        monkeypatch.setitem(HANDLERS, PLAN_EXPLAIN, explain)
        people = [signed_in(rig, name) for name in ("ann", "bob", "cid")]
        for number, who in enumerate((*people[:2], *people[:2])):
            connection = held.enter_context(closing(rig.https()))
            connection.request("GET", f"/ui/plans/p{number}/explanation", headers=who)
        waiting = [begun.get(timeout=20) for _ in range(4)]
        try:
            assert [seen(rig, "/ui/plans", who)[0] for who in people] == [200, 200, 200]
        finally:
            for future in waiting:
                future.set_exception(InputError("it was removed"))


def test_curves_that_are_loaded_again_wait_for_what_was_begun_for_them(tmp_path: Path) -> None:
    clock = ManualClock()
    asked: list[Any] = []

    def telemetry(api: Any, request: Any, call: Any) -> Future[Any]:
        asked.append(request)
        return Future()

    with closing(new_store(tmp_path, clock=clock)) as store, pytest.MonkeyPatch.context() as patched:
        patched.setitem(HANDLERS, DEVICE_TELEMETRY, telemetry)
        patched.setattr(visit, "_PATIENCE_S", 0.0)
        begun: dict[tuple[str, bytes], Future[Any]] = {}
        look = visit.Visit(
            api=planner_context(store, clock),
            principal=Principal("ann", Role.VIEWER, "192.0.2.7"),
            path={"device": "nano"},
            begun=begun,
        )
        for _ in range(3):
            with pytest.raises(UnavailableError, match="`stageloom device telemetry` waits longer"):
                curves(look)
            clock.advance(0.001)
    assert len(asked) == len(begun) == 1
