"""A planner that is stopped while a page waits for what is computed beside it."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from stageloom.planner import service
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.context import HANDLERS
from stageloom.planner.api.routes import ACCESS_CREATE, PLAN_EXPLAIN
from stageloom.planner.api.server import ApiServer, ServerLimits
from stageloom.planner.config import PlannerConfig
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.store.store import ReadStore
from tests.planner.api.rig import unverified
from tests.store.migrated import begin_migrated


def endless(store: ReadStore) -> None:
    threading.Event().wait()


def test_a_page_that_waits_for_a_long_answer_does_not_hold_up_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def explain(api: Any, request: Any, call: Any) -> Any:
        begun.set()
        return api.live.readers.submit(endless)

    monkeypatch.setitem(HANDLERS, PLAN_EXPLAIN, explain)
    monkeypatch.setattr(service, "ApiServer", partial(ApiServer, limits=ServerLimits(finish_s=0.1)))
    config = PlannerConfig(
        data_dir=tmp_path / "home", listen="127.0.0.1:0", api="127.0.0.1:0", search="local", search_workers=1
    )
    begin_migrated(config.data_dir)
    planner = service.Planner(config)
    with ExitStack() as held:
        ask = _signed_in(held, planner)
        ask("/ui/plans/any/explanation")
        assert begun.wait(20)
        stopping = threading.Thread(target=planner.close)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive(), "it waits for as long as a page does"


def _signed_in(held: ExitStack, planner: service.Planner) -> Callable[[str], None]:
    """What sends a browser's request for a page."""
    with PlannerClient(data_dir=planner.config.data_dir) as client:
        token = client.call(ACCESS_CREATE, AccessCreateRequest(name="ann", role=Role.VIEWER)).token
    address = urlsplit(planner.api_url)
    assert address.hostname is not None
    connection = HTTPSConnection(address.hostname, address.port, timeout=20.0, context=unverified())
    held.enter_context(closing(connection))
    connection.request("POST", "/ui/sign-in", urlencode({"token": token}))
    answer = connection.getresponse()
    answer.read()
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return lambda path: connection.request("GET", path, headers={"cookie": cookie})
