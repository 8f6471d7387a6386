"""The planner's metrics over its API: who may have them, and what they say."""

from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPSConnection
from urllib.parse import urlsplit

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.config import PlannerConfig
from stageloom.planner.dispatch.core import DispatchCore
from stageloom.planner.dispatch.events import AppendTelemetry, Joined, TelemetryCommitted, TelemetryReceived
from stageloom.planner.metrics.scrape import PLANNER_METRICS
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.schema.device import DeviceShowRequest
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.schema.service import StatusRequest
from stageloom.planner.service import Planner
from stageloom.planner.store.devices import revoke_device
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import RowKind, RowRange, TaskCounters, TelemetryBatch
from stageloom.shared.metrics import MetricKind
from tests.planner.api.rig import unverified
from tests.planner.world import World
from tests.store.helpers import NANO, enrol, row
from tests.store.migrated import begin_migrated


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    config = PlannerConfig(
        data_dir=tmp_path_factory.mktemp("scraped") / "home",
        listen="127.0.0.1:0",
        api="127.0.0.1:0",
        search="local",
        search_workers=1,
    )
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as running:
        yield running


def _scrape(planner: Planner, token: str, path: str = "/metrics") -> tuple[int, str]:
    connection = HTTPSConnection(urlsplit(planner.api_url).netloc, timeout=20, context=unverified())
    with closing(connection):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def _families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in parse(text)}


def test_token_of_any_role_may_scrape_and_nobody_else(planner: Planner) -> None:
    with PlannerClient(data_dir=planner.config.data_dir) as client:
        created = client.call(routes.ACCESS_CREATE, AccessCreateRequest(name="prometheus", role=Role.VIEWER))
    bearer = created.token.partition(".")[0]  # what follows is for clients of this project
    assert _scrape(planner, bearer)[0] == _scrape(planner, created.token)[0] == 200
    assert _scrape(planner, "")[0] == _scrape(planner, bearer[:-1])[0] == 401
    assert _scrape(planner, bearer, "/metrics/")[0] == 404


@pytest.mark.promise("metrics-scraped-both-sides")
def test_scrape_says_what_the_planner_did(planner: Planner) -> None:
    World(planner.config.data_dir, planner.store)  # a model and a device that is away
    ended = TaskCounters("diamond", 1_000_000, 9, 7, 0, 0, 0, 2)
    planner.counters.rows_stored([(NANO, row(0, ended, kind=RowKind.TASK_COUNTERS))])
    with PlannerClient(data_dir=planner.config.data_dir) as client:
        bearer = client.call(
            routes.ACCESS_CREATE, AccessCreateRequest(name="another", role=Role.VIEWER)
        ).token
        models = (ModelOptions(model="diamond"),)
        client.call(routes.PLAN_CREATE, PlanCreateRequest(models=models, scheduler="ios"))
        client.call(routes.DEVICE_SHOW, DeviceShowRequest(device=NANO))
        with pytest.raises(ApiRefused):
            client.call(routes.DEVICE_SHOW, DeviceShowRequest(device=DeviceId("nobody")))
    enrol(planner.store, DeviceId("gone"), 9)
    planner.store.write(revoke_device, DeviceId("gone"))
    status, text = _scrape(planner, bearer)
    assert status == 200
    families = _families(text)
    for spec in PLANNER_METRICS:
        name = spec.name.removesuffix("_total") if spec.kind is MetricKind.COUNTER else spec.name
        found = families.pop(name, None)
        if spec.name == "stageloom_device_plan_state":  # of a device that reported
            assert found is None
            continue
        assert found is not None, spec.name
        assert (found.type, found.documentation) == (spec.kind.value, spec.about)
        assert {*found.samples[0].labels} - {"le"} == set(spec.labels), spec.name
    assert not families
    values = {(one.name, *one.labels.values()): one.value for family in parse(text) for one in family.samples}
    assert values["stageloom_planner_devices", "enrolled"] == 2
    assert values["stageloom_planner_devices", "revoked"] == 1
    assert values["stageloom_devices_untold",] == 0
    assert ("stageloom_device_online", "gone") not in values, "it would be told as offline for ever"
    assert values["stageloom_planner_devices", "online"] == 0
    assert values["stageloom_device_online", NANO] == 0
    assert values["stageloom_device_tasks_total", NANO, "completed"] == 7
    assert values["stageloom_device_tasks_total", NANO, "failed"] == 2
    assert values["stageloom_searches_total", "completed", "processes"] == 1
    assert values["stageloom_search_duration_seconds_count", "processes"] == 1
    assert values["stageloom_search_workers",] == 1
    assert values["stageloom_api_requests_total", "device.show", "200"] == 1
    assert values["stageloom_api_requests_total", "device.show", "404"] == 1
    assert values["stageloom_api_request_duration_seconds_count", "device.show"] == 2


def _fail_to_store(core: DispatchCore) -> None:
    """A batch of telemetry comes, and the store does not take it."""
    core.handle(Joined(NANO, "n" * 40), 0.0)
    batch = TelemetryBatch(rows=(b"x",), ranges=(RowRange(1, 0, 0),), ledgers=())
    (append,) = core.handle(TelemetryReceived(b"t", "n" * 40, batch), 0.0)
    assert isinstance(append, AppendTelemetry)
    core.handle(TelemetryCommitted(append.ticket, ok=False), 0.0)


def test_scrape_and_status_tell_of_a_store_that_takes_no_telemetry(planner: Planner) -> None:
    with PlannerClient(data_dir=planner.config.data_dir) as client:
        request = AccessCreateRequest(name="failing", role=Role.VIEWER)
        bearer = client.call(routes.ACCESS_CREATE, request).token
        assert client.call(routes.STATUS, StatusRequest()).notices == ()
        planner.server.ask(_fail_to_store)
        (notice,) = client.call(routes.STATUS, StatusRequest()).notices
    assert "could not be stored" in notice
    _, text = _scrape(planner, bearer)
    assert "\nstageloom_planner_telemetry_failures_total 1.0\n" in text
    assert f"\nstageloom_planner_backlog_limit_rows {float(planner.config.backlog_rows)}\n" in text
