"""The page over HTTPS, as a browser asks for it: what it shows to whom, and what it lets nobody do."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from http.client import HTTPSConnection
from itertools import count, product
from pathlib import Path
from time import time
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.context import HANDLERS, ApiCall, ApiContext
from stageloom.planner.api.page.views import VIEWS
from stageloom.planner.api.page.words import figure
from stageloom.planner.dispatch.ports import ReportRecord, StoredRow, TelemetryWrite
from stageloom.planner.explain.plan import explain
from stageloom.planner.labels import parse_changes
from stageloom.planner.schema.access import AccessCreateRequest, AccessRevokeRequest, AuditEntry, Role
from stageloom.planner.schema.base import Page
from stageloom.planner.schema.rollout import RolloutCreateRequest, RolloutInfo, RolloutListRequest
from stageloom.planner.service import Planner
from stageloom.planner.store.access import audit_entries
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import device_info, quarantine_device
from stageloom.planner.store.labels import change_labels
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.rollout_turns import advance_rollout, fail_devices
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, DeviceState, ModelLoad, Origin, Report
from stageloom.shared.messages.telemetry import (
    Ledger,
    QueueSample,
    Row,
    RowData,
    RowKind,
    TrialEnded,
    encode_row,
    histogram_of,
)
from tests.planner.api.rig import unverified
from tests.planner.processes import until
from tests.planner.world import World, ended
from tests.search.graphs import DIAMOND, model
from tests.store.helpers import NANO, add_model, enrol, row

pytestmark = pytest.mark.promise("page-shows-the-fleet", "page-lets-nobody-in")

_NUMBERS = count(150)

HOSTILE = "<script>alert(1)</script>'\"&"


class Shown(NamedTuple):
    """An answer as a browser has it."""

    status: int
    headers: Mapping[str, str]
    text: str


class Browser:
    """A client that keeps cookies and fills forms in; it follows nothing by itself."""

    def __init__(self, planner: Planner) -> None:
        address = urlsplit(planner.api_url)
        assert address.hostname is not None and address.port is not None
        self._address = address.hostname, address.port
        self.cookies: dict[str, str] = {}

    def ask(
        self, path: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Shown:
        """One request; with a form a POST."""
        connection = HTTPSConnection(*self._address, timeout=60.0, context=unverified())
        said = {"cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        body = None if form is None else urlencode(form)
        connection.request("GET" if form is None else "POST", path, body, {**said, **(headers or {})})
        answer = connection.getresponse()
        for name, value in answer.getheaders():
            if name.lower() == "set-cookie":
                cookie, _, content = value.partition(";")[0].partition("=")
                self.cookies[cookie] = content.strip('"')
        shown = Shown(
            answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read().decode()
        )
        connection.close()
        return shown

    def sign_in(self, token: str, back: str = "") -> Shown:
        """Send the form of the first page."""
        return self.ask("/ui/sign-in", {"token": token, "back": back})

    def press(self, page: str, action: str, **more: str) -> Shown:
        """Press the button of a page whose form has this action."""
        form = re.search(rf'<form method="post" action="{re.escape(action)}".*?</form>', self.see(page), re.S)
        assert form is not None, f"{page} has no button for {action}"
        fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[0]))
        return self.ask(action, {**fields, **more})

    def see(self, path: str) -> str:
        """The text of a page that must be there."""
        shown = self.ask(path)
        assert shown.status == 200, shown.text.split("<main")[-1]
        return unescape(shown.text)


@pytest.fixture(scope="module")
def tokens(remote_planner: Planner) -> dict[str, str]:
    """A token of each role."""
    with PlannerClient(data_dir=remote_planner.config.data_dir) as client:
        return {
            role.value: client.call(
                routes.ACCESS_CREATE, AccessCreateRequest(name=role.value, role=role)
            ).token
            for role in Role
        }


@pytest.fixture(scope="module")
def world(remote_planner: Planner) -> World:
    """A device whose second plan was tried and rejected after an alarm, and a second version of its model."""
    world = World(remote_planner.config.data_dir, remote_planner.store)
    control, candidate = world.kept("sequential"), world.kept("greedy")
    world.profiled()
    world.store.write(push, Push(device=NANO, plan="sequential", decided_by="operator"))
    alarm = Alarm(
        boot=7,
        number=1,
        at_us=1_700_000_000_000_000,
        cause="oldest_age",
        value=2.5,
        threshold=0.5,
        plan=control.digest,
        loads=(ModelLoad("diamond", 12.0, 400.0, 3, 2_500_000),),
        samples=(),
    )
    LinkStore(world.store).record_alarm(NANO, alarm)
    desired = world.store.write(push, Push(device=NANO, plan="greedy", decided_by="replan"))
    world.tells(
        TrialEnded(
            epoch=desired.epoch,
            generation=desired.generation,
            origin=Origin.PLANNER,
            how="trial",
            verdict="reject",
            candidate=candidate.digest,
            control=control.digest,
            ratio=0.9,
            ratio_low=0.85,
            ratio_high=0.95,
            pairs=1,
            began_us=1,
            decided_us=2,
            reason=f"slower {HOSTILE}",
        ),
    )
    add_model(world.store, world.home, "relu", 4)
    add_model(world.store, world.home, "relu", 6)
    return world


@pytest.fixture
def viewer(remote_planner: Planner, world: World, tokens: dict[str, str]) -> Browser:
    """A browser in which a viewer is signed in."""
    return _signed_in(remote_planner, tokens["viewer"])


@pytest.fixture
def admin(remote_planner: Planner, world: World, tokens: dict[str, str]) -> Browser:
    """A browser in which an administrator is signed in."""
    return _signed_in(remote_planner, tokens["admin"])


def _signed_in(planner: Planner, token: str) -> Browser:
    browser = Browser(planner)
    assert browser.sign_in(token).status == 303
    return browser


@pytest.fixture
def store(remote_planner: Planner) -> Store:
    """The planner's store."""
    return remote_planner.store


