"""The protocol over HTTP, as an ASGI application."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as AsgiResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from stageloom.edge_agent.serving.access import check_account, check_token
from stageloom.edge_agent.serving.body import ReceivedBody, WaitingBytes, compressed, encoding_for
from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure, failure_of
from stageloom.edge_agent.serving.json_form import parse_request, raw_call, render_answer
from stageloom.edge_agent.serving.models import server_metadata
from stageloom.edge_agent.serving.regions import MemoryRegion
from stageloom.edge_agent.serving.request import InferenceAnswer
from stageloom.edge_agent.serving.request_counts import RequestCounters
from stageloom.edge_agent.serving.verbs import Verbs, no_cuda, no_log_settings, no_trace
from stageloom.shared.errors import InputError

Answer = Callable[[Request], Awaitable["Response"]]

_SMALL_BYTES: Final = 64 << 10  # of a body that is no inference request
_LONG_JSON: Final = 256 << 10  # bytes of JSON from which on a thread decodes it
_LONG_ELEMENTS: Final = 64 << 10  # bytes of an answer's elements that a thread writes in JSON, or compresses
_LENGTH_HEADER: Final = "inference-header-content-length"


class Response(AsgiResponse):
    """A response that is sent in one piece where the connection can."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["state"]["connection"].answer(scope, self.status_code, self.raw_headers, self.body):
            await super().__call__(scope, receive, send)


