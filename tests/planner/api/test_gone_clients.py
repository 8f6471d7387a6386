"""Clients that go before their answer: what was computed for them ends, what they changed does not."""

import contextlib
import threading
from concurrent.futures import CancelledError, Future
from contextlib import closing
from pathlib import Path

import pytest

from stageloom.planner.api.route import unbind
from stageloom.planner.api.routes import STATUS
from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.schema.base import Done
from stageloom.planner.schema.service import StatusRequest
from stageloom.planner.store.access import audit_entries
from tests.planner.api.http import LocalHttp
from tests.planner.api.rig import CHANGE, READ, TryRequest, served
from tests.planner.processes import until

ONE = TryRequest(name="one")
AT_ONCE = 4


def test_a_client_that_goes_keeps_neither_its_turns_nor_what_is_computed_for_it(tmp_path: Path) -> None:
    begun: list[SearchFuture[Done]] = []
    all_begun = threading.Event()

    def compute(_: TryRequest) -> SearchFuture[Done]:
        begun.append(SearchFuture())
        if len(begun) == AT_ONCE:
            all_begun.set()
        return begun[-1]

    with served(tmp_path, {READ: compute}, tls=True) as rig:
        token = rig.token("hasty")
        with contextlib.ExitStack() as held:
            for _ in range(AT_ONCE):
                connection = held.enter_context(closing(rig.https()))
                connection.request("GET", unbind(READ, ONE)[0], headers={"authorization": f"Bearer {token}"})
            assert all_begun.wait(20)
        with rig.client(token) as client:
            client.call(STATUS, StatusRequest(), timeout_s=20.0)
        for future in begun:
            with pytest.raises(CancelledError):
                future.result(20)


def test_what_is_computed_for_a_client_that_stays_is_answered(tmp_path: Path) -> None:
    def compute(_: TryRequest) -> SearchFuture[Done]:
        future: SearchFuture[Done] = SearchFuture()
        threading.Thread(target=future.settle, args=(Done(),)).start()
        return future

    with served(tmp_path, {READ: compute}) as rig, rig.client() as client:
        assert client.call(READ, ONE) == client.call(READ, ONE) == Done()


def test_a_change_is_carried_out_and_noted_although_its_client_has_gone(tmp_path: Path) -> None:
    changing: Future[Done] = Future()
    begun = threading.Event()

    def change(_: TryRequest) -> Future[Done]:
        begun.set()
        return changing

    with served(tmp_path, {CHANGE: change}) as rig:
        with closing(LocalHttp(rig.path)) as connection:
            connection.request("POST", unbind(CHANGE, ONE)[0])
            assert begun.wait(20)
        with rig.client() as client:
            client.call(STATUS, StatusRequest())
        changing.set_result(Done())
        (entry,) = until(lambda: rig.store.read(audit_entries)[0])
        assert (entry.operation, entry.status) == ("try.change", 200)