@pytest.fixture
def device(store: Store) -> DeviceId:
    """A device of one test alone."""
    number = next(_NUMBERS)
    return enrol(store, DeviceId(f"own-{number}"), number)


# -- signing in -------------------------------------------------------------------------------------------


def test_every_page_asks_a_stranger_to_sign_in_and_tells_nothing(remote_planner: Planner) -> None:
    for path in [*(path for path, _ in VIEWS), "/ui/nothing"]:
        shown = Browser(remote_planner).ask(path.replace("{device}", NANO).replace("{plan}", "sequential"))
        assert shown.status == 303 and shown.headers["location"].startswith("/ui/sign-in?back=%2Fui%2F")
        assert not shown.text


@pytest.mark.parametrize(
    ("page", "form"),
    [
        ({}, "/ui/sign-in"),
        (
            {"hx-current-url": "https://x:7424/ui/plans/a?device=b"},
            "/ui/sign-in?back=%2Fui%2Fplans%2Fa%3Fdevice%3Db",
        ),
        ({"hx-current-url": "https://x:7424/ui/\\evil"}, "/ui/sign-in?back=%2Fui%2Ffleet"),
    ],
)
def test_part_of_a_page_takes_a_stranger_to_the_form_and_back_to_the_whole_page(
    remote_planner: Planner, page: dict[str, str], form: str
) -> None:
    shown = Browser(remote_planner).ask("/ui/fleet/live", headers={"hx-request": "true", **page})
    assert (shown.status, shown.headers["hx-redirect"], shown.text) == (401, form, "")


def test_the_cookie_names_the_planner_and_holds_no_token(
    remote_planner: Planner, tokens: dict[str, str]
) -> None:
    browser = Browser(remote_planner)
    cookie = browser.sign_in(tokens["viewer"]).headers["set-cookie"]
    assert re.match(r"__Host-stageloom-[0-9a-f]{12}=[\w-]{43};", cookie)
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= set(cookie.lower().split("; "))
    assert tokens["viewer"][:20] not in cookie


