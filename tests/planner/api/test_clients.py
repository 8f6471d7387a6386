"""A running planner's API, over its local socket and without it."""

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.offline import StoreClient
from stageloom.planner.schema.device import DeviceShowRequest
from stageloom.planner.schema.model import ModelListRequest
from stageloom.planner.schema.service import StatusRequest
from stageloom.shared.errors import StageloomError, UnavailableError
from stageloom.shared.ids import DeviceId
from tests.planner.api.conftest import Callers
from tests.planner.world import World


def test_what_the_store_can_tell_is_told_equally_with_a_planner_and_without(
    callers: Callers, world: World
) -> None:
    models = callers.call(routes.MODEL_LIST, ModelListRequest())
    assert [(model.model, model.digest) for model in models.items] == [("diamond", world.digest)]


def test_what_only_a_running_planner_knows_is_refused_without_one(
    client: PlannerClient, store_client: StoreClient
) -> None:
    assert client.call(routes.STATUS, StatusRequest()).uptime_s > 0.0
    with pytest.raises(UnavailableError, match="no planner runs"):
        store_client.call(routes.STATUS, StatusRequest())


def test_both_refuse_for_the_same_reason(client: PlannerClient, store_client: StoreClient) -> None:
    said = []
    for caller in (client, store_client):
        with pytest.raises(StageloomError) as caught:
            caller.call(routes.DEVICE_SHOW, DeviceShowRequest(device=DeviceId("nobody")))
        said.append((caught.value.cause, caught.value.remedy, caught.value.exit_code))
    assert said[0] == said[1]
