"""The extremes of every field of every message, from a device to what an operator reads, over a restart."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect as shapes

from stageloom.planner.api import routes
from stageloom.planner.api.client import socket_path
from stageloom.planner.api.route import Route, unbind
from stageloom.planner.counters import CEILING
from stageloom.planner.schema.base import Request
from stageloom.planner.schema.device import DeviceReleaseRequest
from stageloom.planner.schema.plan import PlanHistoryRequest
from stageloom.planner.schema.service import StatusRequest, WatchRequest
from stageloom.shared.codec import Codec
from stageloom.shared.errors import DecodeError
from stageloom.shared.messages import control, telemetry
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import ControlToPlanner, Heartbeat, Hello, LocalPlan, Reported
from stageloom.shared.messages.telemetry import MAX_ROW_BYTES, Ledger, RowRange
from tests.adversary.extremes import extremes
from tests.adversary.rig import BOOT, CODECS, Device, Rig
from tests.planner.api.http import LocalHttp, asked
from tests.store.conftest import database_url

pytestmark = pytest.mark.more

__all__ = ["database_url"]  # both databases for what devices say in every run: their limits differ

SENT_LONG_AGO_US = 1_700_000_000_000_000
EXTREME_ROWS = tuple(extremes(shapes.type_info(telemetry.RowData)))


def messages(codec: Codec[Any]) -> list[Any]:
    """The extremes of all messages of a conversation that fit into its frames."""
    return [message for message in extremes(shapes.type_info(codec.types)) if _fits(codec, message)]


def _fits(codec: Codec[Any], message: Any) -> bool:
    try:
        return bool(codec.decode(codec.encode(message)))
    except (ValueError, DecodeError):
        return False  # the longest lists of the longest texts; the frame's own bound comes first


def counts_too_far(message: ControlToPlanner) -> bool:
    """Whether a control message says a counter that only the end of the wire's range explains."""
    said = message.report if isinstance(message, Hello | Reported) else message
    if not isinstance(message, Hello | Reported | Heartbeat | LocalPlan):
        return False
    names = ("epoch", "generation", "revision", "local_counter")
    return any(getattr(said, name, 0) > CEILING for name in names)


def say_control(rig: Rig, bad: Device, message: ControlToPlanner) -> None:
    """Send it within a session, and see that it is refused where it must be; then the device is let in."""
    bad.send("control", message)
    answer = bad.heartbeat()
    if counts_too_far(message):
        assert isinstance(answer, Refused) and answer.code is RefusalCode.QUARANTINED, message
        rig.ask(routes.DEVICE_RELEASE, DeviceReleaseRequest(device=bad.name))
    if not isinstance(answer, control.HeartbeatAck):
        assert isinstance(bad.hello(), control.Welcome), message


def numbered(rows: Sequence[telemetry.RowData], first: int) -> Iterator[telemetry.TelemetryBatch]:
    """Batches of rows, 16 each, which may have 4 KiB each."""
    for at in range(0, len(rows), 16):
        some = [telemetry.Row(SENT_LONG_AGO_US, one) for one in rows[at : at + 16]]
        bodies = [msgspec.msgpack.encode(row) for row in some]
        bodies = [body for body in bodies if len(body) <= MAX_ROW_BYTES]
        yield telemetry.TelemetryBatch(
            rows=tuple(bodies),
            ranges=(RowRange(BOOT, first, first + len(bodies) - 1),),
            ledgers=(Ledger(BOOT, first + len(bodies), 0),),
        )
        first += len(bodies)


def pages(rig: Rig) -> dict[str, Any]:
    """What an operator reads; each page is whole, or this raises."""
    rig.ask(routes.STATUS, StatusRequest())
    rig.ask(routes.PLAN_HISTORY, PlanHistoryRequest())
    for name in ("good", "bad"):
        assert rig.info(name).unshown == ""
        rig.command("device", "telemetry", name)
        rig.command("replan", "list", name)
    rig.command("watch")
    rig.command("plan", "list")
    watched = rig.ask(routes.WATCH, WatchRequest())
    assert {info.device for info in watched.devices} == {"good", "bad"}
    return {info["device"]: info for info in json.loads(rig.command("device", "list", "--json"))}


@pytest.mark.promise("extreme-field-message-taken")
@pytest.mark.timeout(600)
def test_what_any_message_may_say_at_its_extremes_is_stored_and_shown(rig: Rig) -> None:
    """1. A good device stores rows; 2. a bad one says the extremes of every field of every message; 3. every
    page shows both, before and after a restart; 4. the good one's books are its own, and it is served."""
    text = "\N{RIGHT-TO-LEFT OVERRIDE}" * 128
    good, bad = rig.device("good"), rig.device("bad", agent_version=text, device_class=text)
    assert good.is_served() and bad.is_served()
    for message in messages(CODECS["control"][0]):
        say_control(rig, bad, message)
    assert good.is_served()
    for batch in numbered(EXTREME_ROWS, first=1):
        reply = bad.answer("telemetry", batch)
        assert isinstance(reply, telemetry.TelemetryAck), reply
    for lane in ("telemetry", "bulk"):
        for message in messages(CODECS[lane][0]):
            reply = bad.answer(lane, message)
            if isinstance(reply, Refused) and reply.code is RefusalCode.QUARANTINED:
                rig.ask(routes.DEVICE_RELEASE, DeviceReleaseRequest(device=bad.name))
    assert good.is_served()
    for _ in range(2):
        shown = pages(rig)
        assert shown["good"]["unreadable"] == 0
        rig.restart()
        assert good.is_served()
    books = json.loads(rig.command("device", "show", "good", "--json"))
    assert books["quarantine"] == ""
    rows = json.loads(rig.command("device", "telemetry", "good", "--json"))
    assert [row["values"]["code"] for row in rows if row["kind"] == "event"] == ["served"] * len(rows)
    assert len(rows) == 5


OPERATOR_REFUSALS = {400, 404, 408, 409, 413, 422, 429, 503}


def status_of(path: Path, route: Route[Any, Any], request: Request) -> int:
    """How the planner answers; what goes on after the answer is ended."""
    target, body = unbind(route, request)
    with closing(LocalHttp(path)) as connection:
        connection.request(route.method, target, body)
        answer = connection.getresponse()
        if answer.status == 202:
            assert asked(path, "DELETE", answer.headers["location"]).status == 200
        return answer.status


@pytest.mark.promise("extreme-field-message-taken")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgres", marks=pytest.mark.full)], indirect=True
)
def test_no_operators_request_at_its_extremes_fails_the_planner(rig: Rig) -> None:
    """Each is carried out, or refused with a reason; the planner is never at its wits' end."""
    good = rig.device("good")
    path = socket_path(rig.home)
    for route in routes.ROUTES:
        for request in extremes(shapes.type_info(route.request)):
            status = status_of(path, route, request)
            assert status in (200, 201, 202) or status in OPERATOR_REFUSALS, (route.name, status, request)
    assert good.is_served()