def test_a_wrong_token_is_refused_with_the_reason_and_noted(remote_planner: Planner, store: Store) -> None:
    shown = Browser(remote_planner).sign_in("stl_wrong")
    assert shown.status == 401 and "no access token of this planner" in shown.text
    assert "set-cookie" not in shown.headers
    assert _noted(store, "page.sign_in")[0].status == 401


def test_after_signing_in_only_an_own_page_is_shown(remote_planner: Planner, tokens: dict[str, str]) -> None:
    for back, shown in (("/ui/audit", "/ui/audit"), ("https://evil/", "/ui/fleet"), ("//evil", "/ui/fleet")):
        assert Browser(remote_planner).sign_in(tokens["admin"], back).headers["location"] == shown


def test_a_revoked_token_signs_everyone_out(remote_planner: Planner, tokens: dict[str, str]) -> None:
    with PlannerClient(data_dir=remote_planner.config.data_dir) as client:
        token = client.call(routes.ACCESS_CREATE, AccessCreateRequest(name="gone", role=Role.VIEWER)).token
        browser = _signed_in(remote_planner, token)
        assert browser.ask("/ui/fleet").status == 200
        client.call(routes.ACCESS_REVOKE, AccessRevokeRequest(name="gone"))
    assert browser.ask("/ui/fleet").status == 303


def test_signing_out_ends_the_session_and_not_the_cookie_alone(viewer: Browser) -> None:
    kept = dict(viewer.cookies)
    assert viewer.press("/ui/fleet", "/ui/sign-out").status == 303
    viewer.cookies = kept
    assert viewer.ask("/ui/fleet").status == 303


def test_over_the_local_socket_there_is_no_page(remote_planner: Planner) -> None:
    from stageloom.planner.api.client import socket_path
    from tests.planner.api.http import asked

    assert asked(socket_path(remote_planner.config.data_dir), "GET", "/ui/fleet").status == 404


# -- what is shown ----------------------------------------------------------------------------------------


def test_each_page_carries_the_headers_and_no_inline_script_or_style(viewer: Browser) -> None:
    for path in ("/ui/fleet", f"/ui/devices/{NANO}", "/ui/plans/greedy", "/ui/models", "/ui/nothing"):
        shown = viewer.ask(path)
        policy = shown.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert shown.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", shown.text)


def test_the_fleet_counts_devices_and_finds_them_by_name_and_state(viewer: Browser, store: Store) -> None:
    enrol(store, DeviceId("lonely-1"), 51)
    text = viewer.see("/ui/fleet?search=LONELY")
    assert "1 device on this page" in text and "lonely-1" in text and f">{NANO}<" not in text
    assert "No device fits" in viewer.see("/ui/fleet?search=lonely&state=online")
    assert "lonely-1" in viewer.see("/ui/fleet?search=lonely&state=offline")
    assert "No device fits" in viewer.see("/ui/fleet?search=%25")


def test_a_fleet_larger_than_a_page_goes_on_at_the_next_one(viewer: Browser, store: Store) -> None:
    for number in range(53):
        enrol(store, DeviceId(f"many-{number:03d}"), 60 + number)
    text = viewer.see("/ui/fleet?search=many-")
    assert text.count('<th scope="row">') == 50
    following = re.search(r'href="(/ui/fleet\?[^"]*after=[^"]*)"', text)
    assert following is not None
    rest = viewer.see(following[1])
    assert re.findall(r">(many-\d+)<", rest) == ["many-050", "many-051", "many-052"]
    assert viewer.ask("/ui/fleet/live?devices=many-000,many-001").text.count('id="is-many-') == 2


def test_a_device_shows_why_its_plan_changed_and_what_its_alarm_was(viewer: Browser) -> None:
    text = " ".join(viewer.see(f"/ui/devices/{NANO}").split())
    assert "Trial: reject, gain 0.900 (0.850 to 0.950) after 1 pair: slower" in text
    assert "a task had waited for 2.5 s, longer than 0.5 s" in text
    assert "It began re-plan 1" in text


