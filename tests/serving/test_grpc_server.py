"""The gRPC server by itself, over a service that answers when a test says so."""

import contextlib
import gc
import queue
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from stageloom.edge_agent.serving import grpc_api
from stageloom.edge_agent.serving.body import WaitingBytes
from stageloom.edge_agent.serving.failures import InferenceFailure
from stageloom.edge_agent.serving.grpc_api import GrpcServer, server_ends
from stageloom.edge_agent.serving.http_server import address_text, listen_on
from stageloom.edge_agent.serving.protocol import SERVICE, message
from stageloom.edge_agent.serving.request import InferenceAnswer, InferenceCall
from stageloom.edge_agent.serving.request_counts import RequestCounters
from stageloom.shared.errors import TaskCancelled
from tests.agent.conftest import eventually

WAIT_S = 20.0
MOST_BYTES = 1 << 12  # of a request
MOST_WAITING = 1 << 15  # of all requests


class _HeldTask(Future[Any]):
    """A task that ends only by being cancelled, as the client's do: its result is then an error."""

    def __init__(self) -> None:
        super().__init__()
        self.cancellations = 0
        self.asked = threading.Event()

    def cancel(self) -> bool:
        self.cancellations += 1
        if not self.done():
            self.set_exception(TaskCancelled("the task was cancelled"))
        self.asked.set()
        return True


class _HeldService:
    """Holds requests for the model `held` until they are cancelled; answers others at once.

    `ended`: the tasks of these others that somebody still keeps.
    """

    def __init__(self) -> None:
        self.waiting = WaitingBytes(MOST_WAITING)
        self.tasks: dict[str, _HeldTask] = {}
        self.ended: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self.submitted = threading.Semaphore(0)
        self.began_s = 0.0  # of the newest request

    async def model(self, name: str, version: str) -> str:
        return name

    def body_limit(self, model: str) -> int:
        return MOST_BYTES

    async def infer(self, call: InferenceCall, began_s: float, submitted: Any) -> InferenceAnswer:
        self.began_s = began_s
        if call.model == "held":
            task = self.tasks[call.id] = _HeldTask()
            submitted([task])
            self.submitted.release()
            task.result()
        else:
            brief: Future[Any] = Future()
            self.ended.add(brief)
            submitted([brief])
            brief.set_result(bytes(1 << 10))
        return InferenceAnswer(call, 1, [])


@pytest.fixture
def service() -> _HeldService:
    return _HeldService()


@contextlib.contextmanager
def _served(
    service: _HeldService, host: str, tokens: Set[str] = frozenset(), counters: RequestCounters | None = None
) -> Iterator[int]:
    verbs: Any = SimpleNamespace(service=service, region_status=lambda name: {})
    server = GrpcServer(verbs, tokens, address_text(host, 0), 1 << 20, service.waiting, None, counters)
    yield server.start()
    server.stop()


@pytest.fixture
def channel(service: _HeldService) -> Iterator[Any]:
    with _served(service, "127.0.0.1") as port, grpc.insecure_channel(f"127.0.0.1:{port}") as connected:
        yield connected


def _asked(model: str, number: int = 0, nbytes: int = 0) -> Any:
    asked = message("ModelInferRequest")(model_name=model, id=str(number))
    if nbytes:
        asked.parameters["filling"].string_param = "x" * nbytes
    return asked


def _unary(channel: Any) -> Any:
    return channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        request_serializer=message("ModelInferRequest").SerializeToString,
        response_deserializer=message("ModelInferResponse").FromString,
    )


def _stream(channel: Any, requests: Iterator[Any]) -> Any:
    made = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=message("ModelInferRequest").SerializeToString,
        response_deserializer=message("ModelStreamInferResponse").FromString,
    )
    return made(requests)


def _wait_for(service: _HeldService, count: int) -> None:
    for _ in range(count):
        assert service.submitted.acquire(timeout=WAIT_S)


