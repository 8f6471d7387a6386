"""The protocol over gRPC: one handler per method of the service, each call in a thread of its own.

grpc's synchronous server answers a call sooner than the one for asyncio, which wakes the event loop by way of
a socket for every event of every call.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf.json_format import ParseDict

from stageloom.edge_agent.ingest.client import TaskFuture
from stageloom.edge_agent.serving.access import check_account, check_token
from stageloom.edge_agent.serving.body import WaitingBytes, too_large
from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure, failure_of
from stageloom.edge_agent.serving.grpc_form import answer_message, parse_call, plain
from stageloom.edge_agent.serving.models import server_metadata
from stageloom.edge_agent.serving.protocol import SERVICE, message, service
from stageloom.edge_agent.serving.regions import MemoryRegion
from stageloom.edge_agent.serving.request_counts import RequestCounters
from stageloom.edge_agent.serving.settings import host_and_port
from stageloom.edge_agent.serving.verbs import Verbs, no_cuda, no_log_settings, no_trace
from stageloom.edge_agent.serving.waiting import blocking
from stageloom.shared.errors import StageloomError

_AHEAD: Final = 32  # requests of a stream that are worked on at once
_CALLS: Final = 256  # of all clients at once; a thread each, made when it is needed
_STREAMED: Final = 256  # requests of all streams that are worked on at once, a thread each
_FRAME_BYTES: Final = (1 << 24) - 1  # HTTP/2's most: tensors come in few pieces
_WINDOW_BYTES: Final = 4 << 20  # a stream may send ahead
_FINISH_S: Final = 5.0
_HANDSHAKE_S: Final = 10.0  # of TLS, and of HTTP/2 before the first call


class GrpcServer:
    """Serves from `start` to `stop`."""

    def __init__(
        self,
        verbs: Verbs,
        tokens: Set[str],
        address: str,
        message_bytes: int,
        waiting: WaitingBytes,
        certificate: tuple[bytes, bytes] | None,
        counters: RequestCounters | None = None,
    ) -> None:
        """`verbs`: of a service `in_threads`. `certificate`: it and its key in PEM, for TLS.

        `waiting`: of all servers. `counters`: of requests; None: they are not counted.
        """
        self._counters = counters
        self._verbs = verbs
        self._tokens = tokens
        self._address = address
        self._message_bytes = message_bytes
        self._waiting = waiting
        self._certificate = certificate
        self._ends: dict[int, tuple[str, int]] = {}
        self._server: Any = None
        self._threads = ThreadPoolExecutor(_CALLS, "stageloom-grpc")
        self._streamed = ThreadPoolExecutor(_STREAMED, "stageloom-grpc-streamed")

    def start(self) -> int:
        """Bind and serve; the port.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        self._server = grpc.server(
            self._threads,
            maximum_concurrent_rpcs=_CALLS,
            options=[
                ("grpc.max_receive_message_length", self._message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.max_frame_size", _FRAME_BYTES),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
                ("grpc.so_reuseport", 0),  # a second server must not share the port in silence
            ],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        if self._certificate is None:
            port = self._server.add_insecure_port(self._address)
        else:
            certificate, key = self._certificate
            credentials = grpc.ssl_server_credentials([(key, certificate)])
            port = self._server.add_secure_port(self._address, credentials)
        host, _ = host_and_port(self._address)
        self._ends = server_ends(host, port)
        self._server.start()
        return int(port)

    def stop(self) -> None:
        """Take no more calls; those in work get a few seconds."""
        self._server.stop(_FINISH_S).wait()
        self._threads.shutdown(wait=False)
        self._streamed.shutdown(wait=False)

    def _handlers(self) -> Any:
        handlers = {}
        handle: Any
        for method in service().methods:
            asked, answer = message(method.input_type.name), message(method.output_type.name)
            if method.client_streaming:
                make, handle = grpc.stream_stream_rpc_method_handler, self._stream
            else:
                make, handle = (
                    grpc.unary_unary_rpc_method_handler,
                    partial(self._unary, method.name, self._verb(method.name)),
                )
            handlers[method.name] = make(
                handle, request_deserializer=asked.FromString, response_serializer=answer.SerializeToString
            )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _verb(self, name: str) -> Any:
        refused: dict[str, Callable[[], InferenceFailure]] = {
            "CudaSharedMemoryStatus": no_cuda,
            "CudaSharedMemoryRegister": no_cuda,
            "CudaSharedMemoryUnregister": no_cuda,
            "TraceSetting": no_trace,
            "LogSettings": no_log_settings,
        }
        if name in refused:
            return partial(self._refuse, refused[name])
        return getattr(self, f"_{name}")

    def _unary(self, method: str, verb: Any, asked: Any, context: Any) -> Any:
        began_s = time.monotonic()
        status = grpc.StatusCode.OK.name
        try:
            self._check_token(context)
            return blocking(verb(asked, context))
        except Exception as error:
            failure = failure_of(error)
            status = failure.kind.code if context.is_active() else grpc.StatusCode.CANCELLED.name
        finally:
            self._count(method, status, began_s)
        return context.abort(getattr(grpc.StatusCode, failure.kind.code), str(failure))

    def _count(self, method: str, status: str, began_s: float) -> None:
        if self._counters is not None:
            self._counters.add("grpc", method, status, time.monotonic() - began_s)

    def _check_token(self, context: Any) -> None:
        if self._tokens:
            metadata = dict(context.invocation_metadata() or ())
            check_token(str(metadata.get("authorization", "")), self._tokens)

    def _check_account(self, context: Any) -> None:
        client = _address_of(context.peer())
        version = 0 if client is None else ip_address(client[0]).version
        if client is not None and version not in self._ends:
            raise InferenceFailure(
                FailureKind.FORBIDDEN,
                "shared memory is refused where gRPC is served at more than one address of a kind, "
                "since it does not tell which of them a client has connected to",
                remedy="serve gRPC at an address such as 127.0.0.1:8001, or send the tensors in the request",
            )
        check_account(client, self._ends.get(version))

    async def _refuse(self, refusal: Callable[[], InferenceFailure], asked: Any, context: Any) -> Any:
        raise refusal()

    # Health, metadata, repository; named as the protocol names them

    async def _ServerLive(self, asked: Any, context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _ServerReady(self, asked: Any, context: Any) -> Any:
        return message("ServerReadyResponse")(ready=await self._verbs.service.ready())

    async def _ModelReady(self, asked: Any, context: Any) -> Any:
        ready = await self._verbs.model_ready(asked.name, asked.version)
        return message("ModelReadyResponse")(ready=ready)

    async def _ServerMetadata(self, asked: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(**server_metadata())

    async def _ModelMetadata(self, asked: Any, context: Any) -> Any:
        found = await self._verbs.metadata(asked.name, asked.version)
        return ParseDict(found, message("ModelMetadataResponse")())

    async def _ModelConfig(self, asked: Any, context: Any) -> Any:
        found = await self._verbs.config(asked.name, asked.version)
        return ParseDict({"config": found}, message("ModelConfigResponse")())

    async def _ModelStatistics(self, asked: Any, context: Any) -> Any:
        found = await self._verbs.statistics(asked.name, asked.version)
        return ParseDict(found, message("ModelStatisticsResponse")())

    async def _RepositoryIndex(self, asked: Any, context: Any) -> Any:
        found = await self._verbs.index(ready=asked.ready)
        return ParseDict({"models": found}, message("RepositoryIndexResponse")())

    async def _RepositoryModelLoad(self, asked: Any, context: Any) -> Any:
        await self._verbs.load(asked.model_name, plain(asked.parameters))
        return message("RepositoryModelLoadResponse")()

    async def _RepositoryModelUnload(self, asked: Any, context: Any) -> Any:
        await self._verbs.unload(asked.model_name)
        return message("RepositoryModelUnloadResponse")()

    # Shared memory

    async def _SystemSharedMemoryStatus(self, asked: Any, context: Any) -> Any:
        self._check_account(context)
        found = {"regions": self._verbs.region_status(asked.name)}
        return ParseDict(found, message("SystemSharedMemoryStatusResponse")())

    async def _SystemSharedMemoryRegister(self, asked: Any, context: Any) -> Any:
        self._check_account(context)
        self._verbs.regions.register(asked.name, asked.key, asked.offset, asked.byte_size)
        return message("SystemSharedMemoryRegisterResponse")()

    async def _SystemSharedMemoryUnregister(self, asked: Any, context: Any) -> Any:
        self._check_account(context)
        self._verbs.regions.unregister(asked.name)
        return message("SystemSharedMemoryUnregisterResponse")()

    # Inference

    async def _ModelInfer(self, asked: Any, context: Any) -> Any:
        began_s = time.monotonic()
        nbytes = asked.ByteSize()
        self._waiting.take(nbytes)
        try:
            return await self._infer(asked, context, _OpenTasks(context), began_s)
        finally:
            self._waiting.give_back(nbytes)

    async def _infer(self, asked: Any, context: Any, tasks: "_OpenTasks", began_s: float) -> Any:
        """`began_s`: when the request was received, from when its timeout counts."""
        model = await self._verbs.service.model(asked.model_name, asked.model_version)
        most = self._verbs.service.body_limit(model)
        if asked.ByteSize() > most:
            raise too_large(most)

        def find(region: str) -> MemoryRegion:
            self._check_account(context)
            return self._verbs.regions.get(region)

        found = await self._verbs.service.infer(parse_call(asked, find), began_s, tasks.add)
        return answer_message(found)

    def _stream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Answers in the order of the requests, which are worked on side by side."""
        self._begin_stream(context)
        tasks = _OpenTasks(context)
        answers: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        ahead = threading.Semaphore(_AHEAD)
        ended = threading.Event()

        def read() -> None:
            with contextlib.suppress(grpc.RpcError, RuntimeError):  # the client or this server has gone
                for asked in requests:
                    ahead.acquire()
                    if ended.is_set():
                        break
                    answers.put(self._begin_streamed(asked, context, tasks))
            answers.put(None)

        reader = threading.Thread(target=read, name="stageloom-grpc-reader", daemon=True)
        reader.start()
        try:
            while (answer := answers.get()) is not None:
                yield answer.result()
                ahead.release()
        finally:
            ended.set()
            ahead.release()
            reader.join()
            while not answers.empty():
                if (left := answers.get()) is not None:
                    left.cancel()  # what runs already ends with the call

    def _begin_stream(self, context: Any) -> None:
        began_s = time.monotonic()
        try:
            self._check_token(context)
        except InferenceFailure as failure:
            self._count("ModelStreamInfer", failure.kind.code, began_s)
            context.abort(getattr(grpc.StatusCode, failure.kind.code), str(failure))

    def _begin_streamed(self, asked: Any, context: Any, tasks: "_OpenTasks") -> "Future[Any]":
        """A request's answer to come; it counts as waiting until then, or until it is dropped."""
        began_s = time.monotonic()
        nbytes = asked.ByteSize()
        try:
            self._waiting.take(nbytes)
        except InferenceFailure as failure:
            self._count("ModelStreamInfer", failure.kind.code, began_s)
            refused: Future[Any] = Future()
            refused.set_result(_failed_answer(asked, failure))
            return refused
        answer = self._streamed.submit(self._stream_answer, asked, context, tasks, began_s)
        answer.add_done_callback(lambda _: self._waiting.give_back(nbytes))
        return answer

    def _stream_answer(self, asked: Any, context: Any, tasks: "_OpenTasks", began_s: float) -> Any:
        """`began_s`: when the request was received; it may have waited for a thread since."""
        status = grpc.StatusCode.OK.name
        made = message("ModelStreamInferResponse")()
        try:
            made.infer_response.CopyFrom(blocking(self._infer(asked, context, tasks, began_s)))
        except Exception as error:
            failure = failure_of(error)
            status = failure.kind.code if context.is_active() else grpc.StatusCode.CANCELLED.name
            made = _failed_answer(asked, failure)
        finally:
            self._count("ModelStreamInfer", status, began_s)
        return made


def _failed_answer(asked: Any, failure: InferenceFailure) -> Any:
    made = message("ModelStreamInferResponse")(error_message=str(failure))
    made.infer_response.id = asked.id
    return made


class _OpenTasks:
    """A call's tasks that have not ended; they are cancelled when it ends.

    One callback of the call for all of them: gRPC keeps each until the call ends, and a stream may stay open
    for days.
    """

    def __init__(self, context: Any) -> None:
        self._lock = threading.Lock()
        self._tasks: set[TaskFuture] = set()
        self._ended = False
        if not context.add_callback(self._end):
            self._ended = True  # before it began

    def add(self, futures: Sequence[TaskFuture]) -> None:
        with self._lock:
            ended = self._ended
            if not ended:
                self._tasks.update(futures)
        if ended:
            _cancel(futures)
            return
        for future in futures:
            future.add_done_callback(self._forget)

    def _forget(self, future: Any) -> None:
        with self._lock:
            self._tasks.discard(future)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            tasks, self._tasks = self._tasks, set()
        _cancel(tasks)


def _cancel(futures: Iterable[TaskFuture]) -> None:
    for future in futures:
        with contextlib.suppress(StageloomError):  # an agent that has gone has no task of ours
            future.cancel()


def server_ends(host: str, port: int) -> dict[int, tuple[str, int]]:
    """By version of IP the address that clients of a server at `host` are connected to, where it is certain.

    It is not at a wildcard, or at a name with several addresses: another account's client may have the same
    address and port as one of ours as long as the two have connected to different addresses of this server.
    """
    found = {ip_address(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    ends = {}
    for version in (4, 6):
        addresses = [one for one in found if one.version == version]
        if len(addresses) == 1 and not addresses[0].is_unspecified:
            ends[version] = str(addresses[0]), port
    return ends


def _address_of(peer: str) -> tuple[str, int] | None:
    """The address in gRPC's name of a peer, such as `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)