def test_what_a_device_tried_by_itself_is_shown_with_the_generation_that_adopts_it(
    viewer: Browser, store: Store, world: World, device: DeviceId
) -> None:
    """A pushed plan, and two that the device made under it: one loses, the other wins and is adopted."""
    first, own = world.plan("sequential"), replace(world.plan("greedy"), lanes=3)
    store.write(add_plan, "own", own, "local")
    local: dict[str, Any] = {"origin": Origin.LOCAL}
    pushed = store.write(push, Push(device=device, plan="sequential", decided_by="operator"))
    _ended(
        store,
        device,
        ended(pushed, first, "commit", reason="nothing ran"),
        ended(pushed, own, "commit", decided_us=3, reason="better", **local),
        ended(pushed, replace(own, lanes=2), "reject", decided_us=4, reason="worse", **local),
    )
    store.write(push, Push(device=device, plan="own", decided_by="local"))
    changes = " ".join(viewer.see(f"/ui/devices/{device}").split()).split("<li>")
    (adopted,) = [change for change in changes if "by local" in change]
    (given,) = [change for change in changes if "by operator" in change]
    assert "commit: better" in adopted and "commit: nothing ran" in given
    assert not any("worse" in change for change in changes)


@pytest.mark.parametrize(
    ("how", "shown", "explained"),
    [
        ("trial", "Trial: commit: as it was", "Its trial ended with commit."),
        ("outputs", "Outputs compared; commit: as it was", "Outputs compared."),
        (
            "now",
            "No trial: it was ordered to run at once; commit",
            "No trial: it was ordered to run at once.",
        ),
        ("first", "No trial: nothing comparable ran; commit", "No trial: nothing comparable ran."),
        ("proven", "No trial: it had won one there before; commit", "No trial: it had won one there before."),
        ("of_tomorrow", "Decided by of_tomorrow; commit", "Decided by of_tomorrow."),
    ],
)
def test_a_trial_is_told_of_only_where_there_was_one(
    viewer: Browser, store: Store, world: World, device: DeviceId, how: str, shown: str, explained: str
) -> None:
    pushed = store.write(push, Push(device=device, plan="sequential", decided_by="operator"))
    _ended(store, device, ended(pushed, world.plan("sequential"), "commit", how=how, reason="as it was"))
    assert f"<p>{shown}" in " ".join(viewer.see(f"/ui/devices/{device}").split())
    assert f" {explained}</p>" in viewer.see(f"/ui/plans/sequential/explanation?device={device}")


def _ended(store: Store, device: DeviceId, *trials: TrialEnded) -> None:
    """Have a device tell of its trials."""
    rows = tuple(row(number, one, kind=RowKind.TRIAL_ENDED) for number, one in enumerate(trials))
    LinkStore(store).append_telemetry([TelemetryWrite(device, rows, (Ledger(7, len(rows), 0),))])


def test_what_devices_say_is_shown_as_text(viewer: Browser) -> None:
    shown = viewer.ask(f"/ui/devices/{NANO}")
    assert "<script>alert" not in shown.text and "&lt;script&gt;alert(1)" in shown.text
    searched = viewer.ask("/ui/fleet?" + urlencode({"search": HOSTILE}))
    assert "<script>alert" not in searched.text and "alert(1)" in searched.text


def test_curves_of_a_device_that_measured_nothing_say_so(viewer: Browser) -> None:
    assert "It measured nothing" in viewer.see(f"/ui/devices/{NANO}/curves")


def test_curves_show_queues_and_latency_by_the_minute(
    viewer: Browser, store: Store, device: DeviceId
) -> None:
    measured = _measured(store, device, (0, 1))
    text = viewer.see(f"/ui/devices/{device}/curves")
    charts = _charts(text)
    assert [chart["title"] for chart in charts] == ["Queue", "Latency"]
    assert all(chart["models"] == ["relu"] for chart in charts)
    assert charts[0]["moments"] == measured
    assert charts[0]["values"] == [[4.0, 5.0]]
    assert all(0.8 < value < 1.25 for value in charts[1]["values"][0])
    assert text.count("<tr>") == 2 * (1 + 2)
    for chart in charts:
        since, until = chart["span"]
        assert since <= measured[0] < measured[1] < until and 7200.0 <= until - since < 7260.0