@pytest.mark.promise("serving-calls-end")
def test_a_call_that_its_client_cancels_cancels_its_tasks(channel: Any, service: _HeldService) -> None:
    call = _unary(channel).future(_asked("held"))
    _wait_for(service, 1)
    call.cancel()
    assert service.tasks["0"].asked.wait(WAIT_S)


@pytest.mark.promise("serving-calls-end")
def test_a_call_whose_deadline_passes_cancels_its_tasks(channel: Any, service: _HeldService) -> None:
    call = _unary(channel).future(_asked("held"), timeout=2.0)
    _wait_for(service, 1)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.tasks["0"].asked.wait(WAIT_S)


@pytest.mark.promise("serving-calls-end")
def test_a_stream_works_on_32_requests_at_once_and_is_gone_when_its_client_cancels(
    channel: Any, service: _HeldService
) -> None:
    stream = _stream(channel, (_asked("held", number) for number in range(100)))
    _wait_for(service, 32)
    assert not service.submitted.acquire(timeout=0.2)
    stream.cancel()
    for task in list(service.tasks.values()):
        assert task.asked.wait(WAIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("stageloom-grpc-reader"):
            thread.join(WAIT_S)
            assert not thread.is_alive()
    assert len(service.tasks) < 100


def test_a_stream_answers_a_hundred_requests_in_their_order(channel: Any) -> None:
    answers = list(_stream(channel, (_asked("free", number) for number in range(100))))
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(100)]


def test_an_open_stream_keeps_no_task_that_has_ended(channel: Any, service: _HeldService) -> None:
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stream = _stream(channel, iter(asked.get, None))
    for number in range(200):
        asked.put(_asked("free", number))
        assert next(stream).infer_response.id == str(number)
    gc.collect()
    assert len(service.ended) < 5
    asked.put(None)
    assert not list(stream)


@pytest.mark.promise("serving-calls-end")
def test_calls_that_wait_hold_up_no_others(channel: Any, service: _HeldService) -> None:
    held: Sequence[Any] = [_unary(channel).future(_asked("held", number)) for number in range(40)]
    _wait_for(service, 40)
    assert _unary(channel)(_asked("free"), timeout=WAIT_S).model_name == "free"
    for call in held:
        call.cancel()


