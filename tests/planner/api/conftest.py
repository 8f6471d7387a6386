"""A planner in this process, and both of its clients: over its local socket, and on its store alone."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.offline import StoreClient
from stageloom.planner.api.route import Route
from stageloom.planner.config import PlannerConfig
from stageloom.planner.schema.base import Request
from stageloom.planner.service import Planner
from stageloom.planner.store.store import Store
from tests.planner.world import World
from tests.store.migrated import begin_migrated

R = TypeVar("R")


@pytest.fixture(scope="module")
def api_planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    """A planner on an empty data directory, shared by a file's tests; searches run in processes."""
    config = PlannerConfig(
        data_dir=tmp_path_factory.mktemp("api") / "home",
        listen="127.0.0.1:0",
        search="local",
        search_workers=1,
    )
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner:
        yield planner


@pytest.fixture(scope="module")
def remote_planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    """One that serves other machines, too, and any number of their requests."""
    config = PlannerConfig(
        data_dir=tmp_path_factory.mktemp("remote") / "home",
        listen="127.0.0.1:0",
        api="127.0.0.1:0",
        api_rate="100000/100000",
        search="local",
        search_workers=1,
    )
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner:
        yield planner


@pytest.fixture
def client(api_planner: Planner) -> Iterator[PlannerClient]:
    """A client over the local socket."""
    with PlannerClient(data_dir=api_planner.config.data_dir) as made:
        yield made


@pytest.fixture
def store_client(api_planner: Planner) -> Iterator[StoreClient]:
    """What answers where no planner runs, on the same data."""
    with StoreClient(api_planner.config.data_dir) as made:
        yield made


@dataclass(frozen=True)
class Callers:
    """Both ways to ask."""

    client: PlannerClient
    store_client: StoreClient

    def call(self, route: Route[Any, R], request: Request) -> R:
        """The reply over the socket, which is the one that the store alone gives."""
        assert route.offline
        reply = self.client.call(route, request)
        assert self.store_client.call(route, request) == reply
        return reply


@pytest.fixture
def callers(client: PlannerClient, store_client: StoreClient) -> Callers:
    """A call of both: they must agree."""
    return Callers(client, store_client)


@pytest.fixture(scope="module")
def world(api_planner: Planner) -> World:
    """The running planner's data with one small model and one device that is away."""
    return World(api_planner.config.data_dir, api_planner.store)


@pytest.fixture
def store(api_planner: Planner) -> Store:
    """The running planner's store."""
    return api_planner.store
