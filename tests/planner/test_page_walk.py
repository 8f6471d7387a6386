"""An operator's walk through the page in a browser, at a desk and on a telephone, by day and by night."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.rollout import RolloutCreateRequest
from stageloom.planner.store.devices import device_info
from stageloom.shared.ids import DeviceId
from tests.planner.page_fleet import BROWSER, REASON, SIZE, WATCHED, PageFleet, page_fleet, sign_in
from tests.planner.processes import until

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(BROWSER).exists(), reason="needs chromium"),
    pytest.mark.promise("page-works-for-everyone"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageFleet]:
    """Fifty devices, one of which has a story."""
    with page_fleet(tmp_path_factory.mktemp("walk")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium."""
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


_IN_LABELS: Final = """[...document.querySelectorAll(".cards tbody td > *")].some((one) =>
    one.getClientRects().length
    && one.getBoundingClientRect().left < one.parentElement.getBoundingClientRect().left + 136)"""


class Walk:
    """A browser's window, and what is wrong with what it showed."""

    def __init__(self, browser: Any, fleet: PageFleet, width: int, scheme: str) -> None:
        self.fleet = fleet
        self.context = browser.new_context(
            ignore_https_errors=True, viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        sign_in(self.page, fleet, Role.ADMIN)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console: {message.text}")

    def go(self, path: str) -> None:
        """Open a page and judge it."""
        self.page.goto(self.fleet.planner.api_url + path)
        self.judge()

    def judge(self) -> None:
        """Note what axe finds serious, what is wider than the window, and cells that fall apart."""
        path = self.page.url.rpartition("/ui/")[2]
        for found in axe.Axe().run(self.page).response["violations"]:
            if found["impact"] in ("serious", "critical"):
                places = [node["target"] for node in found["nodes"][:3]]
                self.wrong.append(f"{path}: {found['id']} at {places}")
        if self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            self.wrong.append(f"{path} is wider than the window")
        if self.page.viewport_size["width"] <= 768 and self.page.evaluate(_IN_LABELS):
            self.wrong.append(f"{path} has what belongs to a cell below its label")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
def test_everything_an_operator_wants_to_know_is_found_by_clicking(
    browser: Any, fleet: PageFleet, width: int, scheme: str
) -> None:
    walk = Walk(browser, fleet, width, scheme)
    page = walk.page
    walk.judge()
    assert page.locator("tbody tr").count() == SIZE
    page.get_by_label("Name, class or agent").fill(WATCHED)
    page.get_by_role("button", name="Show").click()
    page.get_by_text("1 device on this page").wait_for()
    for label in ("Is", "Plan", "Runs", "Class", "Agent", "Last seen"):
        assert page.locator(f'td[data-label="{label}"]').is_visible()
    page.get_by_role("link", name=WATCHED).click()

    # why its plan changed, and what the alarm was about
    page.locator(".chart canvas").nth(1).wait_for()
    walk.judge()
    changes = page.get_by_role("region", name="Plans and trials")
    assert changes.get_by_text("a task had waited for 1.84 s, longer than 0.5 s").is_visible()
    assert changes.get_by_text(REASON).is_visible()
    alarms = page.get_by_role("region", name="Alarms")
    assert alarms.get_by_text("It began re-plan 1: committed").is_visible()
    assert alarms.get_by_text("1,840 ms").is_visible()
    page.get_by_text("Queue as a table").click()
    assert page.get_by_role("region", name="Queue, minute by minute").locator("tbody tr").count() > 60

    # the plan as its timeline, which a list says, too
    changes.get_by_role("link", name=fleet.plan).click()
    page.locator("svg.timeline").wait_for()
    page.get_by_text("Plans for the same models").wait_for()
    page.get_by_text("The timeline as a list").click()
    assert page.locator("svg.timeline rect").count() == page.locator('td[data-label="Takes"]').count() > 8
    walk.judge()

    # two versions side by side
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Compare").fill("detector@1")
    page.get_by_label("with").fill("detector@2")
    walk.judge()
    page.get_by_role("button", name="Compare").click()
    assert page.locator("tr.differs", has_text="Operators").is_visible()
    assert page.locator("tr", has_text="Runs on").get_by_role("link", name=WATCHED, exact=True).is_visible()
    walk.judge()

    # what was done lately
    page.get_by_role("link", name="Audit log").click()
    page.get_by_label("Operation or target has").fill("sign_in")
    page.get_by_role("button", name="Show").click()
    assert page.locator("tbody tr").first.get_by_text("page.sign_in").is_visible()
    walk.judge()
    walk.go("/ui/replans")
    walk.go("/ui/plans")
    walk.go("/ui/rollouts")
    walk.go(f"/ui/devices/{WATCHED}/revoke")
    walk.context.close()
    assert walk.wrong == []


def test_a_device_is_re_planned_and_revoked_by_button(browser: Any, fleet: PageFleet) -> None:
    walk, device = Walk(browser, fleet, 1400, "light"), DeviceId("shop-11")
    page, store = walk.page, fleet.planner.store
    walk.go(f"/ui/devices/{device}")
    page.get_by_role("button", name="Re-plan now").click()
    page.get_by_text("Found").or_(page.get_by_text("Nothing was pushed")).wait_for()
    walk.judge()
    page.get_by_role("link", name=device).click()
    page.get_by_role("link", name="Revoke…").click()
    page.get_by_role("button", name=f"Revoke {device}").click()
    until(lambda: page.get_by_text("revoked", exact=True).count())
    assert page.get_by_role("button", name="Re-plan now").count() == 0
    assert store.read(device_info, device).revoked
    assert walk.wrong == []
    walk.context.close()


def test_what_is_polled_takes_no_focus_away_and_keeps_buttons_right(browser: Any, fleet: PageFleet) -> None:
    walk, device = Walk(browser, fleet, 1400, "light"), DeviceId("shop-12")
    page = walk.page
    walk.go(f"/ui/devices/{device}")
    other = walk.context.new_page()
    other.goto(page.url)
    page.get_by_role("button", name="Re-plan now").focus()
    with page.expect_response(lambda answer: "/live" in answer.url):
        pass
    assert page.evaluate("document.activeElement.textContent") == "Re-plan now"
    other.get_by_role("button", name="Do not re-plan on alarms").click()
    other.get_by_role("button", name="Re-plan on alarms", exact=True).wait_for()
    page.get_by_role("button", name="Re-plan on alarms", exact=True).wait_for()
    assert walk.wrong == []
    walk.context.close()


def test_a_rollout_is_paused_and_aborted_on_a_telephone(browser: Any, fleet: PageFleet) -> None:
    with PlannerClient(data_dir=fleet.planner.config.data_dir) as client:
        client.call(routes.ROLLOUT_CREATE, RolloutCreateRequest(model="detector@1", rollout="back"))
    walk = Walk(browser, fleet, 360, "dark")
    page = walk.page
    walk.go("/ui/rollouts")
    page.get_by_role("link", name="back", exact=True).click()
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    walk.judge()
    page.get_by_role("link", name="Abort…").click()
    walk.judge()
    page.get_by_role("button", name="Abort back").click()
    page.get_by_text("aborted", exact=True).first.wait_for()
    assert page.get_by_role("button", name="Resume").count() == 0
    assert walk.wrong == []
    walk.context.close()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("it is busy", "The planner does not answer"),
        ('<p role="alert">ada asks too often</p>', "The planner refuses: ada asks too often"),
    ],
)
def test_figures_are_told_to_be_old_for_as_long_as_the_planner_answers_with_errors(
    browser: Any, fleet: PageFleet, body: str, why: str
) -> None:
    walk = Walk(browser, fleet, 1400, "light")
    page, stale = walk.page, walk.page.locator("#stale")
    page.route("**/live?*", lambda route: route.fulfill(status=503, body=body))
    walk.go(f"/ui/devices/{DeviceId('shop-12')}")
    stale.wait_for()
    with page.expect_response(lambda answer: "/live" in answer.url):
        pass
    assert re.search(rf"^{why}; the figures are of \d\d:\d\d:\d\d UTC\.$", stale.text_content())
    assert stale.is_visible()
    page.unroute("**/live?*")
    stale.wait_for(state="hidden")
    assert all("503" in said for said in walk.wrong)
    walk.context.close()


def test_part_of_a_page_that_cannot_be_made_says_why(browser: Any, fleet: PageFleet) -> None:
    walk = Walk(browser, fleet, 360, "light")
    walk.go(f"/ui/plans/{fleet.plan}?device=nobody")
    why = walk.page.get_by_role("region", name="Why it is as it is")
    why.get_by_text("there is no device 'nobody'").wait_for()
    assert all("404" in said for said in walk.wrong)
    walk.context.close()


def test_the_keyboard_alone_reaches_a_device(browser: Any, fleet: PageFleet) -> None:
    walk = Walk(browser, fleet, 1400, "light")
    page = walk.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type(WATCHED)
    page.keyboard.press("Enter")
    page.get_by_text("1 device on this page").wait_for()
    page.get_by_role("link", name=WATCHED).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=WATCHED).wait_for()
    assert walk.wrong == []
    walk.context.close()