def test_curves_break_where_nothing_was_measured_for_more_than_two_minutes(
    viewer: Browser, store: Store, device: DeviceId
) -> None:
    measured = _measured(store, device, (0, 2, 5))
    text = viewer.see(f"/ui/devices/{device}/curves")
    for chart in _charts(text):
        assert chart["moments"] == [measured[0], measured[1], measured[1] + 60.0, measured[2]]
        assert [value is None for value in chart["values"][0]] == [False, False, True, False]
    assert text.count("<tr>") == 2 * (1 + 3), "what was not measured is no row of a table"


def test_curves_of_many_models_reach_back_as_far_as_those_of_one(
    viewer: Browser, store: Store, device: DeviceId
) -> None:
    """More entries than four pages of telemetry take."""
    models = [f"m{number:02d}" for number in range(20)]
    measured = _measured(store, device, range(-105, 6), models)
    charts = _charts(viewer.see(f"/ui/devices/{device}/curves"))
    assert len(charts) == 2
    for chart in charts:
        assert chart["models"] == models and chart["moments"] == measured
        assert all(None not in values for values in chart["values"])


def _measured(
    store: Store, device: DeviceId, minutes: Sequence[int], models: Sequence[str] = ("relu",)
) -> list[float]:
    """Have a device measure in these of the last minutes; returns when that was, in seconds since 1970."""
    start_us = (round(1e6 * time()) // 60_000_000 - 6) * 60_000_000
    moments = [start_us + minute * 60_000_000 for minute in minutes]
    told: list[tuple[int, RowKind, RowData]] = []
    for (place, at_us), name in product(enumerate(moments), models):
        told.append((at_us, RowKind.QUEUE_SAMPLE, QueueSample(name, 4 + place, 10, 20)))
        told.append((at_us, RowKind.LATENCY_HISTOGRAM, histogram_of(name, [1000] * 100)))
    rows = [
        StoredRow(7, number, at_us, kind, encode_row(Row(at_us, data)), data)
        for number, (at_us, kind, data) in enumerate(told)
    ]
    LinkStore(store).append_telemetry([TelemetryWrite(device, tuple(rows), (Ledger(7, len(rows), 0),))])
    return [at_us / 1e6 for at_us in moments]


def _charts(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r'data-chart="(.*?)" role', text)]


def test_a_plan_is_drawn_listed_and_explained(viewer: Browser, device: DeviceId) -> None:
    page = viewer.see("/ui/plans/greedy")
    drawn, said = (viewer.see(part) for part in re.findall(r'hx-get="([^"]+)"', page))
    assert "Plan greedy" in page
    bars, listed = drawn.count("<rect"), drawn.count('data-label="Takes"')
    assert bars == listed > 3 and "stream 1" in drawn and "Costs are of cpu-2-core" in drawn
    assert "for nano" in " ".join(re.sub("<.*?>", "", said).split())
    assert "decided by replan" in said and "1 combined block" in said and "sequential" in said
    other = viewer.see(f"/ui/plans/greedy/explanation?device={device}")
    assert f"{device}</a> was never asked to run it" in other and "No device" not in other


def test_a_plan_of_which_its_device_has_said_nothing_is_explained_so_until_it_does(
    viewer: Browser, store: Store, world: World, device: DeviceId
) -> None:
    page = f"/ui/plans/sequential/explanation?device={device}"
    pushed = store.write(push, Push(device=device, plan="sequential", decided_by="operator"))
    assert "The device has not said anything of it yet.</p>" in viewer.see(page)
    said = Report(
        revision=1, epoch=pushed.epoch, generation=pushed.generation, state=DeviceState.REJECTED, reason="why"
    )
    LinkStore(store).record_reports([ReportRecord(device, 7, said)])
    assert "It is rejected: why.</p>" in viewer.see(page)


