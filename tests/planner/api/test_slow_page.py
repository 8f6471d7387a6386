"""A part of a page that is computed for long: what whoever waits is told, and how often it is computed."""

from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from stageloom.planner.api.context import HANDLERS
from stageloom.planner.api.page import visit
from stageloom.planner.api.routes import PLAN_EXPLAIN
from stageloom.shared.errors import InputError
from tests.planner.api.rig import ApiRig, served


def seen(rig: ApiRig, path: str) -> tuple[int, str]:
    """Status and text of a page for somebody who has just signed in."""
    with closing(rig.https()) as connection:
        connection.request("POST", "/ui/sign-in", urlencode({"token": rig.token(path.rpartition("=")[2])}))
        answer = connection.getresponse()
        answer.read()
        connection.request("GET", path, headers={"cookie": answer.headers["set-cookie"].partition(";")[0]})
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
            status, text = seen(rig, f"/ui/plans/{plan}/explanation?who={who}")
            assert status == 503 and "`stageloom plan explain` waits longer" in text
        assert [plan for plan, _ in begun] == ["slow", "other"]
        begun[0][1].set_exception(InputError("it was removed"))
        seen(rig, "/ui/plans/slow/explanation?who=dan")
        assert [plan for plan, _ in begun] == ["slow", "other", "slow"]