class HttpApi:
    """Routes and what they answer."""

    def __init__(
        self,
        verbs: Verbs,
        tokens: Set[str],
        message_bytes: int,
        waiting: WaitingBytes,
        counters: RequestCounters | None = None,
    ) -> None:
        """`waiting`: of all servers. `counters`: of requests; None: they are not counted."""
        self._counters = counters
        self._verbs = verbs
        self._tokens = tokens
        self._message_bytes = message_bytes
        self._waiting = waiting
        self.application = Router(routes=self._routes())

    def _routes(self) -> "list[Route]":
        table: list[tuple[str, str, Answer]] = [
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
            ("GET", "/v2", self._server),
            ("GET", "/v2/models/stats", self._statistics),
            ("POST", "/v2/repository/index", self._index),
            ("POST", "/v2/repository/models/{name}/load", self._load),
            ("POST", "/v2/repository/models/{name}/unload", self._unload),
            ("GET", "/v2/systemsharedmemory/status", self._region_status),
            ("GET", "/v2/systemsharedmemory/region/{region}/status", self._region_status),
            ("POST", "/v2/systemsharedmemory/region/{region}/register", self._register),
            ("POST", "/v2/systemsharedmemory/region/{region}/unregister", self._unregister),
            ("POST", "/v2/systemsharedmemory/unregister", self._unregister),
        ]
        for base in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            table.insert(0, ("POST", f"{base}/infer", self._infer))  # routes are tried in order
            table += [
                ("GET", base, self._metadata),
                ("GET", f"{base}/ready", self._model_ready),
                ("GET", f"{base}/config", self._config),
                ("GET", f"{base}/stats", self._statistics),
            ]
        for path, refusal in (
            ("/v2/cudasharedmemory/{rest:path}", no_cuda),
            ("/v2/trace/setting", no_trace),
            ("/v2/models/{name}/trace/setting", no_trace),
            ("/v2/logging", no_log_settings),
        ):
            refuse = partial(self._refuse, refusal)
            table += [("GET", path, refuse), ("POST", path, refuse)]
        unknown = partial(self._answer, self._unknown)
        return [
            *(Route(path, partial(self._answer, answer), methods=[method]) for method, path, answer in table),
            Route("/{rest:path}", unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
        ]

    async def _answer(self, answer: Answer, request: Request) -> Response:
        began_s = time.monotonic()
        response = await self._response(answer, request)
        if self._counters is not None:
            method = getattr(answer, "__name__", "_refused").removeprefix("_")
            seconds = time.monotonic() - began_s
            self._counters.add("http", method, str(response.status_code), seconds)
        return response

    async def _response(self, answer: Answer, request: Request) -> Response:
        try:
            check_token(request.headers.get("authorization", ""), self._tokens)
            return await answer(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except (Exception, HTTPException) as error:
            return _failed(failure_of(error))

    async def _unknown(self, request: Request) -> Response:
        path = request.url.path[:200]
        return _failed(InferenceFailure(FailureKind.NOT_FOUND, f"there is no {request.method} {path}"))

    async def _refuse(self, refusal: Callable[[], InferenceFailure], request: Request) -> Response:
        raise refusal()

    # Health, metadata, repository

    async def _live(self, request: Request) -> Response:
        return Response()

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if await self._verbs.service.ready() else 503)

    async def _server(self, request: Request) -> Response:
        return _json(server_metadata())

    async def _model_ready(self, request: Request) -> Response:
        name, version = _model_of(request)
        return Response(status_code=200 if await self._verbs.model_ready(name, version) else 400)

    async def _metadata(self, request: Request) -> Response:
        return _json(await self._verbs.metadata(*_model_of(request)))

    async def _config(self, request: Request) -> Response:
        return _json(await self._verbs.config(*_model_of(request)))

    async def _statistics(self, request: Request) -> Response:
        return _json(await self._verbs.statistics(*_model_of(request)))

    async def _index(self, request: Request) -> Response:
        asked = await self._small_body(request)
        return _json(await self._verbs.index(ready=asked.get("ready") is True))

    async def _load(self, request: Request) -> Response:
        asked = await self._small_body(request)
        await self._verbs.load(request.path_params["name"], asked.get("parameters"))
        return Response()

    async def _unload(self, request: Request) -> Response:
        await self._small_body(request)
        await self._verbs.unload(request.path_params["name"])
        return Response()

    # Shared memory

    async def _region_status(self, request: Request) -> Response:
        _check_account(request)
        return _json(list(self._verbs.region_status(request.path_params.get("region", "")).values()))

    async def _register(self, request: Request) -> Response:
        _check_account(request)
        asked = await self._small_body(request)
        key, offset, byte_size = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        if type(key) is not str or type(offset) is not int or type(byte_size) is not int:
            raise InputError("a region has a key, an offset and a byte_size")
        self._verbs.regions.register(request.path_params["region"], key, offset, byte_size)
        return Response()

    async def _unregister(self, request: Request) -> Response:
        _check_account(request)
        self._verbs.regions.unregister(request.path_params.get("region", ""))
        return Response()

    async def _small_body(self, request: Request) -> dict[str, Any]:
        with ReceivedBody(self._waiting) as received:
            body = await received.receive(request, _SMALL_BYTES)
            if not body:
                return {}
            try:
                return msgspec.json.decode(body, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as error:
                raise InputError(f"failed to parse the request JSON: {str(error)[:200]}") from error

    # Inference

    async def _infer(self, request: Request) -> Response:
        began_s = time.monotonic()
        name, version = _model_of(request)
        model = await self._verbs.service.model(name, version)
        most = min(self._message_bytes, self._verbs.service.body_limit(model))
        length = request.headers.get(_LENGTH_HEADER)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 19):
            raise InputError(f"{_LENGTH_HEADER} is {length[:32]!r}, no number")
        header_length = None if length is None else int(length)

        def find(region: str) -> MemoryRegion:
            _check_account(request)
            return self._verbs.regions.get(region)

        with ReceivedBody(self._waiting) as received:
            body = await received.receive(request, most)
            if header_length == 0:
                call = raw_call(model, version, body)
            elif (len(body) if header_length is None else header_length) > _LONG_JSON:
                call = await asyncio.to_thread(parse_request, name, version, body, header_length, find)
            else:
                call = parse_request(name, version, body, header_length, find)
            with request.state.connection.work_for_client():
                answer = await self._verbs.service.infer(call, began_s)
        accepted = request.headers.get("accept-encoding")
        encoding = encoding_for(accepted) if accepted else ""
        if _is_long(answer, encoding):
            whole, json_length = await asyncio.to_thread(_render, answer, encoding)
        else:
            whole, json_length = _render(answer, encoding)
        headers = {"content-encoding": encoding} if encoding else {}
        if json_length is None:
            return Response(whole, headers=headers, media_type="application/json")
        headers[_LENGTH_HEADER] = str(json_length)
        return Response(whole, headers=headers, media_type="application/octet-stream")


def _is_long(answer: InferenceAnswer, encoding: str) -> bool:
    """Whether to make its body takes so long that the event loop must not wait for it."""
    laboured = (one.elements or () for one in answer.outputs if encoding or not one.wanted.binary)
    return sum(len(part) for elements in laboured for part in elements) > _LONG_ELEMENTS


def _render(answer: InferenceAnswer, encoding: str) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON before it was compressed where elements follow.

    Raises:
        InferenceFailure: an output that JSON cannot hold.
    """
    parts, json_length = render_answer(answer)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    return compressed(body, encoding) if encoding else body, json_length


def _model_of(request: Request) -> tuple[str, str]:
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _check_account(request: Request) -> None:
    """Once for each connection: whose it is does not change."""
    connection = request.state.connection
    if not connection.of_this_account:
        check_account(request.scope.get("client"), request.scope.get("server"))
        connection.of_this_account = True


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _failed(failure: InferenceFailure) -> Response:
    body = msgspec.json.encode({"error": str(failure)})
    headers = {"www-authenticate": "Bearer"} if failure.kind is FailureKind.STRANGER else None
    return Response(body, failure.kind.status, headers, media_type="application/json")
