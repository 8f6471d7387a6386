"""The API as an ASGI application: who asks, may they, what they ask, the answer, and the audit log of it.

Handlers run on a few threads, so that one that waits for the database delays no other. An answer that a
client does not read is given up after a minute.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stageloom.planner.api import problem as problems
from stageloom.planner.api.access import LOCAL, Principal
from stageloom.planner.api.bounds import Refusal, RequestLimits, receive, receive_file, source_of, too_many
from stageloom.planner.api.context import ApiCall, ApiContext
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.idempotency import KeyUse, Remembered, did_nothing, request_digest
from stageloom.planner.api.openapi import document
from stageloom.planner.api.page.site import PageSite
from stageloom.planner.api.problem import ApiRefused, problem, problem_of
from stageloom.planner.api.route import AnswerForm, Route, bind
from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.job import ProblemDetails
from stageloom.planner.store.access import note_request
from stageloom.shared.errors import ExitCode, InputError, StageloomError
from stageloom.shared.failpoint import failpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEY_HEADER: Final = "idempotency-key"

_STILL_S: Final = 15.0  # silence on a stream after which a comment shows that it is alive
_THREADS: Final = 8
_KEY_MAX: Final = 128


class Api:
    """Serves a table of verbs: `local` to the planner's own account, `remote` to whoever has a token."""

    def __init__(
        self, context: ApiContext, routes: Sequence[Route[Any, Any]], limits: RequestLimits | None = None
    ) -> None:
        self._context = context
        self._routes = routes
        self._handlers = {route: handler_of(route) for route in routes}
        self._limits = limits or RequestLimits()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="api")
        for name in (".upload-????????", ".export-????????", ".backup-????????", ".backup-????????.tar"):
            for left in context.config.data_dir.glob(name):  # by a planner that was killed
                shutil.rmtree(left, ignore_errors=True)
                left.unlink(missing_ok=True)
        self._remembered = Remembered(context.store, context.jobs)
        self._streams: Counter[str] = Counter()
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(self._limits.at_once))
        self._scraping = asyncio.Lock()  # one at a time, whoever asks how often
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._schema = msgspec.json.encode(document(routes))
        self._site = PageSite(context, self, self._limits)
        self.local = self._application(remote=False)
        self.remote = self._application(remote=True)

    def end_streams(self) -> None:
        """End the streams of events, which would go on for ever; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)

    def close(self) -> None:
        """Finish what is being handled."""
        self._site.close()
        self._pool.shutdown()

    def _application(self, *, remote: bool) -> ASGIApp:
        by_path: dict[str, dict[str, Route[Any, Any]]] = defaultdict(dict)
        for route in self._routes:
            by_path[route.path][route.method] = route
        table = [
            HttpRoute(path, partial(self._serve, methods, remote), methods=list(methods))
            for path, methods in by_path.items()
        ]
        for served in table:  # no HEAD: a file would be made for nobody, and a stream never ends
            served.methods = {*by_path[served.path]}
        for path, serve in (("/schema", self._serve_schema), ("/metrics", self._serve_metrics)):
            table.append(HttpRoute(path, partial(serve, remote), methods=["GET"]))
        if remote:  # over the local socket nobody signs in
            table += self._page()
        handlers: dict[Any, Any] = {HTTPException: partial(self._serve_nothing, remote), Exception: _internal}
        application = Starlette(routes=table, exception_handlers=handlers)
        application.router.redirect_slashes = False
        return _in_time(application, self._limits.send_s)

    def _count(self, name: str, response: Response, began_s: float) -> None:
        if (planner := self._context.running) is not None:
            seconds = self._context.clock.monotonic_s() - began_s
            planner.counters.request_ended(name, response.status_code, seconds)

    async def _serve_schema(self, remote: bool, request: Request) -> Response:
        return self._turned_away(remote, request) or Response(self._schema, media_type="application/json")

    async def _serve_metrics(self, remote: bool, request: Request) -> Response:
        """To whoever has a token of any role: nothing that is told is more than a viewer may ask."""
        if refused := self._turned_away(remote, request):
            return refused
        try:
            async with self._scraping:
                body, form = await self._in_pool(_scrape, self._context, request.headers.get("accept", ""))
        except Exception as error:
            return _problem_response(problem_of(error, "metrics"))
        return Response(body, media_type=form)

    async def _serve_nothing(self, remote: bool, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, path = HTTPStatus(error.status_code), request.url.path[:200]
        detail = {
            HTTPStatus.NOT_FOUND: f"there is nothing at {path}",
            HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method[:20]} is not possible at {path}",
        }.get(status, error.detail)
        refused = problem(status, detail, "see /schema", ExitCode.USAGE)
        response = self._turned_away(remote, request) or _problem_response(refused, error.headers)
        self._count(_NO_ROUTE, response, self._context.clock.monotonic_s())
        return response

    def _turned_away(self, remote: bool, request: Request) -> Response | None:
        """The answer to who has no token, or asks too much, whatever they ask."""
        try:
            if remote:
                self._admitted(request)
        except Refusal as refusal:
            return _problem_response(refusal.problem, refusal.headers)
        return None

    async def _serve(
        self, methods: Mapping[str, Route[Any, Any]], remote: bool, request: Request
    ) -> Response:
        route = methods[request.method]
        began_s = self._context.clock.monotonic_s()
        principal = Principal(LOCAL, Role.ADMIN, LOCAL)
        told_to_wait = False
        try:
            if remote:
                principal = Principal("", None, source_of(request))
                principal = self._admitted(request)
                self._permitted(route, principal)
            response = await self._answer(route, principal, request)
        except Refusal as refusal:
            response = _problem_response(refusal.problem, refusal.headers)
            told_to_wait = "retry-after" in refusal.headers
        except ClientDisconnect:
            response = Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
        except Exception as error:
            response = _problem_response(problem_of(error, route.name))
        denied = response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        if (route.changes or route.secret or denied) and not told_to_wait:  # a flood fills no log
            target = getattr(request.state, "target", "/".join(request.path_params.values()))
            await self.note(principal, route.name, target, response.status_code)
        self._count(route.name, response, began_s)
        return response

    async def note(self, principal: Principal, verb: str, target: str, status: int) -> None:
        """Write an entry of the audit log, before the client has its answer: what was answered is in it."""
        noted = self._context.store.submit(note_request, principal, verb, target, status)
        noted.add_done_callback(_noted)
        with contextlib.suppress(StageloomError):
            await asyncio.wrap_future(noted)

    # -- for the page ---------------------------------------------------------------------------------------

    async def carry_out(
        self, route: Route[Any, Any], target: str, principal: Principal, do: Callable[[ApiCall], Any]
    ) -> Any:
        """What `do` makes of a verb that a person at the page wants: for its role alone, in turn, and in the
        audit log. Of a job it returns the work, and the answer is the job.

        Raises:
            Refusal, ApiRefused: it was not done.
        """
        status: int = HTTPStatus.OK
        try:
            self._permitted(route, principal)
            async with self._turns[principal.name]:
                reply = await self._in_pool(do, ApiCall(principal))
                if isinstance(reply, Future):
                    reply = await asyncio.wrap_future(reply)
            if route.form is AnswerForm.JOB:
                return self._context.jobs.start(route.name, principal.name, reply)
            return reply
        except Refusal as refusal:
            status = refusal.problem.status
            raise
        except Exception as error:
            refused = problem_of(error, route.name)
            status = refused.status
            raise ApiRefused(refused) from error
        finally:
            await self.note(principal, route.name, target, status)

    def _page(self) -> list[HttpRoute]:
        """The page's own addresses; what is served at each is counted as `page`."""

        async def serve(request: Request) -> Response:
            began_s = self._context.clock.monotonic_s()
            response = await self._site.serve(request)
            self._count("page", response, began_s)
            return response

        return [HttpRoute(path, serve, methods=["GET", "POST"]) for path in ("/ui", "/ui/{rest:path}")]

    # -- who asks -------------------------------------------------------------------------------------------

    def _admitted(self, request: Request) -> Principal:
        tokens, now_s, source = (
            self._context.live.tokens,
            self._context.clock.monotonic_s(),
            source_of(request),
        )
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip().partition(".")[0]  # what follows is for the client, and some send it
        principal = tokens.principal(bearer, source) if scheme.lower() == "bearer" else None
        if principal is None:
            headers = {"www-authenticate": "Bearer"}
            if not tokens.may_fail(source, now_s):
                headers |= {"retry-after": "1", "connection": "close"}
            cause = "no valid access token came with the request"
            remedy = "make one with `stageloom access create` where the planner runs"
            raise Refusal(problem(HTTPStatus.UNAUTHORIZED, cause, remedy, ExitCode.DENIED), headers)
        if not tokens.may_ask(principal, now_s):
            raise too_many(f"requests of {principal.name}")
        return principal

    def _permitted(self, route: Route[Any, Any], principal: Principal) -> None:
        if not principal.may(route.role):
            role = principal.role.value if principal.role is not None else "nobody"
            cause = f"{route.name} is for the role {route.role.value}, and {principal.name} is {role}"
            raise Refusal(problem(HTTPStatus.FORBIDDEN, cause, "use a token of that role", ExitCode.DENIED))

    # -- what they ask --------------------------------------------------------------------------------------

    async def _answer(self, route: Route[Any, Any], principal: Principal, request: Request) -> Response:
        body = await receive(request, self._limits) if route.has_body else b""
        asked = bind(route, request.path_params, request.query_params.multi_items(), body)
        request.state.target = _target(route, asked)
        key = request.headers.get(KEY_HEADER)
        if route.form is not AnswerForm.UPLOAD:
            return await self._carry_out(route, asked, key, ApiCall(principal), request)
        with tempfile.TemporaryDirectory(prefix=".upload-", dir=self._context.config.data_dir) as folder:
            path = Path(folder, "body")
            await receive_file(request, path, self._limits)
            return await self._carry_out(route, asked, key, ApiCall(principal, path), request)

    async def _carry_out(
        self, route: Route[Any, Any], asked: Any, key: str | None, call: ApiCall, request: Request
    ) -> Response:
        if route.form is AnswerForm.EVENTS:
            return await self._events(route, asked, call)
        if key is None or not route.creates:
            return await self._run(route, asked, call, request)
        if not 1 <= len(key) <= _KEY_MAX or not key.isascii() or not key.isprintable():
            raise InputError(
                "the idempotency key is not acceptable", remedy=f"use 1 to {_KEY_MAX} ASCII characters"
            )
        use = KeyUse(call.principal.name, key, request_digest(route, asked))
        with self._remembered.in_use(use):
            kept = await self._remembered.take(use)
            if kept is not None:
                body = self._remembered.again(route, use, kept)
                return Response(body, kept.status, media_type="application/json")
            try:
                response = await self._run(route, asked, call, request)
            except Exception as error:
                if did_nothing(error):
                    await self._remembered.give_back(use)
                raise
            body = b"" if route.secret else bytes(response.body)
            await self._remembered.keep(use, response.status_code, body)
            return response

    async def _in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _run(self, route: Route[Any, Any], asked: Any, call: ApiCall, request: Request) -> Response:
        name = call.principal.name
        async with contextlib.nullcontext() if name == LOCAL else self._turns[name]:
            reply = await self._in_pool(self._handlers[route], self._context, asked, call)
            if isinstance(reply, SearchFuture):
                reply = await _while_asked(reply, request)
            elif isinstance(reply, Future):  # a change of the store goes on, whoever has gone
                reply = await asyncio.wrap_future(reply)
        failpoint("planner.api.answer")
        if route.form is AnswerForm.JOB:
            info = self._context.jobs.start(route.name, call.principal.name, reply)
            return _json(info, HTTPStatus.ACCEPTED, {"location": f"/v1/jobs/{info.job}"})
        if route.form is AnswerForm.DOWNLOAD:
            return _RemovedFile(reply)
        return _json(reply, HTTPStatus.CREATED if route.creates else HTTPStatus.OK)

    # -- streams --------------------------------------------------------------------------------------------

    async def _events(self, route: Route[Any, Any], asked: Any, call: ApiCall) -> Response:
        """A stream, once its first item is there: what is wrong with the request is answered as ever."""
        name = call.principal.name
        if self._streams[name] >= (self._limits.streams if name == LOCAL else self._limits.streams_of_one):
            raise too_many(f"open event streams of {name}")
        self._loop = asyncio.get_running_loop()
        self._streams[name] += 1
        try:
            items = await self._in_pool(self._handlers[route], self._context, asked, call)
            first = await self._in_pool(next, items, _END)
        except BaseException:
            self._streams[name] -= 1
            raise
        return _Events(self._stream(first, items, call.principal), lambda: self._streams.subtract((name,)))

    async def _stream(self, item: Any, items: Iterator[Any], principal: Principal) -> AsyncIterator[bytes]:
        """Each item as an event (name, value), while the token holds; a number is seconds to wait."""
        silent_s, tokens = 0.0, self._context.live.tokens
        try:
            while item is not _END and not self._ending.is_set():
                if principal.name != LOCAL and not tokens.holds(principal):
                    return
                if isinstance(item, tuple):
                    yield event(*item)
                    silent_s = 0.0
                else:
                    while item > 0.0 and not self._ending.is_set():
                        pause_s = min(item, _STILL_S)
                        await self._wait(pause_s)
                        item, silent_s = item - pause_s, silent_s + pause_s
                        if silent_s >= _STILL_S:
                            yield b": still there\n\n"
                            silent_s = 0.0
                item = await self._in_pool(next, items, _END)
            if item is not _END and not isinstance(item, tuple):
                item = await self._in_pool(next, items, _END)
            if isinstance(item, tuple) and item[0] == "end":  # of what has just ended with the planner
                yield event(*item)
        except Exception as error:
            yield event("problem", problem_of(error, "a stream"))

    async def _wait(self, seconds: float) -> None:
        """Wait, or until all streams end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)


def _scrape(context: ApiContext, accept: str) -> tuple[bytes, str]:
    from stageloom.planner.metrics.scrape import scrape  # nobody who is not scraped needs it

    return scrape(context, accept)


_NO_ROUTE: Final = "none"
_END: Final = object()
_GONE: Final = (ClientDisconnect, TimeoutError)


async def _while_asked(reply: "SearchFuture[Any]", request: Request) -> Any:
    """What is computed elsewhere for a client, for as long as the client is there: one that asks for much and
    goes keeps neither its turns nor the process.

    Raises:
        ClientDisconnect: it has gone.
    """
    answer = asyncio.wrap_future(reply)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        gone.cancel()
        answer.cancel()


async def _gone(request: Request) -> None:
    """Returns once the client has hung up; what is left of its body is dropped."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(name: str, value: Any) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


