"""`GET /metrics` as an ASGI application; the agent is asked anew for every scrape."""

import asyncio
from collections.abc import Callable, Set
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from stageloom.edge_agent.serving.access import check_token
from stageloom.edge_agent.serving.failures import InferenceFailure
from stageloom.shared.errors import StageloomError

PATH: Final = "/metrics"
_TEXT: Final = "text/plain; charset=utf-8"


def metrics_application(scrape: Callable[[str], tuple[bytes, str]], tokens: Set[str]) -> ASGIApp:
    """`scrape`: (body, content type) from an Accept header; it runs on a thread, one at a time.

    Whoever has none of the `tokens` is turned away; without tokens nobody is.
    """
    turn = asyncio.Lock()

    async def answer(scope: Scope) -> tuple[HTTPStatus, bytes, str]:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            check_token(headers.get(b"authorization", ""), tokens)
        except InferenceFailure as error:
            return HTTPStatus.UNAUTHORIZED, str(error).encode(), _TEXT
        if scope["path"] != PATH:
            return HTTPStatus.NOT_FOUND, f"metrics are at {PATH}\n".encode(), _TEXT
        if scope["method"] != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is possible\n", _TEXT
        try:
            async with turn:
                body, form = await asyncio.to_thread(scrape, headers.get(b"accept", ""))
        except StageloomError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), _TEXT
        return HTTPStatus.OK, body, form

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        status, body, form = await answer(scope)
        headers = [(b"content-type", form.encode()), (b"content-length", str(len(body)).encode())]
        if status is HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return serve