def test_how_far_a_block_is_above_its_bound_is_shown_in_percent(
    viewer: Browser, store: Store, world: World
) -> None:
    (block,) = explain(store, "sequential", NANO).blocks
    said = viewer.see(f"/ui/plans/sequential/explanation?device={NANO}")
    assert block.over_bound > 0.0
    assert f'data-label="Over the bound">{figure(100 * block.over_bound)} %<' in said


def test_two_versions_are_compared_and_rows_that_differ_marked(viewer: Browser) -> None:
    assert "relu" in viewer.see("/ui/models")
    text = viewer.see("/ui/models/compare?a=relu@1&b=relu@2")
    assert "t0: float32 1 × 4" in text
    assert re.search(r'<tr class="differs"><th scope="row">Operators</th><td[^>]*>4</td><td[^>]*>6<', text)
    assert re.search(r'<tr><th scope="row">Inputs</th>', text)


def test_re_plans_of_the_fleet_are_listed_with_their_causes(viewer: Browser) -> None:
    assert "a task had waited for 2.5 s" in viewer.see("/ui/replans")
    assert "1 re-plan on this page" in viewer.see(f"/ui/replans?device={NANO}")


def test_what_is_unknown_is_a_page_that_says_so(viewer: Browser) -> None:
    for path, status in (
        ("/ui/nothing", 404),
        ("/ui/devices/nobody", 404),
        ("/ui/devices/nobody/live", 404),
        ("/ui/devices/%3Cb%3E", 422),
        ("/ui/plans/nothing", 404),
        ("/ui/models/compare?a=relu@1&b=nothing", 404),
        ("/ui/models/compare", 422),
        ("/ui/replans?after=x", 422),
        (f"/ui/devices/{NANO}/jobs/abc", 404),
    ):
        shown = viewer.ask(path)
        assert shown.status == status, (path, shown.status)
        assert 'role="alert"' in shown.text and "To the fleet" in shown.text


def test_files_are_kept_by_the_browser_and_nothing_else_is_served_beside_them(viewer: Browser) -> None:
    names = re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', viewer.ask("/ui/fleet").text)
    assert len(names) == 5
    for name in names:
        shown = viewer.ask(name)
        assert shown.status == 200 and "immutable" in shown.headers["cache-control"]
    assert viewer.ask("/ui/static/../site.py").status == 404


def test_devices_are_found_by_their_labels(viewer: Browser, store: Store, device: DeviceId) -> None:
    store.write(change_labels, device, parse_changes(["site=berlin", "line=3"]))
    found = viewer.see("/ui/fleet?label=site%3Dberlin+line%3D3")
    assert "1 device on this page" in found and "line=3, site=berlin" in found and device in found
    assert "No device fits" in viewer.see("/ui/fleet?label=site%3Dberlin,line%3D4")
    assert viewer.ask("/ui/fleet?label=site").status == 422
    assert "line=3, site=berlin" in viewer.see(f"/ui/devices/{device}")


# -- roles and buttons ------------------------------------------------------------------------------------


def test_a_viewer_sees_no_button_and_is_refused_who_posts_anyway(viewer: Browser, device: DeviceId) -> None:
    text = viewer.see(f"/ui/devices/{device}")
    assert "Re-plan now" not in text and "Revoke" not in text and "Audit log" not in text
    csrf = re.search(r'name="csrf" value="([^"]+)"', text)
    assert csrf is not None
    for action in ("replan", "revoke", "replanning", "release"):
        assert viewer.ask(f"/ui/devices/{device}/{action}", {"csrf": csrf[1]}).status == 403
    assert viewer.ask(f"/ui/devices/{device}/revoke").status == 403
    assert viewer.ask("/ui/audit").status == 403


def test_an_operator_may_plan_and_not_revoke(
    remote_planner: Planner, world: World, tokens: dict[str, str], device: DeviceId
) -> None:
    text = _signed_in(remote_planner, tokens["operator"]).see(f"/ui/devices/{device}")
    assert "Re-plan now" in text and "Revoke" not in text