class _Events(StreamingResponse):
    """Server-sent events; `ended` is called once they are sent, or the client has gone or does not read."""

    def __init__(self, parts: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(parts, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


class _RemovedFile(FileResponse):
    """A file that is removed once it was sent, or the client has gone. It was made for this request, so there
    are no parts of it to come back for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, media_type="application/octet-stream")
        del self.headers["accept-ranges"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"range"]}
        try:
            await super().__call__(whole, receive, send)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _noted(entry: "Future[None]") -> None:
    if not entry.cancelled() and (error := entry.exception()):
        logger.warning("the audit log lacks an entry: %s", error)


def _target(route: Route[Any, Any], asked: Any) -> str:
    """What a request is about, for the audit log: what its path names, else what it is to be called."""
    values = [getattr(asked, name) for name in route.path_fields]
    values = values or [
        getattr(asked, name, None) for name in ("name", "device", "plan", "rollout", "model", "webhook")
    ]
    return "/".join(str(value) for value in values if value is not None)


def _json(value: Any, status: HTTPStatus, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _problem_response(refused: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(refused), refused.status, headers, problems.MEDIA_TYPE)


async def _internal(request: Request, error: Exception) -> Response:
    if isinstance(error, _GONE):
        return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
    return _problem_response(problem_of(error, f"{request.method} {request.url.path}"))


def _in_time(application: ASGIApp, send_s: float) -> ASGIApp:
    """Gives an answer up whose client does not read on, or which is not there when the planner stops."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(send_s):
                await send(message)

        with contextlib.suppress(*_GONE, asyncio.CancelledError):
            await application(scope, receive, send_in_time)

    return serve
