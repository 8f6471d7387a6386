"""A bare server that takes a request, looks at nothing and answers the same bytes: what the transport costs.

    python -m benchmarks.serving.echo KIND

Prints its address and serves until it is ended. The answers are such as tritonclient reads.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import uvicorn

from stageloom.edge_agent.serving.http_server import listen_on
from stageloom.edge_agent.serving.protocol import SERVICE, message

_OUTPUT: Final = (1, 3, 1, 1)
_JSON: Final = (
    b'{"model_name":"mean","model_version":"1","outputs":[{"name":"y","datatype":"FP32",'
    b'"shape":[1,3,1,1],"parameters":{"binary_data_size":12}}]}'
)
_ELEMENTS: Final = bytes(12)
_OPTIONS: Final = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]


def http() -> None:
    """uvicorn over httptools, as Stageloom serves, with the smallest application that reads a body."""
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(len(_JSON) + len(_ELEMENTS)).encode()),
        (b"inference-header-content-length", str(len(_JSON)).encode()),
    ]

    async def answer(scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _JSON + _ELEMENTS})

    listening = listen_on("127.0.0.1", 0)
    print(f"127.0.0.1:{listening[0].getsockname()[1]}", flush=True)
    config = uvicorn.Config(answer, http="httptools", ws="none", lifespan="off", log_level="error")
    uvicorn.Server(config).run(listening)


def grpc_threads() -> None:
    """grpc's synchronous server."""
    server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
    server.add_generic_rpc_handlers((_handlers(lambda asked, context: _answer()),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()


def grpc_asyncio() -> None:
    """grpc.aio's server."""

    async def handle(asked: Any, context: Any) -> Any:
        return _answer()

    async def serve() -> None:
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_handlers(handle),))
        print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def _handlers(infer: Callable[[Any, Any], Any]) -> Any:
    handler = grpc.unary_unary_rpc_method_handler(
        infer,
        request_deserializer=message("ModelInferRequest").FromString,
        response_serializer=message("ModelInferResponse").SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler})


def _answer() -> Any:
    made = message("ModelInferResponse")(model_name="mean", model_version="1")
    made.outputs.add(name="y", datatype="FP32", shape=_OUTPUT)
    made.raw_output_contents.append(_ELEMENTS)
    return made


KINDS: Final[dict[str, Callable[[], None]]] = {
    "http": http,
    "grpc_asyncio": grpc_asyncio,
    "grpc_threads": grpc_threads,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=list(KINDS))
    KINDS[parser.parse_args().kind]()
