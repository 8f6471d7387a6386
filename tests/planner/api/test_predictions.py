"""Predictions beside what was measured since, with a planner and without one."""

import pytest

from stageloom.planner.api import routes
from stageloom.planner.schema.prediction import PredictionInfo, PredictionListRequest
from stageloom.planner.store.predictions import keep_prediction
from stageloom.planner.store.store import Store
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from tests.planner.api.conftest import Callers
from tests.store.helpers import NANO, enrol


def test_predictions_are_listed_in_pages_newest_first(callers: Callers, store: Store) -> None:
    enrol(store)
    devices = (None, NANO, NANO)
    for at_us, device in enumerate(devices, 1):
        made = PredictionInfo(
            number=0,
            made_at_us=at_us,
            device=device,
            plan="tuned",
            digest=digest_bytes([b"plan"]),
            twin="toy",
            arrivals="some",
            seconds=3.0,
            predicted={"p50_ms": 4.0},
        )
        store.write(keep_prediction, made)
    page = callers.call(routes.PREDICTION_LIST, PredictionListRequest(limit=2))
    assert [(info.number, info.device) for info in page.items] == [(3, NANO), (2, NANO)]
    assert page.items[0].predicted == {"p50_ms": 4.0} and page.items[0].measured is None
    page = callers.call(routes.PREDICTION_LIST, PredictionListRequest(limit=2, after=page.next))
    assert [info.device for info in page.items] == [None] and page.next == ""
    page = callers.call(routes.PREDICTION_LIST, PredictionListRequest(device=NANO, limit=1))
    assert [info.number for info in page.items] == [3] and page.next == "3"


def test_a_device_that_is_not_there_is_refused(callers: Callers) -> None:
    for caller in (callers.client, callers.store_client):
        with pytest.raises(StageloomError, match="there is no device 'nobody'"):
            caller.call(routes.PREDICTION_LIST, PredictionListRequest(device=DeviceId("nobody")))
