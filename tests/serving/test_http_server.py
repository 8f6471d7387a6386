"""The HTTP server by itself, over a client of the agent that answers when a test says so."""

import asyncio
import json
import socket
import threading
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import uvicorn
from uvicorn.server import ServerState

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.serving import http_api, http_server, inference, json_form
from stageloom.edge_agent.serving.body import WaitingBytes, compressed, encoding_for
from stageloom.edge_agent.serving.datatypes import PROTOCOL_NAMES
from stageloom.edge_agent.serving.http_api import HttpApi
from stageloom.edge_agent.serving.http_server import HttpServer, listen_on
from stageloom.edge_agent.serving.inference import InferenceService
from stageloom.edge_agent.serving.regions import RegionTable
from stageloom.edge_agent.serving.request_counts import RequestCounters, decode_requests
from stageloom.edge_agent.serving.verbs import Verbs
from stageloom.shared.errors import TaskCancelled
from tests.serving.played import PlayedTask

WAIT_S = 20.0
_COLUMNS = 1 << 16


def _model(name: str, columns: int) -> ModelSignature:
    return ModelSignature(
        name, (TensorInfo("x", "float32", (1, 1)),), (TensorInfo("y", "float32", (1, columns)),)
    )


class _PlayedClient:
    """Tasks of the models `small` and `large` complete at once, those of `held` when they are cancelled."""

    def __init__(self) -> None:
        self.held: asyncio.Queue[PlayedTask] = asyncio.Queue()

    def models(self) -> dict[str, ModelSignature]:
        columns = {"small": 4, "large": _COLUMNS, "held": 4}
        return {name: _model(name, count) for name, count in columns.items()}

    def submit(self, model: str, inputs: Any, *, deliver: Callable[[Any], Any], **_: Any) -> PlayedTask:
        task = PlayedTask()
        if model == "held":
            self.held.put_nowait(task)
        else:
            outputs = self.models()[model].outputs
            try:
                task.set_result(deliver({one.name: np.ones(one.shape, one.dtype) for one in outputs}))
            except Exception as error:  # as the client does
                task.set_exception(error)
        return task


class _Served:
    """What a test talks with."""

    def __init__(self, client: _PlayedClient, service: InferenceService) -> None:
        self.client = client
        self.service = service
        self.counters = RequestCounters()
        self.address = ("", 0)

    def statuses(self) -> dict[str, int]:
        """Of the requests for inference that were counted."""
        told = decode_requests(msgspec.json.encode(list(self.counters._methods.values())))
        return {status: count for one in told for status, count in one.statuses.items()}


Talk = Callable[[_Served], Coroutine[Any, Any, None]]


def _serve(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = _PlayedClient()
        monkeypatch.setattr(inference, "Client", lambda path: client)
        served = _Served(client, InferenceService(Path("none"), 4))
        verbs: Any = SimpleNamespace(service=served.service)
        api = HttpApi(verbs, frozenset(), 1 << 20, WaitingBytes(1 << 20), served.counters)
        listening = listen_on("127.0.0.1", 0)
        server = HttpServer(api.application, listening, None, 8)
        served.address = listening[0].getsockname()
        await server.start()
        try:
            await asyncio.wait_for(talk(served), WAIT_S)
        finally:
            await server.stop()

    asyncio.run(run())


def _request(model: str, binary: bool, headers: str = "") -> bytes:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}}).encode()
    return _post(model, body, headers)