def test_a_form_without_the_sessions_secret_or_of_another_site_does_nothing(
    admin: Browser, store: Store, device: DeviceId
) -> None:
    path = f"/ui/devices/{device}/revoke"
    csrf = re.search(r'name="csrf" value="([^"]+)"', admin.see(path))
    assert csrf is not None
    assert admin.ask(path, {}).status == 403
    assert admin.ask(path, {"csrf": "x" * 43}).status == 403
    good = {"csrf": csrf[1]}
    assert admin.ask(path, good, {"sec-fetch-site": "cross-site"}).status == 403
    assert admin.ask(path, good, {"sec-fetch-site": "same-site"}).status == 403
    assert admin.ask(path, good, {"origin": "https://evil.example"}).status == 403
    assert not store.read(device_info, device).revoked


def test_a_device_is_revoked_after_a_question_and_the_log_has_who_did_it(
    admin: Browser, store: Store, device: DeviceId
) -> None:
    page = f"/ui/devices/{device}/revoke"
    assert admin.press(page, page).headers["location"] == f"/ui/devices/{device}"
    assert store.read(device_info, device).revoked
    text = admin.see(f"/ui/devices/{device}")
    assert "revoked" in text and "Re-plan now" not in text and page not in text
    entry = _noted(store, "device.revoke")[0]
    assert (entry.who, entry.target, entry.status) == ("admin", device, 200)
    assert device in admin.see(f"/ui/audit?who=admin&about={device}&outcome=done")
    assert "Nothing fits" in admin.see(f"/ui/audit?who=admin&about={device}&outcome=refused")


def test_a_quarantined_device_is_released(admin: Browser, store: Store, device: DeviceId) -> None:
    store.write(quarantine_device, device, "it counts too far")
    page = f"/ui/devices/{device}"
    assert "it counts too far" in admin.see(page)
    admin.press(page, f"{page}/release")
    assert not store.read(device_info, device).quarantine


def test_buttons_come_anew_only_where_others_are_right(admin: Browser, device: DeviceId) -> None:
    page = f"/ui/devices/{device}"
    poll = _poll(admin.see(page))
    assert 'id="buttons"' not in admin.see(poll)
    admin.press(page, f"{page}/replanning")
    changed = admin.see(poll)
    assert 'id="buttons"' in changed and "Re-plan on alarms" in changed and 'hx-swap-oob="true"' in changed


@pytest.mark.parametrize("page", ["/ui/fleet?search={}", "/ui/devices/{}"])
def test_what_a_device_runs_comes_anew_only_when_it_changed(
    viewer: Browser, store: Store, device: DeviceId, page: str
) -> None:
    """So no link that has the focus is replaced while nothing changes."""
    poll = _poll(viewer.see(page.format(device)))
    assert "/ui/plans/" not in viewer.see(poll) and _poll(viewer.see(poll)) == poll
    digest = store.read(plan_info, "greedy").digest
    running = Report(revision=1, active=digest, state=DeviceState.COMMITTED)
    LinkStore(store).record_reports([ReportRecord(device, 7, running)])
    changed = viewer.see(poll)
    assert digest[:12] in changed and "committed" in changed
    later = viewer.see(_poll(changed))
    assert "committed" in later and "/ui/plans/" not in later


def _poll(text: str) -> str:
    """The address at which a page asks for news."""
    found = re.search(r'hx-get="([^"]+/live\?[^"]+)"', text)
    assert found is not None
    return found[1]


def test_a_re_plan_by_hand_pushes_the_plan_that_the_search_finds(
    admin: Browser, store: Store, device: DeviceId
) -> None:
    page = f"/ui/devices/{device}"
    job = admin.press(page, f"{page}/replan").headers["location"]
    assert re.search(r'<div role="status">\s*<div', admin.see(job)), "it stays, and what is in it comes anew"
    ended = until(lambda: text if "hx-trigger" not in (text := admin.see(f"{job}/progress")) else None)
    assert "Found" in ended and "pushed it" in ended and "role=" not in ended, ended
    assert store.read(device_info, device).desired_generation == 1
    assert [entry.operation for entry in _noted(store, "plan.")][:2] == ["plan.push", "plan.create"]


