"""Sessions of the page: what signing in counts as, how long a cookie is good for, where one comes back to."""

import re
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlencode

from stageloom.planner.dispatch.quotas import Rate
from stageloom.planner.store.access import audit_entries
from tests.planner.api.rig import ApiRig, served


def sign_in(rig: ApiRig, token: str, back: str = "") -> HTTPResponse:
    """The answer to the form of the first page."""
    with closing(rig.https()) as connection:
        connection.request("POST", "/ui/sign-in", urlencode({"token": token, "back": back}))
        answer = connection.getresponse()
        answer.read()
        return answer


def test_signing_in_is_a_request_of_its_token(tmp_path: Path) -> None:
    with served(tmp_path, tls=True) as rig:
        rig.context.live.tokens._requests = Rate(per_s=1e-9, burst=2.0)
        token, other = rig.token("ann"), rig.token("bob")
        assert [sign_in(rig, token).status for _ in range(4)] == [303, 303, 429, 429]
        assert sign_in(rig, other).status == 303
        noted, _ = rig.store.read(audit_entries, about="page.sign_in")
        assert [entry.who for entry in noted] == ["bob", "ann", "ann"], "a flood fills no log"


def test_a_cookie_lasts_as_long_as_its_session_is_used(tmp_path: Path) -> None:
    with served(tmp_path, tls=True) as rig:
        cookie = sign_in(rig, rig.token("ann")).headers["set-cookie"]
        assert not re.search("max-age|expires", cookie, re.IGNORECASE)


def test_who_pressed_a_button_after_the_session_ended_comes_back_to_a_page_that_there_is(
    tmp_path: Path,
) -> None:
    with served(tmp_path, tls=True) as rig, closing(rig.https()) as connection:
        connection.request("POST", "/ui/devices/nano/replan", "csrf=x")
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.headers["location"]) == (303, "/ui/sign-in")
        assert sign_in(rig, rig.token("ann")).headers["location"] == "/ui/fleet"
