"""The gRPC server by itself, over a service that answers when a test says so."""

import gc
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from stageloom.edge_agent.serving.grpc_api import GrpcServer
from stageloom.edge_agent.serving.protocol import SERVICE, message
from stageloom.edge_agent.serving.request import InferenceAnswer, InferenceCall
from stageloom.shared.errors import TaskCancelled

WAIT_S = 20.0


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
        self.tasks: dict[str, _HeldTask] = {}
        self.ended: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self.submitted = threading.Semaphore(0)

    async def infer(self, call: InferenceCall, began_s: float, submitted: Any) -> InferenceAnswer:
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


@pytest.fixture
def channel(service: _HeldService) -> Iterator[Any]:
    verbs: Any = SimpleNamespace(service=service)
    server = GrpcServer(verbs, frozenset(), "127.0.0.1:0", 1 << 20, None)
    port = server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as connected:
        yield connected
    server.stop()


def _asked(model: str, number: int = 0) -> Any:
    return message("ModelInferRequest")(model_name=model, id=str(number))


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