def _post(model: str, body: bytes, headers: str) -> bytes:
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask(served: _Served, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer."""
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
    return head, body


@pytest.mark.parametrize(
    ("model", "binary", "headers", "on_loop"),
    [
        ("small", False, "", True),
        ("small", False, "Accept-Encoding: gzip\r\n", True),
        ("large", True, "", True),
        ("large", False, "", False),
        ("large", True, "Accept-Encoding: gzip\r\n", False),
        ("large", True, "Accept-Encoding: gzip;q=0\r\n", True),
    ],
)
def test_large_answers_are_written_in_json_and_compressed_by_a_thread(
    model: str, binary: bool, headers: str, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def watched(function: Any) -> Any:
        def call(*given: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*given)

        return call

    monkeypatch.setattr(http_api, "render_answer", watched(json_form.render_answer))
    monkeypatch.setattr(http_api, "compressed", watched(compressed))

    async def talk(served: _Served) -> None:
        head, body = await _ask(served, _request(model, binary, headers))
        if b"content-encoding: gzip" in head:
            body = zlib.decompress(body, 31)
        outputs = msgspec.json.decode(body[: body.index(b"}]}") + 3] if binary else body)["outputs"]
        columns = 4 if model == "small" else _COLUMNS
        assert outputs[0].get("data", [1.0] * columns) == [1.0] * columns
        assert served.statuses() == {"200": 1}
        assert served.service.statistics.of(model, 1)["inference_count"] == 1

    _serve(talk, monkeypatch)
    assert [thread is threading.main_thread() for thread in threads] == [on_loop] * len(threads)
    assert len(threads) == 1 + ("gzip\r" in headers)


def test_a_body_without_json_is_answered_with_all_outputs_as_binary_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def talk(served: _Served) -> None:
        given = np.ones((1, 1), np.float32).tobytes()
        head, body = await _ask(served, _post("small", given, "Inference-Header-Content-Length: 0\r\n"))
        assert head.startswith(b"http/1.1 200 ")
        assert body.endswith(b"}]}" + np.ones(4, np.float32).tobytes())

    _serve(talk, monkeypatch)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate, br", "gzip"),
        ("deflate;q=1.0, gzip;q=0.5", "deflate"),
        ("GZIP ; Q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("gzip;q=0, deflate", "deflate"),
        ("gzip;q=0.000", ""),
        ("gzip;q=0.1, identity;q=0.9", ""),
        ("identity", ""),
        ("*", ""),
        ("*;q=0", ""),
        ("identity;q=0", ""),
        ("identity;q=0, *", "gzip"),
        ("identity;q=0, gzip;q=0, *;q=0.1", "deflate"),
        ("gzip;q=0, deflate;q=0, *", ""),
        ("*;q=0, deflate;q=0.2", "deflate"),
        ("gzip;q=much", ""),
        ("br", ""),
        (",;=,", ""),
    ],
)
def test_an_answer_is_in_no_encoding_that_its_client_refuses(accepted: str, encoding: str) -> None:
    assert encoding_for(accepted) == encoding


@pytest.mark.parametrize(("encoding", "window_bits"), [("gzip", 31), ("deflate", 15)])
def test_what_is_compressed_can_be_read_again(encoding: str, window_bits: int) -> None:
    assert zlib.decompress(compressed(b"abc" * 100, encoding), window_bits) == b"abc" * 100


def test_requests_are_told_why_while_the_agent_has_no_models_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """404 would say that there is no such model, which no client asks for again."""

    async def talk(served: _Served) -> None:
        with monkeypatch.context() as loading:
            loading.setattr(served.client, "models", dict)
            status = SimpleNamespace(ready=False, reason="a plan is being loaded")
            loading.setattr(inference, "ask_status", lambda path: status)
            head, body = await _ask(served, _request("small", True))
            assert head.startswith(b"http/1.1 503 ")
            assert json.loads(body)["error"].startswith("a plan is being loaded; ")
            assert not await Verbs(served.service, RegionTable()).model_ready("small", "")
        for model, status_line in (("small", b"http/1.1 200 "), ("none", b"http/1.1 404 ")):
            head, _ = await _ask(served, _request(model, True))
            assert head.startswith(status_line)

    _serve(talk, monkeypatch)


@pytest.mark.promise("serving-calls-end")
def test_a_request_whose_client_goes_cancels_its_tasks_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(served: _Served) -> None:
        _, writer = await asyncio.open_connection(*served.address)
        writer.write(_request("held", False))
        task = await served.client.held.get()
        writer.close()
        assert isinstance(await asyncio.to_thread(task.exception, WAIT_S), TaskCancelled)
        await _ask(served, _request("small", False))
        assert served.statuses() == {"200": 1, "400": 1}
        phases = served.service.statistics.of("held", 1)["inference_stats"]
        assert (phases["success"]["count"], phases["fail"]["count"]) == (0, 1)

    _serve(talk, monkeypatch)
    assert not caplog.records


@pytest.mark.parametrize(
    "newer", [TensorInfo("y", "int32", (1, 4)), TensorInfo("z", "float32", (1, 4))], ids=["type", "name"]
)
def test_an_answer_is_of_the_outputs_that_its_model_has_since_a_moment(
    newer: TensorInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A model is known. 2. A plan changes its output. 3. A request comes before it is asked for."""
    monkeypatch.setattr(inference, "_KNOWN_S", WAIT_S)

    async def talk(served: _Served) -> None:
        await _ask(served, _request("small", False))
        changed = {"small": ModelSignature("small", _model("small", 4).inputs, (newer,))}
        monkeypatch.setattr(served.client, "models", lambda: changed)
        head, body = await _ask(served, _request("small", False))
        assert head.startswith(b"http/1.1 200 ")
        (made,) = json.loads(body)["outputs"]
        datatype = PROTOCOL_NAMES[newer.dtype]
        assert made == {"name": newer.name, "datatype": datatype, "shape": [1, 4], "data": [1] * 4}

    _serve(talk, monkeypatch)


def test_a_client_that_does_not_read_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_ANSWER_S", 0.05)

    async def talk(served: _Served) -> None:
        _, writer = await asyncio.open_connection(*served.address, limit=1 << 10)
        request = _request("large", False)
        with pytest.raises(ConnectionError):
            while True:  # answers that nobody reads pile up
                writer.write(request)
                await writer.drain()
                await asyncio.sleep(0)

    _serve(talk, monkeypatch)


def test_a_name_is_served_at_all_its_addresses_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["127.0.0.1", "192.0.2.1", "127.0.0.2", "127.0.0.1"]

    def addresses(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", addresses)
            listening = listen_on("board", 0)
        port = listening[0].getsockname()[1]
        assert [one.getsockname() for one in listening] == [("127.0.0.1", port), ("127.0.0.2", port)]
        server = HttpServer(application, listening, None, 8)
        await server.start()
        for address in ("127.0.0.1", "127.0.0.2"):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
        await server.stop()

    asyncio.run(run())


def test_a_name_without_an_address_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    with pytest.raises(OSError, match="Cannot assign"):
        listen_on("board", 0)


class _PlayedLoop:
    """Timers that a test lets pass."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        timer = SimpleNamespace(seconds=seconds, callback=callback)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def create_task(self, work: Coroutine[Any, Any, None]) -> Any:
        work.close()  # a test answers instead
        return Future()


class _PlayedTransport:
    """Keeps what is asked of it."""

    def __init__(self) -> None:
        self.aborted = 0
        self.closed = False
        self.high: int | None = None

    def get_extra_info(self, name: str) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def abort(self) -> None:
        self.aborted += 1

    def write(self, body: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connection() -> tuple[Any, _PlayedLoop, _PlayedTransport]:
    """A connection that has begun and waits for a head."""
    loop, transport = _PlayedLoop(), _PlayedTransport()
    config = uvicorn.Config(
        lambda: None,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=http_server._IDLE_S,
    )
    config.load()
    made = http_server._BoundedHttp(8, config=config, server_state=ServerState(), app_state={}, _loop=loop)
    made.connection_made(transport)
    made._stop_timer()
    return made, loop, transport


_HEAD = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [(_HEAD + b"{", b"}  "), (_HEAD + b"{}  ", b"\r\n")],
    ids=["the rest of a refused body", "a stray line end"],
)
def test_a_connection_has_a_minute_until_the_next_request_whatever_follows_an_answer(
    before: bytes, after: bytes, connection: tuple[Any, _PlayedLoop, _PlayedTransport]
) -> None:
    """1. A request is refused. 2. Bytes come that are no request. 3. Nothing comes, or the next request."""
    made, loop, transport = connection
    made.data_received(before)
    assert made.answer(made.cycle.scope, 401, [], b"")
    made.data_received(after)
    assert not made.transport.is_closing()
    (timer,) = loop.timers
    assert timer.seconds == 60.0
    timer.callback()
    assert transport.closed
    transport.closed = False
    made.data_received(_HEAD)
    assert made.timeout_keep_alive_task is None
    assert loop.timers == [made._timer], "the next request has limits of its own"


def test_an_answer_has_a_minute_to_be_taken(connection: tuple[Any, _PlayedLoop, _PlayedTransport]) -> None:
    made, loop, transport = connection
    assert transport.high == 1, "every byte that waits is told"
    made.pause_writing()
    (timer,) = loop.timers
    assert timer.seconds == 60.0
    made.on_message_begin()  # the next request has its own limits
    made._stop_timer()
    assert loop.timers == [timer]
    timer.callback()
    assert transport.aborted == 1


def test_an_answer_that_is_taken_in_time_leaves_no_limit(
    connection: tuple[Any, _PlayedLoop, _PlayedTransport],
) -> None:
    made, loop, transport = connection
    made.pause_writing()
    made.resume_writing()
    assert (loop.timers, transport.aborted, made.flow.write_paused) == ([], 0, False)
    made.pause_writing()
    made.connection_lost(ConnectionResetError())
    assert not loop.timers
