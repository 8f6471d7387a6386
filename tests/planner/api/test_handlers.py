"""What handlers refuse before they do anything, and the lists that they page."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiContext
from stageloom.planner.api.handlers import devices, service
from stageloom.planner.api.route import Route
from stageloom.planner.schema.base import Request
from stageloom.planner.schema.device import DeviceListRequest, DeviceProfileReply, DeviceProfileRequest
from stageloom.planner.schema.model import ModelListRequest
from stageloom.planner.schema.plan import (
    ArrivalRate,
    ModelOptions,
    PlanCreateRequest,
    PlanHistoryRequest,
    PlanPushRequest,
)
from stageloom.planner.schema.replan import ReplanningChangeRequest, ReplanningShowRequest
from stageloom.planner.schema.service import SettingsRequest, WatchRequest
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.shared import failpoint
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError, NotFoundError, StorageError
from stageloom.shared.ids import DeviceId
from tests.planner.api.context import QuietFleet, answer_of, planner_context
from tests.store.helpers import NANO, add_model, enrol, small_plan
from tests.store.migrated import new_store

MODELS = (ModelOptions(model="relu"),)


@pytest.fixture
def api(tmp_path: Path) -> ApiContext:
    """A planner with a device and nothing else."""
    store = new_store(tmp_path, clock=ManualClock())
    enrol(store)
    return planner_context(store, ManualClock())


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (DeviceProfileRequest(device=NANO), "no models to measure; add some with `stageloom model add`"),
        (DeviceProfileRequest(device=NANO, plan="p", models=("m",)), "leave out models, batch"),
        (DeviceProfileRequest(device=NANO, plan="p", batch=2), "leave out models, batch"),
        (DeviceProfileRequest(device=NANO, plan="p", executor="onnx"), "leave out models, batch, executor"),
        (DeviceProfileRequest(device=NANO, intra_op_threads=2), "name the executor, too"),
        (DeviceProfileRequest(device=NANO, unsure_only=True), "is about the stages of a plan"),
        (PlanCreateRequest(models=MODELS, measure_s=1.0), "measuring needs a device"),
        (
            PlanCreateRequest(models=MODELS, measure_s=1.0, device=NANO, budget_s=1.0),
            "measuring is for one scheduler",
        ),
        (
            PlanCreateRequest(models=MODELS, rates=(ArrivalRate(model="relu", per_s=1.0),)),
            "rates say what arrives in a tournament",
        ),
        (
            PlanCreateRequest(models=MODELS, rates=(ArrivalRate(model="relu", per_s=1.0),) * 2, budget_s=1.0),
            "rates name relu twice",
        ),
        (PlanHistoryRequest(after="x"), "a list cannot go on after 'x'"),
        (PlanHistoryRequest(after=str(2**60)), "a list cannot go on after"),
    ],
)
def test_what_has_no_effect_is_refused(api: ApiContext, request_: Request, said: str) -> None:
    route: Any = next(route for route in routes.ROUTES if route.request is type(request_))
    with pytest.raises(InputError, match=said):
        answer_of(api, route, request_)


def test_a_device_that_there_is_not_is_not_found_before_a_job_begins(api: ApiContext) -> None:
    with pytest.raises(NotFoundError, match="there is no device 'ghost'"):
        answer_of(api, routes.DEVICE_PROFILE, DeviceProfileRequest(device=DeviceId("ghost"), models=("m",)))


def test_a_profile_of_many_models_at_once_is_a_reply_that_clients_read(
    api: ApiContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has answered each request at once, with a reason."""
    monkeypatch.setattr(devices, "open_requests", lambda session, requests: [])
    monkeypatch.setattr(
        devices, "answer_reasons", lambda session, requests: {number: f"no {number}" for number in requests}
    )
    for number in range(many := 17):  # more than a request may name
        add_model(api.store, tmp_path, f"m{number}")
    reply = answer_of(api, routes.DEVICE_PROFILE, DeviceProfileRequest(device=NANO))
    assert len(reply.requests) == len(reply.measured) == len(reply.reasons) == many
    assert msgspec.convert(msgspec.to_builtins(reply), DeviceProfileReply) == reply


