"""The page's addresses: signing in and out, views, buttons, files; and the headers that all of them carry.

Somebody signs in with an access token. The cookie names a session and nothing else, its name holds the
planner's, so that two planners of one host do not sign each other's users out. A form carries its session's
secret, and a browser that says where a request comes from must name this site.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Router
from starlette.routing import Route as HttpRoute

from stageloom.planner.api.access import Principal
from stageloom.planner.api.bounds import Refusal, RequestLimits, receive, source_of, too_many
from stageloom.planner.api.context import ApiCall, ApiContext
from stageloom.planner.api.page.actions import ACTIONS, Action
from stageloom.planner.api.page.rendering import render, static_files
from stageloom.planner.api.page.sessions import Sessions, SignedIn
from stageloom.planner.api.page.views import SLOW_VIEWS, VIEWS
from stageloom.planner.api.page.visit import View, Visit
from stageloom.planner.api.problem import problem, problem_of
from stageloom.planner.api.route import Route
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.job import ProblemDetails
from stageloom.planner.store.devices import planner_created_us
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import ExitCode

logger = logging.getLogger(__name__)

SIGN_IN: Final = "/ui/sign-in"
_HOME: Final = "/ui/fleet"
_THREADS: Final = 4
_FIELDS: Final = 32

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class VerbRunner(Protocol):
    """What carries verbs out and keeps the audit log: `stageloom.planner.api.application.Api`."""

    async def carry_out(
        self, route: Route[Any, Any], target: str, principal: Principal, do: Callable[[ApiCall], Any]
    ) -> Any: ...

    async def note(self, principal: Principal, verb: str, target: str, status: int) -> None: ...


class PageSite:
    """Answers everything below `/ui`."""

    def __init__(self, context: ApiContext, verbs: VerbRunner, limits: RequestLimits) -> None:
        self._context, self._verbs, self._limits = context, verbs, limits
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="page")  # its own: pages may take long
        self._slow_pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="slow-page")  # and some for minutes
        self._turns: dict[tuple[str, bool], asyncio.Semaphore] = {}
        self._begun: dict[tuple[str, bytes], Future[Any]] = {}
        self._router = Router(
            [
                HttpRoute("/ui", self._home, methods=["GET"]),
                HttpRoute("/ui/static/{name}", self._static, methods=["GET"]),
                HttpRoute(SIGN_IN, self._ask_token, methods=["GET"]),
                HttpRoute(SIGN_IN, self._sign_in, methods=["POST"]),
                HttpRoute("/ui/sign-out", self._sign_out, methods=["POST"]),
                *(HttpRoute(path, partial(self._view, view), methods=["GET"]) for path, view in VIEWS),
                *(HttpRoute(path, partial(self._act, action), methods=["POST"]) for path, action in ACTIONS),
            ],
            redirect_slashes=False,
        )

    @cached_property
    def _sessions(self) -> Sessions:
        return Sessions(self._context.live.tokens)

    @cached_property
    def _cookie(self) -> str:
        made = str(self._context.reader.read(planner_created_us))
        return f"__Host-stageloom-{digest_bytes([made.encode()])[:12]}"

    def close(self) -> None:
        """Finish what is being rendered."""
        self._pool.shutdown()
        self._slow_pool.shutdown()

    async def serve(self, request: Request) -> Response:
        """The answer to one request, whatever it asks."""
        try:
            response = await self._answer(request)
        except Refusal as refusal:
            response = self._refused(request, refusal.problem, refusal.headers)
        except ClientDisconnect:
            response = Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
        except Exception as error:
            response = self._refused(request, problem_of(error, f"page {request.url.path[:200]}"))
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _answer(self, request: Request) -> Response:
        status = HTTPStatus.NOT_FOUND
        for route in self._router.routes:
            match, found = route.matches(request.scope)
            if match is Match.FULL:
                request.scope.update(found)
                response: Response = await found["endpoint"](request)
                return response
            if match is Match.PARTIAL:
                status = HTTPStatus.METHOD_NOT_ALLOWED
        if self._signed_in(request) is None:
            return self._to_sign_in(request)
        raise Refusal(problem(status, f"there is no page {request.url.path[:200]}", "start from the fleet"))

    # -- who looks ------------------------------------------------------------------------------------------

    def _signed_in(self, request: Request) -> SignedIn | None:
        cookie = request.cookies.get(self._cookie, "")
        return self._sessions.find(cookie, source_of(request), self._now_s()) if cookie else None

    def _now_s(self) -> float:
        return self._context.clock.monotonic_s()

    def _admitted(self, request: Request) -> SignedIn | None:
        """Who is signed in and may ask now.

        Raises:
            Refusal: they ask too often.
        """
        signed_in = self._signed_in(request)
        if signed_in and not self._context.live.tokens.may_ask(signed_in.principal, self._now_s()):
            raise too_many(f"requests of {signed_in.principal.name}")
        return signed_in

    def _to_sign_in(self, request: Request) -> Response:
        """To the form, and from there back; a part of a page takes the whole page there."""
        if "hx-request" in request.headers:
            _, _, page = request.headers.get("hx-current-url", "").partition("/ui/")
            form = _form_before(f"/ui/{page}") if page else SIGN_IN
            return Response(status_code=HTTPStatus.UNAUTHORIZED, headers={"hx-redirect": form})
        if request.method != "GET":  # a button's address is no page to come back to
            return RedirectResponse(SIGN_IN, HTTPStatus.SEE_OTHER)
        back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(_form_before(back), HTTPStatus.SEE_OTHER)

    async def _ask_token(self, request: Request) -> Response:
        return self._sign_in_page(request, request.query_params.get("back", ""))

    def _sign_in_page(self, request: Request, back: str, refused: str = "") -> Response:
        status = HTTPStatus.UNAUTHORIZED if refused else HTTPStatus.OK
        values = {"back": back, "problem": refused} | self._frame(request, None)
        return _page("sign_in.html", values, status)

    async def _sign_in(self, request: Request) -> Response:
        form = await self._form(request)
        tokens, source = self._context.live.tokens, source_of(request)
        bearer = form.get("token", "").strip().partition(".")[0]  # what follows is for other clients
        principal = tokens.principal(bearer, source)
        if principal is not None and not tokens.may_ask(principal, self._now_s()):
            raise too_many(f"requests of {principal.name}")
        cookie = self._sessions.begin(bearer, source, self._now_s())
        if principal is None or cookie is None:
            if not tokens.may_fail(source, self._now_s()):
                raise too_many("attempts to sign in")
            await self._verbs.note(Principal("", None, source), "page.sign_in", "", HTTPStatus.UNAUTHORIZED)
            cause = "This is no access token of this planner."
            return self._sign_in_page(request, form.get("back", ""), cause)
        await self._verbs.note(principal, "page.sign_in", "", HTTPStatus.OK)
        response = RedirectResponse(_own_path(form.get("back", "")), HTTPStatus.SEE_OTHER)
        # It has no age of its own: the session knows when it was used last, and ends for idleness here.
        response.set_cookie(self._cookie, cookie, secure=True, httponly=True, samesite="strict")
        return response

    async def _sign_out(self, request: Request) -> Response:
        await self._checked_form(request, self._signed_in(request))
        self._sessions.end(request.cookies.get(self._cookie, ""))
        response = RedirectResponse(SIGN_IN, HTTPStatus.SEE_OTHER)
        response.delete_cookie(self._cookie, secure=True, httponly=True, samesite="strict")
        return response

    # -- forms ----------------------------------------------------------------------------------------------

    async def _form(self, request: Request) -> Mapping[str, str]:
        """The fields of a form that this site sent.

        Raises:
            Refusal: another site's page sent it, or it is none.
        """
        origin, said = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        here = f"{request.url.scheme}://{request.headers.get('host', '')}"
        if said not in ("same-origin", "none") if said else origin not in (None, here):
            raise _forged()
        body = await receive(request, self._limits)
        try:
            return dict(parse_qsl(body.decode(), max_num_fields=_FIELDS, keep_blank_values=True))
        except ValueError:
            raise Refusal(problem(HTTPStatus.BAD_REQUEST, "this is no form", "send it again")) from None

    async def _checked_form(self, request: Request, signed_in: SignedIn | None) -> Mapping[str, str]:
        form = await self._form(request)
        if signed_in and not hmac.compare_digest(form.get("csrf", "").encode(), signed_in.csrf.encode()):
            raise _forged()
        return form

    # -- what they look at ----------------------------------------------------------------------------------

    async def _home(self, request: Request) -> Response:
        return RedirectResponse(_HOME, HTTPStatus.SEE_OTHER)

    async def _static(self, request: Request) -> Response:
        file = static_files().get(request.path_params["name"])
        if file is None:
            return Response(status_code=HTTPStatus.NOT_FOUND)
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(file.body, headers=headers, media_type=file.media_type)

    async def _view(self, view: View, request: Request) -> Response:
        signed_in = self._admitted(request)
        if signed_in is None:
            return self._to_sign_in(request)
        visit = Visit(
            api=self._context,
            principal=signed_in.principal,
            path=request.path_params,
            query=dict(request.query_params),
            begun=self._begun,
        )

        def made() -> bytes:
            shown = view(visit)
            return render(shown.template, {**shown.values, **self._frame(request, signed_in)})

        slow = view in SLOW_VIEWS
        name = signed_in.principal.name
        async with self._turns.setdefault((name, slow), asyncio.Semaphore(_THREADS // 2)):
            pool = self._slow_pool if slow else self._pool
            body = await asyncio.get_running_loop().run_in_executor(pool, made)
        return Response(body, media_type="text/html")

    async def _act(self, action: Action, request: Request) -> Response:
        signed_in = self._admitted(request)
        if signed_in is None:
            return self._to_sign_in(request)
        form = await self._checked_form(request, signed_in)
        visit = Visit(api=self._context, principal=signed_in.principal, path=request.path_params, query=form)
        plan = action(visit)
        answer = await self._verbs.carry_out(plan.route, plan.target, signed_in.principal, plan.do)
        return RedirectResponse(plan.then(answer), HTTPStatus.SEE_OTHER)

    def _frame(self, request: Request, signed_in: SignedIn | None) -> dict[str, Any]:
        """What the frame around every page shows."""
        principal = signed_in.principal if signed_in else None
        return {
            "who": principal.name if principal else "",
            "role": principal.role.value if principal and principal.role else "",
            "csrf": signed_in.csrf if signed_in else "",
            "here": request.url.path,
            "may_operate": bool(principal and principal.may(Role.OPERATOR)),
            "may_administer": bool(principal and principal.may(Role.ADMIN)),
        }

    def _refused(
        self, request: Request, refused: ProblemDetails, headers: Mapping[str, str] | None = None
    ) -> Response:
        signed_in = None
        with contextlib.suppress(Exception):  # the error that is told may be the session's own
            signed_in = self._signed_in(request)
        values = {"problem": refused} | self._frame(request, signed_in)
        return _page("problem.html", values, HTTPStatus(refused.status), headers)


def _page(
    template: str,
    values: Mapping[str, Any],
    status: HTTPStatus = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(render(template, values), status, headers, "text/html")


def _form_before(page: str) -> str:
    """The address of the form that leads to a page."""
    return f"{SIGN_IN}?back={quote(_own_path(page), safe='')}"


def _own_path(back: str) -> str:
    """Where to go after signing in: a page of this site, whatever a link said."""
    return back if back.startswith("/ui/") and "\\" not in back and back.isprintable() else _HOME


def _forged() -> Refusal:
    cause = "this form was not sent from this page, or you signed in again since"
    return Refusal(problem(HTTPStatus.FORBIDDEN, cause, "go back, load the page anew", ExitCode.DENIED))
