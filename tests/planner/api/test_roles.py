"""What each role may do over TLS, of every route; and that a token is refused once it was revoked."""

import http.client
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.access import Principal, Tokens
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.handlers.service import hold_tokens
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.api.route import Route
from stageloom.planner.schema.access import AccessCreateRequest, AccessRevokeRequest, Role
from stageloom.planner.schema.service import StatusRequest
from stageloom.planner.service import Planner
from stageloom.planner.store.access import audit_entries
from stageloom.shared.errors import ExitCode, UnavailableError
from stageloom.shared.ids import Digest
from tests.planner.api.rig import unverified


@pytest.fixture(scope="module")
def tokens(remote_planner: Planner) -> dict[str, str]:
    with PlannerClient(data_dir=remote_planner.config.data_dir) as client:
        made = {
            role.value: client.call(
                routes.ACCESS_CREATE, AccessCreateRequest(name=role.value, role=role)
            ).token
            for role in Role
        }
    return {**made, "nobody": "stl_" + "x" * 43, "": ""}


def _status(remote_planner: Planner, route: Route[Any, Any], token: str) -> int:
    """How a request is answered whose path names nothing that exists and whose body is empty."""
    port = int(remote_planner.api_url.rpartition(":")[2])
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=unverified(), timeout=20)
    path = route.path.replace("{", "").replace("}", "")
    bearer = token.partition(".")[0]
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    with closing(connection):
        connection.request(route.method, path, b"{}" if route.has_body else b"", headers)
        return connection.getresponse().status


_ENDLESS = (routes.WATCH_EVENTS,)


@pytest.mark.parametrize("route", [r for r in routes.ROUTES if r not in _ENDLESS], ids=lambda r: r.name)
@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_do_what_its_routes_say_and_nothing_else(
    remote_planner: Planner,
    tokens: dict[str, str],
    route: Route[Any, Any],
    role: Role,
) -> None:
    status = _status(remote_planner, route, tokens[role.value])
    if role.includes(route.role):
        assert status not in (401, 403) and status < 500
    else:
        assert status == 403


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda r: r.name)
@pytest.mark.parametrize("token", ["nobody", ""])
def test_without_a_token_that_holds_nothing_is_answered(
    remote_planner: Planner,
    tokens: dict[str, str],
    route: Route[Any, Any],
    token: str,
) -> None:
    assert _status(remote_planner, route, tokens[token]) == 401


def test_a_viewer_may_read_what_shows_no_secret_and_change_nothing() -> None:
    """The table itself, by what routes are: a new one that changes something is never a viewer's."""
    for route in routes.ROUTES:
        if route.role is Role.VIEWER:
            assert route.method == "GET" and not route.secret


def test_a_revoked_token_is_refused_at_once(remote_planner: Planner) -> None:
    with PlannerClient(data_dir=remote_planner.config.data_dir) as local:
        token = local.call(routes.ACCESS_CREATE, AccessCreateRequest(name="short", role=Role.VIEWER)).token
        with PlannerClient(url=remote_planner.api_url, token=token) as remote:
            remote.call(routes.STATUS, StatusRequest())
            local.call(routes.ACCESS_REVOKE, AccessRevokeRequest(name="short"))
            with pytest.raises(ApiRefused) as refused:
                remote.call(routes.STATUS, StatusRequest())
    assert refused.value.status == 401 and refused.value.exit_code is ExitCode.DENIED


def test_a_token_that_is_revoked_while_another_is_made_does_not_hold_again() -> None:
    """1. One reads the tokens of the store. 2. Another revokes `b`. 3. The first goes on."""
    old, new = [(Digest(name), name, Role.ADMIN) for name in "ab"], [(Digest("a"), "a", Role.ADMIN)]
    reading, revoked, answers = threading.Event(), threading.Event(), iter([old, new])

    def read(_: object) -> object:
        answer = next(answers)
        if answer is old:
            reading.set()
            assert revoked.wait(20)
        return answer

    planner: Any = SimpleNamespace(tokens=Tokens(), store=SimpleNamespace(read=read))
    threads = [threading.Thread(target=hold_tokens, args=(planner,)) for _ in range(2)]
    threads[0].start()
    assert reading.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    revoked.set()
    for thread in threads:
        thread.join()
    held = [name for name in "ab" if planner.tokens.holds(Principal(name, Role.ADMIN, ""))]
    assert held == ["a"]


def test_a_client_accepts_no_certificate_but_the_one_that_its_token_names(
    remote_planner: Planner, tokens: dict[str, str], tmp_path: Path
) -> None:
    bearer, _, pinned = tokens["viewer"].partition(".")
    other = ("B" if pinned[0] == "A" else "A") + pinned[1:]
    with (
        PlannerClient(url=remote_planner.api_url, token=f"{bearer}.{other}") as client,
        pytest.raises(UnavailableError, match="not the one that the token names"),
    ):
        client.call(routes.STATUS, StatusRequest())


def test_a_flood_without_a_token_leaves_few_entries_in_the_audit_log(remote_planner: Planner) -> None:
    before = remote_planner.store.read(audit_entries, limit=256)[0]
    for _ in range(60):
        assert _status(remote_planner, routes.STATUS, "") == 401
    remote_planner.store.write(lambda session: None)  # what was noted before is committed
    after = remote_planner.store.read(audit_entries, limit=256)[0]
    assert len(after) - len(before) <= 30