def test_a_write_that_took_place_but_is_said_to_have_failed_is_looked_up(
    api: ApiContext, tmp_path: Path
) -> None:
    """Where the connection breaks during the commit, nobody here knows whether it took place."""
    fleet = api.live.fleet
    assert isinstance(fleet, QuietFleet)
    add_model(api.store, tmp_path)
    api.store.write(add_plan, "p", small_plan(api.store), "greedy")

    def lost(name: str) -> None:
        if name == "planner.commit.after":
            raise OSError("the connection broke")

    asked: list[tuple[Route[Any, Any], Request]] = [
        (routes.PLAN_PUSH, PlanPushRequest(plan="p", devices=(NANO,))),
        (routes.PLAN_PUSH, PlanPushRequest(plan="p")),
        (routes.DEVICE_PROFILE, DeviceProfileRequest(device=NANO, models=("relu",))),
        (routes.DEVICE_PROFILE, DeviceProfileRequest(device=NANO, plan="p")),
    ]
    before = failpoint.arm(lost)
    try:
        for route, request in asked:
            with pytest.raises(StorageError, match="the connection broke"):
                answer_of(api, route, request)
    finally:
        failpoint.arm(before)
    assert fleet.told == []
    assert fleet.doubted == [(NANO,), (), (NANO,), (NANO,)]
    found = LinkStore(api.store).desired(NANO)
    assert found is not None and found.generation == len(asked)


def test_a_list_goes_on_where_a_page_ends(api: ApiContext, tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    for number, name in enumerate(names):
        add_model(api.store, tmp_path, name)
        enrol(api.store, DeviceId(name), number + 2)
    models = answer_of(api, routes.MODEL_LIST, ModelListRequest(limit=2))
    assert ([info.model for info in models.items], models.next) == (["a", "b"], "b@1")
    rest = answer_of(api, routes.MODEL_LIST, ModelListRequest(limit=2, after=models.next))
    assert ([info.model for info in rest.items], rest.next) == (["c", "d"], "")
    devices = answer_of(api, routes.DEVICE_LIST, DeviceListRequest(limit=4))
    assert ([info.device for info in devices.items], devices.next) == ([*names], "d")
    last = answer_of(api, routes.DEVICE_LIST, DeviceListRequest(limit=4, after="d"))
    assert ([info.device for info in last.items], last.next) == ([NANO], "")


def test_two_who_change_how_a_device_is_replanned_at_once_both_do(api: ApiContext) -> None:
    def change(**to: Any) -> None:
        answer_of(api, routes.REPLANNING_CHANGE, ReplanningChangeRequest(device=NANO, **to))

    for number in range(1, 30):
        with ThreadPoolExecutor(2) as both:
            both.submit(change, budget_s=float(number))
            both.submit(change, members_max=number)
        now = answer_of(api, routes.REPLANNING_SHOW, ReplanningShowRequest(device=NANO))
        assert (now.budget_s, now.members_max) == (number, number)


def test_settings_are_told_without_a_password(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    api = planner_context(
        store, ManualClock(), database_url="postgresql+psycopg://planner:hunter2@db/planner"
    )
    told = {one.name: one for one in answer_of(api, routes.SETTINGS, SettingsRequest()).settings}
    assert told["database_url"].value == "postgresql+psycopg://planner:***@db/planner"
    assert not told["database_url"].default and told["listen"].default


def test_a_look_at_more_devices_than_it_holds_says_so(
    api: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        enrol(api.store, DeviceId(f"camera-{number}"), number + 2)
    assert not answer_of(api, routes.WATCH, WatchRequest()).cut
    monkeypatch.setattr(service, "PAGE_MAX", 2)
    look = answer_of(api, routes.WATCH, WatchRequest())
    assert ([info.device for info in look.devices], look.cut) == (["camera-0", "camera-1"], True)