def test_a_rollout_is_shown_paused_resumed_and_aborted(
    remote_planner: Planner, admin: Browser, viewer: Browser, world: World, tmp_path: Path
) -> None:
    digest, blob = pack_artifact(model("diamond", [*DIAMOND, [3]])[1], b"diamond 2")
    (tmp_path / "diamond.artifact").write_bytes(blob)
    world.store.add_model("diamond", tmp_path / "diamond.artifact", digest)
    assert "stageloom rollout create --model MODEL@VERSION" in admin.see("/ui/rollouts")
    with PlannerClient(data_dir=remote_planner.config.data_dir) as client:
        client.call(routes.ROLLOUT_CREATE, RolloutCreateRequest(model="diamond@2", rollout="second"))
    assert "1 rollout on this page, newest first" in admin.see("/ui/rollouts")
    page = "/ui/rollouts/second"
    for text in (viewer.see(page), viewer.see(f"{page}/live?buttons=x")):
        assert "wave 1 of" in text and "Pause" not in text and "Abort" not in text
    assert NANO in viewer.see(page)
    poll = _poll(admin.see(page))
    assert 'id="buttons"' not in admin.see(poll)
    admin.press(page, f"{page}/pause")
    assert "Resume" in admin.see(poll)
    admin.press(page, f"{page}/resume")
    admin.press(f"{page}/abort", f"{page}/abort", rollback="yes")
    ended = admin.see(page)
    assert "aborted" in ended and "Pause" not in ended and "Resume" not in ended and "Abort…" not in ended
    assert [entry.operation for entry in _noted(world.store, "rollout.")[:3]] == [
        "rollout.abort",
        "rollout.resume",
        "rollout.pause",
    ]
    assert viewer.ask("/ui/rollouts/nothing").status == 404


def test_a_stopped_rollout_is_aborted_and_one_that_has_ended_is_not(
    remote_planner: Planner, admin: Browser, world: World, tmp_path: Path
) -> None:
    digest, blob = pack_artifact(model("diamond", [*DIAMOND, [3], [4]])[1], b"diamond 3")
    (tmp_path / "diamond.artifact").write_bytes(blob)
    version = world.store.add_model("diamond", tmp_path / "diamond.artifact", digest).version
    with PlannerClient(data_dir=remote_planner.config.data_dir) as client:
        request = RolloutCreateRequest(model=f"diamond@{version}", rollout="failed", waves="100%")
        client.call(routes.ROLLOUT_CREATE, request)
    world.store.write(fail_devices, "failed", [NANO], "no plan")
    world.store.write(advance_rollout, "failed", {})
    page = "/ui/rollouts/failed"
    assert "stopped" in admin.see(page) and "Abort…" in admin.see(page)
    question = admin.see(f"{page}/abort")
    assert "Leave it stopped" in question and "Go on with it" not in question
    admin.press(f"{page}/abort", f"{page}/abort")
    assert "Abort…" not in admin.see(page)
    ended = admin.see(f"{page}/abort")
    assert "It is aborted already" in ended and f'action="{page}/abort"' not in ended


def test_rollouts_are_shown_page_by_page(viewer: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(api: ApiContext, request: RolloutListRequest, call: ApiCall) -> Page[RolloutInfo]:
        return Page(items=(), next="" if request.after else "the last one")

    monkeypatch.setitem(HANDLERS, routes.ROLLOUT_LIST, first)
    further = re.search(r'href="([^"]+)" rel="next"', viewer.see("/ui/rollouts"))
    assert further is not None and further[1] == "/ui/rollouts?after=the%20last%20one"
    assert 'rel="next"' not in viewer.see(further[1])


def _noted(store: Store, about: str) -> list[AuditEntry]:
    return store.read(audit_entries, limit=16, about=about)[0]
