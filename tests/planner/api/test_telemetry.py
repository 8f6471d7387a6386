"""What a device measured, over the API: in pages, with a planner and without one."""

from collections.abc import Callable

import pytest

from stageloom.planner.api import routes
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.schema.service import TelemetryBooks
from stageloom.planner.schema.telemetry import DeviceBooksRequest, DeviceTelemetryRequest, RollUp
from stageloom.planner.service import Planner
from stageloom.planner.store.link import LinkStore
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import Event, Ledger, QueueSample, RowKind
from tests.planner.api.conftest import Callers
from tests.store.helpers import enrol, row

SHOP = DeviceId("shop")


@pytest.fixture(scope="module", autouse=True)
def rows(api_planner: Planner) -> None:
    """Five queue samples and two events of a device."""
    enrol(api_planner.store, SHOP, number=2)
    made = [row(sequence, QueueSample("m", sequence, 0, 0)) for sequence in range(5)]
    made += [row(sequence, Event("served", "all"), kind=RowKind.EVENT) for sequence in (5, 6)]
    write = TelemetryWrite(SHOP, tuple(made), (Ledger(7, 9, 2),))
    LinkStore(api_planner.store).append_telemetry([write])


def test_a_row_has_the_fields_of_its_kind_as_an_object(callers: Callers) -> None:
    page = callers.call(routes.DEVICE_TELEMETRY, DeviceTelemetryRequest(device=SHOP))
    assert [item.kind for item in page.items] == [RowKind.EVENT] * 2 + [RowKind.QUEUE_SAMPLE] * 5
    assert page.next == "" and page.items[0].values == {"code": "served", "text": "all"}
    assert page.items[-1].values == {"model": "m", "tasks": 0, "queued_work_us": 0, "oldest_age_us": 0}
    assert (page.items[-1].width_s, page.items[-1].rows) == (0, 1)


def test_kinds_and_a_moment_narrow_it_and_pages_go_on_where_the_one_before_ended(callers: Callers) -> None:
    request = DeviceTelemetryRequest(device=SHOP, kind=(RowKind.QUEUE_SAMPLE, RowKind.EVENT), limit=3)
    paged = list(callers.client.pages(routes.DEVICE_TELEMETRY, request))
    assert paged == list(callers.store_client.pages(routes.DEVICE_TELEMETRY, request))
    whole = callers.call(routes.DEVICE_TELEMETRY, DeviceTelemetryRequest(device=SHOP)).items
    assert tuple(paged) == whole
    events = callers.call(
        routes.DEVICE_TELEMETRY, DeviceTelemetryRequest(device=SHOP, kind=(RowKind.EVENT,), since_us=1)
    )
    assert events.items == whole[:2]


def test_it_is_rolled_up_on_request(callers: Callers) -> None:
    request = DeviceTelemetryRequest(device=SHOP, by=RollUp.HOUR)
    (hour,) = callers.call(routes.DEVICE_TELEMETRY, request).items
    assert (hour.kind, hour.width_s, hour.rows) == (RowKind.QUEUE_SAMPLE, 3600, 5)
    assert hour.values["tasks"] == {"mean": 2.0, "min": 0.0, "max": 4.0, "samples": 5}


def test_the_books_say_what_became_of_all_rows(callers: Callers) -> None:
    books = callers.call(routes.DEVICE_BOOKS, DeviceBooksRequest(device=SHOP))
    assert books == TelemetryBooks(produced=9, stored=7, dropped=2, lost=0)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda: DeviceTelemetryRequest(device=DeviceId("nobody")), "there is no device 'nobody'"),
        (lambda: DeviceTelemetryRequest(device=DeviceId("nobody"), by=RollUp.MINUTE), "'nobody'"),
        (lambda: DeviceTelemetryRequest(device=SHOP, after="x"), "cannot go on after 'x'"),
        (lambda: DeviceTelemetryRequest(device=SHOP, after="1.2.3"), "cannot go on after '2.3'"),
        (lambda: DeviceTelemetryRequest(device=SHOP, after=f"{2**60}.1"), "cannot go on after"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(
    callers: Callers, ask: Callable[[], DeviceTelemetryRequest], why: str
) -> None:
    for caller in (callers.client, callers.store_client):
        with pytest.raises(StageloomError, match=why):
            caller.call(routes.DEVICE_TELEMETRY, ask())