def test_a_request_larger_than_its_model_takes_is_refused(channel: Any) -> None:
    with pytest.raises(grpc.RpcError, match="larger than 4096 bytes") as refused:
        _unary(channel)(_asked("free", nbytes=MOST_BYTES), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    (answer,) = _stream(channel, iter([_asked("free", 7, nbytes=MOST_BYTES)]))
    assert "larger than 4096 bytes" in answer.error_message
    assert answer.infer_response.id == "7"


def test_requests_in_work_share_what_may_wait_and_give_it_back(channel: Any, service: _HeldService) -> None:
    large = MOST_BYTES - 100
    held = [_unary(channel).future(_asked("held", number, large)) for number in range(4)]
    stream = _stream(channel, (_asked("held", number, large) for number in range(4, 8)))
    _wait_for(service, 8)
    with pytest.raises(grpc.RpcError, match="too many bytes") as refused:
        _unary(channel)(_asked("free", nbytes=large), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    (answer,) = _stream(channel, iter([_asked("free", 9, large)]))
    assert "too many bytes" in answer.error_message
    for call in (*held, stream):
        call.cancel()

    def all_is_free() -> bool:
        with contextlib.suppress(InferenceFailure):
            service.waiting.take(MOST_WAITING)
            return True
        return False

    eventually(all_is_free, "what ended has given back what it had")


class _HeldThreads:
    """Runs what was submitted when a test says so."""

    def __init__(self) -> None:
        self.run: list[Any] = []

    def submit(self, function: Any, *given: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.run.append(lambda: answer.set_result(function(*given)))
        return answer


def test_a_request_of_a_stream_is_timed_from_when_it_was_received(
    service: _HeldService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. It is received at 10 s. 2. A thread is free at 13 s, and answers at once."""
    now = SimpleNamespace(s=10.0)
    monkeypatch.setattr(grpc_api, "time", SimpleNamespace(monotonic=lambda: now.s))
    verbs: Any = SimpleNamespace(service=service)
    counters, threads = RequestCounters(), _HeldThreads()
    server = GrpcServer(verbs, frozenset(), "127.0.0.1:0", 1 << 20, service.waiting, None, counters)
    server._streamed = threads  # type: ignore[assignment]
    context = SimpleNamespace(add_callback=lambda callback: True, is_active=lambda: True)
    answer = server._begin_streamed(_asked("free", 7), context, grpc_api._OpenTasks(context))
    now.s = 13.0
    threads.run.pop()()
    assert answer.result(WAIT_S).infer_response.id == "7"
    (counted,) = counters._methods.values()
    assert (counted.method, counted.statuses) == ("ModelStreamInfer", {"OK": 1})
    assert counted.seconds.sum_s == 3.0
    assert service.began_s == 10.0, "its timeout counts from there, too"


def test_calls_without_a_token_are_counted_as_refused_be_they_streams_or_not(service: _HeldService) -> None:
    counters = RequestCounters()
    with (
        _served(service, "127.0.0.1", {"secret"}, counters) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as connected,
    ):
        with pytest.raises(grpc.RpcError, match="token"):
            _unary(connected)(_asked("free"), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError, match="token"):
            list(_stream(connected, iter([_asked("free")])))
    statuses = {one.method: one.statuses for one in counters._methods.values()}
    assert statuses == {method: {"UNAUTHENTICATED": 1} for method in ("ModelInfer", "ModelStreamInfer")}


def _ask_for_regions(address: str) -> None:
    with grpc.insecure_channel(address) as connected:
        asked = connected.unary_unary(
            f"/{SERVICE}/SystemSharedMemoryStatus",
            request_serializer=message("SystemSharedMemoryStatusRequest").SerializeToString,
            response_deserializer=message("SystemSharedMemoryStatusResponse").FromString,
        )
        asked(message("SystemSharedMemoryStatusRequest")(), timeout=WAIT_S)


def _is_here(address: str) -> bool:
    with contextlib.suppress(OSError):
        for bound in listen_on(address, 0):
            bound.close()
        return True
    return False


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "::1", "localhost", socket.gethostname()],
    ids=["version 4", "version 6", "localhost", "the machine's name"],
)
def test_programs_of_this_account_use_shared_memory_where_a_server_has_one_address(
    service: _HeldService, host: str
) -> None:
    if not _is_here(host):
        pytest.skip(f"{host} is no address of this machine")
    with _served(service, host) as port:
        for address, _ in server_ends(host, port).values():
            if _is_here(address):
                _ask_for_regions(address_text(address, port))


@pytest.mark.promise("serving-lets-in-only")
def test_nobody_uses_shared_memory_where_the_servers_end_is_not_known(service: _HeldService) -> None:
    with _served(service, "0.0.0.0") as port, pytest.raises(grpc.RpcError, match="more than one address"):
        _ask_for_regions(f"127.0.0.1:{port}")


def test_a_server_has_one_end_for_each_version_of_ip_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[str]] = {
        "localhost": ["::1", "127.0.0.1", "127.0.0.1"],
        "board": ["192.0.2.7", "192.0.2.8", "2001:db8::7"],
        "0.0.0.0": ["0.0.0.0"],
        "::": ["::"],
    }
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, **_: [(0, 0, 0, "", (one, port)) for one in found[host]]
    )
    assert server_ends("localhost", 8001) == {4: ("127.0.0.1", 8001), 6: ("::1", 8001)}
    assert server_ends("board", 8001) == {6: ("2001:db8::7", 8001)}
    assert server_ends("0.0.0.0", 8001) == server_ends("::", 8001) == {}
